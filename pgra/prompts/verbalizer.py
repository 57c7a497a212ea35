"""Verbalizers: which word the reader writes for which label.

With a slot in the reader's template, the target is T5's own way to fill a gap (Raffel et al. 2020,
section 3.1.4): `<extra_id_0> WORD <extra_id_1>`. Without one it is the word alone.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pgra.config import choose
from pgra.data.tasks import check_words
from pgra.data.text import word_key
from pgra.errors import ConfigError

logger = logging.getLogger(__name__)

SLOT = "<extra_id_0>"
SLOT_END = "<extra_id_1>"
DECODES = ("official", "verbalizer")


@dataclass(frozen=True)
class Verbalizer:
    """Label to word and back; of the reader's template only the slot matters."""

    words: Mapping[str, str]
    template: str

    def __post_init__(self) -> None:
        check_words("words", self.words)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def has_slot(self) -> bool:
        return SLOT in self.template

    def target_text(self, label: str) -> str:
        """Return the reader's target for a label."""
        word = self.words[label]
        return f"{SLOT} {word} {SLOT_END}" if self.has_slot else word

    def target_ids(self, tokenizer: Any) -> list[list[int]]:
        """Tokenise every label's target, end of sentence included, in the order of labels."""
        texts = [self.target_text(label) for label in self.labels]
        return [list(ids) for ids in tokenizer(texts).input_ids]

    def label_of_word(self, text: str) -> str | None:
        """Return the label whose word equals a generated text, None if there is none.

        Case, surplus spaces and surrounding punctuation do not count (`pgra.data.text.word_key`).
        """
        said = word_key(text)
        if said in self._labels or any(map(str.isalnum, said)):
            return self._labels.get(said)
        # Marks alone: "-." says "-", if that is a word.
        found = [label for word, label in self._labels.items() if word in said]
        return found[0] if len(found) == 1 else None

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        return {word_key(word): label for label, word in self.words.items()}

    def audit(self, tokenizer: Any, *, decode: str = "verbalizer") -> tuple[str, ...]:
        """Check that a tokenizer separates the words; return labels whose word is several tokens.

        One word may begin another: the next token decides. A decode of one token ("official") can
        never give the labels returned: with T5's vocabulary "Entity" is two, which caps the
        released code on TREC at 81.2 %.

        Raises:
            ConfigError: If two targets are the same tokens, a word has unknown pieces, the slot is
                no token of this tokenizer, or, for "official", two words begin with the same token
                or none is a single one.
        """
        choose("decode", decode, DECODES)
        for token in (SLOT, SLOT_END) if self.has_slot else ():
            ids = tokenizer(token, add_special_tokens=False).input_ids
            if len(ids) != 1 or ids[0] == tokenizer.unk_token_id:
                raise ConfigError(
                    f"reader_template {self.template!r} holds {SLOT}, but '{token}' is no token of "
                    "this reader: give a --reader_template without it, or another reader"
                )
        pieces = {
            label: tuple(tokenizer(word, add_special_tokens=False).input_ids)
            for label, word in self.words.items()
        }
        for label, ids in pieces.items():
            if not ids or tokenizer.unk_token_id in ids:
                raise ConfigError(
                    f"verbalizer word '{self.words[label]}' of label '{label}' is not in the "
                    "reader's vocabulary: choose another word"
                )
        self._refuse_equal(pieces, "are the same tokens")
        multi = tuple(label for label, ids in pieces.items() if len(ids) > 1)
        if decode == "official":
            self._refuse_equal({k: ids[:1] for k, ids in pieces.items()}, "begin with one token")
            if len(multi) == len(pieces):  # as with ByT5, whose tokens are bytes
                raise ConfigError(
                    f"decode 'official' writes one token, and the words of all {len(multi)} "
                    "labels are more to this reader: use --decode verbalizer"
                )
            if multi:
                logger.warning(
                    "decode 'official' writes one token: %d of %d labels can never be right (%s)",
                    len(multi),
                    len(pieces),
                    ", ".join(multi),
                )
        return multi

    def _refuse_equal(self, pieces: Mapping[str, tuple[int, ...]], what: str) -> None:
        seen: dict[tuple[int, ...], str] = {}
        for label, ids in pieces.items():
            if ids in seen:
                other = seen[ids]
                raise ConfigError(
                    f"verbalizer words '{self.words[other]}' ({other}) and '{self.words[label]}' "
                    f"({label}) {what} to the reader: choose another word for one of them"
                )
            seen[ids] = label
