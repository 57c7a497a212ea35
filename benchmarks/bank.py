"""The representation bank: what a rerank from it costs, what smaller states change, what it holds.

    python benchmarks/bank.py --quick
    python benchmarks/bank.py --lm facebook/opt-1.3b --num_texts 20000 --json figures.json

Three parts, printed as one table each:

    cost     a real LM fills a bank with real sentences behind a real 8-exemplar prefix; then all
             queries are reranked from it, 150 candidates each (by bundled:minilm-l6), opening and
             checking the bank included: the rerank's share of the fill
    states   the same states kept as float16 and int8: the share of each query's 16 best of its 150
             candidates that stays
    size     banks of 10,000 to 1,000,000 random states, each filled, opened, gone through and
             reranked from in a process of its own: peak host memory (Linux), and pairs a second
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import parse_flags, positive, run_apart_from, shared_parser, write_figures
from others import peak_mb
from subjects import read_reviews
from torch import Tensor

from pgra.cli import run
from pgra.commands.common import say
from pgra.config import CorpusArguments, RerankArguments
from pgra.core import Candidates, Context, Example, Rows
from pgra.data.corpus import Corpus, open_corpus
from pgra.encoders.encoder import Encoder
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.rerank.bank import Advance, Bank
from pgra.rerank.base import RerankRequest
from pgra.rerank.prompted import PromptedReranker, query_key
from pgra.rerank.similarity import find_similarity, score_candidates

NUM_CANDIDATES = 150
DEPTH = 16
SHARD_ROWS = 512
SYNTHETIC_QUERIES = 2000


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = shared_parser(
        __doc__ or "", quick="300 texts, 100,000 random states", lm="bundled:smollm2-135m"
    )
    parser.add_argument("--num_texts", type=positive, default=600)
    parser.add_argument("--num_queries", type=positive, default=40)
    parser.add_argument("--random_states", nargs=2, type=int, help=argparse.SUPPRESS)
    args = parse_flags(parser, argv)
    if args.random_states:
        say(json.dumps(measure_random(*args.random_states)))
        return 0
    if args.quick:
        args.num_texts = 300
    figures = measure_lm(args)
    figures |= measure_sizes([10_000, 100_000] if args.quick else [10_000, 100_000, 1_000_000])
    write_figures(args.json, figures)
    return 0


def measure_lm(args: argparse.Namespace) -> dict[str, float]:
    """Fill a bank by the LM, rerank from it, and keep its states in fewer bytes."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder)
        corpus = open_corpus(
            CorpusArguments(corpus=args.corpus, max_passages=args.num_texts), artifacts
        )
        splits, prompt = read_reviews()
        queries = splits.test[: args.num_queries]
        candidates = find_candidates(queries, corpus)
        lm = CausalLM.from_name(args.lm, device=args.device)
        encoder = PromptedEncoder(lm, prompt)
        encoder.encode(corpus.texts(range(8)))  # the weights, the prefix and its check
        request = RerankRequest(
            args=RerankArguments(),
            prompt=prompt,
            corpus=corpus,
            context=Context(artifacts=artifacts),
        )
        figures = time_rerank(request, encoder, queries, candidates=candidates)
        say(
            f"{args.lm}, {lm.dtype}, on {lm.device}: {figures['texts_read']:.0f} texts read once "
            f"in {figures['fill_seconds']:.1f} s, {candidates.rows.size} pairs reranked from the "
            f"bank in {figures['rerank_seconds']:.3f} s ({figures['rerank_share_of_fill']:.2%} of "
            f"it); a second run reads {figures['second_run_texts_read']:.0f} texts"
        )
        filled = PromptedReranker(request, encoder)
        return figures | compare_dtypes(filled, artifacts, queries, candidates=candidates)


def find_candidates(queries: list[Example], corpus: Corpus) -> Candidates:
    """Give each query the passages nearest to it by a sentence encoder."""
    encoder = Encoder.from_name("bundled:minilm-l6", device="cpu")
    passages = encoder.encode(corpus.texts(range(len(corpus))))
    scores = encoder.encode([query.text for query in queries]) @ passages.T
    rows = np.broadcast_to(np.arange(len(corpus)), scores.shape)
    return Candidates.best(rows, scores, min(NUM_CANDIDATES, len(corpus)))


def time_rerank(
    request: RerankRequest,
    encoder: PromptedEncoder,
    queries: list[Example],
    *,
    candidates: Candidates,
) -> dict[str, float]:
    """Time the fill, and the rerank by who opens the bank anew."""
    first = PromptedReranker(request, encoder)
    work = first.prepare(queries, candidates.rows)
    start = time.perf_counter()
    again = PromptedReranker(request, encoder)
    second = again.prepare(queries, candidates.rows)
    again.rerank(queries, candidates)
    seconds = time.perf_counter() - start
    return {
        "fill_seconds": work.seconds,
        "texts_read": float(work.num_new),
        "second_run_texts_read": float(second.num_new),
        "rerank_seconds": seconds,
        "rerank_share_of_fill": seconds / work.seconds,
    }


def compare_dtypes(
    filled: PromptedReranker, artifacts: Path, queries: list[Example], *, candidates: Candidates
) -> dict[str, float]:
    """Rank by the same states kept otherwise; give the share of the best that stays."""
    keys = np.unique(candidates.rows)
    query_keys = np.array([query_key(query) for query in queries], np.int64)
    figures: dict[str, float] = {}

    def best(bank: Bank, similarity: str) -> Rows:
        scores = score_candidates(
            bank,
            candidates.rows,
            query_bank=filled.query_bank,
            query_keys=query_keys,
            similarity=find_similarity(similarity)(),
        )
        return Candidates.best(candidates.rows, scores, DEPTH).rows

    def given(wanted: Rows, _: Advance) -> Tensor:
        return torch.from_numpy(filled.bank.states(wanted))

    say(f"{'kept as':<10}{'bytes a state':>14}{'same 16, dot':>14}{'same 16, cosine':>17}")
    for dtype, size in (("float16", 2 * filled.bank.width), ("int8", filled.bank.width)):
        bank = Bank(artifacts / dtype, {"bank_dtype": dtype}, dtype=dtype)
        bank.fill(keys, lambda wanted: wanted, given, shard_rows=SHARD_ROWS)
        for similarity in ("dot", "cosine"):
            figures[f"{dtype}_top16_same_{similarity}"] = share_kept(
                best(filled.bank, similarity), best(bank, similarity)
            )
        dot, cosine = (figures[f"{dtype}_top16_same_{name}"] for name in ("dot", "cosine"))
        say(f"{dtype:<10}{size:>14}{dot:>14.4f}{cosine:>17.4f}")
    return figures


def share_kept(whole: Rows, small: Rows) -> float:
    """Give the mean share of each line's rows that stands in the other's line too."""
    both = zip(whole, small, strict=True)
    return float(np.mean([len(np.intersect1d(a, b)) / len(a) for a, b in both]))


def measure_sizes(sizes: list[int]) -> dict[str, float]:
    """Measure banks of random states, narrow ones for memory and one of a real width for speed."""
    say(
        f"{'states':>10}{'width':>7}{'fill s':>9}{'open s':>9}{'rows/s read':>13}{'pairs/s':>12}"
        f"{'peak MB':>9}"
    )
    figures: dict[str, float] = {}
    for rows, width in [(20_000, 576), *((size, 64) for size in sizes)]:
        found = run_apart(rows, width)
        say(
            f"{rows:>10}{width:>7}{found['fill_seconds']:>9.2f}{found['open_seconds']:>9.2f}"
            f"{found['rows_per_second']:>13,.0f}{found['pairs_per_second']:>12,.0f}"
            f"{found['peak_mb']:>9.0f}"
        )
        figures |= {f"{name}_{rows}x{width}": value for name, value in found.items()}
    figures["pairs_per_second"] = figures["pairs_per_second_20000x576"]
    grown = figures[f"peak_mb_{sizes[-1]}x64"] - figures[f"peak_mb_{sizes[0]}x64"]
    figures[f"rss_growth_mb_{sizes[0] // 1000}k_to_{short(sizes[-1])}"] = grown
    return figures


def short(count: int) -> str:
    """Write a round number in few letters."""
    return f"{count // 1_000_000}m" if count >= 1_000_000 else f"{count // 1000}k"


def run_apart(rows: int, width: int) -> dict[str, Any]:
    """Measure one bank in a process of its own, whose peak of memory is its own too."""
    return run_apart_from(__file__, "--random_states", str(rows), str(width))


def measure_random(rows: int, width: int) -> dict[str, float]:
    """Fill, open, go through and rerank from a bank of random states."""
    generator = torch.Generator().manual_seed(0)

    def states(keys: Rows, _: Advance) -> Tensor:
        return torch.randn(len(keys), width, generator=generator)

    def fill(name: str, count: int) -> None:
        Bank(root / name, {}).fill(range(count), np.asarray, states, shard_rows=SHARD_ROWS)

    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        fill("queries", SYNTHETIC_QUERIES)
        figures = {"fill_seconds": seconds_of(lambda: fill("passages", rows))}
        start = time.perf_counter()
        bank, query_bank = Bank(root / "passages", {}), Bank(root / "queries", {})
        figures["open_seconds"] = time.perf_counter() - start
        figures["rows_per_second"] = rows / seconds_of(lambda: go_through(bank))
        wanted = np.random.default_rng(0).integers(0, rows, (SYNTHETIC_QUERIES, NUM_CANDIDATES))
        seconds = seconds_of(lambda: rank(bank, query_bank, wanted))
        figures["pairs_per_second"] = wanted.size / seconds
    return figures | {"peak_mb": peak_mb()}


def go_through(bank: Bank) -> None:
    """Read all states, as exhaustive search does."""
    for block in bank.blocks(rows=65_536):
        block.states.sum()


def rank(bank: Bank, query_bank: Bank, rows: Rows) -> Candidates:
    """Order all queries' candidates, as the reranker does."""
    scores = score_candidates(
        bank,
        rows,
        query_bank=query_bank,
        query_keys=np.arange(len(rows)),
        similarity=find_similarity("cosine")(),
    )
    return Candidates.best(rows, scores, rows.shape[1])


def seconds_of(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(run(main))
