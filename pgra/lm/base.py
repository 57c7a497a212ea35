"""The contract of an LM that answers prompts, here or at an endpoint, and arguments of all LMs.

Light: no torch. `pgra.lm.state_lm` has the contract of an LM that gives states.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pgra.config import Arguments, arg
from pgra.errors import ConfigError, ModelError
from pgra.lm.names import ENDPOINT, REMOTE, find_entry, is_model
from pgra.prompts import CHATS
from pgra.types import Fields

DTYPES = ("auto", "bfloat16", "float16", "float32")
# Shares of the depth whose states a head reads: the mean of their heads is better than the last
# layer's, and than any one that held-out examples choose (docs/worth.md).
DEPTHS = (0.5, 0.67, 0.77, 0.9, 1.0)
DEVICE_MAPS = ("auto", "balanced", "none", "sequential")


@dataclass(kw_only=True)
class LMArguments(Arguments):
    """Which LM, and how it is run; shared by all that have one."""

    GROUP = "LM"

    lm: str = arg(
        "facebook/opt-13b",
        "Causal LM: hub id, folder or bundled:NAME; or in an engine: http://HOST:PORT of a vLLM, "
        "SGLang or llama.cpp server; or module:Class, of your own.",
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

    def check(self) -> None:
        """Refuse an engine's arguments for an LM of transformers, and a layer for an engine."""
        entry = find_entry(self.lm)
        if entry.is_engine and self.lm_layer != "last":
            raise ConfigError(f"--lm {self.lm} gives states of the last layer: leave lm_layer out")
        if is_model(self.lm) and (self.lm_tokenizer or self.lm_reference):
            raise ConfigError(
                f"--lm {self.lm} is not an engine: leave lm_tokenizer, lm_reference out"
            )


AUTO = "auto"
CHAT = "chat"
COMPLETIONS = "completions"
Tokens = Sequence[int]  # ids, of a text
Prompts = Sequence[Tokens]
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


def add_up(counts: Sequence[int | None]) -> int | None:
    """Return the sum of counts; None where an endpoint omits one."""
    return None if None in counts else sum(filter(None, counts))


class LanguageModel(ABC):
    """A frozen LM that scores and writes text after prompts.

    Results come in the order of prompts, and none depends on the other prompts of a call. `window`
    is the most tokens of prompt and answer together.
    """

    window: int

    @property
    @abstractmethod
    def fingerprint(self) -> Fields:
        """All that its answers depend on, besides the prompt."""

    @abstractmethod
    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,), including those that open every input."""

    @abstractmethod
    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance = int
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after each prompt, B lists of C.

        Prompts are not empty. Words are C texts as they would follow: " great", with its space.
        """

    def complete(
        self,
        prompts: Sequence[str],  # noqa: ARG002
        *,
        max_new_tokens: int,  # noqa: ARG002
        stop: str,  # noqa: ARG002
        advance: Advance = int,  # noqa: ARG002
    ) -> list[Completion]:
        """Continue each prompt greedily until `stop`, the LM's own end, or `max_new_tokens`."""
        raise ConfigError("this LM does not write: use --decide_by score, or another LM")


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
