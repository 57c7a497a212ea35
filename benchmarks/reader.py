"""The reader: examples a second of training and inference, against Fusion-in-Decoder as usual.

    python benchmarks/reader.py --quick
    python benchmarks/reader.py --task sst2 --dataset_name data/sst2 --corpus wiki_1m.txt
    python benchmarks/reader.py --model random:t5-base --num_evidence 16 --bf16

Both ways read the same queries with the same evidence (the first stage's best d of real Wikipedia
sentences) with the same T5, in one run and in turn. `random:t5-base` is a T5 of that shape with
random weights, for speed alone.

    usual   each segment padded to 128 tokens, the encoder's outputs put side by side with their
            padding, torch.optim.AdamW; with `--bf16` by autocast; labels by `generate`
    pgra    what train.py and evaluate.py run: segments in groups of like length, no
            padding for the decoder; labels by scoring the words of each

Each way trains and decides in a process of its own, so that neither finds the other's memory. The
first step and the first batch are not timed. Decisions are those of the weights that pgra trained.
"""

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import torch
from measuring import (
    Cost,
    matrix_rate,
    measured,
    parse_flags,
    positive,
    shared_parser,
    show_figures,
    wait_for,
    write_figures,
)
from safetensors.torch import load_model, save_model
from subjects import open_reader
from torch.optim.optimizer import register_optimizer_step_post_hook
from usual import PADDED, Reading, batches, decide_usual, train_usual

from pgra.cli import run
from pgra.commands.common import quiet_libraries
from pgra.context import Context
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.data.examples import DataArguments, load_splits
from pgra.data.tasks import Task
from pgra.lm.load import choose_device
from pgra.reader.arguments import TrainingArguments
from pgra.reader.inputs import SegmentLayout, TokenizedInputs, build_inputs
from pgra.reader.predict import T5Classifier
from pgra.reader.train import fit
from pgra.retrieval import open_retriever
from pgra.retrieval.base import RetrieverArguments

T = TypeVar("T")
HEADLINE_DEPTH = 8
PAPER_STEPS = 5000
QUIET = Context(progress=False)


@dataclass
class Way:
    """What one way took.

    Attributes:
        train: Each repetition of the training steps.
        infer: Each repetition of the decisions.
        decided: The label of each example after training; None where no label's word was written.
    """

    train: list[Cost] = field(default_factory=list)
    infer: list[Cost] = field(default_factory=list)
    decided: list[str | None] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print a table."""
    args = parse(argv)
    reading = read_examples(args)
    figures: dict[str, float] = {}
    for depth in args.num_evidence:
        of_depth = measure_depth(reading, depth, args)
        show_figures(f"{args.model}, d = {depth}, {args.device.type}", of_depth)
        figures |= {f"d{depth}/{name}": value for name, value in of_depth.items()}
        if depth == HEADLINE_DEPTH or len(args.num_evidence) == 1:
            figures |= of_depth
    write_figures(args.json, figures)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the flags, with defaults for the device."""
    parser = shared_parser(__doc__ or "", quick="d = 8, 2 steps, 16 examples, once")
    parser.add_argument("--model", default="bundled:t5-small-titles", help="or random:t5-base")
    parser.add_argument("--task", default="rotten-tomatoes")
    parser.add_argument("--dataset_name", default="bundled:rotten-tomatoes")
    parser.add_argument("--reader_template", help="default: the task's")
    parser.add_argument("--max_passages", type=positive, default=2000)
    parser.add_argument("--encoder", default="bundled:minilm-l6")
    parser.add_argument("--num_evidence", type=positive, nargs="+", help="d; default 4 8 16")
    parser.add_argument("--batch_size", type=positive, default=8, help="examples a training step")
    parser.add_argument("--steps", type=positive, help="timed; default 3, on a GPU 50")
    parser.add_argument("--num_examples", type=positive, help="decided; default 32, on a GPU 872")
    parser.add_argument("--repeats", type=positive, default=2, help="the best counts")
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--bf16", action="store_true", help="both ways' training; else float32")
    parser.add_argument("--torch_compile", action="store_true", help="pgra's training")
    args = parse_flags(parser, argv)
    args.device = choose_device(args.device)
    on_gpu = args.device.type == "cuda"
    args.num_evidence = args.num_evidence or ([8] if args.quick else [4, 8, 16])
    args.steps = args.steps or (2 if args.quick else 50 if on_gpu else 3)
    args.num_examples = args.num_examples or (16 if args.quick else 872 if on_gpu else 32)
    args.repeats = 1 if args.quick else args.repeats
    return args


def read_examples(args: argparse.Namespace) -> Reading:
    """Read labelled queries, and find evidence for them."""
    task = Task.load(args.task)
    most = max(args.num_examples, (args.steps + 1) * args.batch_size)
    data = DataArguments(task=args.task, dataset_name=args.dataset_name, max_train_samples=most)
    examples = load_splits(task, data).train
    with tempfile.TemporaryDirectory() as folder:
        chosen = CorpusArguments(corpus=args.corpus, max_passages=args.max_passages)
        corpus = open_corpus(chosen, Path(folder))
        k = max(args.num_evidence)
        dense = RetrieverArguments(encoder=args.encoder, num_candidates=k)
        retriever = open_retriever(
            dense, corpus, Context(artifacts=Path(folder), device=args.device.type)
        )
        candidates = retriever.retrieve([example.text for example in examples], k)
        evidence = [corpus.texts(rows) for rows in candidates.rows]
    template = args.reader_template or task.reader_template
    return Reading(task.metric, task.labels, template, dict(task.verbalizer), examples, evidence)


def measure_depth(reading: Reading, depth: int, args: argparse.Namespace) -> dict[str, float]:
    """Time both ways at one depth."""
    usual = Way()
    ours = Way()
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights"
        for _ in range(args.repeats):
            usual.train.append(in_a_process(train_usual, reading, depth, args))
            ours.train.append(in_a_process(train_ours, reading, depth, args, weights))
            for way, work in ((usual, decide_usual), (ours, decide_ours)):
                cost, way.decided = in_a_process(work, reading, depth, args, weights)
                way.infer.append(cost)
    reader, tokenizer = open_reader(args.model, device=torch.device("cpu"))
    tested = tokenize(reading.first(args.num_examples), depth, tokenizer)
    trained = tokenize(reading, depth, tokenizer)
    steps = list(batches(args, len(trained)))[1:]
    operations = {  # a backward pass costs two forward ones
        "train": 3.0 * sum(count_operations(reader.model, trained, rows) for rows in steps),
        "infer": count_operations(reader.model, tested, range(len(tested))),
    }
    return summarise(tested, operations, usual, ours, args)


def in_a_process(work: Callable[..., T], *parts: Any) -> T:
    """Call in a process that ends with it."""
    with ProcessPoolExecutor(max_workers=1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_quietly, work, *parts).result()


def _quietly(work: Callable[..., T], *parts: Any) -> T:
    logging.disable(logging.WARNING)
    quiet_libraries()
    return work(*parts)


def tokenize(reading: Reading, depth: int, tokenizer: Any) -> TokenizedInputs:
    """Tokenise all examples with their best d."""
    layout = SegmentLayout(reading.template, "query_first", PADDED)
    evidence = [texts[:depth] for texts in reading.evidence]
    return build_inputs(reading.examples, evidence, tokenizer, reading.verbalizer, layout=layout)


def train_ours(
    reading: Reading,
    depth: int,
    args: argparse.Namespace,
    weights: Path,
) -> Cost:
    """Train by what train.py calls, and keep the weights."""
    reader, tokenizer = open_reader(args.model, device=args.device)
    inputs = tokenize(reading, depth, tokenizer)
    classifier = T5Classifier(reader, tokenizer, reading.verbalizer)
    times: list[float] = []

    def note(*_: object) -> None:
        if len(times) in (0, args.steps):  # what was before is not counted after
            wait_for(args.device)
        times.append(time.perf_counter())

    hook = register_optimizer_step_post_hook(note)
    with tempfile.TemporaryDirectory() as folder, measured(args.device) as cost:
        training = TrainingArguments(
            output_dir=folder,
            max_steps=args.steps + 1,
            per_device_train_batch_size=args.batch_size,
            learning_rate=args.learning_rate,
            eval_steps=0,
            save_steps=0,
            bf16=args.bf16,
            torch_compile=args.torch_compile,
        )
        context = Context(device=args.device.type, progress=False)
        fit(
            classifier,
            inputs,
            training,
            context,
            folder=Path(folder) / "reader",
            evaluate=dict,
            metric="",
        )
    hook.remove()
    save_model(reader.model, str(weights))
    return replace(cost, seconds=times[-1] - times[0])


def decide_ours(
    reading: Reading, depth: int, args: argparse.Namespace, weights: Path
) -> tuple[Cost, list[str | None]]:
    """Decide by what evaluate.py calls."""
    reader, tokenizer = open_reader(args.model, device=args.device)
    load_model(reader.model, weights)
    classifier = T5Classifier(reader, tokenizer, reading.verbalizer)

    def decide(count: int) -> list[str | None]:
        # What evaluate.py finds on disk is made here: tokens.
        inputs = tokenize(reading.first(count), depth, tokenizer)
        return [prediction.label for prediction in classifier.predict(inputs, QUIET)]

    decide(args.batch_size)
    with measured(args.device) as cost:
        decided = decide(args.num_examples)
    return cost, decided


def count_operations(t5: Any, inputs: TokenizedInputs, rows: Sequence[int]) -> float:
    """Count the multiplications and additions of one pass over rows, without padding.

    The encoder's matrices and attention, and for the decoder's few tokens its own matrices, its
    head, and reading the encoded tokens as they are (no keys and values of them).
    """
    config = t5.config
    lengths = [[len(segment) for segment in inputs[row].segments] for row in rows]
    written = [len(target) if (target := inputs[i].target) is not None else 0 for i in rows]
    tokens = sum(map(sum, lengths))
    squares = sum(length * length for length in chain.from_iterable(lengths))
    pairs = sum(count * sum(line) for line, count in zip(lengths, written, strict=True))
    encoder = 2.0 * _matrices(t5.encoder.block) * tokens
    attention = 4.0 * config.num_layers * config.num_heads * config.d_kv * squares
    crossing = 4.0 * config.num_decoder_layers * config.d_model * config.num_heads * pairs
    head = config.vocab_size * config.d_model
    decoder = 2.0 * (_matrices(t5.decoder.block) + head) * sum(written)
    return float(encoder + attention + crossing + decoder)


def _matrices(module: torch.nn.Module) -> int:
    return sum(
        p.numel() for name, p in module.named_parameters() if p.dim() > 1 and "bias" not in name
    )


def summarise(
    tested: TokenizedInputs,
    operations: Mapping[str, float],
    usual: Way,
    ours: Way,
    args: argparse.Namespace,
) -> dict[str, float]:
    """Return rates, memory and their ratios."""
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    rates = {kind: matrix_rate(args.device, kind) for kind in {torch.float32, dtype}}
    counts = {"train": args.steps * args.batch_size, "infer": len(tested)}
    figures: dict[str, float] = {
        "tokens_per_segment": sum(tested.sizes()) / sum(map(len, tested.segments)),
        "matrix_tflops": rates[dtype] / 1e12,
    }
    for title, way in (("usual", usual), ("pgra", ours)):
        for stage, costs in (("train", way.train), ("infer", way.infer)):
            seconds = min(cost.seconds for cost in costs)
            rate = rates[dtype if stage == "train" else torch.float32]
            figures[f"{title}_{stage}_examples_per_second"] = counts[stage] / seconds
            figures[f"{title}_{stage}_peak_mib"] = max(cost.peak_mib for cost in costs)
            figures[f"{title}_{stage}_share_of_matrix_rate"] = operations[stage] / seconds / rate
    for stage in ("train", "infer"):
        unit = f"{stage}_examples_per_second"
        figures[f"{stage}_speedup"] = figures[f"pgra_{unit}"] / figures[f"usual_{unit}"]
    agreed = [a == b for a, b in zip(usual.decided, ours.decided, strict=True)]
    figures["same_predictions"] = sum(agreed) / len(agreed)
    figures["no_label_written"] = float(usual.decided.count(None))
    step = args.batch_size / figures["pgra_train_examples_per_second"]
    figures["minutes_for_5000_steps"] = PAPER_STEPS * step / 60
    return figures


if __name__ == "__main__":
    sys.exit(run(main))
