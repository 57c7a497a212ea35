"""The contract of an LM that gives states and scores of token ids, and so answers prompts."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self

import jinja2
import torch
from torch import Tensor

from pgra.arrays import Scores, Vectors
from pgra.errors import ConfigError, ModelError, show
from pgra.lm.base import Advance, LanguageModel, LMArguments, Prompts, Tokens
from pgra.lm.load import ModelSource
from pgra.parallel import Turn
from pgra.prompts import Chat

_PLAIN_TEXT = "The answer is"  # which every tokenizer knows
_SHOWN_CHARS = 60  # of a prompt in a message

# Starts to read prompts of token ids; what it returns waits for their states, (n, H) on the CPU.
BeginStates = Callable[[Prompts, Advance], Callable[[], Tensor]]


class StateLM(LanguageModel):
    """A frozen LM that gives states and scores of token ids.

    It is opened as `Class(args, device=...)`, with the `LMArguments` of the command. A class of
    yours needs `tokenizer`, `window`, `fingerprint` and `states`; `scores` where words are scored,
    and `complete` where text is written. A constructor of yours calls `super().__init__(args)`.

    Attributes:
        tokenizer: As transformers has them: called with texts, it returns their `input_ids`.
        window: Most tokens of a prompt, with what follows it.
        args: Its name, and how it is run.
        source: Its name, and the files that it was opened from.
        device: Where it runs.
        dtype: Of the states that are stored.
        busy: Held by the thread that uses it.
    """

    tokenizer: Any

    def __init__(self, args: LMArguments, *, device: str = "auto") -> None:  # noqa: ARG002
        """Open what `args.lm` names; raise a `PgraError` for what cannot be used."""
        self.args = args
        self.source = ModelSource(args.lm, args.lm, None, args.lm)
        self.device = torch.device("cpu")
        self.dtype = torch.float32
        self.busy = Turn()

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: nothing changes an LM."""
        return self

    @classmethod
    def _open(cls, args: LMArguments, device: str) -> Self:
        return cls(args, device=device)

    @abstractmethod
    def states(self, prompts: Prompts, *, advance: Advance = int) -> Scores:
        """Return the state at the last token of each prompt, (n, H) float32.

        Prompts are token ids, none empty, and fit the window.
        """

    def scores(
        self,
        prompts: Prompts,  # noqa: ARG002
        words: Sequence[Prompts],  # noqa: ARG002
        *,
        advance: Advance = int,  # noqa: ARG002
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after its prompt.

        `words` has a list for each prompt.
        """
        raise ConfigError(f"--lm {self.source.name} gives states alone: use another LM for scores")

    def share_prefix(
        self,
        ids: Tokens,  # noqa: ARG002 (of LMs that share it)
        probes: Callable[[], Prompts],  # noqa: ARG002
        layers: Sequence[int] = (),  # noqa: ARG002
    ) -> BeginStates:
        """Return a function that starts to read prompts, most of which begin with `ids`.

        It returns a function that waits for their states. `probes` gives a few such prompts, to
        try a faster way on. By default nothing is shared. `layers` are of `layers_at`.
        """

        def begin(prompts: Prompts, advance: Advance) -> Callable[[], Tensor]:
            states = torch.from_numpy(self.states(prompts, advance=advance)).to(self.dtype)
            return lambda: states

        return begin

    def layers_at(self, depths: Sequence[float]) -> list[int]:  # noqa: ARG002
        """Return the layers before the last, at shares of the depth, that it gives states of."""
        return []

    def word_rows(self, words: Prompts) -> Vectors | None:  # noqa: ARG002
        """Return what gives each word's logit for a state, (C, H + 1); None if it has no such."""
        return None

    def check_kept(self, prompts: Prompts, states: Scores) -> None:
        """Raise a ModelError if an LM that may have changed no longer gives stored states."""

    def release(self) -> None:
        """Free the weights until they are needed again."""

    def not_finite(self, where: str, what: str = "state") -> ModelError:
        """Return the error for NaN or infinite numbers; `where` is such as "for a prompt"."""
        larger = {torch.float16: "bfloat16", torch.bfloat16: "float32"}.get(self.dtype)
        way_out = f"use --lm_dtype {larger}" if larger else "its weights are damaged"
        return ModelError(
            f"'{self.source.name}' gives no finite {what} in {self.dtype} {where}: {way_out}"
        )

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that would open an LM like this one."""
        return {"lm": self.args.lm, "lm_dtype": self.args.lm_dtype}

    @cached_property
    def width(self) -> int:
        """H, the width of a state. It may differ from a config's: OPT-350m projects."""
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

    def with_lead(self, ids: Tokens) -> list[int]:
        """Return ids after `lead_ids`, unless they begin with these, as a chat's may."""
        has_lead = list(ids[: len(self.lead_ids)]) == self.lead_ids
        return list(ids) if has_lead else [*self.lead_ids, *ids]

    def tokenize_inputs(self, texts: Sequence[str]) -> list[list[int]]:
        """Return each text's token ids after those that open every input."""
        return [self.with_lead(ids) for ids in self.tokenize(texts)]

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, (B,), including those that open every input."""
        return [len(ids) for ids in self.tokenize_inputs(texts)]

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
        longest = 0
        for prompt in prompts:
            ids, after = self.split_words(prompt, words)
            prompt_ids.append(ids)
            word_ids.append(after)
            longest = max([longest, *map(len, after)])
        self._check_prompts(prompts, prompt_ids, longest)
        return self.scores(prompt_ids, word_ids, advance=advance)

    def split_words(self, prompt: str, words: Sequence[str]) -> tuple[list[int], list[list[int]]]:
        """Return the token ids of a prompt and of each word."""
        ids, *joint = self.tokenize_inputs([prompt, *(prompt + word for word in words)])
        for word, both in zip(words, joint, strict=True):
            if both[: len(ids)] != ids or len(both) == len(ids):
                raise ModelError(
                    f"the tokenizer of '{self.source.name}' joins {word!r} to the prompt before it "
                    f"({prompt[-_SHOWN_CHARS:]!r}): begin the word with a space"
                )
        return ids, [both[len(ids) :] for both in joint]

    def _check_prompts(self, prompts: Sequence[str], ids: Prompts, max_new_tokens: int) -> None:
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
