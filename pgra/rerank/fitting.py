"""What a fitted similarity is fitted to: a draw of passages, a draw of training queries, the words.

The draws depend on the corpus and on the training queries alone: not on which candidates are in the
bank, so that all k and d share one ranking, nor on the reader's seed; and no test query is among
them. What was measured is a product of its own, so that a new query is scored as the run's were,
without the training data:

    passages.npy  (2, D) float32: mean and spread of passages' values
    queries.npy   (2, D) float32: of queries' values
    words.npy     (C, H + 1) float32, label words only: the head's rows, with the bias at the end
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pgra.data.build import build_once
from pgra.errors import ArtifactError, ConfigError
from pgra.io import artifact_dir, digest, is_finished, read_array, read_manifest, write_array
from pgra.models.answer_words import AnswerWords
from pgra.models.lm_head import LMHead
from pgra.models.prefix import PromptedEncoder
from pgra.rerank.bank import Bank
from pgra.rerank.keys import query_key
from pgra.rerank.similarity import PLAIN, WAYS, Similarity, Usual, WordRows
from pgra.types import Example, Json, Rows

STAGE = "similarity"
SAMPLE = 2000
_SEED = 0
_FEWEST = 2
_OWN_FIELDS = ("similarity_sample", "label_tokens")


@dataclass(frozen=True)
class Reference:
    """What a task gives a similarity.

    Attributes:
        queries: The training queries, those in the prompt left out.
        words: The word that answers, by label.
        made: The reranker's fingerprint of an earlier run that is taken up, without its training
            queries; None for a new one.
    """

    queries: Sequence[Example] = ()
    words: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, Json] | None = None

    def of_prefix(self, place: int, count: int) -> "Reference":
        """Give the reference of one of several prefixes."""
        if self.made is None or count == 1:
            return self
        made: Any = self.made
        return replace(self, made=made["prefixes"][place])


class Fitting:
    """Fits a similarity once, or takes up what is there; those that need no fit are just there.

    Attributes:
        name: A name of `WAYS`.
        fingerprint: All that scores depend on, besides queries and candidates.
        folder: Where what was measured is.
    """

    def __init__(
        self,
        name: str,
        encoder: PromptedEncoder,
        reference: Reference,
        *,
        num_rows: int,
        made_of: Mapping[str, Json],
        home: Path,
    ) -> None:
        """Draw, and refuse what cannot be fitted.

        Args:
            name: A name of `WAYS`.
            encoder: LM, with its head for label words, and prompt.
            reference: What the task gives.
            num_rows: Passages of the corpus.
            made_of: What passages' states depend on.
            home: Where the folder goes, with the beginning of its name.

        Raises:
            ConfigError: If there are too few texts to measure, or label words begin alike.
            ModelError: If the tokenizer joins a word to the prompt.
        """
        self.name, self._way, self._encoder = name, WAYS[name], encoder
        self._num_rows, self._is_known = num_rows, reference.made is not None
        self._queries = _draw_queries(reference.queries) if self._way.is_fitted else {}
        fields = self._fields(reference) if self._way.is_fitted else {}
        self._tokens = fields.get("label_tokens")
        self.fingerprint: Mapping[str, Json] = {**made_of, "similarity": name, **fields}
        self.folder = artifact_dir(home.parent, home.name, self.fingerprint)

    def _fields(self, reference: Reference) -> dict[str, Any]:
        """Give what the fingerprint tells of a fit."""
        if reference.made is not None:
            return {part: reference.made[part] for part in _OWN_FIELDS if part in reference.made}
        for count, what in (
            (len(self._queries), "training queries beside those in the prompt"),
            (self._num_rows, "passages"),
        ):
            if count < _FEWEST:
                raise ConfigError(
                    f"similarity '{self.name}' is fitted to {what}, and there are {count}: give "
                    f"at least {_FEWEST}, or use --similarity dot"
                )
        queries = digest(list(self._queries))
        fields: dict[str, Any] = {
            "similarity_sample": {"size": SAMPLE, "seed": _SEED, "queries": queries}
        }
        if self._way.reads_words:
            fields["label_tokens"] = self._first_tokens(reference.words)
        return fields

    def _first_tokens(self, words: Mapping[str, str]) -> list[int]:
        firsts = AnswerWords.of(self._encoder, words).firsts
        if len(firsts) < _FEWEST:
            raise ConfigError(
                f"similarity '{self.name}' tells labels by the first tokens of their words, and "
                f"{', '.join(words.values())} all begin alike: choose others in the task's "
                "prompt_words, or use another --similarity"
            )
        return firsts

    @property
    def is_ready(self) -> bool:
        """Say whether nothing is left to measure."""
        return not self._way.is_fitted or is_finished(self.folder)

    def num_columns(self, width: int) -> int:
        """Give D, of what is compared, where states have `width` columns."""
        return width if self._tokens is None else len(self._tokens)

    def rows(self) -> Rows:
        """Give the passages whose states it has yet to measure, sorted."""
        if self.is_ready:
            return np.empty(0, dtype=np.int64)
        if self._num_rows <= SAMPLE:
            return np.arange(self._num_rows)
        drawn = np.random.default_rng(_SEED).choice(self._num_rows, SAMPLE, replace=False)
        return np.sort(drawn)

    def queries(self) -> list[Example]:
        """Give the queries whose states it has yet to measure."""
        return [] if self.is_ready else list(self._queries.values())

    def check(self) -> None:
        """Refuse to measure where only an earlier run's fingerprint is known.

        Raises:
            ArtifactError: If it is so; the folder that is missing is named.
        """
        if self._is_known and not self.is_ready:
            raise ArtifactError(
                f"{self.folder} is missing, what similarity '{self.name}' was fitted to: restore "
                "it, or give the run's train.py command again, which makes it anew"
            )

    def fit(self, bank: Bank, query_bank: Bank) -> None:
        """Measure the states of `rows` and `queries`, which are in the banks, if nobody has.

        Raises:
            ArtifactError: If what is there is damaged, or it cannot be written.
            ModelError: If the LM has no plain head, for label words.
        """
        if self._way.is_fitted:
            build_once(
                self.folder,
                stage=STAGE,
                fingerprint=self.fingerprint,
                build=lambda aside: self._measure(aside, bank, query_bank),
            )

    def _measure(self, aside: Path, bank: Bank, query_bank: Bank) -> Mapping[str, Json]:
        words = self._word_rows() if self._way.reads_words else None
        values = Similarity(words=words).values
        rows, keys = self.rows(), np.array(list(self._queries), np.int64)
        for part, states in (("passages", bank.states(rows)), ("queries", query_bank.states(keys))):
            usual = Usual.of(values(states))
            write_array(aside / f"{part}.npy", np.stack([usual.mean, usual.spread]))
        if words is not None:
            write_array(aside / "words.npy", np.column_stack([words.weight, words.bias]))
        return {"passages": len(rows), "queries": len(keys)}

    def _word_rows(self) -> WordRows:
        """Take the label words' rows of the LM's head."""
        head = LMHead.of(self._encoder.lm).layer
        weight = head.weight[self._tokens].float()
        bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias[self._tokens]
        return WordRows(weight.cpu().numpy(), bias.float().cpu().numpy())

    @cached_property
    def similarity(self) -> Similarity:
        """Read what `fit` measured.

        Raises:
            ArtifactError: If it is not there, or damaged.
        """
        if not self._way.is_fitted:
            return PLAIN[self.name]
        read_manifest(self.folder, stage=STAGE, fingerprint=self.fingerprint)
        words = np.array(read_array(self.folder / "words.npy")) if self._tokens else None
        return Similarity(
            words=None if words is None else WordRows(words[:, :-1], words[:, -1]),
            passages=Usual(*np.array(read_array(self.folder / "passages.npy"))),
            queries=Usual(*np.array(read_array(self.folder / "queries.npy"))),
            is_unit=self._way.is_unit,
        )


def _draw_queries(examples: Sequence[Example]) -> dict[int, Example]:
    """Draw different queries, by key: whatever their order, and however often one stands there."""
    by_key = {query_key(example): example for example in examples}
    keys = np.array(sorted(by_key), np.int64)
    if len(keys) > SAMPLE:
        keys = np.sort(np.random.default_rng(_SEED).choice(keys, SAMPLE, replace=False))
    return {key: by_key[key] for key in keys.tolist()}
