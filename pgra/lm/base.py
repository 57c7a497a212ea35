"""The contracts of language models, and their arguments. Light: no torch.

A `LanguageModel` answers prompts, here or at an endpoint. A `StateLM` gives states and scores of
token ids, and answers prompts by them; `--lm module:Class` names one of a user's own.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self

from pgra.arrays import Scores
from pgra.config import Arguments, arg
from pgra.errors import ConfigError, ModelError, show
from pgra.lm.names import ENDPOINT, REMOTE, find_entry, is_model
from pgra.parallel import Turn
from pgra.prompts import CHATS, Chat
from pgra.types import Json

if TYPE_CHECKING:
    import torch

    from pgra.lm.load import ModelSource

DTYPES = ("auto", "bfloat16", "float16", "float32")
DEVICE_MAPS = ("auto", "balanced", "none", "sequential")


@dataclass(kw_only=True)
class LMArguments(Arguments):
    """Which LM, and how it is run; shared by all that have one."""

    GROUP = "LM"

    lm: str = arg(
        "facebook/opt-13b",
        "Causal LM: hub id, folder or bundled:NAME; or in an engine: http://HOST:PORT of a vLLM, "
        "SGLang or llama.cpp server, or vllm:NAME, in this process; or module:Class, of your own.",
        is_common=True,
    )
    lm_dtype: str = arg(
        "auto",
        "auto (on a GPU float16 for weights that are float16, as OPT's, else bfloat16; on a CPU "
        "float32), float32, bfloat16 or float16.",
        choices=DTYPES,
    )
    lm_device_map: str = arg(
        "none",
        "none (one device), or over all GPUs of one process: auto, balanced, sequential.",
        choices=DEVICE_MAPS,
        decides=False,
    )
    lm_batch_tokens: int = arg(
        512,
        "Own tokens in one LM batch on a CPU; four times as many where answers are written or "
        "scored, and 64 times as many on a GPU.",
        least=1,
        decides=False,
    )
    lm_tokenizer: str | None = arg(
        None,
        "The LM's own tokenizer, hub id or folder, where a server does not name it. It counts an "
        "endpoint's prompts; without it a token is taken for every 3 bytes.",
        decides=False,  # fingerprints have its content
    )
    max_parallel_calls: int = arg(
        8, "Calls to a server that are under way at a time.", least=1, decides=False
    )

    @property
    def server(self) -> str | None:
        """The address of an engine's server, without /v1; None for another LM."""
        is_server = self.lm.startswith(("http://", "https://"))
        return self.lm.rstrip("/").removesuffix("/v1") if is_server else None


@dataclass(kw_only=True)
class StateArguments(LMArguments):
    """Which of an LM's states are read under a prompt, and how."""

    GROUP = "Reranker"

    max_prompt_tokens: int | None = arg(
        None,
        "Longest prompt; default: the LM's window. Longer texts are cut, never the tail.",
        least=8,
    )
    lm_layer: str = arg(
        "last",
        "Layer whose states are compared; later ones are not run. last, the number of one (from 1 "
        "on), or a share of the depth such as 0.6.",
    )
    chat_template: str = arg(
        "off",
        "Whether prompts are written in the LM's own chat template, without thinking: off; auto "
        "(all in one message, where it has a template); turns (a turn an exemplar).",
        choices=CHATS,
    )
    lm_reference: str | None = arg(
        None,
        "The LM of an engine for transformers, hub id or folder: the states of 16 texts are "
        "compared before others are kept.",
        decides=False,
    )
    lm_tensor_parallel: int = arg(1, "GPUs that hold vllm:NAME.", least=1, decides=False)

    def check(self) -> None:
        """Refuse an engine's arguments for an LM of transformers, and a layer for an engine."""
        entry = find_entry(self.lm)
        if entry.is_engine and self.lm_layer != "last":
            raise ConfigError(f"--lm {self.lm} gives states of the last layer: leave lm_layer out")
        if is_model(self.lm) and (self.lm_tokenizer or self.lm_reference):
            raise ConfigError(
                f"--lm {self.lm} is not an engine: leave lm_tokenizer, lm_reference out"
            )


_PLAIN_TEXT = "The answer is"  # which every tokenizer knows
_SHOWN_CHARS = 60  # of a prompt in a message
AUTO = "auto"
CHAT = "chat"
COMPLETIONS = "completions"
Advance = Callable[[int], object]  # called with how many more prompts are done, for a progress bar


@dataclass(frozen=True)
class Completion:
    """What an LM wrote after a prompt, up to the stop string; counts an endpoint omits are None.

    Where a word was scored, `text` is "" and `log_probability` is the word's.
    """

    text: str
    num_prompt_tokens: int | None = None
    num_new_tokens: int | None = None
    log_probability: float | None = None

    @property
    def chance(self) -> float:
        """The word's log-probability; a ModelError if there is none: 0 would be the best."""
        if self.log_probability is None:
            raise ModelError(
                "an endpoint filtered a prompt, and gave its word no log-probability: use "
                "--decide_by generation, or another LM"
            )
        return self.log_probability


class LanguageModel(Protocol):
    """A frozen LM that scores and writes text after prompts.

    Results come in the order of prompts, and none depends on the other prompts of a call. `window`
    is the most tokens of prompt and answer together.
    """

    window: int

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that its answers depend on, besides the prompt."""

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,), including those that open every input."""

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt, B lists of C.

        Prompts are not empty. Words are C texts as they would follow: " great", with its space.
        """

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Continue each prompt greedily until `stop`, the LM's own end, or `max_new_tokens`."""


class StateLM(ABC):
    """A frozen LM that gives states and scores of token ids: a `LanguageModel` too.

    It is opened as `Class(args, device=...)`, with the `LMArguments` of the command. A class of
    yours needs `tokenizer`, `window`, `fingerprint` and `states`; `scores` where words are scored.

    Attributes:
        tokenizer: As transformers has them: called with texts, it returns their `input_ids`.
        window: Most tokens of a prompt, with what follows it.
    """

    tokenizer: Any
    window: int

    def __init__(self, args: "LMArguments", *, device: str = "auto") -> None:  # noqa: B027
        """Open what `args.lm` names; raise a `PgraError` for what cannot be used."""

    @classmethod
    def _open(cls, args: "LMArguments", device: str) -> Self:
        return cls(args, device=device)

    @property
    @abstractmethod
    def fingerprint(self) -> Mapping[str, Json]:
        """All that states and scores depend on, besides the token ids."""

    @abstractmethod
    def states(self, prompts: Sequence[Sequence[int]], *, advance: Advance = int) -> Scores:
        """Return the state at the last token of each prompt, (n, H) float32.

        Prompts are token ids, none empty, and fit the window.
        """

    def scores(
        self,
        prompts: Sequence[Sequence[int]],  # noqa: ARG002
        words: Sequence[Sequence[Sequence[int]]],  # noqa: ARG002
        *,
        advance: Advance = int,  # noqa: ARG002
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after its prompt.

        `words` has a list for each prompt.
        """
        raise ConfigError(f"--lm {self.source.name} gives states alone: use another LM for scores")

    def complete(
        self,
        prompts: Sequence[str],  # noqa: ARG002
        *,
        max_new_tokens: int,  # noqa: ARG002
        stop: str,  # noqa: ARG002
        advance: Advance = int,  # noqa: ARG002
    ) -> list[Completion]:
        """Continue each prompt; see `LanguageModel`."""
        raise ConfigError(f"--lm {self.source.name} does not write: use --decide_by score")

    def share_prefix(
        self,
        ids: Sequence[int],  # noqa: ARG002 (of LMs that share it)
        probes: Callable[[], Sequence[Sequence[int]]],  # noqa: ARG002
    ) -> "BeginStates":
        """Return a function that starts to read prompts, most of which begin with `ids`.

        It returns a function that waits for their states. `probes` gives a few such prompts, to
        try a faster way on. By default nothing is shared.
        """

        def begin(
            prompts: Sequence[Sequence[int]], advance: Advance
        ) -> "Callable[[], torch.Tensor]":
            import torch

            states = torch.from_numpy(self.states(prompts, advance=advance)).to(self.dtype)
            return lambda: states

        return begin

    def check_kept(self, prompts: Sequence[Sequence[int]], states: Scores) -> None:  # noqa: B027
        """Raise a ModelError if an LM that may have changed no longer gives stored states."""

    def release(self) -> None:  # noqa: B027 (most hold nothing large)
        """Free the weights until they are needed again."""

    def not_finite(self, where: str, what: str = "state") -> ModelError:
        """Return the error for NaN or infinite numbers; `where` is such as "for a prompt"."""
        return ModelError(f"'{self.source.name}' gives no finite {what} {where}")

    @cached_property
    def source(self) -> "ModelSource":
        """Its name, and the files that it was opened from."""
        from pgra.lm.load import ModelSource

        name = f"{type(self).__module__}:{type(self).__qualname__}"
        return ModelSource(name, name, None, name)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that would open an LM like this one."""
        return {"lm": self.source.name}

    @cached_property
    def busy(self) -> Turn:
        """Held by the thread that uses the LM."""
        return Turn()

    @cached_property
    def dtype(self) -> "torch.dtype":
        """The dtype that states are stored in."""
        import torch

        return torch.float32

    @cached_property
    def device(self) -> "torch.device":
        """Where it runs."""
        import torch

        return torch.device("cpu")

    @cached_property
    def width(self) -> int:
        """H, the width of a state."""
        return int(self.states(self.tokenize([_PLAIN_TEXT])).shape[1])

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids, without special tokens."""
        if not texts:
            return []
        ids = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"]
        return list(ids)

    @cached_property
    def lead_ids(self) -> list[int]:
        """The special tokens that open every input, such as OPT's </s>; empty for GPT-2."""
        full = self.tokenizer([_PLAIN_TEXT])["input_ids"][0]
        bare = self.tokenize([_PLAIN_TEXT])[0]
        starts = (i for i in range(len(full)) if full[i : i + len(bare)] == bare)
        return list(full[: next(starts, 0)])

    def with_lead(self, ids: Sequence[int]) -> list[int]:
        """Return ids after `lead_ids`, unless they begin with these, as a chat's may."""
        has_lead = list(ids[: len(self.lead_ids)]) == self.lead_ids
        return list(ids) if has_lead else [*self.lead_ids, *ids]

    def _tokenize_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.with_lead(ids) for ids in self.tokenize(texts)]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,), including those that open every input."""
        return [len(ids) for ids in self._tokenize_inputs(texts)]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt.

        It is not divided by the word's tokens.

        Raises:
            ConfigError: If a prompt is empty, or does not fit the window with a word.
            ModelError: If the tokenizer joins a word to the prompt before it, or the LM cannot be
                used.
        """
        prompt_ids = []
        word_ids = []
        for prompt in prompts:
            ids, after = self._split_words(prompt, words)
            prompt_ids.append(ids)
            word_ids.append(after)
        longest = max((len(word) for line in word_ids for word in line), default=0)
        self._check_prompts(prompts, prompt_ids, longest)
        return self.scores(prompt_ids, word_ids, advance=advance)

    def _split_words(self, prompt: str, words: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of a prompt and of each word."""
        ids, *joint = self._tokenize_inputs([prompt, *(prompt + word for word in words)])
        for word, both in zip(words, joint, strict=True):
            if both[: len(ids)] != ids or len(both) == len(ids):
                raise ModelError(
                    f"the tokenizer of '{self.source.name}' joins {word!r} to the prompt before it "
                    f"({prompt[-_SHOWN_CHARS:]!r}): begin the word with a space"
                )
        return ids, [both[len(ids) :] for both in joint]

    def _check_prompts(
        self, prompts: Sequence[str], ids: Sequence[Sequence[int]], max_new_tokens: int
    ) -> None:
        for number, (text, line) in enumerate(zip(prompts, ids, strict=True), 1):
            if not line:
                raise ConfigError(f"prompt {number} is empty: there is nothing to continue")
            if len(line) + max_new_tokens > self.window:
                raise ConfigError(
                    f"prompt {number} has {len(line)} tokens ({text[-_SHOWN_CHARS:]!r} at its end)"
                    f", and '{self.source.name}' holds {self.window} with the {max_new_tokens} to "
                    "come"
                )

    def chat(self, style: str) -> Chat | None:
        """Return how prompts are written as a chat, of `CHATS`; None for plain text."""
        has_template = getattr(self.tokenizer, "chat_template", None) is not None
        if style == "off" or (style == "auto" and not has_template):
            return None
        return style, self._write_chat

    def _write_chat(self, messages: list[dict[str, str]]) -> str:
        import jinja2

        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
                )
            )
        except (AttributeError, TypeError, ValueError, jinja2.TemplateError) as error:
            raise ModelError(
                f"'{self.source.name}' writes no chat ({show(error)}): use --chat_template off"
            ) from None


# Starts to read prompts of token ids; what it returns waits for their states, (n, H) on the CPU.
BeginStates = Callable[[Sequence[Sequence[int]], Advance], "Callable[[], torch.Tensor]"]


@dataclass(kw_only=True)
class CompleterArguments(LMArguments):
    """Which LM answers, and how an endpoint is asked."""

    GROUP = "LM"

    lm: str = arg(
        "",
        "Causal LM, which must be named where one is asked: hub id (facebook/opt-13b is of the "
        "paper's size), folder or bundled:NAME; openai:MODEL, at an endpoint; http://HOST:PORT of "
        "a server; or module:Class, of your own.",
        is_common=True,
    )
    lm_window: int | None = arg(
        None,
        "Most tokens of a prompt and its answer; default: the LM's own, 2048 at an endpoint.",
        least=1,
    )
    base_url: str | None = arg(
        None,
        "An OpenAI-compatible endpoint, up to /v1 (default: OPENAI_BASE_URL, or OpenAI's). Its key "
        "is read from OPENAI_API_KEY alone.",
        decides=False,
        is_common=True,
    )
    endpoint: str = arg(
        AUTO,
        "Which of a server's endpoints is asked: completions, or chat (the prompt is one message "
        "of a user); auto takes completions where the server has them for this model.",
        choices=(AUTO, CHAT, COMPLETIONS),
    )

    def check(self) -> None:
        """Refuse arguments of an endpoint for a local LM."""
        options = (self.base_url, self.lm_tokenizer, self.endpoint)
        if options != (None, None, AUTO) and not self.is_remote:
            raise ConfigError(
                "base_url, endpoint and lm_tokenizer are for an endpoint, and "
                f"--lm {self.lm} is not one: write --lm {REMOTE}MODEL, or leave them out"
            )
        if self.base_url and self.server:
            raise ConfigError(f"--lm {self.lm} is an address: leave base_url out")
        if find_entry(self.lm).answers is None:
            raise ConfigError(
                f"--lm {self.lm} gives states alone: give a server's http://HOST:PORT"
            )

    def check_named(self) -> None:
        if not self.lm:
            raise ConfigError(
                f"--lm is missing: name a hub id, a folder, bundled:smollm2-135m, {REMOTE}MODEL or "
                "module:Class"
            )

    @property
    def is_remote(self) -> bool:
        """Whether it is asked over HTTP."""
        return find_entry(self.lm).answers == ENDPOINT
