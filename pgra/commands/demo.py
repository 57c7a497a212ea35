"""The demo (`make demo`, `pgra demo`): the main job on real models, and what the LM picks."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from pgra.commands.common import about, join_run, parse_run, quiet_libraries, say
from pgra.config import config_root, wants_help

if TYPE_CHECKING:
    from pgra.core import Context
    from pgra.experiments.consistency import Lines
    from pgra.methods.arguments import RunArguments
    from pgra.report.metrics import Difference

READERS = {  # by name: the folder, and the arguments that differ
    "T5 alone": ("t5", ["--num_evidence", "0"]),
    "T5 + LM's evidence (PGRA)": ("pgra", []),
}
_LEVEL = 0.01


def main(argv: Sequence[str] | None = None) -> int:
    """See prompt-guided retrieval at work on real models and real text, in three minutes.

    Examples:
      pgra demo
      pgra demo --max_steps 64 --output_dir runs/longer

    Takes the flags of `pgra train` too; defaults are those of configs/experiments/demo.yaml.
    Stopped, it resumes where it was.
    """
    words = [*(argv or [])]
    if wants_help(words):
        _parse(words)
    context, args = join_run(words), _parse(words)
    base = args.folder
    from pgra.commands.report import write_page
    from pgra.experiments import consistency
    from pgra.report.compare import compare_runs
    from pgra.report.metrics import compare_means, compare_methods
    from pgra.report.results import Group, load_run
    from pgra.runs import run

    quiet_libraries()
    runs, count = [], len(READERS) + 1
    for number, (name, (folder, own)) in enumerate(READERS.items(), 1):
        say(f"\n[{number}/{count}] {name}")
        outcome = run(_parse([*words, *own, "--output_dir", str(base / folder)]), context)
        runs.append(load_run(outcome.folder, name=name))
    say(f"\n[{count}/{count}] what each stage picks, labelled by the T5 alone")
    alone, pgra = runs
    sides = {"the encoder": _first_stage(args, context), "the LM": pgra.predictions}
    labeler = consistency.open_labeler(alone.folder)
    texts = consistency.distinct_evidence(list(sides.values()))
    kept = base / "evidence" / "pseudo_labels"
    labels = consistency.label_texts(labeler, texts, kept, device=args.runtime.device)
    first, second = (
        consistency.measure_consistency(
            name, alone.task, lines, labels, labels=labeler.record.labels
        )
        for name, lines in sides.items()
    )
    gap = compare_means(second.shares, first.shares, seed=0)
    effect = (
        f"By the T5 alone, {100 * second.score:.1f} % of the evidence that the LM picks has its "
        f"review's own label, of the encoder's {100 * first.score:.1f} %: {_verdict(gap)}."
    )
    trained = compare_methods([pgra.outcomes], [alone.outcomes], seed=0)
    decided = (
        f"{pgra.name} is right on {100 * pgra.value:.1f} %, {alone.name} on "
        f"{100 * alone.value:.1f} %: {_verdict(trained)}."
    )
    study, page = compare_runs(Group("The demo's readers", runs)), base / "report.html"
    title = "Prompt-guided retrieval: the demo"
    write_page(page, [study], title=title, lead=f"{effect}\n\n{decided}")
    say(f"\nDoes the LM pick other evidence than the encoder?\n  {effect}")
    say(f"\nDoes the T5 decide better with it?\n  {decided}")
    say(f"\nTo look through examples: open {page}")
    return 0


def _parse(words: Sequence[str]) -> "RunArguments":
    own = str(config_root() / "experiments" / "demo.yaml")
    config = [] if "--config" in words else ["--config", own]
    args, _ = parse_run([*config, *words], prog="pgra demo", **about(main))
    return args


def _first_stage(args: "RunArguments", context: "Context") -> "Lines":
    """Find the first stage's best evidence, as lines of `predictions.jsonl`, undecided."""
    from pgra.methods.stages import Stages

    first = args.having(rerank=replace(args.rerank, reranker="none"), rerank_options=None)
    stages = Stages.read(first, context)
    stages.find(("test",))
    pairs = zip(stages.data.examples("test"), stages.evidence_lines("test"), strict=True)
    return [
        {**vars(example), "prediction": None, "evidence": [asdict(line) for line in found]}
        for example, found in pairs
    ]


def _verdict(gap: "Difference") -> str:
    """Describe a difference, in points, and whether it is beyond noise."""
    low, high = (100 * bound for bound in gap.interval)
    noise = "beyond noise" if gap.p < _LEVEL else "which may be noise"
    return (
        f"{100 * gap.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}, p "
        f"{gap.p:.3f}), {noise}"
    )
