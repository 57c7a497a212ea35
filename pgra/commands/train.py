"""Trains readers on a task: `train.py`, `pgra train`, alone or under `accelerate launch`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from pgra.commands.common import (
    parse_series,
    quiet_libraries,
    say,
    show_metrics,
    show_summary,
)
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from pgra.config import PgraArguments, SeriesArguments
    from pgra.core import Context
    from pgra.experiments.search import SearchResult
    from pgra.publish import HubTarget
    from pgra.reader.arguments import ReaderTrainingArguments

EXAMPLE = """examples:
  accelerate launch train.py --task sst2
  accelerate launch train.py --task sst2 --config configs/experiments/paper.yaml
  python train.py --task sst2 --dataset_name bundled:rotten-tomatoes \\
      --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \\
      --model_name_or_path bundled:t5-small-titles --num_evidence 4 --max_steps 40
  python train.py --task my_task.yaml --train_file train.jsonl --test_file test.jsonl
  python train.py --task sst2 --seeds 0 1 2
  python train.py --task sst2 --system fid
  python train.py --config configs/experiments/lm-bff.yaml --task sst2 --seeds 13 21 42 87 100
  python train.py --task sst2 --search grid --report_to tensorboard
  python train.py --task sst2 --model_name_or_path google-t5/t5-3b --lora_rank 16
  python train.py --task sst2 --push_to_hub --hub_model_id me/sst2-pgra

--system fid trains Fusion-in-Decoder on the first stage's best, plain the reader without evidence,
random on random passages; icl and knn train nothing. What tells them apart may be given as flags
too (--reranker none, --num_evidence 0). A stopped run goes on when the same command is given again.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run whatever stage is missing, train, and measure on the test set."""
    args, series, training, context = parse_series(
        argv,
        prog="train.py",
        description="Train a reader on a task with evidence that an LM picked.",
        epilog=EXAMPLE,
    )
    from pgra.runs import series_folder

    quiet_libraries()
    pattern = _output_dir(args, training)
    folder = series_folder(pattern, series.seed_list() or [training.seed])
    target = _take_target(args, training, series, folder=folder, context=context)
    # Several seeds without a search have a folder each, which the pattern tells.
    has_pattern = series.seeds is not None and series.search == "none"
    training.output_dir = pattern if has_pattern else str(folder)
    run = _train(args, series, training, context)
    if target is not None and context.worker.is_main:
        from pgra.publish import push_run

        say(f"pushed: {push_run(run, target)}")
    return 0


def _train(
    args: "PgraArguments",
    series: "SeriesArguments",
    training: "ReaderTrainingArguments",
    context: "Context",
) -> "Path":
    """Train what is asked for, show what came out, and give the run that counts."""
    from pgra.experiments.search import search_runs
    from pgra.runs import refuse_own, run_system, train_seeds

    if series.search != "none":
        refuse_own(args, f"search '{series.search}'")
        found = search_runs(args, training, series, context)
        told, run = _show_search(found), found.outcome.folder
    elif series.seeds is not None:
        summary = train_seeds(args, training, series.seed_list(), context)
        told, run = show_summary(summary), summary.folder
    else:
        outcome = run_system(args, training, context)
        told, run = show_metrics(outcome), outcome.folder
    if context.worker.is_main:
        say(told)
    return run


def _take_target(
    args: "PgraArguments",
    training: "ReaderTrainingArguments",
    series: "SeriesArguments",
    *,
    folder: "Path",
    context: "Context",
) -> "HubTarget | None":
    """See before any work that the reader can be pushed where it shall go."""
    from pgra.publish import open_target, take_target
    from pgra.runs import refuse_own

    if training.push_to_hub:
        refuse_own(args, "push_to_hub")
    if training.push_to_hub and series.seeds is not None:
        raise ConfigError(
            "push_to_hub with several seeds: which reader is meant? Leave it out, and push one "
            "with pgra push --run DIR"
        )
    target = take_target(training, folder.absolute().name)
    if target is None or not context.worker.is_main:
        return target
    return open_target(target)


def _output_dir(args: "PgraArguments", training: "ReaderTrainingArguments") -> str:
    """Fill the default's places but for the seed, of which there may be several."""
    task = (args.data.task or "").rpartition("/")[2].removesuffix(".yaml")
    name = str(training.output_dir)
    return name.replace("{task}", task).replace("{method}", args.method)


def _show_search(found: "SearchResult") -> str:
    lines = [f"learning rate  batch  dev {found.metric}  step"]
    for one in sorted(found.tried, key=lambda one: one.point):
        mark = "  <- kept" if one.point == found.winner.point else ""
        lines.append(
            f"{one.point.learning_rate:>13g}  {one.point.batch_size:>5}  "
            f"{one.dev_value:>{len(found.metric) + 4}.4f}  {one.step:>4}{mark}"
        )
    told = show_metrics(found.outcome) if found.seeds is None else show_summary(found.seeds)
    return "\n".join([*dict.fromkeys(lines), told])
