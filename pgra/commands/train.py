"""`pgra train`: a reader, trained on a task, or another method."""

import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pgra.commands.common import (
    SeriesArguments,
    given_names,
    parse_run,
    quiet_libraries,
    say,
    show_metrics,
    show_seeds,
)
from pgra.config import Defaults
from pgra.context import join_context
from pgra.errors import ConfigError, check_alone
from pgra.methods.arguments import RunArguments

logger = logging.getLogger(__name__)

_PAPER_LM = "facebook/opt-13b"


def main(argv: Sequence[str]) -> int:
    r"""Train a reader on a task with evidence that an LM picked, or run another method.

    Examples:
      pgra train --config small --task sst2 --dataset_name bundled:rotten-tomatoes
      accelerate launch -m pgra train --task sst2 --config paper
      pgra train --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \
          --model_name_or_path bundled:t5-small-titles --num_evidence 4 --max_steps 40
      pgra train --task my_task.yaml --train_file train.jsonl --test_file test.jsonl --dry_run
      pgra train --task sst2 --method fid --seeds 0 1 2
      pgra train --task sst2 --method ralm --reader_lm bundled:smollm2-135m
      pgra train --task sst2 --report_to tensorboard
      pgra train --method knn --help

    --method fid trains Fusion-in-Decoder on the first stage's best, plain the reader without
    evidence, random on random passages; icl, kate and knn train nothing. What distinguishes them
    may be given as flags too (--reranker none, --num_evidence 0). A stopped run resumes when the
    same command is given again.
    """
    return run_method(argv, main, "pgra train", {})


def run_method(
    words: Sequence[str], command: Callable[..., int], prog: str, defaults: Mapping[str, Any]
) -> int:
    """Run a method, with each of the seeds, and show what was measured."""
    args, (series,) = parse_run(
        command,
        prog,
        words,
        [SeriesArguments],
        defaults=[Defaults(prog, defaults)],
    )
    context = join_context(args.runtime.device)
    from pgra.runs import run, run_seeds

    quiet_libraries()
    if series.dry_run:
        from pgra.experiments.dry_run import show_plan

        check_alone(f"{prog} --dry_run")
        say(show_plan(args))
        return 0
    if context.is_main and not given_names(words) & {"config", "lm", "profile"}:
        _ask_for_paper_models(args)
    if series.seeds:
        report = show_seeds(run_seeds(args, series.seeds, context))
    else:
        report = show_metrics(run(args, context))
    if context.is_main:
        say(report)
    return 0


def _ask_for_paper_models(args: RunArguments) -> None:
    """Say what a bare command loads, and ask where a person sits at a terminal."""
    stage = args.sections.get("rerank")
    if stage is None or stage.lm != _PAPER_LM or stage.reranker != "prompted":
        return
    from huggingface_hub import try_to_load_from_cache

    is_there = try_to_load_from_cache(_PAPER_LM, "config.json")
    if is_there or not (args.data.task and stage.num_evidence):
        return
    logger.warning(
        f"this loads the paper's models: {_PAPER_LM} (26 GB), google-bert/bert-base-uncased and "
        "google-t5/t5-base (1.3 GB), for a GPU of 48 GB. --config small takes small bundled ones."
    )
    if sys.stdin.isatty() and input("Load them? [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("nothing was loaded: give --config small, or models of your own (--lm)")
