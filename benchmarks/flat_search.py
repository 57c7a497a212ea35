"""Exact search of random vectors in all ways, in one process: pgra's, and FAISS called directly."""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from others import seconds_of

from pgra.retrieval.dense import DenseRetriever
from pgra.retrieval.exact import Vectors
from pgra.retrieval.factory import VectorSource, map_faiss
from pgra.retrieval.flat import BlockSearch
from pgra.retrieval.shards import Shard, plan_shards, read_rows, read_shards

BATCHES = (1, 64, 1024)
SHARD_ROWS = 8192
INDEX = "ours.faiss"
TUNED, DEFAULT = 1, faiss.cvar.distance_compute_blas_threshold
OVERHEAD = "pgra overhead"


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
    """Time all ways in turn, at each batch size."""
    source, queries = source_of(Path(folder), int(rows), int(width)), read_queries(folder)
    raw = faiss.IndexFlatIP(int(width))
    for block in source.blocks():
        raw.add(block)
    mapped = TimedIndex(map_faiss(Path(folder) / INDEX))
    ways: dict[str, Callable[[Vectors], object]] = {
        "pgra": lambda batch: retriever(mapped).search(batch, args.k),
        "FAISS tuned": partial(ask_raw, raw, k=args.k, threshold=TUNED),
        "FAISS default": partial(ask_raw, raw, k=args.k, threshold=DEFAULT),
        "pgra, shards": lambda batch: retriever(BlockSearch(source.blocks, source.num_rows)).search(
            batch, args.k
        ),
    }
    rates: dict[str, dict[str, float]] = {way: {} for way in (*ways, OVERHEAD)}
    for size in BATCHES:
        calls = 8 if size == 1 else 1
        for search in ways.values():
            search(queries[:size])  # pages are read, buffers made
        for _ in range(args.repeats):
            for way, search in ways.items():
                mapped.seconds = 0.0
                seconds = seconds_of(partial(ask_often, search, queries, size, calls))
                rate = size * calls / seconds
                rates[way][str(size)] = max(rates[way].get(str(size), 0.0), rate)
                if mapped.seconds:
                    least = rates[OVERHEAD].get(str(size), float("inf"))
                    rates[OVERHEAD][str(size)] = min(least, seconds / mapped.seconds)
    return rates


def ask_often(search: Callable[[Vectors], object], queries: Vectors, size: int, calls: int) -> None:
    """Search batches one after another."""
    for call in range(calls):
        search(queries[call : call + size] if size == 1 else queries[:size])


def ask_raw(index: Any, queries: Vectors, *, k: int, threshold: int) -> None:
    """Call FAISS as its users do."""
    faiss.cvar.distance_compute_blas_threshold = threshold
    index.search(queries, k)


def retriever(index: Any) -> DenseRetriever:
    """Give our search without an encoder, which it does not use for vectors."""
    return DenseRetriever(index, None, {})  # type: ignore[arg-type]


def source_of(folder: Path, rows: int, width: int) -> VectorSource:
    """Give the vectors that lie in shards."""
    shards: list[Shard] = plan_shards(folder, rows, SHARD_ROWS)
    return VectorSource(rows, width, partial(read_rows, shards), partial(read_shards, shards))


def read_queries(folder: str) -> Vectors:
    """Read the queries."""
    queries: Vectors = np.load(Path(folder) / "queries.npy")
    return queries
