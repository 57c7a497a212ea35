"""A first stage that learns from the second: the whole corpus searched in the task's space.

    values(e) = what the similarity compares of passage e      (pgra.rerank.similarity)
    map       = ridge regression from the index' vectors to values, on a sample that the LM has read
    score     = values(x) . map(vector(e))                     of every passage e of the corpus

An exhaustive search has the LM read every passage. Here it reads a sample, then each query's
candidates; the map tells of all others what their states would say. Of values with many columns
the leading principal directions of the sample are learnt; of chances their logarithms.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt

from pgra.artifacts import (
    artifact_dir,
    build_once,
    is_finished,
    read_array,
    read_manifest,
    write_array,
)
from pgra.config import Arguments as _Arguments
from pgra.config import arg
from pgra.core import Candidates, Example, Json, Rows
from pgra.errors import ConfigError
from pgra.rerank.bank import Floats, bank_name, query_key
from pgra.rerank.head import log_softmax
from pgra.rerank.prompted import PromptedReranker
from pgra.retrieval.base import (
    BuiltIndex,
    IndexIdentity,
    IndexRequest,
    Retriever,
    check_num_candidates,
)
from pgra.retrieval.dense import DenseRetriever, read_removed
from pgra.retrieval.faiss import VectorSource, nearest
from pgra.retrieval.shards import find_shards, vector_source

logger = logging.getLogger(__name__)

STAGE = "distilled"
_DIRECTIONS = 64  # of values with more columns
_MOST = 0.01  # of the corpus: a sample beyond the first grows no larger
_WORTH_IT = 0.01  # of the correlation, for which the sample is doubled once more
_PENALTIES = 10.0 ** np.arange(-4, 3.5, 0.5)  # times the mean variance of a column
_SEED = 0
_LEAST = 1e-9
_COUNTS = ("correlation", "num_read")
_NO_ROWS: Rows = np.empty(0, dtype=np.int64)

Doubles = npt.NDArray[np.float64]


@dataclass(kw_only=True)
class DistilledArguments(_Arguments):
    """How much of the corpus is read to learn from."""

    GROUP = "Retriever"

    distill_sample: int = arg(
        2000,
        "Passages that the LM reads first, to learn what it makes of all; with --retriever "
        "distilled. Doubled up to a hundredth of the corpus while that helps.",
        least=16,
        is_common=True,
    )


@dataclass(frozen=True)
class RidgeMap:
    """A linear map, and how well it foretells what it was not fitted to.

    Attributes:
        weights: (D + 1, r), the constant in the last row.
        correlation: Of foretold and true values, each example left out of its fit; the mean over
            the columns by their variance.
        penalty: The one that was chosen, times the mean variance of a column.
    """

    weights: Floats
    correlation: float
    penalty: float


def fit_ridge(vectors: Floats, values: Floats) -> RidgeMap:
    """Fit values (n, r) to vectors (n, D); the penalty with the least leave-one-out error."""
    centre, middle = vectors.mean(axis=0, dtype=np.float64), values.mean(axis=0, dtype=np.float64)
    x, y = vectors - centre, values - middle
    left, lengths, right = np.linalg.svd(x, full_matrices=False)  # (n, m), (m,), (m, D)
    targets, scale = left.T @ y, float((lengths**2).mean())
    beyond, space = y - left @ targets, 1 - (left**2).sum(axis=1)  # what no map can reach
    best: tuple[float, float, Doubles] | None = None
    for penalty in _PENALTIES:
        kept = penalty * scale / (lengths**2 + penalty * scale)
        # The error with an example left out is its error over the share that it has not explained.
        errors = beyond + left @ (kept[:, None] * targets)
        errors /= np.maximum(left**2 @ kept + space - 1 / len(x), _LEAST)[:, None]
        size = float((errors**2).sum())
        if best is None or size < best[0]:
            best = size, float(penalty), y - errors
    assert best is not None
    _, penalty, told = best
    told = told - told.mean(axis=0)
    spread = np.sqrt((told**2).sum(axis=0) * (y**2).sum(axis=0))
    each = (told * y).sum(axis=0) / np.where(spread == 0, 1, spread)
    weight = (y**2).sum(axis=0)
    slopes = right.T @ ((lengths / (lengths**2 + penalty * scale))[:, None] * targets)
    weights = np.vstack([slopes, middle - centre @ slopes]).astype(np.float32)
    return RidgeMap(weights, float((each * weight).sum() / max(weight.sum(), _LEAST)), penalty)


class DistilledRetriever(Retriever):
    """Finds the passages that the second stage would rank first, as far as the map can tell.

    Attributes:
        correlation: How well values are foretold; see `RidgeMap`.
        num_read: Passages that were read to learn the map.
    """

    Arguments = DistilledArguments
    encodes = True
    learns = True

    def __init__(
        self, reranker: PromptedReranker, identity: IndexIdentity, rows: Rows, source: VectorSource
    ) -> None:
        """Take up what `_learn` left, and foretell the values of all passages.

        Args:
            reranker: The second stage.
            identity: The index and the map.
            rows: The passages, rising, without removed ones.
            source: Their vectors, and those of removed ones.
        """
        self.fingerprint = identity.fingerprint
        folder = _home(reranker, identity)
        manifest = read_manifest(folder, stage=STAGE, fingerprint=self.fingerprint)
        self.correlation, self.num_read = (manifest.counts[name] for name in _COUNTS)
        weights = read_array(folder / "weights.npy")
        self._directions = np.asarray(read_array(folder / "directions.npy"))
        self._reranker, self._rows = reranker, rows
        told = np.concatenate([b @ weights[:-1] + weights[-1] for b in source.blocks()])[rows]
        are_chances = reranker.fitting.similarity.are_chances
        self._told = np.exp(log_softmax(told)) if are_chances else told

    @classmethod
    def identify(cls, request: IndexRequest) -> IndexIdentity:
        """Name the index of vectors, and what is learnt from the second stage.

        Raises:
            ConfigError: If there is no second stage to learn from.
        """
        reranker, dense = _second_stage(request), DenseRetriever.identify(request)
        fields: dict[str, Json] = {
            "dense": dict(dense.fingerprint),
            "second stage": dict(reranker.fitting.fingerprint),  # whatever the topic's weight
            "directions": _DIRECTIONS,
            **_options(request).deciding(),
        }
        return IndexIdentity(fields, dense.folders)

    @classmethod
    def prepare(cls, request: IndexRequest) -> list[BuiltIndex]:
        """Find or build the index of vectors."""
        return DenseRetriever.prepare(request)

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        """Find or build the index, and learn the map or take it up."""
        reranker, identity = _second_stage(request), cls.identify(request)
        [built] = cls.prepare(request)
        source = vector_source(find_shards(built.folder), built.manifest.counts["dim"])
        removed = read_removed(built.folder, built.manifest)
        rows = np.setdiff1d(np.arange(source.num_rows), removed)
        _learn(reranker, identity, rows, source, sample=_options(request).distill_sample)
        return cls(reranker, identity, rows, source)

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Find candidates of texts, read as passages are; see `for_examples`."""
        template = self._reranker.encoder.prompt.template
        return self.for_examples(
            [Example(text, template.passage_fields(text)) for text in queries], k
        )

    def for_examples(self, examples: Sequence[Example], k: int) -> Candidates:
        """Return each query's k passages of the largest foretold score; the LM reads the queries.

        Raises:
            ConfigError: If k exceeds the passages.
        """
        check_num_candidates(k, len(self._rows))
        reranker, keys = self._reranker, np.array([query_key(e) for e in examples], np.int64)
        reranker.prepare(examples, _NO_ROWS)
        states, norms = reranker.query_bank.states(keys), reranker.query_bank.norms(keys)
        values = reranker.fitting.similarity.of_queries(states, norms, keys) @ self._directions
        return nearest(values, self._told, k, rows=self._rows)


def _second_stage(request: IndexRequest) -> PromptedReranker:
    name, reranker = request.args.retriever, request.reranker
    if reranker is None:
        raise ConfigError(
            f"retriever '{name}' learns from a task's second stage: use it with pgra rerank or "
            "pgra train, or choose dense, bm25 or hybrid here"
        )
    if not isinstance(reranker, PromptedReranker):
        raise ConfigError(
            f"retriever '{name}' learns the LM's states under one prompt: use --reranker prompted, "
            "--num_prefixes 1, and exemplars that all queries share"
        )
    return reranker


def _options(request: IndexRequest) -> DistilledArguments:
    options = request.options or DistilledArguments()
    assert isinstance(options, DistilledArguments)  # its own
    return options


def _home(reranker: PromptedReranker, identity: IndexIdentity) -> Path:
    home = reranker.context.artifacts / "distilled"
    return artifact_dir(home, bank_name(reranker.encoder.lm.source.name), identity.fingerprint)


def _learn(
    reranker: PromptedReranker,
    identity: IndexIdentity,
    rows: Rows,
    source: VectorSource,
    *,
    sample: int,
) -> None:
    """Fit the map to more and more passages, if nobody has; all processes read them."""
    folder = _home(reranker, identity)
    is_there = is_finished(folder)
    reranker.context.barrier()  # all have looked
    if is_there:
        return
    order = np.random.default_rng(_SEED).permutation(rows)
    most, size, before = max(sample, int(_MOST * len(rows))), min(sample, len(rows)), -np.inf
    while True:
        read = np.sort(order[:size])
        reranker.prepare([], read)
        similarity, bank = reranker.fitting.similarity, reranker.bank
        values = similarity.of_passages(bank.states(read), bank.norms(read))
        if similarity.are_chances:
            values = np.log(np.maximum(values, _LEAST))
        directions = np.eye(values.shape[1], dtype=np.float32)
        if values.shape[1] > _DIRECTIONS:
            _, _, axes = np.linalg.svd(values - values.mean(axis=0), full_matrices=False)
            directions = np.ascontiguousarray(axes[:_DIRECTIONS].T)
        found = fit_ridge(source.read(read), values @ directions)
        logger.info("distilled: %d passages read, correlation %.3f", size, found.correlation)
        if found.correlation - before < _WORTH_IT or 2 * size > min(most, len(rows)):
            break
        size, before = 2 * size, found.correlation

    def write(aside: Path) -> Mapping[str, Json]:
        write_array(aside / "weights.npy", found.weights)
        write_array(aside / "directions.npy", directions)
        return dict(zip(_COUNTS, (round(found.correlation, 4), size), strict=True))

    build_once(
        folder,
        stage=STAGE,
        fingerprint=identity.fingerprint,
        build=write,
        context=reranker.context,
    )
