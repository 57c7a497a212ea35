"""How similar two states are, what a similarity is fitted to, and candidates' scores.

    dot              the states as they are (Guo et al. 2023, eq. 3)
    cosine           states of length 1 (their code)
    whitened         each column less its mean, over its standard deviation
    whitened_cosine  the same, then of length 1 (as Timkey and van Schijndel 2021)
    calibrated       less the mean state of texts without content, then of length 1: no data needed
    head             the probability that both have one label, by a head fitted to training examples

Hidden states have a large part in common, and a few columns far larger than the rest; whitening
takes both away. Passages and queries, two kinds of text, each have their own statistics. What the
LM says of no text at all is a cheaper estimate of the common part (Zhao et al. 2021, "Calibrate
before use", with its three texts).

A similarity of your own (`--similarity module:Class`) derives from `Similarity` and overrides
`change`, or `of_passages` and `of_queries`. A fitted one is a dataclass of arrays that sets
`is_fitted` and overrides `fit` (`examples/own_similarity.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from safetensors.numpy import load_file, save_file

from pgra.arrays import Indices, Rows, Vectors, unit
from pgra.artifacts import artifact_dir, build_once, digest, find_fault, read_array, write_array
from pgra.config import find_class
from pgra.errors import ConfigError
from pgra.lm.prefix import PromptedEncoder, StateColumns
from pgra.rerank.arguments import AUTO, FitData
from pgra.rerank.bank import Bank
from pgra.rerank.base import query_key, query_keys
from pgra.rerank.head import LabelModel, column_stats, fit_labels, softmax, standardize
from pgra.types import MISSING_ROW, Example, Fields


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What a similarity is fitted to: states of drawn passages (n, H) and training queries (m, H).

    `examples` are these queries, their keys rising; `settings` the result of `Similarity.settings`;
    `columns` are the states', for those that read several depths.
    """

    passages: Vectors
    queries: Vectors
    examples: Sequence[Example]
    settings: Mapping[str, Any]
    columns: StateColumns | None = None


@dataclass(frozen=True, kw_only=True)
class Similarity:
    """Changes states so that the inner products of what comes out are the scores.

    Attributes:
        is_fitted: Whether `fit` measures a draw of passages and training queries.
        learns_labels: Whether a fitted one learns the labels of training queries.
        content_free: Texts that it measures instead.
        reads_depths: Whether states are those of several depths, side by side.
    """

    is_fitted: ClassVar[bool] = False
    learns_labels: ClassVar[bool] = True
    content_free: ClassVar[Sequence[str]] = ()
    reads_depths: ClassVar[bool] = False

    @classmethod
    def settings(cls, data: FitData, examples: Sequence[Example]) -> dict[str, Any]:  # noqa: ARG003
        """Return what decides a fit beside the draw of training queries, named as `FIT_SETTINGS`.

        Raises:
            ConfigError: If there is nothing to fit to; nothing was read yet.
        """
        return {}

    @classmethod
    def fit(cls, sample: Sample) -> Self:  # noqa: ARG003
        """Measure a sample; the fields are stored as arrays."""
        return cls()

    def of_passages(self, states: Vectors) -> Vectors:
        """Return passages' states (n, H) as they are compared with queries, (n, D)."""
        return states

    def of_queries(self, states: Vectors, keys: Rows) -> Vectors:  # noqa: ARG002
        """Return queries' states (n, H) as they are compared with passages, (n, D).

        `keys` (n,), of `query_key`, identify the queries that `fit` saw.
        """
        return self.of_passages(states)


class Cosine(Similarity):
    """States of length 1."""

    def of_passages(self, states: Vectors) -> Vectors:
        return unit(states)


@dataclass(frozen=True, kw_only=True)
class Whitened(Similarity):
    """Each column less its mean, over its spread, (2, D) of passages and of queries."""

    passages: Vectors
    queries: Vectors

    is_fitted = True
    learns_labels = False

    @classmethod
    def fit(cls, sample: Sample) -> Self:
        return cls(passages=column_stats(sample.passages), queries=column_stats(sample.queries))

    def of_passages(self, states: Vectors) -> Vectors:
        return standardize(states, self.passages)

    def of_queries(self, states: Vectors, keys: Rows) -> Vectors:  # noqa: ARG002
        return standardize(states, self.queries)


class WhitenedCosine(Whitened):
    """The same, of length 1."""

    def of_passages(self, states: Vectors) -> Vectors:
        return unit(super().of_passages(states))

    def of_queries(self, states: Vectors, keys: Rows) -> Vectors:
        return unit(super().of_queries(states, keys))


@dataclass(frozen=True, kw_only=True)
class Calibrated(Similarity):
    """States less the mean state of texts without content, (H,), of length 1."""

    mean: Vectors

    is_fitted = True
    learns_labels = False
    content_free = ("N/A", "[MASK]", "")

    @classmethod
    def fit(cls, sample: Sample) -> Self:
        return cls(mean=sample.queries.mean(axis=0, dtype=np.float64).astype(np.float32))

    def of_passages(self, states: Vectors) -> Vectors:
        return unit(states - self.mean)


@dataclass(frozen=True, kw_only=True)
class LabelHead(LabelModel, Similarity):
    """The probability that query and passage have one label, as `LabelModel` gives it.

        score(x, e) = sum_y p_x(y) q_e(y)
        p_x = softmax(l(x))                              the probabilities for a query
        q_e = softmax(l(e) - mean of l over passages)    for a passage, whatever the corpus leans to

    A query that heads were fitted to is scored by those of the folds without it: a reader would
    else be trained on evidence better than it gets later.

    Fields as of `LabelModel`; `keys`, rising, are those of the m queries, `folds` theirs, and
    `mean` has the mean scores over passages, (C,).
    """

    folds: Indices
    keys: Rows
    mean: Vectors

    is_fitted = True
    reads_depths = True

    @classmethod
    def settings(cls, data: FitData, examples: Sequence[Example]) -> dict[str, Any]:
        """Return the labels with their words, and a digest of those of the examples."""
        if not data.words:
            raise ConfigError(
                "similarity 'head' learns labels, and this task has none: use whitened_cosine"
            )
        truth = [example.label for example in examples]
        return {"similarity_fit": {"labels": dict(data.words), "of_queries": digest(truth)}}

    @classmethod
    def fit(cls, sample: Sample) -> Self:
        """Fit heads and opinion to the queries' labels, and the mean scores to the passages."""
        labels = list(sample.settings["similarity_fit"]["labels"])
        assert sample.columns is not None
        fit = fit_labels(sample.queries, sample.columns, sample.examples, labels)
        return cls(
            **vars(fit.model),
            folds=fit.folds,
            keys=query_keys(sample.examples),
            mean=fit.model.score(sample.passages).mean(axis=0),
        )

    def of_passages(self, states: Vectors) -> Vectors:
        """Return q_e."""
        return softmax(self.score(states) - self.mean)

    def of_queries(self, states: Vectors, keys: Rows) -> Vectors:
        """Return p_x, by the heads that have not seen the query."""
        at = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        folds = np.where(self.keys[at] == keys, self.folds[at], self.num_folds)
        return softmax(self.score(states, folds))


SIMILARITIES = {
    "calibrated": "pgra.rerank.similarity:Calibrated",
    "cosine": "pgra.rerank.similarity:Cosine",
    "dot": "pgra.rerank.similarity:Similarity",
    "head": "pgra.rerank.similarity:LabelHead",
    "whitened": "pgra.rerank.similarity:Whitened",
    "whitened_cosine": "pgra.rerank.similarity:WhitenedCosine",
}


def find_similarity(name: str) -> type[Similarity]:
    """Return the class of a similarity: of `SIMILARITIES`, an entry point, or `module:Class`."""
    cls: type[Similarity] = find_class("similarity", name, SIMILARITIES)
    return cls


def learns_labels(name: str) -> bool:
    """Whether a similarity learns the labels of training queries; `auto` may choose one."""
    if name == AUTO:
        return True
    cls = find_similarity(name)
    return cls.is_fitted and cls.learns_labels


# What a fitted similarity is fitted to: a draw of passages, and a draw of training queries.
#
# The draws depend on the corpus and on the training queries alone: not on which candidates are in
# the bank, so that all k and d share one ranking, nor on the reader's seed; and no test query is
# among them. What was measured is a product of its own, NAME.npy a field of the class, so that a
# new query is scored as the run's were, without the training data.


_STAGE = "similarity"
SAMPLE = 2000
_SEED = 0
FIT_SETTINGS = ("similarity_sample", "similarity_fit")  # in a fingerprint
FIT_FILE = "similarity.safetensors"  # in a reader's folder


class Fitting:
    """Fits a similarity once, or loads the fit; some similarities need none.

    `fingerprint` is all that scores depend on, besides queries and candidates; `folder` holds the
    fit.
    """

    def __init__(
        self,
        name: str,
        data: FitData,
        encoder: PromptedEncoder,
        *,
        num_rows: int,
        bank_fields: Fields | None = None,
        root: Path | None = None,
        kind: str = "",
    ) -> None:
        """Draw, and refuse what cannot be fitted.

        `encoder` gives the states, `num_rows` is the size of the corpus, `bank_fields` what
        passages' states depend on, `root` and `kind` say where `artifact_dir` puts the fit;
        None: it stays in memory.

        Raises:
            ConfigError: If the name is unknown, or texts are too few.
        """
        self.name = name
        self._encoder = encoder
        self._class = find_similarity(name)
        self._run_file = None if data.folder is None else data.folder / FIT_FILE
        if texts := self._class.content_free:
            show = encoder.prompt.template.passage_fields
            data = replace(data, queries=[Example("", show(text)) for text in texts])
            num_rows = 0
        self._num_rows = num_rows
        self._queries: dict[int, Example] = {}
        if self._class.is_fitted:
            labelled = sorted(data.queries, key=lambda example: str(example.label))
            by_key = {query_key(example): example for example in labelled}
            # Different ones, whatever their order.
            drawn = draw_keys(np.array(sorted(by_key), np.int64))
            self._queries = {key: by_key[key] for key in drawn.tolist()}
        self._settings = self._describe(data)
        self.fingerprint = {**(bank_fields or {}), "similarity": name, **self._settings}
        self.folder = None if root is None else artifact_dir(root, kind, self.fingerprint)

    def _describe(self, data: FitData) -> dict[str, Any]:
        """Return a fit's part of the fingerprint."""
        if data.fingerprint is not None:
            return {n: data.fingerprint[n] for n in FIT_SETTINGS if n in data.fingerprint}
        sample = {}
        if self._class.is_fitted and not self._class.content_free:
            if (count := min(len(self._queries), self._num_rows)) < 2:
                raise ConfigError(
                    f"similarity '{self.name}' is fitted to queries, and there are {count}: use dot"
                )
            queries = digest(list(self._queries))
            sample = {"similarity_sample": {"size": SAMPLE, "seed": _SEED, "queries": queries}}
        return {**sample, **self._class.settings(data, list(self._queries.values()))}

    @property
    def is_ready(self) -> bool:
        """Whether nothing is left to measure."""
        if not self._class.is_fitted or self._run_file is not None:
            return True
        if self.folder is None:
            return False
        return find_fault(self.folder, _STAGE, self.fingerprint) is None

    def rows(self) -> Rows:
        """Return the passages whose states it has yet to measure, sorted."""
        return draw_keys(np.arange(0 if self.is_ready else self._num_rows))

    def queries(self) -> list[Example]:
        """Return the drawn training queries whose states it has yet to measure."""
        return [] if self.is_ready else list(self._queries.values())

    def fit(self, bank: Bank, query_bank: Bank) -> None:
        """Fit to the states of `rows` and `queries`, from their banks, unless that was done."""
        if not self._class.is_fitted or self._run_file is not None:
            return

        def measure(aside: Path) -> Fields:
            rows = self.rows()
            keys = np.array(list(self._queries), np.int64)
            self.similarity = self.fit_states(bank.states(rows), query_bank.states(keys))
            for name, array in vars(self.similarity).items():
                write_array(aside / f"{name}.npy", array)
            return {"passages": len(rows), "queries": len(keys)}

        assert self.folder is not None
        build_once(self.folder, stage=_STAGE, fingerprint=self.fingerprint, build=measure)

    def fit_states(self, passages: Vectors, queries: Vectors) -> Similarity:
        """Return the fit to the states of `rows` and `queries`, (n, H) and (m, H)."""
        columns = None
        if self._class.reads_depths:
            words = self._settings["similarity_fit"]["labels"]
            columns = self._encoder.columns(list(words.values()))
        return self._class.fit(
            Sample(
                passages=passages,
                queries=queries,
                examples=list(self._queries.values()),
                settings=self._settings,
                columns=columns,
            )
        )

    def save(self, folder: Path) -> None:
        """Write the fit, if there is one, into a reader's folder."""
        if self._class.is_fitted:
            save_file(vars(self.similarity), folder / FIT_FILE)

    @cached_property
    def similarity(self) -> Similarity:
        """The fitted similarity; if its files are missing or damaged, that is an ArtifactError."""
        if not self._class.is_fitted:
            return self._class()
        if self._run_file is not None:
            return self._class(**load_file(self._run_file))
        assert self.folder is not None
        names = [field.name for field in fields(self._class)]
        return self._class(**{n: np.array(read_array(self.folder / f"{n}.npy")) for n in names})


def draw_keys(keys: Rows) -> Rows:
    """Draw as many of these as a similarity is fitted to, sorted; the same ones each time."""
    if len(keys) > SAMPLE:
        keys = np.sort(np.random.default_rng(_SEED).choice(keys, SAMPLE, replace=False))
    return keys


# Scores of candidates from their states (Guo et al. 2023, eq. 3), going once through the bank.
#
# A passage that is a candidate of many queries is read once for all of them, and shards are read in
# the order in which they lie on disk: no query fetches its own 150 states from 2,000 files.


_CHUNK_BYTES = 1 << 28  # of queries and pairs: the bank is gone through once for so many queries
_BLOCK_BYTES = 1 << 25  # of passage states at a time
_PAIR_BYTES = 1 << 19  # of states on either side of a product: the processor's cache holds both


def score_candidates(
    bank: Bank, rows: Rows, *, query_bank: Bank, query_keys: Rows, similarity: Similarity
) -> Vectors:
    """Return the product of each candidate's state and its query's, both changed.

    Rows are (B, K), `MISSING_ROW` where missing; scores are (B, K) float32, -inf there.

    Raises:
        KeyError: If a state is missing.
        ArtifactError: If states are not what was written.
    """
    scores = np.full(rows.shape, -np.inf, dtype=np.float32)
    step = max(1, _CHUNK_BYTES // (4 * max(1, query_bank.width) + 60 * rows.shape[1]))
    for start in range(0, len(rows), step):
        some = slice(start, start + step)
        queries = similarity.of_queries(query_bank.states(query_keys[some]), query_keys[some])
        scores[some] = _score(bank, rows[some], queries, similarity)
    return scores


def _score(bank: Bank, rows: Rows, queries: Vectors, similarity: Similarity) -> Vectors:
    scores = np.full(rows.size, -np.inf, dtype=np.float32)
    present = np.flatnonzero(rows != MISSING_ROW)  # places in the flat rows and scores
    distinct, number = np.unique(rows.ravel()[present], return_inverse=True)
    size = max(1, _BLOCK_BYTES // (4 * max(1, bank.width, queries.shape[1])))
    for keys, states in bank.blocks(distinct, rows=size):
        passages = similarity.of_passages(states)
        at = np.full(len(distinct), -1)  # where a passage is in this block
        at[np.searchsorted(distinct, keys)] = np.arange(len(keys))
        here = np.flatnonzero(at[number] >= 0)
        step = max(1, _PAIR_BYTES // (4 * max(1, passages.shape[1])))
        for start in range(0, len(here), step):
            pairs = here[start : start + step]
            places = present[pairs]
            left = passages[at[number[pairs]]]
            right = queries[places // rows.shape[1]]
            scores[places] = np.vecdot(left, right)
    return scores.reshape(rows.shape)
