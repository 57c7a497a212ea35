"""The demo (`make demo`, `pgra demo`): the main job on real models, and where evidence decides."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pgra.commands.common import parse_run, quiet_libraries, say
from pgra.config import config_root
from pgra.context import Context, join_context

if TYPE_CHECKING:
    from pgra.methods.arguments import RunArguments
    from pgra.report.results import FinishedRun

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


def main(argv: Sequence[str]) -> int:
    """See prompt-guided retrieval at work on real models and real text, in three minutes.

    Examples:
      pgra demo
      pgra demo --max_steps 64 --output_dir runs/longer

    Takes the flags of `pgra train` too; defaults are those of configs/experiments/demo.yaml, and of
    demo-questions.yaml and demo-claims.yaml for these. Stopped, it resumes where it was.
    """
    words = [*argv]
    args = _parse(words)
    context = join_context(args.runtime.device)
    from pgra.commands.report import write_page
    from pgra.report.compare import compare_runs
    from pgra.report.results import Group

    quiet_libraries()
    questions, effect = _rank_questions(words, context)
    reviews, reviews_effect = _train(READERS, words, context)
    reviews_forecast = _forecast(args, "head")
    words += _make_claims(args, context)
    claims_forecast = _forecast(_parse(words), "first_stage")
    claims, claims_effect = _train(CLAIMS, words, context)
    parts = [
        ("questions", "Does the LM find what answers a question?", questions, effect),
        (
            "reviews",
            "Does a T5 decide reviews better with what the LM picks?",
            reviews,
            [reviews_forecast, reviews_effect],
        ),
        (
            "claims",
            "And claims, which the corpus makes true or false?",
            claims,
            [claims_forecast, claims_effect],
        ),
    ]
    studies = []
    for what, question, runs, lines in parts:
        group = Group(f"The demo's {what}", runs, points={run.name: {} for run in runs})
        studies.append(compare_runs(group, baseline=runs[0].name))
        say("\n  ".join([f"\n{question}", *lines]))
    page = args.folder / "report.html"
    lead = "\n\n".join(" ".join([question, *lines]) for _, question, _, lines in parts)
    write_page(page, studies, title="Prompt-guided retrieval: the demo", lead=lead)
    say(f"\nTo look through examples: open {page}")
    return 0


def _parse(words: Sequence[str]) -> "RunArguments":
    config = [] if "--config" in words else ["--config", "demo"]
    args, _ = parse_run(main, "pgra demo", [*config, *words])
    return args


def _train(
    readers: Mapping[str, tuple[str, list[str]]], words: Sequence[str], context: Context
) -> "tuple[list[FinishedRun], str]":
    """Train two readers; return their results, and how the second differs from the first."""
    from pgra.report.results import load_measures
    from pgra.runs import run

    base = _parse(words).folder
    runs = []
    for name, (folder, flags) in readers.items():
        say(f"\n{name}")
        args = _parse([*words, *flags, "--output_dir", str(base / folder)])
        runs.append(load_measures(run(args, context).folder, name=name)[0])
    alone, read = runs
    return runs, (
        f"Trained, {read.name} is right on {100 * read.value:.1f} %, {alone.name} on "
        f"{100 * alone.value:.1f} %: {_verdict(runs)}."
    )


def _rank_questions(
    words: Sequence[str], context: Context
) -> "tuple[list[FinishedRun], list[str]]":
    """Compare how often BM25's first passage and the LM's answer a question; show an example."""
    import numpy as np

    from pgra.artifacts import write_lines
    from pgra.methods.stages import Stages
    from pgra.report.metrics import TextOutcomes
    from pgra.report.results import FinishedRun
    from pgra.run_folder import PREDICTIONS_FILE

    say("\nasking the LM which passages make a question likely")
    file = str(config_root() / "demo-questions.jsonl")  # of test; nothing is learnt
    args = _parse([*words, *QUESTIONS.split(), "--train_file", file, "--test_file", file])
    args = args.change("corpus", max_passages=None)
    plain = args.change("rerank", reranker="none").having(rerank_options=None)
    runs = []
    hits = []
    for name, stage_args in (("BM25", plain), ("BM25, then the LM", args)):
        stages = Stages.read(stage_args, context)
        stages.find(("test",))
        evidence = stages.evidence_lines("test")
        is_hit, *_, in_reach = stages.find_answers("test", evidence).values()
        hits.append(np.array(is_hit))
        lines = []
        for question, passages in zip(stages.data.examples("test"), evidence, strict=True):
            text = passages[0].text if passages else ""
            line = {"text": question.text, "prediction": text, "evidence": []}
            lines.append({**vars(question), **line})
        run = FinishedRun(
            args.folder / "questions" / stage_args.rerank.reranker,
            method="search",
            name=name,
            task="questions",
            metrics={"uses_seed": False},
            outcomes=TextOutcomes("hit@1", hits[-1][:, None]),
            examples=file,
        )
        write_lines(run.folder / PREDICTIONS_FILE, lines)
        runs.append(run)
    before, after, in_all = 100 * np.array([*hits, in_reach]).mean(axis=1)
    effect = (
        f"BM25's first passage answers {before:.1f} % of {len(lines)} questions; of its first "
        f"{args.retriever.num_candidates} the LM's choice does {after:.1f} %, any {in_all:.1f} %: "
        f"{_verdict(runs)}."
    )
    gained = int(np.argmax(hits[1] - hits[0]))
    first, second = (run.predictions[gained] for run in runs)
    example = f"BM25 has {first['prediction']!r}, the LM {second['prediction']!r}."
    return runs, [effect, f"{first['text']!r}: {example}"]


def _make_claims(args: "RunArguments", context: Context) -> list[str]:
    """Make claims of the demo's corpus; return the flags of their task."""
    from pgra.data.claims import ClaimsArguments, make_claims
    from pgra.data.corpus import open_corpus

    options = ClaimsArguments(
        output_dir=str(args.folder / "claims"), num_train=136, num_dev=8, num_test=100
    )
    corpus = open_corpus(args.change("corpus", max_passages=None).corpus, context.artifacts)
    folder = make_claims(corpus, options).folder
    files = ["--dataset_name", str(folder), "--corpus", str(folder / "corpus.txt")]
    return ["--config", "demo-claims", "--task", "claims", *files]


def _forecast(args: "RunArguments", source: str) -> str:
    """Measure what evidence is worth to the T5 before its training, and describe it."""
    from pgra.experiments.worth import measure_worth
    from pgra.methods.arguments import WorthArguments

    say("\nasking the T5, not trained yet, what evidence is worth to it")
    options = WorthArguments(num_queries=64, depths=[args.rerank.num_evidence], sources=[source])
    result = measure_worth(args, options)
    (row,) = result["rows"]
    advice = "with" if result["best"] else "without"
    gain = "{mean:+.2f} bits a query ({low:+.2f} to {high:+.2f}".format_map(row["gain"])
    return (
        f"Not trained yet, it gains {gain}, p {row['p']:.3f} of no gain), so `pgra worth` says: "
        f"train {advice} evidence."
    )


def _verdict(runs: "Sequence[FinishedRun]") -> str:
    """Describe the second run's difference to the first, and whether it is beyond noise."""
    from pgra.report.metrics import compare_methods

    gap = compare_methods([runs[1].outcomes], [runs[0].outcomes], seed=0)
    low, high = (100 * bound for bound in gap.interval)
    noise = "beyond noise" if gap.p < 0.01 else "which may be noise"
    return (
        f"{100 * gap.difference:+.1f} points (95 % interval {low:+.1f} to {high:+.1f}, p "
        f"{gap.p:.3f}), {noise}"
    )
