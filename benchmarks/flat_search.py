"""Exact search of random vectors in all ways, in one process: pgra's, and FAISS called directly."""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from others import seconds_of

from pgra.retrieval.dense import DenseRetriever
from pgra.retrieval.faiss import BlockSearch, Vectors, VectorSource, map_faiss
from pgra.retrieval.shards import plan_shards, vector_source

BATCHES = (1, 64, 1024)
SHARD_ROWS = 8192
INDEX = "ours.faiss"
TUNED = 1
OVERHEAD = "pgra overhead"
OURS, OTHERS = "pgra", ("FAISS tuned", "FAISS default")
LEAST_SECONDS, MOST_ROUNDS = 15, 25  # of short searches: one call alone says little


class TimedIndex:
    """A FAISS index that counts the seconds of its own searches.

    What lies between them and the seconds of the search around them is that search's overhead,
    free of the noise between two calls.

    Attributes:
        seconds: In all searches so far.
    """

    def __init__(self, index: Any) -> None:
        self._index = index
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def search(self, *given: Any) -> Any:
        """Search as the index does."""
        start = time.perf_counter()
        found = self._index.search(*given)
        self.seconds += time.perf_counter() - start
        return found


def time_ways(
    args: argparse.Namespace, folder: str, rows: str, width: str
) -> dict[str, dict[str, float]]:
    """Time all ways in turn, at each batch size: rates, ratios to others, and the overhead.

    A ratio is the median over the rounds, in each of which two calls stand side by side, now the
    one and now the other first. The best calls of each are from different moments, and where other
    jobs run these differ by more than the ways do.
    """
    import faiss

    default = faiss.cvar.distance_compute_blas_threshold
    source, queries = source_of(Path(folder), int(rows), int(width)), read_queries(folder)
    raw = faiss.IndexFlatIP(int(width))
    for block in source.blocks():
        raw.add(block)
    mapped = TimedIndex(map_faiss(Path(folder) / INDEX))
    ways: dict[str, Callable[[Vectors], object]] = {
        OURS: lambda batch: retriever(mapped).search(batch, args.k),
        "FAISS tuned": partial(ask_raw, raw, k=args.k, threshold=TUNED),
        "FAISS default": partial(ask_raw, raw, k=args.k, threshold=default),
        "pgra, shards": lambda batch: retriever(BlockSearch(source)).search(batch, args.k),
    }
    names = (*ways, *map(versus, OTHERS), OVERHEAD)
    rates: dict[str, dict[str, float]] = {way: {} for way in names}
    for size in BATCHES:
        calls = 8 if size == 1 else 1
        for search in ways.values():
            search(queries[:size])  # pages are read, buffers made
        rounds = take_rounds(
            {way: partial(ask_often, search, queries, size, calls) for way, search in ways.items()},
            mapped,
            least=args.repeats,
        )
        for way in ways:
            rates[way][str(size)] = size * calls / min(took[way] for took in rounds)
        for other in OTHERS:
            ratios = [took[other] / took[OURS] for took in rounds]
            rates[versus(other)][str(size)] = statistics.median(ratios)
        rates[OVERHEAD][str(size)] = min(took[OVERHEAD] for took in rounds)
    return rates


def take_rounds(
    ways: Mapping[str, Callable[[], object]], mapped: TimedIndex, *, least: int
) -> list[dict[str, float]]:
    """Time all ways round by round, back and forth: each round's seconds, and the overhead."""
    rounds: list[dict[str, float]] = []
    begun = time.perf_counter()
    while len(rounds) < least or (
        len(rounds) < MOST_ROUNDS and time.perf_counter() - begun < LEAST_SECONDS
    ):
        took: dict[str, float] = {}
        for way in list(ways)[:: -1 if len(rounds) % 2 else 1]:
            mapped.seconds = 0.0
            took[way] = seconds_of(ways[way])
            if mapped.seconds:
                took[OVERHEAD] = took[way] / mapped.seconds
        rounds.append(took)
    return rounds


def versus(other: str) -> str:
    """Name the ratio of our rate to another's."""
    return f"{OURS} / {other}"


def ask_often(search: Callable[[Vectors], object], queries: Vectors, size: int, calls: int) -> None:
    """Search batches one after another."""
    for call in range(calls):
        search(queries[call : call + size] if size == 1 else queries[:size])


def ask_raw(index: Any, queries: Vectors, *, k: int, threshold: int) -> None:
    """Call FAISS as its users do."""
    import faiss

    faiss.cvar.distance_compute_blas_threshold = threshold
    index.search(queries, k)


def retriever(index: Any) -> DenseRetriever:
    """Return our search without an encoder, which it does not use for vectors."""
    return DenseRetriever(index, None, {})  # type: ignore[arg-type]


def source_of(folder: Path, rows: int, width: int) -> VectorSource:
    """Return the vectors that lie in shards."""
    return vector_source(plan_shards(folder, rows, SHARD_ROWS), width)


def read_queries(folder: str) -> Vectors:
    """Read the queries."""
    queries: Vectors = np.load(Path(folder) / "queries.npy")
    return queries
