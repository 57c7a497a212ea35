"""The first stage beside the tools that others use: encoding and exact search.

    python benchmarks/index.py --quick
    python benchmarks/index.py --sizes 100000 1000000 --widths 384 768 --json figures.json

    encode   real sentences by the same encoder, on the same device in the same precision: pgra's,
             and `encode` of sentence-transformers at the best of its batch sizes; and the least
             cosine between the vectors of both
    search   random unit vectors (an exact search takes the same time for any), `--k` hits a query:
             pgra's flat index as it is mapped from its file, and FAISS' called directly, as it
             comes and tuned (matrix products always); a ratio is the median of the rounds'

Both sides of a ratio run in turn in this process; the best of `--repeats` counts.
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from measuring import parse_flags, positive, shared_parser, show_figures, write_figures

from pgra.arrays import Vectors
from pgra.cli import run
from pgra.commands.common import say
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.lm.load import find_model
from pgra.retrieval.dense import plan_shards, vector_source
from pgra.retrieval.faiss import EXACT, FaissIndex, build_faiss

BATCHES = (1, 64, 1024)  # of queries
ENCODE_BATCHES = (16, 32, 64, 128, 256)  # of sentence-transformers, whose own default is 32
SHARD_ROWS = 8192
Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    args = parse(argv)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        if "encode" in args.parts:
            figures |= compare_encoders(args, Path(folder))
        if "search" in args.parts:
            for width in args.widths:
                for rows in args.sizes:
                    with tempfile.TemporaryDirectory(dir=folder) as aside:
                        figures |= compare_search(args, Path(aside), rows, width=width)
    show_figures("beside others", figures)
    write_figures(args.json, figures)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = shared_parser(__doc__ or "", quick="256 texts, 50,000 vectors x 384")
    parser.add_argument("--encoder", default="bundled:minilm-l6", help="hub id, folder, bundled:")
    parser.add_argument("--num_texts", type=positive, default=4096, help="that are encoded")
    parser.add_argument("--sizes", nargs="+", type=positive, default=[100_000, 1_000_000])
    parser.add_argument("--widths", nargs="+", type=positive, default=[384, 768])
    parser.add_argument("--k", type=positive, default=150, help="hits a query")
    parser.add_argument("--repeats", type=positive, default=5)
    parts = ("encode", "search")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    args = parse_flags(parser, argv)
    if args.quick:
        args.num_texts = min(args.num_texts, 256)
        args.repeats = 2
        args.sizes = [min(min(args.sizes), 50_000)]
        args.widths = [min(args.widths)]
    if args.k > (least := min(args.sizes)):
        raise ConfigError(f"k is {args.k}, more than the {least} passages: lower it")
    return args


def compare_encoders(args: argparse.Namespace, folder: Path) -> Figures:
    """Encode the same texts by both libraries."""
    import torch
    from sentence_transformers import SentenceTransformer

    corpus = open_corpus(CorpusArguments(corpus=args.corpus, max_passages=args.num_texts), folder)
    texts = corpus.texts(range(len(corpus)))
    ours = Encoder(args.encoder, max_encoder_tokens=128, device=args.device)
    dtype = str(ours.fingerprint["dtype"])
    device = str(ours.device)
    other = SentenceTransformer(find_model(args.encoder).path, device=device)
    other.max_seq_length = 128
    other.to(getattr(torch, dtype))
    ways: dict[str, Callable[[], object]] = {"pgra": lambda: ours.encode(texts)}
    for size in ENCODE_BATCHES:
        ways[f"sentence-transformers, {size}"] = partial(
            other.encode,
            texts,
            batch_size=size,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
    ours.encode(texts[:8])
    other.encode(texts[:8], show_progress_bar=False)
    seconds = best_seconds(ways, args.repeats)
    our_seconds = seconds.pop("pgra")
    best = min(seconds, key=lambda way: seconds[way])
    vectors = ours.encode(texts), ways[best]()
    cosine = float((np.asarray(vectors[0]) * np.asarray(vectors[1])).sum(axis=1).min())
    say(f"encode: {len(texts):,} texts by {args.encoder}, {dtype}, {device}; best: {best}")
    return {
        "encode_vs_sentence_transformers": seconds[best] / our_seconds,
        "encode_least_cosine": cosine,
        "encode_texts_per_second": len(texts) / our_seconds,
    }


def compare_search(args: argparse.Namespace, folder: Path, rows: int, *, width: int) -> Figures:
    """Build and search random vectors by pgra and by FAISS called directly."""
    import faiss

    rng = np.random.default_rng(0)
    for shard in plan_shards(folder, rows, SHARD_ROWS):
        np.save(shard.path, unit(rng, shard.stop - shard.start, width).astype(np.float16))
    queries = unit(rng, max(BATCHES), width)
    source = vector_source(plan_shards(folder, rows, SHARD_ROWS), width)
    start = time.perf_counter()
    build_faiss(source, EXACT, folder / "ours.faiss")
    built = time.perf_counter() - start
    index = faiss.read_index(str(folder / "ours.faiss"), faiss.IO_FLAG_MMAP_IFC)
    ours = FaissIndex(index, EXACT, lambda rows: queries[rows])  # it reads no vector again
    raw = faiss.IndexFlatIP(width)
    for block in source.blocks():
        raw.add(block)
    default = faiss.cvar.distance_compute_blas_threshold

    def ask_raw(batch: Vectors, threshold: int) -> None:
        faiss.cvar.distance_compute_blas_threshold = threshold
        raw.search(batch, args.k)

    figures: Figures = {f"{rows}x{width}/build_seconds": built}
    for size in BATCHES:
        batch = queries[:size]
        ways: dict[str, Callable[[], object]] = {
            "pgra": partial(ours.search, batch, args.k),
            "tuned": partial(ask_raw, batch, 1),
            "default": partial(ask_raw, batch, default),
        }
        rounds = [
            {way: seconds_of(ways[way]) for way in list(ways)[:: -1 if turn % 2 else 1]}
            for turn in range(args.repeats + 1)
        ][1:]  # in the first pages are read
        rate = size / min(took["pgra"] for took in rounds)
        name = f"{rows}x{width}/b{size}_flat_search"
        figures[f"{name}_per_second"] = rate
        for other in ("tuned", "default"):
            figures[f"{name}_vs_{other}"] = statistics.median(
                took[other] / took["pgra"] for took in rounds
            )
    return figures


def seconds_of(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def best_seconds(ways: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Time all ways in turn; the best of each."""
    rounds = [{way: seconds_of(work) for way, work in ways.items()} for _ in range(repeats)]
    return {way: min(took[way] for took in rounds) for way in ways}


def unit(rng: np.random.Generator, rows: int, width: int) -> Vectors:
    """Draw unit vectors."""
    drawn = rng.standard_normal((rows, width), dtype=np.float32)
    unit_vectors: Vectors = drawn / np.linalg.norm(drawn, axis=1, keepdims=True)
    return unit_vectors


if __name__ == "__main__":
    sys.exit(run(main))
