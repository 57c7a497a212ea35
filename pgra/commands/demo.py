"""The demo (`make demo`, `pgra demo`): three readers, alike but for their evidence."""

import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import about, join_run, parse_run, quiet_libraries, say
from pgra.config import config_root
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.config import PgraArguments, RunArguments

READERS = {
    "no evidence": ["--num_evidence", "0"],
    "stage 1 evidence": ["--reranker", "none"],
    "stage 2 evidence (PGRA)": [],
}
_FOLDERS = dict(zip(READERS, ("t5", "fid", "pgra"), strict=True))


def main(argv: Sequence[str] | None = None) -> int:
    """See prompt-guided retrieval at work on real models and data.

    Examples:
      pgra demo
      pgra demo --max_steps 64 --output_dir runs/longer

    Takes the flags of pgra train; defaults are those of configs/experiments/demo.yaml. What is
    there already is reused.
    """
    start = time.perf_counter()
    words = [*(argv or [])]
    context, run_args = join_run(words), _parse(words)
    args = run_args.pgra
    if args.is_exhaustive:
        raise ConfigError(
            "the demo compares the evidence of both stages, and retriever 'exhaustive' has one "
            "only: use pgra train, or another --retriever"
        )
    base = run_args.folder
    from pgra.report.results import load_run
    from pgra.runs import run

    quiet_libraries()
    say(_introduce(args))
    reused, runs = [], []
    for number, (name, extra) in enumerate(READERS.items(), 1):
        say(f"\n[{number}/{len(READERS)}] reader with {name}")
        folder = base / _FOLDERS[name]
        mine = _parse([*words, *extra, "--output_dir", str(folder)])
        outcome = run(mine, context)
        reused.append(outcome.reused)
        runs.append(load_run(outcome.folder, name=name))
    say("\n" + _report(runs, base, time.perf_counter() - start, all_reused=all(reused)))
    say(f"Written: {base / 'report.md'}, {base / 'results.png'}")
    return 0


def _parse(words: Sequence[str]) -> "RunArguments":
    demo = config_root() / "experiments" / "demo.yaml"
    config = [] if "--config" in words else ["--config", str(demo)]
    args, _ = parse_run([*config, *words], prog="pgra demo", **about(main))
    return args


def _introduce(args: "PgraArguments") -> str:
    count = f"{args.corpus.max_passages:,}" if args.corpus.max_passages else "all"
    return (
        f"Movie-review sentences ({args.data.dataset_name}) get {args.retriever.num_candidates} "
        f"candidates each from {args.retriever.encoder} among {count} "
        f"Wikipedia sentences;\nthe LM {args.rerank.lm} reads every distinct candidate once under "
        f"a prompt of {args.rerank.num_exemplars} examples (on two cores about 15 a second, so "
        f"queries are few);\nthe reader {args.reader.model_name_or_path} is trained three times "
        f"for the same steps: without evidence, with the first stage's best "
        f"{args.rerank.num_evidence}, and with the LM's best {args.rerank.num_evidence}."
    )


def _report(runs: Sequence[Any], base: Path, seconds: float, *, all_reused: bool) -> str:
    """Write the report and the plot, and return the report."""
    from pgra.artifacts import write_text
    from pgra.report.compare import compare_runs
    from pgra.report.figures import plot_study
    from pgra.report.page import case_study, choose_case, demo_table
    from pgra.report.results import Group

    first, place = runs[0].metrics, choose_case(runs)
    notes = "\n".join(f"- {note}" for note in runs[-1].metrics["notes"])
    timing = (
        f"All of it was there already and was reused; {seconds:.0f} s."
        if all_reused
        else f"{seconds:.0f} s in all; stages in seconds: {_stages(runs)}."
    )
    report = (
        "# Three readers, alike but for their evidence\n\n"
        f"{first['metric']} on {first['n']} held-out sentences of {first['task']}, seed "
        f"{first['seed']}, one run a reader:\n\n{demo_table(runs).to_markdown()}\n\n"
        "![metric with interval](results.png)\n\n"
        "Intervals are bootstrap intervals over the test sentences; differences are paired. One "
        "seed and small models:\na difference whose interval holds 0 is none.\n\n## An example"
        f"\n\nThe first test sentence on which the readers disagree (number {place + 1}):\n\n"
        f"```\n{case_study(runs, place)}\n```\n\n## What to know\n\n{notes}\n\n{timing}\n"
    )
    write_text(base / "report.md", report)
    plot_study(compare_runs(Group("Three readers", runs)), base / "results.png")
    return report


def _stages(runs: Sequence[Any]) -> str:
    """Add up each stage's seconds: a later reader finds what an earlier one made."""
    total: Counter[str] = Counter()
    for one in runs:
        total.update(one.metrics["seconds"])
    return ", ".join(f"{name} {value:.0f}" for name, value in total.items())
