"""The demo (`make demo`, `pgra demo`): the main job on real models, and what the LM picks."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import about, join_run, parse_run, quiet_libraries, say
from pgra.config import config_root
from pgra.errors import ConfigError
from pgra.help import wants_help
from pgra.progress import Bar

if TYPE_CHECKING:
    from pgra.experiments.consistency import ConsistencyReport
    from pgra.methods.arguments import PgraArguments, RunArguments
    from pgra.report.metrics import Difference
    from pgra.report.results import Trial

READERS = {  # by name: the folder, and the arguments that differ
    "T5 alone": ("t5", ["--num_evidence", "0"]),
    "T5 + LM's evidence (PGRA)": ("pgra", []),
}
_LEVEL = 0.01
_SILENCE = 5.0  # seconds between two lines where there is no terminal


def main(argv: Sequence[str] | None = None) -> int:
    """See prompt-guided retrieval at work on real models and real text, in three minutes.

    Examples:
      pgra demo
      pgra demo --max_steps 64 --output_dir runs/longer

    Takes the flags of `pgra train` too; defaults are those of configs/experiments/demo.yaml.
    Stopped, it goes on where it was.
    """
    start = time.perf_counter()
    Bar.seconds = _SILENCE
    words = [*(argv or [])]
    if wants_help(words):
        _parse(words)
    say("Loading torch and transformers ...")
    context, run_args = join_run(words), _parse(words)
    args = run_args.pgra
    if args.is_exhaustive:
        raise ConfigError(
            "the demo compares the evidence of both stages, and retriever 'exhaustive' has one "
            "only: use pgra train, or another --retriever"
        )
    base = run_args.folder
    from pgra.experiments.consistency import compare_evidence
    from pgra.report.results import load_run
    from pgra.runs import run

    quiet_libraries()
    say(_introduce(args))
    runs, is_new, count = [], False, len(READERS) + 1
    for number, (name, (folder, own)) in enumerate(READERS.items(), 1):
        say(f"\n[{number}/{count}] {name}")
        outcome = run(_parse([*words, *own, "--output_dir", str(base / folder)]), context)
        is_new = is_new or not outcome.reused
        runs.append(load_run(outcome.folder, name=name))
    say(f"\n[{count}/{count}] what each stage picks, labelled by the T5 alone")
    found = compare_evidence(args, runs[0].folder, base / "evidence", context=context)
    seconds = f"{time.perf_counter() - start:.0f} s" + ("" if is_new else ", all of it reused")
    say("\n" + _report(args, runs, found, base, seconds))
    return 0


def _parse(words: Sequence[str]) -> "RunArguments":
    own = str(config_root() / "experiments" / "demo.yaml")
    config = [] if "--config" in words else ["--config", own]
    args, _ = parse_run([*config, *words], prog="pgra demo", **about(main))
    return args


def _introduce(args: "PgraArguments") -> str:
    """Describe what will be done."""
    count = f"{args.corpus.max_passages:,}" if args.corpus.max_passages else "all"
    return "\n".join(
        [
            f"Task: is a sentence of a film review positive? ({args.data.dataset_name})",
            f"  1. {args.retriever.encoder} finds {args.retriever.num_candidates} candidates for "
            f"each review among {count} sentences of Wikipedia.",
            f"  2. {args.rerank.lm} reads each once, under a prompt of "
            f"{args.rerank.num_exemplars} examples, and picks {args.rerank.num_evidence}.",
            f"  3. {args.reader.model_name_or_path} is trained, {len(READERS)} times: "
            + "; ".join(READERS),
        ]
    )


def _report(
    args: "PgraArguments",
    runs: "Sequence[Trial]",
    found: "ConsistencyReport",
    base: Path,
    seconds: str,
) -> str:
    """Write the page, and return what the terminal shows."""
    from pgra.artifacts import write_text
    from pgra.commands.report import PAGE_SAMPLES, show_samples
    from pgra.report.compare import compare_runs
    from pgra.report.metrics import compare_means, compare_methods
    from pgra.report.page import render_page
    from pgra.report.results import Group

    first, second = found.runs[1:]  # the one before is by chance
    gap = compare_means(second.shares, first.shares, seed=0)
    effect = (
        f"By the T5 alone, {100 * second.score:.1f} % of the evidence that the LM picks has its "
        f"review's own label, of the encoder's {100 * first.score:.1f} %: "
        f"{_verdict(gap, len(second.shares))}."
    )
    lines = []
    for run in runs[1:]:
        own = compare_methods([run.outcomes], [runs[0].outcomes], seed=0)
        lines.append(
            f"{run.name} is right on {100 * run.value:.1f} %, {runs[0].name} on "
            f"{100 * runs[0].value:.1f} %: {_verdict(own, len(run.predictions))}."
        )
    case = _case(args, runs[0], found)
    study = compare_runs(Group("The demo's readers", runs))
    title, lead = "Prompt-guided retrieval: the demo", "\n\n".join([effect, *lines, case])
    samples = show_samples([study.group], PAGE_SAMPLES)
    page = render_page(title, [study], samples, lead=lead)
    write_text(base / "report.html", page)
    return "\n\n".join(
        [
            "Does the LM pick other evidence than the encoder?\n  " + effect,
            "Does the T5 decide better with it?\n  " + "\n  ".join(lines),
            case,
            f"It took {seconds}. To look through examples: open {base / 'report.html'}",
        ]
    )


def _verdict(gap: "Difference", n: int) -> str:
    """Describe a difference, in points, and whether it is beyond noise."""
    told = (
        f"{100 * gap.difference:+.1f} points (95 % interval {100 * gap.low:+.1f} to "
        f"{100 * gap.high:+.1f}, p {gap.p:.3f}, {n} reviews)"
    )
    if gap.p < _LEVEL:
        return f"{told}, beyond noise"
    return f"{told}, which may be noise"


def _case(args: "PgraArguments", reader: "Trial", found: "ConsistencyReport") -> str:
    """Show a review on which the stages differ most in the LM's favour, the LM's surest one."""
    first, second = found.runs[1:]
    by_id = {
        name: {line["id"]: line for line in found.lines[name]} for name in (first.name, second.name)
    }
    chances = [sum(seen["score"] for seen in by_id[second.name][i]["evidence"]) for i in second.ids]
    gain = second.shares - first.shares
    query = second.ids[max(range(len(gain)), key=lambda n: (gain[n], chances[n]))]
    text = {line["id"]: line for line in reader.predictions}[query]
    lines = [
        "An example, of the reviews on which they differ most the one of which the LM is surest:",
        f'  "{text["text"]}" ({text["label"]})',
    ]
    for way, name in ((first.name, "the encoder picks"), (second.name, "the LM picks")):
        line: Mapping[str, Any] = by_id[way][query]
        lines.append(f"  {name}:")
        lines += [
            f"    {found.pseudo_labels[seen['text']]}: {seen['text']}"
            for seen in line["evidence"][: args.rerank.num_evidence]
        ]
    return "\n".join(lines)
