"""Trains a reader on a task: `train.py`, `pgra train`, alone or under `accelerate launch`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgra.commands.common import parse_run, quiet_libraries, say, show_metrics

if TYPE_CHECKING:
    from pgra.config import PgraArguments
    from pgra.reader.arguments import ReaderTrainingArguments

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
    args, training, processes = parse_run(
        argv,
        prog="train.py",
        description="Train a reader on a task with evidence that an LM picked.",
        epilog=EXAMPLE,
    )
    from pgra.pipelines.run import train_run

    quiet_libraries()
    training.output_dir = _output_dir(args, training)
    outcome = train_run(args, training, processes)
    if processes.worker.is_main:
        say(show_metrics(outcome))
    return 0


def _output_dir(args: "PgraArguments", training: "ReaderTrainingArguments") -> str:
    """Fill the default's places."""
    task = (args.data.task or "").rpartition("/")[2].removesuffix(".yaml")
    name = str(training.output_dir)
    for place, value in (("task", task), ("method", args.method), ("seed", training.seed)):
        name = name.replace(f"{{{place}}}", str(value))
    return name
