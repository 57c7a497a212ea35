"""The words that answer a prompt, as an LM's tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from pgra.errors import ConfigError, ModelError
from pgra.models.prefix import PromptedEncoder

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class AnswerWords:
    """The words that may follow a prompt, as an LM's tokens.

    Attributes:
        tokens: By label, in the task's order of labels; all of a word's tokens, its space included.
    """

    tokens: Mapping[str, Tokens]

    @classmethod
    def of(cls, encoder: PromptedEncoder, words: Mapping[str, str]) -> Self:
        """Cut the words as they stand in the exemplars: behind the answer's line and a space.

        Args:
            encoder: LM and prompt.
            words: Word by label.

        Raises:
            ConfigError: If one word begins another, which would then always win.
            ModelError: If the tokenizer cuts a prompt otherwise when a word follows it.
        """
        prompt = encoder.prompt
        suffix = prompt.suffix(prompt.template.passage_fields("The film"))
        bare, *full = encoder.lm.tokenize([suffix, *(f"{suffix} {w}" for w in words.values())])
        tokens: dict[str, Tokens] = {}
        for (label, word), ids in zip(words.items(), full, strict=True):
            if ids[: len(bare)] != bare or len(ids) == len(bare):
                raise ModelError(
                    f"the tokenizer of '{encoder.lm.source.name}' joins '{word}' to the prompt "
                    "before it: it cannot be scored apart. Use another LM"
                )
            tokens[label] = tuple(ids[len(bare) :])
        for label, mine in tokens.items():
            for other, longer in tokens.items():
                if label != other and longer[: len(mine)] == mine:
                    raise ConfigError(
                        f"prompt word '{words[label]}' ({label}) begins '{words[other]}' ({other}) "
                        "to the LM, so it would always win: choose another in the task's "
                        "prompt_words"
                    )
        return cls(tokens)

    @property
    def firsts(self) -> list[int]:
        """Give the tokens that words begin with, in the order of labels, each once."""
        return list(dict.fromkeys(ids[0] for ids in self.tokens.values()))

    @property
    def beginnings(self) -> list[Tokens]:
        """Give what may be written before a word's next token, the empty beginning first."""
        found = {ids[:end] for ids in self.tokens.values() for end in range(len(ids))}
        return sorted(found, key=lambda ids: (len(ids), ids))

    def nexts(self, beginning: Tokens) -> dict[str, int]:
        """Give the token that follows a beginning, of the labels whose word has it."""
        end = len(beginning)
        return {
            label: ids[end]
            for label, ids in self.tokens.items()
            if ids[:end] == beginning and len(ids) > end
        }
