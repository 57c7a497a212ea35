"""A causal LM in this process, and its states of prompts."""

import copy
import gc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pgra.core import Json
from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.base import LMArguments
from pgra.lm.batching import BackOff, pad, send
from pgra.lm.kernels import tolerance

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
        self.with_head, self.busy = with_head, threading.RLock()
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
            self.device, self.dtype = lm.device, lm.dtype
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
        name, dtype = self.source.name, self.dtype
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

        kind, spread = AutoModelForCausalLM if self.with_head else AutoModel, self.how.lm_device_map
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
        full, bare = self.tokenizer(probe)["input_ids"], self.tokenize([probe])[0]
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return list(full[: next(starts, 0)])

    @torch.inference_mode()
    def states_of(self, batch: Sequence[Sequence[int]]) -> Tensor:
        """Return the state at each input's last token, (n, H) in the LM's dtype, on its device.

        A state is the output of `layer` after the final norm. Inputs are token ids, none empty.
        """
        ids, mask = pad(batch)
        # Right padding and causality keep real tokens from the padding; positions must be given,
        # for OPT and GPT-2 count them in other ways when they are not.
        hidden = self.model(  # loaded first: weights that do not fit are refused before all else
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
        return [[*self.lead_ids, *ids] for ids in self.tokenize(texts)]

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
