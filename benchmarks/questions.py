r"""Open questions: does evidence let a fused T5 answer?

    python benchmarks/questions.py --quick --dataset_name data/triviaqa
    python benchmarks/questions.py --dataset_name data/triviaqa --corpus wiki_1m.txt \
        --model google-t5/t5-base --max_train_samples 20000 --max_steps 5000

The second is for a GPU and is not measured yet. From the same weights a Fusion-in-Decoder T5
(Izacard and Grave 2021) is trained with AdamW to write each question's first accepted answer:

    none     from the question alone
    random   with as many passages, drawn by chance
    bm25     with BM25's best passages

Recall is the share of test questions with an accepted answer in their evidence: its words in a row
in one passage, both normalised as exact match does. Exact match is the mean over seeds, its
difference that to `none` on the same questions; interval and p are over questions, not seeds. Both
are told again for the questions whose BM25 evidence holds an answer, and for the others: the first
may be easier anyway, which `none` shows. `--max_steps 0` measures the model as it is. The first
answer may be a rare name: in KATE's files of TriviaQA that of a helicopter is an emoji.
"""

import argparse
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from measuring import parse_flags, positive, shared_parser, write_figures
from subjects import open_reader

from pgra.cli import run
from pgra.commands.common import say
from pgra.config import CorpusArguments, DataArguments, RetrieverArguments, at_least
from pgra.core import MISSING_ROW, Context
from pgra.data.corpus import open_corpus
from pgra.data.references import Reference, load_references
from pgra.data.tasks import GenerationTask
from pgra.lm.batching import GroupCost, PackedSegments, pack_segments
from pgra.lm.load import choose_device
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs, pad_targets
from pgra.report.metrics import compare_means
from pgra.report.tables import Cell, Table
from pgra.report.text_metrics import is_exact_match, normalize_answer
from pgra.retrieval import open_retriever

NONE, RANDOM, BM25 = "none", "random", "bm25"
TASKS = ("nq_open", "triviaqa", "webquestions")  # measured by exact match
QUICK = {"max_train_samples": 60, "max_test_samples": 40, "num_evidence": 4, "max_steps": 8}
NEW_TOKENS = 16  # most of an answer
ASKED = 16  # questions answered at once

Flags = argparse.Namespace
Asked = list[Reference]
Evidence = list[list[str]]
"""Texts of each question, best first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Find evidence, train and measure each way, and print a table."""
    args = parse(argv)
    counts = {name: getattr(args, name) for name in ("max_train_samples", "max_test_samples")}
    data = DataArguments(task=args.task, dataset_name=args.dataset_name, **counts)
    train, test = load_references(GenerationTask.load(args.task), data)
    right, held = {}, {}
    for way, evidence in find_evidence([*train, *test], args).items():
        runs = [measure(train, test, evidence, args, seed) for seed in args.seeds]
        right[way] = np.mean(runs, axis=0)
        pairs = zip(test, evidence[len(train) :], strict=True)
        held[way] = np.array([holds_answer(*pair) for pair in pairs])
    figures, table = compare(right, held)
    say(table.to_text())
    write_figures(args.json, figures)
    return 0


def parse(argv: Sequence[str] | None) -> Flags:
    """Read the flags."""
    parser = shared_parser(__doc__ or "", quick=f"1 seed, and at most {QUICK}")
    parser.add_argument("--model", default="bundled:t5-small-titles")
    parser.add_argument("--task", default="triviaqa", choices=TASKS)
    parser.add_argument("--dataset_name", help="default: the task's own")
    parser.add_argument("--max_passages", type=positive, help="default: the whole corpus")
    parser.add_argument("--max_train_samples", type=positive, default=20_000)
    parser.add_argument("--max_test_samples", type=positive, default=2000)
    parser.add_argument("--num_evidence", type=positive, default=16)
    parser.add_argument("--batch_size", type=positive, default=8)
    parser.add_argument("--max_steps", type=int, default=1000)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    args = parse_flags(parser, argv)
    at_least("--max_steps", args.max_steps, 0)
    args.device = choose_device(args.device)
    if args.quick:
        vars(args).update({name: min(getattr(args, name), most) for name, most in QUICK.items()})
        args.seeds = args.seeds[:1]
    return args


def find_evidence(asked: Asked, args: Flags) -> dict[str, Evidence]:
    """Return each way's evidence of each question."""
    queries = [one.example.text for one in asked]
    found: dict[str, Evidence] = {NONE: [[] for _ in queries]}
    with tempfile.TemporaryDirectory() as folder:
        context = Context(artifacts=Path(folder), progress=False)
        given = CorpusArguments(corpus=args.corpus, max_passages=args.max_passages)
        corpus = open_corpus(given, context.artifacts)
        for name in (RANDOM, BM25):
            first = RetrieverArguments(retriever=name, num_candidates=args.num_evidence)
            rows = open_retriever(first, corpus, context).retrieve(queries, args.num_evidence).rows
            found[name] = [corpus.texts(own[own != MISSING_ROW]) for own in rows]
    return found


def holds_answer(reference: Reference, evidence: Sequence[str]) -> bool:
    """Return whether a passage has an accepted answer's words in a row, both normalised."""
    answers = [f" {plain} " for text in reference.answers if (plain := normalize_answer(text))]
    passages = [f" {normalize_answer(text)} " for text in evidence]
    return any(answer in passage for passage in passages for answer in answers)


def measure(train: Asked, test: Asked, evidence: Evidence, args: Flags, seed: int) -> list[bool]:
    """Train a reader; return which test questions it then answers right, (B,)."""
    reader, tokenizer = open_reader(args.model, device=args.device)
    examples = [one.example for one in (*train, *test)]
    shown = " ".join(f"{name}: {{{name}}}" for name in examples[0].fields)
    layout = SegmentLayout(f"{shown} context:" if any(evidence) else shown)
    targets = Verbalizer({one.label: one.label for one in examples if one.label}, layout.template)
    inputs = build_inputs(examples, evidence, tokenizer, targets, layout=layout)

    def pack(rows: Sequence[int], cost: GroupCost) -> PackedSegments:
        segments, pad = [inputs[row].segments for row in rows], tokenizer.pad_token_id
        return pack_segments(segments, pad_token_id=pad, cost=cost).to(args.device)

    torch.manual_seed(seed)  # of dropout; the order of examples is alike for all ways, too
    drawn, order, size = random.Random(seed), list[int](), args.batch_size
    while len(order) < args.max_steps * size:
        order += drawn.sample(range(len(train)), len(train))
    optimizer = torch.optim.AdamW(reader.parameters(), lr=args.learning_rate)
    reader.train()
    for start in range(0, args.max_steps * size, size):
        rows = order[start : start + size]
        labels = pad_targets([inputs.targets[str(inputs.labels[row])] for row in rows])
        packed = pack(rows, GroupCost.on(args.device, is_training=True))
        reader(**vars(packed), labels=labels.to(args.device)).loss.backward()
        torch.nn.utils.clip_grad_norm_(reader.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    reader.eval()
    texts: list[str] = []
    for start in range(len(train), len(inputs), ASKED):
        packed = pack(range(len(inputs))[start : start + ASKED], GroupCost.on(args.device))
        written = reader.generate(packed, max_new_tokens=NEW_TOKENS, do_sample=False, num_beams=1)
        texts += tokenizer.batch_decode(written, skip_special_tokens=True)
    return [is_exact_match(text, one.answers) for text, one in zip(texts, test, strict=True)]


def compare(
    right: Mapping[str, npt.NDArray[np.float64]], held: Mapping[str, npt.NDArray[np.bool_]]
) -> tuple[dict[str, float], Table]:
    """Return figures and a table of all questions and of both parts.

    Given, by way, (B,): the share of seeds that answer right; whether evidence holds an answer.
    """
    figures = {f"{way}_recall": float(held[way].mean()) for way in (BM25, RANDOM)}
    note = "Evidence holds an answer: bm25's {bm25_recall:.1%}, random {random_recall:.1%}."
    parts = {"all": held[BM25] | True, "held": held[BM25], "not_held": ~held[BM25]}
    lines = []
    for part, rows in parts.items():
        figures[f"{part}/questions"] = count = int(rows.sum())
        for way, own in right.items() if count else ():
            gap = compare_means(own[rows], right[NONE][rows], seed=0)
            told = {"exact_match": float(own[rows].mean()), "difference": gap.difference}
            told |= {"low": gap.low, "high": gap.high, "p": gap.p}
            figures |= {f"{part}/{way}/{name}": value for name, value in told.items()}
            shares = [f"{100 * told['exact_match']:.1f}", f"{100 * gap.difference:+z.1f}"]
            ends = (100 * gap.low, 100 * gap.high)
            cells = map(Cell, [f"{part}, {count}", way, *shares])
            lines.append([*cells, Cell.interval(ends, "+z.1f"), Cell.of_p(gap.p)])
    columns = ["questions", "evidence", "exact match, %", "to none", "95 % interval", "p"]
    return figures, Table("Open questions", columns, lines, [note.format(**figures)])


if __name__ == "__main__":
    sys.exit(run(main))
