"""Second stage with the LM in 16, 8 and 4 bits: what changes in the evidence, and what it costs.

    python benchmarks/quantized.py --quick
    python benchmarks/quantized.py --lm facebook/opt-1.3b --num_queries 200 --json figures.json

Real reviews are the queries, real sentences the candidates, behind the task's 8-exemplar prompt.
Each row is compared with the same LM in float32:

    cosine    of a sentence's state with its float32 state, mean
    kept dot  share of a query's top d by product (the paper) that stays the same, mean
    kept cos  the same by cosine (the paper's code)
    8bit, other batches: the same LM and texts in another order, compared with the 8bit row; where
              what is rounded depends on a text's neighbours (LLM.int8), its states do too

Sentences a second are of one pass over all texts, loading, prefix and self-check not counted.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import parse_flags, positive, shared_parser, write_figures
from subjects import read_reviews
from torch import Tensor

from pgra.cli import run
from pgra.commands.common import say
from pgra.config import CorpusArguments
from pgra.data.corpus import open_corpus
from pgra.errors import ConfigError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.retrieval.base import check_num_candidates

WAYS = {  # name: dtype and quantization
    "float32": ("float32", "none"),
    "float16": ("float16", "none"),
    "bfloat16": ("bfloat16", "none"),
    "8bit": ("auto", "8bit"),
    "4bit": ("auto", "4bit"),
}


@dataclass(frozen=True)
class Reading:
    """What one way of loading gave.

    Attributes:
        queries: (B, H) float32.
        passages: (K, H) float32, every query's candidates.
        megabytes: Of weights, with their scales.
        rate: Sentences a second.
    """

    queries: Tensor
    passages: Tensor
    megabytes: float
    rate: float


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print one table."""
    parser = shared_parser(
        __doc__ or "", quick="16 queries, 100 candidates", lm="bundled:smollm2-135m"
    )
    parser.add_argument("--num_queries", type=positive, default=100)
    parser.add_argument("--num_candidates", type=positive, default=150, help="the paper's k")
    parser.add_argument("--num_evidence", type=positive, default=16, help="the paper's d")
    args = parse_flags(parser, argv)
    if args.quick:
        args.num_queries, args.num_candidates = 16, 100
    if args.num_evidence > args.num_candidates:
        raise ConfigError(
            f"num_evidence ({args.num_evidence}) exceeds num_candidates ({args.num_candidates}): "
            "only candidates can be kept"
        )
    figures = measure(args)
    write_figures(args.json, figures)
    return 0


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Read the same texts in every way and print how the evidence differs."""
    splits, prompt = read_reviews()
    queries = [example.text for example in splits.test[: args.num_queries]]
    passages = _passages(args)
    chance = args.num_evidence / args.num_candidates
    say(
        f"{args.lm}: {len(queries)} queries, {len(passages)} candidates each, top "
        f"{args.num_evidence} kept ({chance:.0%} stay by chance)"
    )
    say(f"{'weights':<22}{'MB':>7}{'texts/s':>9}{'cosine':>9}{'kept dot':>10}{'kept cos':>10}")
    found: dict[str, Reading] = {}
    figures: dict[str, float] = {"kept_by_chance": chance}
    for name, (dtype, quantization) in WAYS.items():
        lm = CausalLM.from_name(args.lm, dtype=dtype, device=args.device, quantization=quantization)
        found[name] = read(lm, prompt, queries, passages)
        figures |= _compare(name, found[name], found["float32"], args.num_evidence)
        if quantization == "8bit":
            again = read(lm, prompt, queries, passages, is_reversed=True)
            name = "8bit, other batches"
            figures |= _compare(name, again, found["8bit"], args.num_evidence)
    for name in WAYS:
        figures[f"{name}_rate_vs_float32"] = found[name].rate / found["float32"].rate
        figures[f"{name}_bytes_vs_float32"] = found[name].megabytes / found["float32"].megabytes
    return figures


def read(
    lm: CausalLM,
    prompt: FewShotPrompt,
    queries: Sequence[str],
    passages: Sequence[str],
    *,
    is_reversed: bool = False,
) -> Reading:
    """Let an LM read queries and candidates, in order or from the last to the first."""
    encoder = PromptedEncoder(lm, prompt)
    encoder.encode(passages[:8])  # the weights, the prefix, the self-check
    texts = [*queries, *passages]
    start = time.perf_counter()
    states = encoder.encode(texts[::-1]).flip(0) if is_reversed else encoder.encode(texts)
    seconds = time.perf_counter() - start
    split = states.float().split([len(queries), len(passages)])
    return Reading(split[0], split[1], weight_bytes(lm.model) / 1e6, len(texts) / seconds)


def weight_bytes(model: torch.nn.Module) -> int:
    """Count the bytes of weights, with the scales of 8-bit rows and 4-bit blocks."""
    return sum(_bytes(weight) for weight in model.parameters())


def _bytes(weight: Any) -> int:
    if hasattr(weight, "__tensor_flatten__"):  # 8bit: several tensors that pose as one of float32
        names, _ = weight.__tensor_flatten__()
        return sum(int(getattr(weight, name).nbytes) for name in names)
    state = getattr(weight, "quant_state", None)  # 4bit
    return int(weight.nbytes) + (0 if state is None else int(state.absmax.nbytes))


def kept_share(found: Tensor, truth: Tensor, depth: int) -> float:
    """Give the share of each row's best `depth` columns that both score matrices agree on."""
    best, true_best = found.topk(depth).indices, truth.topk(depth).indices
    return float((best[:, :, None] == true_best[:, None, :]).any(2).float().mean())


def _compare(name: str, found: Reading, truth: Reading, depth: int) -> dict[str, float]:
    unit = torch.nn.functional.normalize
    cosine = float(torch.cosine_similarity(found.passages, truth.passages).mean())
    dot = kept_share(found.queries @ found.passages.T, truth.queries @ truth.passages.T, depth)
    cos = kept_share(
        unit(found.queries) @ unit(found.passages).T,
        unit(truth.queries) @ unit(truth.passages).T,
        depth,
    )
    say(
        f"{name:<22}{found.megabytes:>7.0f}{found.rate:>9.2f}{cosine:>9.4f}{dot:>10.1%}{cos:>10.1%}"
    )
    key = name.replace(", ", "_").replace(" ", "_")
    return {
        f"{key}_cosine": cosine,
        f"{key}_kept_dot": dot,
        f"{key}_kept_cosine": cos,
        f"{key}_megabytes": found.megabytes,
        f"{key}_texts_per_second": found.rate,
    }


def _passages(args: argparse.Namespace) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(CorpusArguments(corpus=args.corpus), Path(folder))
        check_num_candidates(args.num_candidates, len(corpus))
        step = max(1, len(corpus) // args.num_candidates)
        return corpus.texts(range(0, step * args.num_candidates, step))


if __name__ == "__main__":
    sys.exit(run(main))
