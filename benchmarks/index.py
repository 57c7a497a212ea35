"""The first stage: vectors made, index built and searched, beside the tools that others use.

    python benchmarks/index.py --quick
    python benchmarks/index.py --sizes 100000 1000000 --widths 384 768 --json figures.json

Three parts, printed as one table each:

    encode   real sentences by the same encoder, on the same device in the same precision: pgra's,
             and `encode` of sentence-transformers at the best of its batch sizes; and the least
             cosine between the vectors of both
    search   random unit vectors (an exact search takes the same time for any), `--k` hits a query:
             pgra's flat index as it is mapped from its file; its search of the float16 shards; and
             FAISS' flat index called directly, as it comes and tuned (matrix products always).
             These run in one process in turn, on a CPU, for at least 15 seconds or 25 rounds. A
             ratio is the median of the rounds'. The overhead is the seconds of pgra's search over
             those of the FAISS call inside it, the least of all rounds.
    words    BM25 on real sentences, queries are real reviews: pgra's, and rank-bm25

Each runs in a process of its own; "grown" is what that process's peak of memory (Linux) lies
above what it held before, pages of mapped files included. The best of `--repeats` counts.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flat_search import (
    BATCHES,
    INDEX,
    OVERHEAD,
    SHARD_ROWS,
    read_queries,
    retriever,
    source_of,
    time_ways,
    versus,
)
from measuring import (
    parse_flags,
    positive,
    run_apart_from,
    shared_parser,
    write_figures,
)
from others import BATCHES as ENCODE_BATCHES
from others import peak_mb, seconds_of
from subjects import read_reviews

from pgra.cli import run
from pgra.commands.common import say
from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import Context
from pgra.data.corpus import open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.lm.load import choose_device, find_model
from pgra.retrieval import open_retriever
from pgra.retrieval.faiss import BlockSearch, IndexPlan, Vectors, build_faiss, map_faiss
from pgra.retrieval.shards import plan_shards

OTHERS = str(Path(__file__).with_name("others.py"))
HEADLINE = 64  # the batch of the figures without a prefix
LEAST_COSINE = 0.9999
Figures = dict[str, float]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    args = parse(argv)
    if args.part:
        say(json.dumps(PARTS[args.part[0]](args, *args.part[1:])))
        return 0
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        if "encode" in args.parts:
            figures |= compare_encoders(args, Path(folder))
        if "search" in args.parts:
            for width in args.widths:
                for rows in args.sizes:
                    with tempfile.TemporaryDirectory(dir=folder) as aside:
                        figures |= compare_search(args, Path(aside), rows, width=width)
        if "words" in args.parts:
            figures |= compare_words(args, Path(folder))
    write_figures(args.json, figures)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = shared_parser(__doc__ or "", quick="256 texts, 50,000 vectors x 384, 4,000 passages")
    parser.add_argument("--encoder", default="bundled:minilm-l6", help="hub id, folder, bundled:")
    parser.add_argument("--encoder_dtype", default="auto")
    parser.add_argument("--max_encoder_tokens", type=positive, default=128)
    parser.add_argument("--num_texts", type=positive, default=4096, help="that are encoded")
    parser.add_argument("--num_passages", type=positive, default=19_000, help="of BM25")
    parser.add_argument("--num_queries", type=positive, default=100, help="of BM25")
    parser.add_argument("--sizes", nargs="+", type=positive, default=[100_000, 1_000_000])
    parser.add_argument("--widths", nargs="+", type=positive, default=[384, 768])
    parser.add_argument("--k", type=positive, default=150, help="hits a query")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument(
        "--parts", nargs="+", choices=("encode", "search", "words"), default=list(TABLES)
    )
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parse_flags(parser, argv)
    if args.quick:
        args.num_texts, args.num_passages = min(args.num_texts, 256), min(args.num_passages, 4000)
        args.num_queries, args.repeats = min(args.num_queries, 20), 1
        args.sizes, args.widths = [min(min(args.sizes), 50_000)], [min(args.widths)]
    if args.k > (least := min(*args.sizes, args.num_passages)):
        raise ConfigError(f"k is {args.k}, more than the {least} passages: lower it")
    return args


def compare_encoders(args: argparse.Namespace, folder: Path) -> Figures:
    """Encode the same texts by both libraries."""
    corpus = open_corpus(CorpusArguments(corpus=args.corpus, max_passages=args.num_texts), folder)
    texts = folder / "texts.json"
    texts.write_text(json.dumps(corpus.texts(range(len(corpus)))))
    ours, theirs = folder / "ours.npy", folder / "theirs.npy"
    found = apart(args, "encode", str(texts), str(ours))
    if found["pooling"] not in ("cls", "mean"):
        raise ConfigError(
            f"sentence-transformers knows no pooling '{found['pooling']}': use another --encoder"
        )
    words = [found["pooling"], found["dtype"], found["device"], args.max_encoder_tokens]
    other = other_way("encode", find_model(args.encoder).path, *words, texts, theirs, args.repeats)
    cosine = float((np.load(ours) * np.load(theirs)).sum(axis=1).min())
    say(
        f"encode: {len(corpus):,} texts by {args.encoder}, {found['dtype']}, {found['device']}, "
        f"{found['threads']} threads\n{'':<24}{'texts/s':>10}{'grown MB':>10}\n"
        f"{'pgra':<24}{found['rate']:>10.1f}{found['grown_mb']:>10.0f}\n"
        f"{'sentence-transformers':<24}{other['rate']:>10.1f}{other['grown_mb']:>10.0f}"
        f"   best batch {other['batch']}\n"
        f"pgra is {found['rate'] / other['rate']:.2f} times as fast; least cosine {cosine:.6f}\n"
    )
    if cosine < LEAST_COSINE:
        raise ConfigError(
            f"the two libraries' vectors differ (least cosine {cosine:.6f}), so that their speeds "
            "say nothing: use another --encoder"
        )
    return {
        "encode_vs_sentence_transformers": found["rate"] / other["rate"],
        "encode_least_cosine": cosine,
        **{f"encode_pgra_{name}": found[name] for name in ("rate", "grown_mb")},
        **{f"encode_others_{name}": other[name] for name in ("rate", "grown_mb", "batch")},
    }


def encode(args: argparse.Namespace, texts_file: str, out: str) -> Mapping[str, Any]:
    """Time pgra's encoder; write the vectors."""
    import torch

    texts = json.loads(Path(texts_file).read_text())
    encoder = Encoder.from_name(
        args.encoder,
        max_encoder_tokens=args.max_encoder_tokens,
        encoder_dtype=args.encoder_dtype,
        device=args.device,
    )
    encoder.encode(texts[:8])
    before = peak_mb()
    tries = args.repeats * len(ENCODE_BATCHES)  # as many as the other has
    seconds = min(seconds_of(partial(encoder.encode, texts)) for _ in range(tries))
    np.save(out, encoder.encode(texts), allow_pickle=False)
    return {
        "rate": len(texts) / seconds,
        "grown_mb": peak_mb() - before,
        "device": str(choose_device(args.device)),
        "threads": torch.get_num_threads(),
        **{name: str(encoder.fingerprint[name]) for name in ("pooling", "dtype")},
    }


def compare_search(args: argparse.Namespace, folder: Path, rows: int, *, width: int) -> Figures:
    """Build and search random vectors in all ways."""
    rng = np.random.default_rng(0)
    for shard in plan_shards(folder, rows, SHARD_ROWS):
        np.save(shard.path, unit(rng, shard.stop - shard.start, width).astype(np.float16))
    queries = folder / "queries.npy"
    np.save(queries, unit(rng, max(BATCHES), width))
    shape = (str(folder), str(rows), str(width))
    ours, theirs = apart(args, "build", *shape), other_way("flat", folder, queries, args.k)
    shards = apart(args, "shards", *shape)
    rates: dict[str, dict[str, float]] = apart(args, "rates", *shape)
    lines = [
        f"search: {rows:,} x {width}, {args.k} hits; built and written in "
        f"{ours['build_seconds']:.1f} s (grown {ours['build_mb']:.0f} MB), by FAISS in "
        f"{theirs['build_seconds']:.1f} s ({theirs['build_mb']:.0f} MB); grown when searched too: "
        f"{ours['grown_mb']:.0f} MB, FAISS {theirs['grown_mb']:.0f} MB, the shards alone "
        f"{shards['grown_mb']:.0f} MB",
        f"{'queries/s at a batch of':<26}" + "".join(f"{size:>10}" for size in BATCHES),
    ]
    for way, by_batch in rates.items():
        digits = 4 if way == OVERHEAD else 3 if "/" in way else 1
        cells = [f"{by_batch[str(size)]:>10.{digits}f}" for size in BATCHES]
        lines.append(f"{way:<26}" + "".join(cells))
    say("\n".join(lines) + "\n")
    return search_figures(f"{rows}x{width}", rates) | {
        **{f"{rows}x{width}/pgra_{name}": value for name, value in ours.items()},
        **{f"{rows}x{width}/faiss_{name}": value for name, value in theirs.items()},
        f"{rows}x{width}/shards_grown_mb": shards["grown_mb"],
    }


def search_figures(name: str, rates: Mapping[str, Mapping[str, float]]) -> Figures:
    """Return all rates, and the ratios of the last and largest collection without its name."""
    figures = {
        f"{name}/b{size}_{way.replace(' ', '_')}": rate
        for way, by_batch in rates.items()
        for size, rate in by_batch.items()
        if "/" not in way
    }
    for size in map(str, BATCHES):
        for other in ("default", "tuned"):
            ratio = rates[versus(f"FAISS {other}")][size]
            figures[f"{name}/b{size}_flat_search_vs_{other}"] = ratio
    for key in ("flat_search_vs_default", "flat_search_vs_tuned", OVERHEAD.replace(" ", "_")):
        figures[key] = figures[f"{name}/b{HEADLINE}_{key}"]
    return figures


def build(args: argparse.Namespace, folder: str, rows: str, width: str) -> Figures:
    """Build our index from the shards, and search it."""
    source = source_of(Path(folder), int(rows), int(width))
    before = peak_mb()
    path = Path(folder) / INDEX
    work = partial(build_faiss, source, IndexPlan(factory="Flat"), path)
    seconds = seconds_of(work)
    built_mb = peak_mb() - before
    retriever(map_faiss(path)).search(read_queries(folder)[:HEADLINE], args.k)
    return {"build_seconds": seconds, "build_mb": built_mb, "grown_mb": peak_mb() - before}


def search_shards(args: argparse.Namespace, folder: str, rows: str, width: str) -> Figures:
    """Search the shards, as where the vectors exceed memory."""
    source = source_of(Path(folder), int(rows), int(width))
    queries = read_queries(folder)[:HEADLINE]
    import torch

    torch.empty(0)
    before = peak_mb()
    retriever(BlockSearch(source)).search(queries, args.k)
    return {"grown_mb": peak_mb() - before}


def compare_words(args: argparse.Namespace, folder: Path) -> Figures:
    """Build and ask BM25 by both libraries."""
    corpus = open_corpus(
        CorpusArguments(corpus=args.corpus, max_passages=args.num_passages), folder
    )
    splits, _ = read_reviews(max_train_samples=200)
    texts, queries = folder / "passages.json", folder / "reviews.json"
    texts.write_text(json.dumps(corpus.texts(range(len(corpus)))))
    queries.write_text(json.dumps([review.text for review in splits.test[: args.num_queries]]))
    theirs = other_way("words", texts, queries, args.k)
    ours = apart(args, "words", str(folder), str(queries))
    say(
        f"words: {len(corpus):,} passages, {args.num_queries} queries\n"
        f"{'':<12}{'queries/s':>12}{'build s':>10}{'grown MB':>10}"
    )
    for way, found in (("pgra", ours), ("rank-bm25", theirs)):
        say(
            f"{way:<12}{found['rate']:>12.1f}{found['build_seconds']:>10.2f}"
            f"{found['grown_mb']:>10.0f}"
        )
    return {
        "bm25_vs_rank_bm25": ours["rate"] / theirs["rate"],
        **{f"bm25_pgra_{name}": value for name, value in ours.items()},
        **{f"bm25_others_{name}": value for name, value in theirs.items()},
    }


def ask_words(args: argparse.Namespace, folder: str, queries_file: str) -> Figures:
    """Build our BM25 index and ask it."""
    queries = json.loads(Path(queries_file).read_text())
    corpus = open_corpus(
        CorpusArguments(corpus=args.corpus, max_passages=args.num_passages), Path(folder)
    )
    before = peak_mb()
    start = time.perf_counter()
    bm25 = open_retriever(
        RetrieverArguments(retriever="bm25", num_candidates=args.k),
        corpus,
        Context(artifacts=Path(folder), progress=False),
    )
    build_seconds = time.perf_counter() - start
    rate = len(queries) / seconds_of(partial(bm25.retrieve, queries, args.k))
    return {"rate": rate, "build_seconds": build_seconds, "grown_mb": peak_mb() - before}


def unit(rng: np.random.Generator, rows: int, width: int) -> Vectors:
    """Draw unit vectors."""
    drawn = rng.standard_normal((rows, width), dtype=np.float32)
    return drawn / np.linalg.norm(drawn, axis=1, keepdims=True)


def apart(args: argparse.Namespace, part: str, *words: str) -> dict[str, Any]:
    """Measure a part of ours in a process of its own."""
    given: dict[str, object] = {
        name: getattr(args, name)
        for name in (
            *("corpus", "device", "encoder", "encoder_dtype", "max_encoder_tokens"),
            *("num_passages", "k", "repeats"),
        )
    }
    flags = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return run_apart_from(__file__, *flags, "--part", part, *words)


def other_way(part: str, *words: object) -> dict[str, Any]:
    """Measure another library in a process of its own.

    Raises:
        ConfigError: If it is not installed.
    """
    found = run_apart_from(OTHERS, part, *map(str, words))
    if "missing" in found:
        name = str(found["missing"]).replace("_", "-")
        raise ConfigError(
            f"{name} is not installed: pip install {name}, or leave it out by --parts"
        )
    return found


TABLES = ("encode", "search", "words")
PARTS: dict[str, Callable[..., Mapping[str, Any]]] = {
    "encode": encode,
    "build": build,
    "shards": search_shards,
    "rates": time_ways,
    "words": ask_words,
}

if __name__ == "__main__":
    sys.exit(run(main))
