"""Second stage: sentences a second as released, with the prefix shared, and with no prefix at all.

    python benchmarks/rerank.py --quick
    python benchmarks/rerank.py --lm facebook/opt-1.3b random:opt-13b --json figures.json

All ways read real sentences after the same real 8-exemplar prefix with the same LM, in one run
and in turn. `random:opt-13b` is an OPT of that shape with random weights, for speed alone (its
tokens are those of bundled:smollm2-135m).

    released  each candidate once: whole prompts, batches of 4 in the order found, right padding
    expanded  the prefix run once, a copy of its keys and values with each text
    cascade   attention in two parts, the prefix's keys and values stand once: pgra's own way
    depths    the same, and the states at five depths come out, as a head reads them
    floor     the whole suffix (template and text) with no prefix at all, by stock calls
"""

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from measuring import (
    Cost,
    matrix_rate,
    measured,
    parse_flags,
    positive,
    shared_parser,
    show_figures,
    write_figures,
)
from subjects import count_operations, open_lm, read_reviews

from pgra.cli import run
from pgra.context import Context
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.lm.base import DEPTHS, DTYPES
from pgra.lm.batching import token_budget_batches
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import batch_budget
from pgra.lm.prefix import PromptedEncoder, TokenizedPrompts
from pgra.parallel import run_overlapped
from pgra.prompts import FewShotPrompt
from pgra.retrieval import open_retriever
from pgra.retrieval.base import RetrieverArguments

ON_CPU = ["bundled:smollm2-135m", "random:opt-125m"]
ON_GPU = ["random:opt-13b", "random:opt-2.7b", "random:opt-125m", "bundled:smollm2-135m"]
RELEASED_BATCH = 4
EXEMPLAR_SEED = 10  # draws exemplars of the usual length: 340 tokens with the instruction


@dataclass(frozen=True)
class Reading:
    """What the LM is given.

    Attributes:
        texts: Distinct sentences, in the order the first stage found them.
        prompt: What they follow.
    """

    texts: list[str]
    prompt: FewShotPrompt


@dataclass
class Way:
    """One way of reading, and what it took.

    Attributes:
        texts: What it may read.
        run: Reads texts.
        behind: Tokens run before, that each text's tokens look back on.
        lengths: Tokens the LM works on, of each text that one repetition reads.
        costs: Of each repetition.
    """

    texts: Sequence[str]
    run: Callable[[Sequence[str]], object]
    behind: int = 0
    lengths: list[int] = field(default_factory=list)
    costs: list[Cost] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Give the best repetition's texts a second."""
        return len(self.lengths) / min(cost.seconds for cost in self.costs)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one table for each LM."""
    args = parse(argv)
    reading = find_texts(args.corpus, args.num_texts)
    figures: dict[str, float] = {}
    for name in args.lm:
        of_lm = measure_lm(name, reading, args)
        figures |= {f"{name.split(':')[-1]}/{key}": value for key, value in of_lm.items()}
        if name == args.lm[0]:
            figures |= of_lm
    write_figures(args.json, figures)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags, with defaults for the device."""
    parser = shared_parser(__doc__ or "", quick="2 seconds a way, 2 repetitions, 1 LM")
    parser.add_argument(
        "--lm", nargs="+", help="hub ids, folders, bundled:NAME, random:opt-13b; default by device"
    )
    parser.add_argument(
        "--num_texts", type=positive, help="at most, a way; default 512, on a GPU 20000"
    )
    parser.add_argument("--seconds", type=float, default=8.0, help="a way and repetition, about")
    parser.add_argument("--repeats", type=positive, help="the best counts; default 3, on a GPU 1")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    args = parse_flags(parser, argv)
    args.on_gpu = torch.cuda.is_available() and args.device != "cpu"
    args.lm = args.lm or (ON_GPU if args.on_gpu else ON_CPU[:1] if args.quick else ON_CPU)
    args.num_texts = args.num_texts or (20_000 if args.on_gpu else 512)
    args.least_texts = min(args.num_texts, 64 if args.quick else 4096 if args.on_gpu else 512)
    args.repeats = 2 if args.quick else args.repeats or (1 if args.on_gpu else 3)
    args.seconds = min(args.seconds, 2.0) if args.quick else args.seconds
    return args


def find_texts(corpus_name: str, num_texts: int) -> Reading:
    """Find candidates for a task's real queries by BM25, and write its prompt."""
    splits, prompt = read_reviews(exemplar_seed=EXEMPLAR_SEED, max_train_samples=200)
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(CorpusArguments(corpus=corpus_name), Path(folder))
        args = RetrieverArguments(retriever="bm25", num_candidates=min(150, len(corpus)))
        bm25 = open_retriever(args, corpus, Context(artifacts=Path(folder), progress=False))
        queries = [e.text for e in (*splits.train, *splits.dev, *splits.test[:200])]
        rows = bm25.retrieve(queries, args.num_candidates).rows.ravel().tolist()
        texts = corpus.texts(list(dict.fromkeys(row for row in rows if row >= 0)))
    return Reading(list(itertools.islice(itertools.cycle(texts), num_texts)), prompt)


def measure_lm(name: str, reading: Reading, args: argparse.Namespace) -> dict[str, float]:
    """Time all ways with one LM, and show the figures."""
    lm = open_lm(name, dtype=args.dtype, device=args.device)
    encoder = PromptedEncoder(lm, reading.prompt)
    peak_rate = matrix_rate(lm.device, lm.dtype)
    shard = 4096 if lm.device.type == "cuda" else 512
    ways = make_ways(lm, reading, encoder, shard)
    sizes = [len(ids) for ids in _prompts(encoder, reading.texts)]
    shared = len(encoder.shared_ids)
    head = prefix_tokens(lm, reading.prompt)
    skipped = {"released": 0, "floor": head}
    for title, way in ways.items():
        # Few texts make ragged batches: the ways that sort them get a shard's worth.
        least = 0 if title == "released" else args.least_texts
        skip = skipped.get(title, shared)
        choose_count(way, [size - skip for size in sizes], args, least)
    for _ in range(args.repeats):
        for way in ways.values():
            with measured(lm.device) as cost:
                way.run(way.texts[: len(way.lengths)])
            way.costs.append(cost)
    own_tokens = fmean(ways["cascade"].lengths)
    rate = ways["cascade"].rate * own_tokens
    figures = {
        **rate_figures(ways, lm.config, peak_rate),
        "matrix_tflops": peak_rate / 1e12,
        "minutes_for_1m_sentences_of_45_tokens": 45e6 / rate / 60,
        "prefix_tokens": float(shared),
        "own_tokens_per_text": own_tokens,
        "suffix_tokens_per_text": fmean(ways["floor"].lengths),
    }
    if lm.device.type == "cpu":  # elsewhere the weights may not fit once more, in float32
        figures["max_relative_error"] = largest_error(lm, encoder, reading.texts[:16])
    show_figures(
        f"{name}, {lm.dtype}, {lm.device.type}, {torch.get_num_threads()} threads", figures
    )
    return figures


def rate_figures(ways: dict[str, Way], config: Any, peak_rate: float) -> dict[str, float]:
    """Give each way's rate and memory, and the ratios between them.

    Operations are counted as if the last layer ran on all tokens, which the shared ways spare.
    """
    figures: dict[str, float] = {}
    for title, way in ways.items():
        figures[f"{title}_texts_per_second"] = way.rate
        figures[f"{title}_peak_mib"] = max(cost.peak_mib for cost in way.costs)
        flops = count_operations(config, way.lengths, behind=way.behind)
        flops *= way.rate / len(way.lengths)
        figures[f"{title}_share_of_matrix_rate"] = flops / peak_rate
    ours = ways["cascade"].rate
    return figures | {
        "speedup_vs_released": ours / ways["released"].rate,
        "share_of_floor": ours / ways["floor"].rate,
        "depths_vs_one": ways["depths"].rate / ours,
    }


def prefix_tokens(lm: CausalLM, prompt: FewShotPrompt) -> int:
    """Count the tokens before the suffix: instruction and exemplars."""
    return len(lm.lead_ids) + len(lm.tokenize([prompt.prefix])[0])


def make_ways(
    lm: CausalLM, reading: Reading, encoder: PromptedEncoder, shard: int
) -> dict[str, Way]:
    """Give all ways of reading."""
    num_shared = len(encoder.shared_ids)
    head = prefix_tokens(lm, reading.prompt)
    ways = {"released": Way(reading.texts, partial(read_whole, encoder))}
    for title in ("expanded", "cascade"):
        read = partial(read_by, title, lm, encoder, shard)
        read(reading.texts[:8])  # the prefix and the first kernels
        ways[title] = Way(reading.texts, read, num_shared)
    deep = PromptedEncoder(lm, reading.prompt, depths=DEPTHS)
    ways["depths"] = Way(reading.texts, partial(read_by, "cascade", lm, deep, shard), num_shared)
    ways["floor"] = Way(reading.texts, partial(read_bare, encoder, shard, head))
    return ways


def read_whole(encoder: PromptedEncoder, texts: Sequence[str]) -> None:
    """Read whole prompts in batches of 4, in the order given."""
    lm = encoder.lm
    assert isinstance(lm, CausalLM)
    for start in range(0, len(texts), RELEASED_BATCH):
        prompts = _prompts(encoder, texts[start : start + RELEASED_BATCH])
        lm.states_of(prompts).cpu()


def read_by(
    way: str, lm: CausalLM, encoder: PromptedEncoder, shard: int, texts: Sequence[str]
) -> None:
    """Read as `read_shared`, sharing the prefix in one way."""
    lm.way = way
    read_shared(encoder, shard, texts)


def read_shared(encoder: PromptedEncoder, shard: int, texts: Sequence[str]) -> None:
    """Read shards of texts after the shared prefix, as a bank does: tokenised ahead."""

    def tokenize(part: Sequence[str]) -> TokenizedPrompts:
        return encoder.tokenize([encoder.prompt.template.passage_fields(text) for text in part])

    shards = [texts[start : start + shard] for start in range(0, len(texts), shard)]
    run_overlapped(shards, tokenize, encoder.begin, keep=lambda _, fetch: fetch())


@torch.inference_mode()
def read_bare(encoder: PromptedEncoder, shard: int, skip: int, texts: Sequence[str]) -> None:
    """Read what follows the first tokens with nothing before it, sorted as the shared ways do.

    States are fetched once a shard, as theirs are: on a GPU each fetch waits for all before it.
    """
    lm = encoder.lm
    assert isinstance(lm, CausalLM)
    for start in range(0, len(texts), shard):
        own = [ids[skip:] for ids in _prompts(encoder, texts[start : start + shard])]
        budget = batch_budget(lm.args.lm_batch_tokens, lm.device)
        batches = token_budget_batches([len(ids) for ids in own], budget)
        torch.cat([lm.states_of([own[i] for i in batch]) for batch in batches]).cpu()


def _prompts(encoder: PromptedEncoder, texts: Sequence[str]) -> list[list[int]]:
    return encoder.tokenize([encoder.prompt.template.passage_fields(t) for t in texts]).ids


def choose_count(way: Way, lengths: Sequence[int], args: argparse.Namespace, least: int) -> None:
    """Choose how many texts a way reads in about the time it is given, after a first few."""
    few = RELEASED_BATCH
    start = time.perf_counter()
    way.run(way.texts[:few])
    rate = few / (time.perf_counter() - start)
    count = max(few, least, min(args.num_texts, int(rate * args.seconds)))
    way.lengths = list(lengths[: min(count, len(way.texts))])


def largest_error(lm: CausalLM, encoder: PromptedEncoder, texts: Sequence[str]) -> float:
    """Give how far ours lies from whole prompts in float32, each alone, relative to its length.

    A half-precision LM is turned into a float32 one for it, so this comes last.
    """
    fields = [encoder.prompt.template.passage_fields(text) for text in texts]
    prompts = encoder.tokenize(fields)
    ours = encoder.begin(prompts)().float()
    lm.model.float()
    truth = torch.cat([lm.states_of([ids]).float().cpu() for ids in prompts.ids])
    return float(((ours - truth).norm(dim=1) / truth.norm(dim=1)).max())


if __name__ == "__main__":
    sys.exit(run(main))
