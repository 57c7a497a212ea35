"""The demo (`make demo`, `pgra demo`): the main job on real models, and where evidence decides."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import about, join_run, parse_run, quiet_libraries, say
from pgra.config import config_root, wants_help

if TYPE_CHECKING:
    from pgra.context import Context
    from pgra.methods.arguments import RunArguments
    from pgra.report.metrics import Difference
    from pgra.report.results import Trial
    from pgra.types import Json

# By name: the folder, and the arguments that differ.
READERS = {
    "T5 alone": ("t5", ["--num_evidence", "0"]),
    "T5 + LM's evidence (PGRA)": ("pgra", []),
}
CLAIMS = {
    "T5 alone": ("claims-t5", ["--num_evidence", "0"]),
    "T5 + BM25's best passage": ("claims-bm25", []),
}
QUESTIONS = (
    "--config demo-questions --task webquestions --retriever bm25 --reranker likelihood "
    "--corpus bundled:wikipedia-19k --num_evidence 1 --allow_test_in_train"
)


def main(argv: Sequence[str] | None = None) -> int:
    """See prompt-guided retrieval at work on real models and real text, in three minutes.

    Examples:
      pgra demo
      pgra demo --max_steps 64 --output_dir runs/longer

    Takes the flags of `pgra train` too; defaults are those of configs/experiments/demo.yaml, and of
    demo-questions.yaml and demo-claims.yaml for these. Stopped, it resumes where it was.
    """
    words = [*(argv or [])]
    if wants_help(words):
        _parse(words)
    context = join_run(words)
    args = _parse(words)
    from pgra.commands.report import write_page
    from pgra.report.compare import compare_runs
    from pgra.report.results import Group

    quiet_libraries()
    asked, effect = _rank_questions(words, context)
    reviews, decided = _train(READERS, words, args.folder, context)
    forecast = _worth(args, "head", context)
    words += _make_claims(args, context)
    claims_forecast = _worth(_parse(words), "first_stage", context)
    claims, claims_decided = _train(CLAIMS, words, args.folder, context, done=len(READERS))
    found = {
        "Does the LM find what answers a question?": effect,
        "Does a T5 decide reviews better with what the LM picks?": [forecast, decided],
        "And claims, which the corpus makes true or false?": [claims_forecast, claims_decided],
    }
    page = args.folder / "report.html"
    title = "Prompt-guided retrieval: the demo"
    studies = []
    for what, runs in (("questions", asked), ("claims", claims), ("reviews", reviews)):
        rows: dict[str, dict[str, Json]] = {run.name: {} for run in runs}
        group = Group(f"The demo's {what}", runs, points=rows)
        studies.append(compare_runs(group, baseline=runs[0].name))
    lead = "\n\n".join(" ".join([head, *lines]) for head, lines in found.items())
    write_page(page, studies, title=title, lead=lead)
    for head, lines in found.items():
        say("\n  ".join([f"\n{head}", *lines]))
    say(f"\nTo look through examples: open {page}")
    return 0


def _parse(words: Sequence[str]) -> "RunArguments":
    config = [] if "--config" in words else ["--config", "demo"]
    args, _ = parse_run([*config, *words], prog="pgra demo", **about(main))
    return args


def _train(
    readers: Mapping[str, tuple[str, list[str]]],
    words: Sequence[str],
    base: Path,
    context: "Context",
    *,
    done: int = 0,
) -> "tuple[list[Trial], str]":
    """Train two readers; return their results, and how the second differs from the first."""
    from pgra.report.metrics import compare_methods
    from pgra.report.results import load_run
    from pgra.runs import run

    runs = []
    for number, (name, (folder, own)) in enumerate(readers.items(), done + 1):
        say(f"\n[{number}/{len(READERS) + len(CLAIMS)}] {name}")
        outcome = run(_parse([*words, *own, "--output_dir", str(base / folder)]), context)
        runs.append(load_run(outcome.folder, name=name))
    alone, read = runs
    gap = compare_methods([read.outcomes], [alone.outcomes], seed=0)
    return runs, (
        f"Trained, {read.name} is right on {100 * read.value:.1f} %, {alone.name} on "
        f"{100 * alone.value:.1f} %: {_verdict(gap)}."
    )


def _rank_questions(words: Sequence[str], context: "Context") -> "tuple[list[Trial], list[str]]":
    """Compare how often BM25's first passage and the LM's answer a question; show an example."""
    import numpy as np

    from pgra.artifacts import write_lines
    from pgra.methods.stages import Stages
    from pgra.report.metrics import TextOutcomes, compare_methods
    from pgra.report.results import PREDICTIONS_FILE, Trial

    say("\nasking the LM which passages make a question likely")
    file = str(config_root() / "demo-questions.jsonl")  # of test; nothing is learnt
    args = _parse([*words, *QUESTIONS.split(), "--train_file", file, "--test_file", file])
    args = args.having(corpus=replace(args.corpus, max_passages=None))
    plain = args.having(rerank=replace(args.rerank, reranker="none"), rerank_options=None)
    runs = []
    right = []
    for name, how in (("BM25", plain), ("BM25, then the LM", args)):
        stages = Stages.read(how, context)
        stages.find(("test",))
        lines = stages.evidence_lines("test")
        hits, *_, among = stages.find_answers("test", lines).values()
        right.append(np.array(hits))
        first = [line[0].text if line else "" for line in lines]
        said = [
            {**vars(one), "text": one.text, "prediction": text, "evidence": []}
            for one, text in zip(stages.data.examples("test"), first, strict=True)
        ]
        folder = args.folder / "questions" / how.rerank.reranker
        folder.mkdir(parents=True, exist_ok=True)
        write_lines(folder / PREDICTIONS_FILE, said)
        found = TextOutcomes("hit@1", right[-1][:, None])
        about = {"uses_seed": False}
        runs.append(Trial("search", name, "questions", 0, folder, {}, about, found, file))
    before, after = (run.predictions[int(np.argmax(right[1] - right[0]))] for run in runs)
    gap = compare_methods([runs[1].outcomes], [runs[0].outcomes], seed=0)
    return runs, [
        f"BM25's first passage answers {100 * runs[0].value:.1f} % of {len(hits)} questions; of "
        f"its first {args.retriever.num_candidates} the LM's choice does {100 * runs[1].value:.1f} "
        f"%, any {100 * np.mean(among):.1f} %: {_verdict(gap)}.",
        f"{before['text']!r}: BM25 has {before['prediction']!r}, the LM {after['prediction']!r}.",
    ]


def _make_claims(args: "RunArguments", context: "Context") -> list[str]:
    """Make claims of the demo's corpus; return the flags of their task."""
    from pgra.data.claims import ClaimsArguments, make_claims
    from pgra.data.corpus import open_corpus

    where = str(args.folder / "claims")
    how = ClaimsArguments(output_dir=where, num_train=136, num_dev=8, num_test=100)
    whole = replace(args.corpus, max_passages=None)
    folder = make_claims(open_corpus(whole, context.artifacts), how).folder
    files = ["--dataset_name", str(folder), "--corpus", str(folder / "corpus.txt")]
    return ["--config", "demo-claims", "--task", "claims", *files]


def _worth(args: "RunArguments", source: str, context: "Context") -> str:
    """Ask the untrained T5 what evidence is worth, and say it."""
    from pgra.methods.arguments import WorthArguments
    from pgra.methods.worth import measure_worth

    say("\nasking the T5, not trained yet, what evidence is worth to it")
    how = WorthArguments(num_queries=64, depths=[args.rerank.num_evidence], sources=[source])
    found = measure_worth(args, how, context)
    (row,), advice = found["rows"], "with" if found["best"] else "without"
    return (
        f"Not trained yet, it gains {row['bits']:+.2f} bits a query ({row['low']:+.2f} to "
        f"{row['high']:+.2f}), so `pgra worth` says: train {advice} evidence."
    )


def _verdict(gap: "Difference") -> str:
    """Describe a difference, in points, and whether it is beyond noise."""
    low, high = (100 * bound for bound in gap.interval)
    noise = "beyond noise" if gap.p < 0.01 else "which may be noise"
    return (
        f"{100 * gap.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}, p "
        f"{gap.p:.3f}), {noise}"
    )
