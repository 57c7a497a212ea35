"""Find the passage that holds an answer: what likelihood adds to the first stages.

    python benchmarks/find.py --json figures.json
    python benchmarks/find.py --quick

Of the demo's 255 questions on bundled:wikipedia-19k, or others (--questions, --corpus): does the
first passage hold an answer? MiniLM's first 20, BM25's and both, in their own order and by the LM's
likelihood, with and without the first stage's score. Each value is a mean over questions, with its
95 % interval (bootstrap), and the difference to the first row's, paired by question.
"""

import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measuring import parse_flags, shared_parser, write_figures

from pgra.cli import run
from pgra.commands.common import say
from pgra.context import Context
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.data.examples import DataArguments
from pgra.experiments.search_ways import read_way
from pgra.methods.arguments import RunArguments, RuntimeArguments
from pgra.methods.stages import Stages
from pgra.reader.arguments import ReaderArguments
from pgra.report.metrics import bootstrap_mean, compare_means, has_answer, interval_95
from pgra.rerank.arguments import RerankArguments
from pgra.retrieval.arguments import RetrieverArguments

ROOT = Path(__file__).parents[1]
QUESTIONS = ("configs/demo-questions.jsonl", "notes/demo-questions-again.jsonl")
ENCODER = "bundled:minilm-l6"
DEPTH = 20
FIRST_STAGES = ("dense", "bm25", "bm25+dense")
RERANKED = ("likelihood+bm25", "likelihood+bm25+dense")
WAYS = (*FIRST_STAGES, "likelihood", "likelihood+dense", *RERANKED)
Values = npt.NDArray[np.float64]


def find_passages(
    name: str, corpus_name: str, files: Sequence[str], folder: Path, *, count: int | None
) -> dict[str, dict[str, Values]]:
    """Search a corpus for each question in several ways; return hit@1 and MRR by way.

    Where no first stage has an answer among its candidates, the LM does not read them: all ways
    have 0 then.
    """
    lines: list[str] = []
    for file in files:
        lines += (ROOT / file).read_text().splitlines()
    drawn = np.random.default_rng(0).permutation(len(lines))[:count]
    questions = [json.loads(lines[i]) for i in sorted(drawn)]
    context = Context(artifacts=folder)
    sections = {
        "runtime": RuntimeArguments(artifacts_dir=str(folder)),
        "data": DataArguments(),
        "corpus": CorpusArguments(corpus=corpus_name),
        "retriever": RetrieverArguments(encoder=ENCODER, num_candidates=DEPTH),
        "rerank": RerankArguments(lm=name, lm_dtype="bfloat16", num_evidence=DEPTH),
        "reader": ReaderArguments(),
    }
    args = RunArguments(sections)
    corpus = open_corpus(args.corpus, context.artifacts)
    ranks = np.zeros((len(WAYS), len(questions)))  # of the first answer, from 1; 0 for none
    for number, way in enumerate(WAYS):
        asked = [*range(len(questions))]
        if number >= len(FIRST_STAGES):
            asked = np.flatnonzero(ranks[: len(FIRST_STAGES)].any(axis=0)).tolist()
        stages = Stages.without_task(read_way(way, args), context, corpus)
        examples = stages.write_queries([questions[i]["question"] for i in asked])
        start = time.perf_counter()
        _, best = stages.search(examples)
        seconds = time.perf_counter() - start
        say(f"{way}: {seconds:.0f} s, {stages.cost.num_new} of {best.rows.size} pairs read now")
        stages.release()
        for i, rows in zip(asked, best.rows, strict=True):
            texts = corpus.texts(rows[rows >= 0])
            is_right = [has_answer(text, questions[i]["answers"]) for text in texts]
            ranks[number, i] = is_right.index(True) + 1 if any(is_right) else 0
    inverse = np.divide(1, ranks, out=np.zeros_like(ranks), where=ranks > 0)
    return {
        "in the first": dict(zip(WAYS, np.asarray(ranks == 1, np.float64), strict=True)),
        "MRR": dict(zip(WAYS, inverse, strict=True)),
        f"in the {DEPTH}": dict(zip(FIRST_STAGES, np.asarray(ranks > 0, np.float64), strict=False)),
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each measure, and write the figures."""
    parser = shared_parser(__doc__ or "", quick="ten questions", lm="bundled:smollm2-135m")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, help="as .jsonl")
    parser.add_argument("--count", type=int, help="of questions, drawn; default: all")
    parser.add_argument("--artifacts_dir", type=Path, help="kept; default: a temporary folder")
    args = parse_flags(parser, argv)
    with tempfile.TemporaryDirectory() as folder:
        tables = find_passages(
            args.lm,
            args.corpus,
            args.questions,
            args.artifacts_dir or Path(folder),
            count=10 if args.quick else args.count,
        )
    figures: dict[str, float] = {}
    for title, rows in tables.items():
        rival = next(iter(rows.values()))
        say(f"\nan answer {title}, n = {len(rival)}: % (95 % interval), points to the first row")
        for name, values in rows.items():
            low, high = interval_95(bootstrap_mean(values, seed=0))
            gap = compare_means(values, rival, seed=0)
            figures[f"{title}: {name}"] = float(values.mean())
            say(
                f"{name:<38}{100 * values.mean():6.1f} ({100 * low:.1f} to {100 * high:.1f})"
                f"{100 * gap.difference:+7.1f}, p {gap.p:.3f}"
            )
    write_figures(args.json, figures)
    return 0


if __name__ == "__main__":
    raise SystemExit(run(main))
