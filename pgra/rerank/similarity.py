"""How alike two states are, what a similarity is fitted to, and candidates' scores.

    dot              the states as they are (Guo et al. 2023, eq. 3)
    cosine           states of length 1 (their code)
    whitened         each column less its mean, over its standard deviation
    whitened_cosine  the same, then of length 1 (as Timkey and van Schijndel 2021)
    label_words      the LM's own log-chances of the label words, each less its mean, over its
                     standard deviation

Hidden states have a large part in common, and a few columns far larger than the rest, so that
products tell little of the texts; mean and standard deviation take both away. And an LM under a few
shots may answer one label for nearly all texts: of the log-chances, only how they differ from what
is usual tells them apart (akin to Zhao et al. 2021, "Calibrate before use").

Passages have the means of passages, and queries those of queries: the two are of different kinds
of text, and what all queries have in common says nothing of which passage is like one of them.

A similarity of your own (`--similarity module:Class`) derives from `Similarity` and overrides
`change`, or `of_passages` and `of_queries`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch

from pgra.artifacts import (
    artifact_dir,
    build_once,
    digest,
    is_finished,
    read_array,
    read_manifest,
    write_array,
)
from pgra.config import find_class
from pgra.core import MISSING_ROW, Example, Json, Rows
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.prefix import PromptedEncoder
from pgra.rerank.bank import Bank, Floats, query_key
from pgra.rerank.base import Reference
from pgra.rerank.head import affine, column_stats, log_softmax


def log_chances(states: Floats, words: Floats) -> Floats:
    """Return the log-probability of each word among these words, (n, C), behind states (n, H).

    Args:
        states: Of an LM.
        words: (C, H + 1): what its head has for the token that each word begins with; the bias is
            the last column.
    """
    chances: Floats = log_softmax(affine(states, words))
    return chances


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Changes states so that the inner products of what comes out are the scores.

    Attributes:
        is_fitted: Whether it gets `passages` and `queries`, measured on a draw of both.
        reads_words: Whether states become log-chances of the label words; it is fitted then.
        is_unit: Whether each is divided by its length.
        words: The LM head's rows of the label words, as `log_chances` takes them.
        passages: Mean and spread of passages' values, (2, D).
        queries: Of queries' values.
    """

    is_fitted: ClassVar[bool] = False
    reads_words: ClassVar[bool] = False
    is_unit: ClassVar[bool] = False
    words: Floats | None = None
    passages: Floats | None = None
    queries: Floats | None = None

    def of_passages(self, states: Floats, norms: Floats) -> Floats:
        """Return what is compared with a query.

        Args:
            states: (n, H).
            norms: (n,), of these states.

        Returns:
            (n, D): H columns, or one a label word.
        """
        return self.change(states, norms, self.passages)

    def of_queries(self, states: Floats, norms: Floats) -> Floats:
        """Return what is compared with passages; see `of_passages`."""
        return self.change(states, norms, self.queries)

    def values(self, states: Floats) -> Floats:
        """Return what mean and spread are taken of: the states, or log-chances of words."""
        return states if self.words is None else log_chances(states, self.words)

    def change(self, states: Floats, norms: Floats, stats: Floats | None) -> Floats:
        """Change states of one kind, whose mean and spread are `stats`; see `of_passages`."""
        values = self.values(states)
        if stats is not None:
            values = (values - stats[0]) / stats[1]
        if not self.is_unit:
            return values
        lengths = norms if values is states else np.linalg.norm(values, axis=1)
        unit: Floats = values / np.where(lengths == 0, 1, lengths).astype(np.float32)[:, None]
        return unit


class Cosine(Similarity):
    """States of length 1."""

    is_unit = True


class Whitened(Similarity):
    """Each column less its mean, over its spread."""

    is_fitted = True


class WhitenedCosine(Whitened):
    """The same, of length 1."""

    is_unit = True


class LabelWords(Whitened):
    """Log-chances of the label words, standardized."""

    reads_words = True


SIMILARITIES = {
    "cosine": "pgra.rerank.similarity:Cosine",
    "dot": "pgra.rerank.similarity:Similarity",
    "label_words": "pgra.rerank.similarity:LabelWords",
    "whitened": "pgra.rerank.similarity:Whitened",
    "whitened_cosine": "pgra.rerank.similarity:WhitenedCosine",
}


def find_similarity(name: str) -> type[Similarity]:
    """Return the class of a similarity: of `SIMILARITIES`, an entry point, or `module:Class`.

    Raises:
        ConfigError: If there is none of that name.
    """
    cls: type[Similarity] = find_class("similarity", name, SIMILARITIES)
    return cls


# What a fitted similarity is fitted to: a draw of passages, a draw of training queries, the words.
#
# The draws depend on the corpus and on the training queries alone: not on which candidates are in
# the bank, so that all k and d share one ranking, nor on the reader's seed; and no test query is
# among them. What was measured is a product of its own, so that a new query is scored as the
# run's were, without the training data:
#
#     passages.npy  (2, D) float32: mean and spread of passages' values
#     queries.npy   (2, D) float32: of queries' values
#     words.npy     (C, H + 1) float32, label words only: the head's rows, with the bias at the end


STAGE = "similarity"
SAMPLE = 2000
_SEED = 0
_FEWEST = 2
_OWN_FIELDS = ("similarity_sample", "label_tokens")


class Fitting:
    """Fits a similarity once, or takes up what is there; those that need no fit are just there.

    Attributes:
        name: A name of `SIMILARITIES`, or `module:Class`.
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
            name: A name of `SIMILARITIES`, or `module:Class`.
            encoder: LM, with its head for label words, and prompt.
            reference: What the task gives.
            num_rows: Passages of the corpus.
            made_of: What passages' states depend on.
            home: Where the folder goes, with the beginning of its name.

        Raises:
            ConfigError: If there is no such similarity, there are too few texts to measure, or
                label words begin alike.
            ModelError: If the tokenizer joins a word to the prompt.
        """
        self.name, self._class, self._encoder = name, find_similarity(name), encoder
        self._num_rows, self._is_known = num_rows, reference.made is not None
        is_fitted = self._class.is_fitted
        by_key = {query_key(example): example for example in reference.queries}
        keys = draw_keys(np.array(sorted(by_key), np.int64)).tolist() if is_fitted else []
        self._queries = {key: by_key[key] for key in keys}  # different ones, whatever their order
        fields = self._fields(reference) if is_fitted else {}
        self._tokens = fields.get("label_tokens")
        self.fingerprint: Mapping[str, Json] = {**made_of, "similarity": name, **fields}
        self.folder = artifact_dir(home.parent, home.name, self.fingerprint)

    def _fields(self, reference: Reference) -> dict[str, Any]:
        """Return what the fingerprint says of a fit."""
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
        if self._class.reads_words:
            words = reference.words
            fields["label_tokens"] = self._encoder.first_tokens(words.values())
            if len(fields["label_tokens"]) < _FEWEST:
                raise ConfigError(
                    f"similarity '{self.name}' tells labels by the first tokens of their words, "
                    f"and {', '.join(words.values())} all begin alike: choose others in the task's "
                    "prompt_words, or use another --similarity"
                )
        return fields

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to measure."""
        return not self._class.is_fitted or is_finished(self.folder)

    def num_columns(self, width: int) -> int:
        """Return D, of what is compared, where states have `width` columns."""
        return width if self._tokens is None else len(self._tokens)

    def rows(self) -> Rows:
        """Return the passages whose states it has yet to measure, sorted."""
        if self.is_ready:
            return np.empty(0, dtype=np.int64)
        return draw_keys(np.arange(self._num_rows))

    def queries(self) -> list[Example]:
        """Return the queries whose states it has yet to measure."""
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
        if self._class.is_fitted:
            build_once(
                self.folder,
                stage=STAGE,
                fingerprint=self.fingerprint,
                build=lambda aside: self._measure(aside, bank, query_bank),
                verify=False,  # when it is read
            )

    def _measure(self, aside: Path, bank: Bank, query_bank: Bank) -> Mapping[str, Json]:
        words = None
        if self._class.reads_words:
            head = self._encoder.lm.head
            weight = head.weight[self._tokens].float()
            bias = weight.new_zeros(len(weight)) if head.bias is None else head.bias[self._tokens]
            words = torch.column_stack([weight, bias.float()]).cpu().numpy()
            write_array(aside / "words.npy", words)
        values = self._class(words=words).values
        rows, keys = self.rows(), np.array(list(self._queries), np.int64)
        for part, states in (("passages", bank.states(rows)), ("queries", query_bank.states(keys))):
            write_array(aside / f"{part}.npy", column_stats(values(states)))
        return {"passages": len(rows), "queries": len(keys)}

    @cached_property
    def similarity(self) -> Similarity:
        """Read what `fit` measured.

        Raises:
            ArtifactError: If it is not there, or damaged.
        """
        if not self._class.is_fitted:
            return self._class()
        read_manifest(self.folder, stage=STAGE, fingerprint=self.fingerprint)
        parts = ["passages", "queries", *(["words"] if self._tokens else [])]
        return self._class(
            **{part: np.array(read_array(self.folder / f"{part}.npy")) for part in parts}
        )


def draw_keys(keys: Rows) -> Rows:
    """Draw as many of these as a similarity is fitted to, sorted; the same ones each time."""
    if len(keys) > SAMPLE:
        keys = np.sort(np.random.default_rng(_SEED).choice(keys, SAMPLE, replace=False))
    return keys


# Scores of candidates from their states (Guo et al. 2023, eq. 3), going once through the bank.
#
# A passage that is a candidate of many queries is read once for all of them, and shards are read in
# the order in which they lie on disk: no query fetches its own 150 states from 2,000 files.


_QUERY_BYTES = 1 << 28  # of query states: the bank is gone through once for so many queries
_NUM_PAIRS = 1 << 22  # of query and candidate, likewise: each takes some 60 bytes on the way
_BLOCK_BYTES = 1 << 25  # of passage states at a time
_PAIR_BYTES = 1 << 19  # of states on either side of a product: the processor's cache holds both

Indices = npt.NDArray[np.intp]


def score_candidates(
    bank: Bank, rows: Rows, *, query_bank: Bank, query_keys: Rows, similarity: Similarity
) -> Floats:
    """Return each candidate's score: the product of its state and the query's, both changed.

    Args:
        bank: Holds the candidates' states.
        rows: Candidates, (B, K), `MISSING_ROW` where missing.
        query_bank: Holds the queries' states.
        query_keys: Queries, (B,).
        similarity: Changes the states.

    Returns:
        (B, K) float32, -inf where a candidate is missing.

    Raises:
        KeyError: If a state is missing.
        ArtifactError: If states are not what was written.
    """
    scores = np.full(rows.shape, -np.inf, dtype=np.float32)
    by_bytes = _QUERY_BYTES // (4 * max(1, query_bank.width))
    step = max(1, min(by_bytes, _NUM_PAIRS // max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        keys = query_keys[some]
        queries = similarity.of_queries(query_bank.states(keys), query_bank.norms(keys))
        scores[some] = _score(bank, rows[some], queries=queries, similarity=similarity)
    return scores


def _score(bank: Bank, rows: Rows, *, queries: Floats, similarity: Similarity) -> Floats:
    flat = rows.ravel()
    pairs = np.argsort(flat, kind="stable")  # places in `flat`, those of one passage together
    pairs = pairs[np.searchsorted(flat, MISSING_ROW, side="right", sorter=pairs) :]
    distinct, first, count = np.unique(flat[pairs], return_index=True, return_counts=True)
    scores = np.full(flat.shape, -np.inf, dtype=np.float32)
    for block in bank.blocks(distinct, rows=max(1, _BLOCK_BYTES // (4 * max(1, bank.width)))):
        at = np.searchsorted(distinct, block.keys)
        passage = np.repeat(np.arange(len(at)), count[at])
        place = pairs[_runs(first[at], count[at])]
        query = place // rows.shape[1]
        passages = similarity.of_passages(block.states, block.norms)
        scores[place] = _products(passages, passage, right=queries, right_rows=query)
    return scores.reshape(rows.shape)


def _runs(first: Indices, count: Indices) -> Indices:
    """Return `count` numbers from each `first` on, end to end."""
    ends = np.cumsum(count)
    return np.arange(count.sum()) + np.repeat(first - ends + count, count)


def _products(left: Floats, left_rows: Indices, *, right: Floats, right_rows: Indices) -> Floats:
    """Return the inner products of pairs of rows, (n,), so few at a time that the cache holds them.

    A matrix product would compute all pairs, and of 500,000 passages a query has 150.
    """
    out = np.empty(len(left_rows), dtype=np.float32)
    step = max(1, _PAIR_BYTES // (4 * max(1, left.shape[1])))
    for start in range(0, len(out), step):
        part = slice(start, start + step)
        out[part] = np.vecdot(left[left_rows[part]], right[right_rows[part]])
    return out
