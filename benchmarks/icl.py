"""In-context learning: prompts a second of a local LM, against `generate` prompt by prompt.

    python benchmarks/icl.py --quick
    python benchmarks/icl.py --task webquestions --dataset_name data/webquestions --json out.json

All ways write answers to the same real queries with the same LM and weights, in one run and in
turn, greedily, up to the end of the line or so many tokens.

    loop     transformers' `generate`, one prompt after the other, with `stop_strings`
    pgra     `pgra.lm.causal_lm.CausalLM.complete`

Two kinds of prompts: `nearest` has each query's own exemplars (BM25, nearest first: KATE), so that
no prompt shares anything with another; `shared` has one random draw before all queries.

`share_of_matrix_rate` tells what is left: prompts that share nothing must each be read, by whoever
reads them, and that is bound by the rate of the machine's own matrix products.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import eq
from pathlib import Path

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
from subjects import count_operations

from pgra.cli import run
from pgra.context import Context
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.data.examples import DataArguments, load_splits
from pgra.data.tasks import GenerationTask, Task
from pgra.lm.base import DTYPES
from pgra.lm.causal_lm import CausalLM
from pgra.retrieval import open_retriever
from pgra.retrieval.base import RetrieverArguments
from pgra.types import Example

STOP = "\n"
SEED = 0


@dataclass(frozen=True)
class Data:
    """What prompts are made of.

    Attributes:
        frame: How fields are shown, up to where the answer begins.
        pool: Examples whose labels are their answers.
        queries: What is asked.
        max_new_tokens: Most tokens of an answer.
    """

    frame: str
    pool: list[Example]
    queries: list[Example]
    max_new_tokens: int


@dataclass
class Way:
    """One way of writing, and what it took.

    Attributes:
        write: Gives the answers to prompts.
        first: Cost of what came before the repetitions, and is not timed.
        costs: Of each repetition.
        answers: Of the last.
    """

    write: Callable[[Sequence[str]], list[str]]
    first: Cost = field(default_factory=Cost)
    costs: list[Cost] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Give the best repetition's."""
        return min(cost.seconds for cost in self.costs)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table for both kinds of prompts."""
    args = parse(argv)
    completer = CausalLM(args.lm, dtype=args.dtype, device=args.device)
    data = read_data(args)
    peak_rate = matrix_rate(completer.device, completer.dtype)
    figures = {"matrix_tflops": peak_rate / 1e12}
    drawn = random.Random(SEED).sample(data.pool, min(args.num_exemplars, len(data.pool)))
    for kind, prompts in (
        ("nearest", nearest_prompts(data, args.num_exemplars)),
        ("shared", [write_prompt(data, drawn, query) for query in data.queries]),
    ):
        of_kind = measure_prompts(prompts, completer, data, peak_rate, args)
        title = f"{kind}: {len(prompts)} prompts, {args.lm}, {completer.dtype}"
        show_figures(title, of_kind)
        figures |= {f"{kind}_{name}": value for name, value in of_kind.items()}
    figures["speedup_vs_loop"] = figures["nearest_speedup_vs_loop"]
    write_figures(args.json, figures)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags."""
    parser = shared_parser(__doc__ or "", quick="32 queries, once", lm="bundled:smollm2-135m")
    parser.add_argument("--task", default="rotten-tomatoes", help="of classification or generation")
    parser.add_argument(
        "--dataset_name", help="default: bundled data of rotten-tomatoes, else the task's own"
    )
    parser.add_argument("--num_exemplars", type=positive, default=8)
    parser.add_argument("--num_queries", type=positive, default=64)
    parser.add_argument("--max_pool", type=positive, default=2000)
    parser.add_argument("--repeats", type=positive, default=3, help="the best counts")
    parser.add_argument("--dtype", default="auto", choices=DTYPES)
    args = parse_flags(parser, argv)
    if args.dataset_name is None and args.task == "rotten-tomatoes":
        args.dataset_name = "bundled:rotten-tomatoes"
    if args.quick:
        args.num_queries = min(args.num_queries, 32)
        args.repeats = 1
    return args


def read_data(args: argparse.Namespace) -> Data:
    """Read pool and queries; a task of classification answers with its labels' names."""
    chosen = DataArguments(
        task=args.task,
        dataset_name=args.dataset_name,
        max_train_samples=args.max_pool,
        max_test_samples=args.num_queries,
    )
    if args.task in GenerationTask.names():
        task = GenerationTask.load(args.task)
        splits = load_splits(task, chosen, is_trained=False)
        return Data(task.frame, list(splits.train), list(splits.test), task.max_new_tokens)
    labelled = Task.load(args.task)
    splits = load_splits(labelled, chosen)
    slots = " ".join(f"{{{name}}}" for name in labelled.inputs)
    return Data(f"Sentence: {slots} Label:", list(splits.train), list(splits.test), 10)


def write_prompt(data: Data, exemplars: Sequence[Example], query: Example) -> str:
    """Write a query after exemplars, in their order."""
    blocks = [f"{data.frame.format_map(e.fields)} {e.label}" for e in exemplars]
    return "\n\n".join([*blocks, data.frame.format_map(query.fields)])


def nearest_prompts(data: Data, num_exemplars: int) -> list[str]:
    """Give each query its nearest exemplars, nearest first."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "pool.txt"
        file.write_text("".join(" ".join(e.text.split()) + "\n" for e in data.pool))
        corpus = open_corpus(CorpusArguments(corpus=str(file), drop_duplicates=False), Path(folder))
        count = min(num_exemplars, len(data.pool))
        args = RetrieverArguments(retriever="bm25", num_candidates=count)
        bm25 = open_retriever(args, corpus, Context(artifacts=Path(folder), progress=False))
        rows = bm25.retrieve([query.text for query in data.queries], count).rows.tolist()
    return [
        write_prompt(data, [data.pool[row] for row in line if row >= 0], query)
        for line, query in zip(rows, data.queries, strict=True)
    ]


def measure_prompts(
    prompts: Sequence[str],
    completer: CausalLM,
    data: Data,
    peak_rate: float,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Time all ways on one kind of prompts."""
    most = data.max_new_tokens
    ways = {
        "loop": Way(lambda texts: generate(completer, texts, most)),
        "pgra": Way(lambda texts: write(completer, texts, most)),
    }
    write(completer, prompts[:2], most)  # weights, self-check
    for title, way in ways.items():  # first kernels; what pgra lays out once, and keeps
        with measured(completer.device) as way.first:
            way.write(prompts if title == "pgra" else prompts[:2])
    for _ in range(args.repeats):
        for way in ways.values():
            with measured(completer.device) as cost:
                way.answers = way.write(prompts)
            way.costs.append(cost)
    return figures_of(ways, completer, prompts, peak_rate)


def write(completer: CausalLM, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
    """Write as pgra does."""
    completions = completer.complete(prompts, max_new_tokens=max_new_tokens, stop=STOP)
    return [completion.text for completion in completions]


@torch.inference_mode()
def generate(completer: CausalLM, prompts: Sequence[str], max_new_tokens: int) -> list[str]:
    """Write as a loop over stock calls does."""
    lm = completer
    answers = []
    for prompt in prompts:
        inputs = lm.tokenizer(prompt, return_tensors="pt").to(lm.device)
        length = inputs["input_ids"].shape[1]
        out = lm.whole.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
            pad_token_id=0,
            stop_strings=STOP,
            tokenizer=lm.tokenizer,
        )
        text = lm.tokenizer.decode(
            out[0, length:], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        answers.append(text.split(STOP)[0])
    return answers


def figures_of(
    ways: dict[str, Way], completer: CausalLM, prompts: Sequence[str], peak_rate: float
) -> dict[str, float]:
    """Give rates and ratios."""
    lengths = completer.count_tokens(prompts)
    ours = ways["pgra"]
    flops = count_operations(completer.config, lengths)
    figures = {"prompt_tokens": sum(lengths) / len(lengths)}
    for title, way in ways.items():
        figures[f"{title}_prompts_per_second"] = len(prompts) / way.seconds
        figures[f"{title}_peak_mib"] = max(cost.peak_mib for cost in (way.first, *way.costs))
        # Of the prompts' own operations alone: written tokens and shared parts are on the house.
        figures[f"{title}_share_of_matrix_rate"] = flops / way.seconds / peak_rate
        figures[f"{title}_same_answers"] = sum(map(eq, way.answers, ours.answers)) / len(prompts)
    return figures | {"speedup_vs_loop": ways["loop"].seconds / ours.seconds}


if __name__ == "__main__":
    sys.exit(run(main))
