"""States and scores of token ids, from a server of vLLM, SGLang or llama.cpp."""

import base64
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Scores
from pgra.errors import ConfigError, ModelError, show
from pgra.lm import load
from pgra.lm.base import Advance, LMArguments, Prompts, Tokens
from pgra.lm.causal_lm import CausalLM
from pgra.lm.client import Client, Declined, call_all
from pgra.lm.kernels import tolerance
from pgra.lm.state_lm import StateLM
from pgra.lm.transformers_lm import NO_LIMIT
from pgra.types import Fields, Json

PROBE = "The answer is a question of time."
_ADMITTED = 16  # texts that are compared before states are used
_NORMALISED = 1e-3  # a length so near 1 is not that of an LM's state
_NUM_PROMPTS = 8  # of one call

_TIMEOUT = 900.0  # seconds; a call waits for those before it: asked again, it would be read twice

# By the owner that /v1/models names: where it says more, where states are, how to start it.
_ENGINES = {
    "vllm": ("/version", "/v1/embeddings", "vllm serve MODEL --runner pooling --convert embed"),
    "llamacpp": ("/props", "/embedding", "llama-server -m FILE --embeddings --pooling last"),
    "sglang": ("/get_server_info", "/generate", "sglang with --return-hidden-states-mode last"),
}
_OTHER = ("", "/v1/embeddings", "one that gives its last token's state, such as vLLM or llama.cpp")
# What states depend on, of all that a server says.
_ABOUT = ("version", "build_info", "dtype", "quantization", "kv_cache_dtype", "ftype", "n_params")
_LENGTHS = ("max_model_len", "context_length", "n_ctx")  # the window's names


class StateServer(StateLM):
    """A server of vLLM, SGLang or llama.cpp; it gives the states and scores of its first LM.

    Only its tokenizer is here. Before states are used, those of 16 prompts are compared: asked
    alone, together in another order, and of transformers (`lm_reference`).

    Attributes:
        about: All that its states depend on, as far as it says: engine, version, model, dtype.
    """

    about: Fields

    def __init__(self, args: LMArguments, *, device: str = "auto") -> None:
        """Ask a server which LM it has, and load its tokenizer.

        Args:
            args: Which server.
            device: Where `lm_reference` runs.

        Raises:
            ConfigError: If the client is not installed, or no tokenizer is named.
            ModelError: If it cannot be reached, has no LM, or one with another tokenizer.
        """
        super().__init__(args)
        self.about = {}
        self._client = Client(args.lm, args.server, _TIMEOUT)
        self.look()
        self.device = load.choose_device(device)
        self.dtype = getattr(torch, args.lm_dtype.replace("auto", "float32"))
        name = args.lm_tokenizer or self._named
        if name is None:
            raise ConfigError(f"{args.lm} names no tokenizer: give the LM's own by --lm_tokenizer")
        files = load.find_model(name)
        self.tokenizer = load.read_tokenizer(files)
        self._tokenizer_identity = files.identity
        self.source = load.ModelSource(self._model, "", None, self._model, inputs=files.inputs)
        self.window = min(self._longest or NO_LIMIT, self.tokenizer.model_max_length)
        self._admitted: tuple[Tokens, Scores] | None = None  # a prompt, and its state
        ours = self.tokenize([PROBE])[0]
        theirs = self._ask_tokens()
        if theirs not in (None, ours, [*self.lead_ids, *ours]):
            raise ModelError(
                f"'{name}' is not {args.lm}'s --lm_tokenizer "
                f"('{PROBE}' is {ours} here, {theirs} there): give its own"
            )

    def look(self) -> None:
        """Ask which LM it has; ModelError if it is another one than before."""
        served = self._client.first_model("/v1/models")
        self._model = served["id"]
        engine = str(served.get("owned_by"))
        more_path, self._states_path, self._how_to_start = _ENGINES.get(engine, _OTHER)
        with self._client.reading("the LM it serves"):
            served |= served.get("meta") or {}
            if more_path:
                more = self._client.ask(more_path)
                served |= {**more, **more.get("default_generation_settings", {})}
            lengths = [int(served[name]) for name in _LENGTHS if served.get(name)]
        fields = {name: served[name] for name in _ABOUT if served.get(name) is not None}
        about = {"engine": engine, "model": self._model, **fields}
        if self.about not in ({}, about):
            raise ModelError(
                f"{self.args.lm} is another LM than before: {show(about)}, was {show(self.about)}: "
                "start that one again, and the same command continues"
            )
        self.about = about
        self._named = served.get("tokenizer_path") or served.get("root")
        self._longest = min(lengths, default=None)

    def _ask_tokens(self) -> list[int] | None:
        """Return the server's token ids of `PROBE`; None where it does not say."""
        text = {"content": PROBE, "prompt": PROBE}  # by llama.cpp and by vLLM
        body = {"model": self._model, "add_special_tokens": False, **text}
        try:
            reply = self._client.ask("/tokenize", body)
        except Declined:
            return None
        return reply.get("tokens") if isinstance(reply, dict) else None

    @property
    def fingerprint(self) -> Fields:
        """All that states depend on, besides the token ids."""
        engine = {"engine": dict(self.about), "tokenizer": self._tokenizer_identity}
        return {**load.model_fields(self.source, self.dtype), **engine}

    @cached_property
    def width(self) -> int:
        """H, the width of a state."""
        return int(self.ask_states(self.tokenize([PROBE])).shape[1])

    def states(self, prompts: Prompts, *, advance: Advance = int) -> Scores:
        """Return the state at each prompt's last token, (n, H) float32.

        Raises:
            ModelError: If the engine gives no states, or other ones than before.
        """
        if not prompts:
            return np.empty((0, self.width), np.float32)
        prompt, state = self._admitted = self._admitted or self._admit(prompts)
        states = self._ask_batches(prompts, advance)
        self.look()  # it may have been restarted meanwhile, with another LM
        self._compare(self._ask_batches([prompt]), state, "than at first")
        return states

    def check_kept(self, prompts: Prompts, states: Scores) -> None:
        """Compare with states that were stored before; ModelError if they differ."""
        read = torch.from_numpy(self.states(prompts)).to(self.dtype)
        self._compare(read.float().numpy(), states, "than those that are kept")

    def _ask_batches(self, prompts: Prompts, advance: Advance = int) -> Scores:
        size = _NUM_PROMPTS
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

        def check(states: Scores) -> None:
            self._check_width(states)
            advance(len(states))

        states = call_all(
            self.ask_states, batches, parallel=self.args.max_parallel_calls, done=check
        )
        return np.concatenate(states)

    def _check_width(self, states: Scores) -> None:
        if (width := states.shape[1]) != self.width:
            raise ModelError(
                f"{self.args.lm} gave states of {self.width} and {width} numbers: it is another LM "
                "than before"
            )

    def _admit(self, prompts: Prompts) -> tuple[Tokens, Scores]:
        """Compare states of some prompts, asked in several ways; return a prompt and its state."""
        chosen = list(prompts[:: -(-len(prompts) // _ADMITTED)])
        alone = np.concatenate([self._ask_batches([prompt]) for prompt in chosen])
        if (abs(np.linalg.norm(alone, axis=1) - 1) < _NORMALISED).all():
            raise ModelError(
                f"{self.args.lm} normalises its states to length 1, and the dot product needs them "
                "whole: start it without (vLLM: --pooler-config '{\"use_activation\": false}')"
            )
        self._compare(self._ask_batches(chosen[::-1])[::-1], alone, "in another order")
        if name := getattr(self.args, "lm_reference", None):
            reference = CausalLM(name, device=str(self.device))
            truth: Tensor = reference.states_of(chosen)
            self._compare(alone, truth.float().cpu().numpy(), f"than '{name}' in transformers")
        return chosen[0], alone[:1]

    def _compare(self, states: Scores, expected: Scores, where: str) -> None:
        """Raise a ModelError if states differ by more than the rounding of the engine's dtype."""
        self._check_width(expected)
        distances = np.linalg.norm(states - expected, axis=1)
        errors = distances / np.linalg.norm(expected, axis=1)
        dtype = str(self.about.get("dtype", self.args.lm_dtype)).removeprefix("torch.")
        if dtype not in ("float32", "float16"):
            dtype = "bfloat16"
        most = tolerance(getattr(torch, dtype))
        if num_other := int((~(errors <= most)).sum()):
            raise ModelError(
                f"{self.args.lm} gives other states {where}: {num_other} of {len(errors)} "
                f"differ, by up to {errors.max():.2%} of their length, and the rounding of {dtype} "
                f"is at most {most:.2%}"
            )

    def ask_states(self, prompts: Prompts) -> Scores:
        """Return the states of prompts, (n, H) float32; ModelError if it gives other ones."""
        ids = [list(prompt) for prompt in prompts]
        body: dict[str, Json]
        if self._states_path == "/embedding":
            body = {"content": ids, "embd_normalize": -1}
        elif self._states_path == "/generate":
            sampling: dict[str, Json] = {"max_new_tokens": 1, "temperature": 0}
            body = {"input_ids": ids, "sampling_params": sampling, "return_hidden_states": "last"}
        else:
            body = {
                "model": self._model,
                "input": ids,
                "encoding_format": "base64",
                "use_activation": False,  # vLLM's word for normalising
            }
        try:
            reply = self._client.ask(self._states_path, body)
        except Declined as error:
            raise ModelError(f"{error}: for states start {self._how_to_start}") from None
        with self._client.reading(f"the states of {len(ids)} prompts"):
            items = reply["data"] if isinstance(reply, dict) else reply
            return np.stack([_read_state(item) for item in _in_order(items, len(ids))])

    def scores(
        self,
        prompts: Prompts,
        words: Sequence[Prompts],
        *,
        advance: Advance = int,
    ) -> list[list[float]]:
        """Return the log-probability of each word after its prompt; see `StateLM`."""
        return call_all(
            self._ask_scores,
            list(zip(prompts, words, strict=True)),
            parallel=self.args.max_parallel_calls,
            done=lambda _: advance(1),
        )

    def _ask_scores(self, query: tuple[Tokens, Prompts]) -> list[float]:
        """Return the log-probabilities of words after a prompt, from prompts that are echoed."""
        prompt, words = query
        prompts = [[*prompt, *word] for word in words]
        body: dict[str, Json] = {
            "model": self._model,
            "prompt": prompts,
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": 1,
        }
        reply = self._client.ask("/v1/completions", body)
        with self._client.reading("the log-probabilities of an echoed prompt"):
            scores = []
            choices = _in_order(reply["choices"], len(prompts))
            for ids, choice in zip(prompts, choices, strict=True):
                line = choice["logprobs"]["token_logprobs"]
                chances = line[len(prompt) : len(ids)]
                score = math.fsum(chances)
                is_whole = len(line) - len(ids) in (0, 1)  # one token is written after it
                if not (is_whole and chances and math.isfinite(score)):
                    raise ValueError(f"{len(line)} for {len(ids)} tokens, their sum is {score}")
                scores.append(score)
            return scores


def _in_order(items: Sequence[Mapping[str, Any]], count: int) -> list[Mapping[str, Any]]:
    """Return a reply's items by their `index`, or as they come; an error if one is missing."""
    if len(items) != count:
        raise ValueError(f"there are {len(items)}")
    numbered = {item.get("index", number): item for number, item in enumerate(items)}
    return [numbered[number] for number in range(count)]


def _read_state(item: Mapping[str, Any]) -> Scores:
    """Return a state, (H,), in the form of OpenAI, llama.cpp or SGLang."""
    values = item["embedding"] if "embedding" in item else item["meta_info"]["hidden_states"]
    if isinstance(values, str):
        return np.frombuffer(base64.b64decode(values), "<f4")
    state: Scores = np.atleast_2d(np.asarray(values, np.float32))[-1]  # of all tokens, or the last
    return state
