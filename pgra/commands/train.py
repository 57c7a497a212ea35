"""Trains a reader on a task: `train.py`, `pgra train`, alone or under `accelerate launch`."""

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from pgra.arguments import parse_arguments
from pgra.commands.common import SECTIONS, quiet_libraries, say, show_metrics
from pgra.pipelines.pgra import PgraArguments

EXAMPLE = """examples:
  accelerate launch train.py --task sst2
  accelerate launch train.py --task sst2 --config configs/experiments/paper.yaml
  python train.py --task sst2 --dataset_name bundled:rotten-tomatoes \\
      --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \\
      --model_name_or_path bundled:t5-small-titles --num_evidence 4 --max_steps 40
  python train.py --task my_task.yaml --train_file train.jsonl --test_file test.jsonl

--num_evidence 0 trains the plain reader, --reranker none Fusion-in-Decoder on the first stage's
best. A stopped run goes on when the same command is given again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run whatever stage is missing, train, and measure on the test set."""
    from pgra.processes import join_processes
    from pgra.reader.arguments import ReaderTrainingArguments

    # Before the Trainer's arguments, which would join with a time limit of half an hour.
    words = list(sys.argv[1:] if argv is None else argv)
    on_cpu = "--device=cpu" in words or ("--device", "cpu") in pairwise(words)
    processes = join_processes("cpu" if on_cpu else "auto")
    *sections, training = parse_arguments(
        [*SECTIONS.values(), ReaderTrainingArguments],
        [*words, "--use_cpu"] if on_cpu else words,
        prog="train.py",
        description="Train a reader on a task with evidence that an LM picked.",
        epilog=EXAMPLE,
    )
    from pgra.pipelines.run import train_run

    args = PgraArguments(**dict(zip(SECTIONS, sections, strict=True)))
    quiet_libraries()
    training.output_dir = _output_dir(args, training)
    outcome = train_run(args, training, processes)
    if processes.worker.is_main:
        say(show_metrics(outcome))
    return 0


def _output_dir(args: PgraArguments, training: Any) -> str:
    """Fill the default's places."""
    task = (args.data.task or "").rpartition("/")[2].removesuffix(".yaml")
    name: str = training.output_dir
    for place, value in (("task", task), ("method", args.method), ("seed", training.seed)):
        name = name.replace(f"{{{place}}}", str(value))
    return name
