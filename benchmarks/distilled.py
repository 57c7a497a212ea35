"""What a distilled first stage finds of an exhaustive search, for how many forwards of the LM.

The LM reads the whole corpus once (the slow part, kept under --artifacts for the next call); then
each sample size learns a map, and the candidates by it are compared with the exhaustive search:

    recall    share of each query's best 16 of the whole corpus that is among its candidates
    attained  mean score of the best 16 candidates: 0 that of passages by chance, 1 the exhaustive
    forwards  share of the corpus that the LM would read, at most: the sample and all candidates

python benchmarks/distilled.py --artifacts artifacts --json figures.json
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from measuring import parse_flags, positive, shared_parser, write_figures
from subjects import read_reviews

from pgra.cli import run
from pgra.commands.common import say
from pgra.config import CorpusArguments, RerankArguments, RetrieverArguments
from pgra.core import Context, Example
from pgra.data.corpus import open_corpus
from pgra.data.tasks import Task
from pgra.report.figures import plain_text, save_figure
from pgra.rerank import Reference, RerankRequest
from pgra.rerank.bank import Floats
from pgra.rerank.distilled import DistilledArguments, DistilledRetriever
from pgra.rerank.exhaustive import ExhaustiveSearch
from pgra.rerank.prompted import PromptedReranker
from pgra.retrieval import open_retriever

DEPTH = 16
CANDIDATES = (16, 50, 150, 500)
SHARES = (0.0125, 0.025, 0.05, 0.1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and print the tables."""
    parser = shared_parser(
        __doc__ or "", quick="1,000 passages, 50 queries", lm="bundled:smollm2-135m"
    )
    parser.add_argument("--num_passages", type=positive, default=19_000)
    parser.add_argument("--num_queries", type=positive, default=300)
    parser.add_argument("--similarities", nargs="+", default=["head", "whitened"])
    parser.add_argument("--figure", type=Path, help="SVG or PNG: recall and attained by forwards")
    parser.add_argument("--artifacts", type=Path, help="keep states here; default: nowhere")
    args = parse_flags(parser, argv)
    if args.quick:
        args.num_passages, args.num_queries = 1_000, 50
    splits, prompt = read_reviews(max_train_samples=400)
    kept = tempfile.TemporaryDirectory() if args.artifacts is None else nullcontext(args.artifacts)
    with kept as folder:
        context = Context(artifacts=Path(folder), device=args.device, progress=False)
        given = CorpusArguments(corpus=args.corpus, max_passages=args.num_passages)
        corpus = open_corpus(given, context.artifacts)
        figures: dict[str, float] = {}
        words = Task.load("rotten-tomatoes").prompt_words
        for name in args.similarities:
            request = RerankRequest(
                args=RerankArguments(lm=args.lm, similarity=name, bank="full"),
                prompt=prompt,
                corpus=corpus,
                context=context,
                reference=Reference(splits.train, words),
            )
            reranker = PromptedReranker.open(request)
            assert isinstance(reranker, PromptedReranker)
            figures |= measure(name, reranker, splits.test[: args.num_queries])
    write_figures(args.json, figures)
    if args.figure is not None:
        draw(figures, args.figure)
    return 0


def measure(name: str, reranker: PromptedReranker, queries: list[Example]) -> dict[str, float]:
    """Compare candidates by samples of several sizes with the exhaustive search."""
    count, context = len(reranker.corpus), reranker.context
    figures: dict[str, float] = {}
    reranker.prepare(queries, np.arange(count))
    scores = reranker.score(queries, np.tile(np.arange(count), (len(queries), 1)))
    best = ExhaustiveSearch(reranker).search(queries, DEPTH)
    top, chance = _best(scores), float(scores.mean())
    say(
        f"{name}: {count:,} passages, {len(queries)} queries, "
        f"{len(np.unique(best.rows))} different passages among their best {DEPTH}\n"
        f"{'sample':>8}{'corr.':>8}{'k':>6}{'recall':>9}{'attained':>10}{'forwards':>10}"
    )
    for share in SHARES:
        sample = max(DEPTH, round(share * count))
        retriever = open_retriever(
            RetrieverArguments(encoder="bundled:minilm-l6", retriever="distilled"),
            reranker.corpus,
            context,
            options=DistilledArguments(distill_sample=sample),
            reranker=reranker,
        )
        assert isinstance(retriever, DistilledRetriever)
        for k in CANDIDATES:
            found = retriever.for_examples(queries, min(k, count)).rows
            pairs = zip(found, best.rows, strict=True)
            recall = np.mean([len(np.intersect1d(a, b)) / DEPTH for a, b in pairs])
            attained = (_best(np.take_along_axis(scores, found, 1)) - chance) / (top - chance)
            read = min(1.0, (retriever.num_read + len(np.unique(found))) / count)
            key = f"{name}/sample_{share:g}/k{k}"
            figures |= {f"{key}_recall": float(recall), f"{key}_attained": attained}
            figures[f"{key}_forwards"] = read
            say(
                f"{sample:>8}{retriever.correlation:>8.3f}{k:>6}{recall:>9.3f}{attained:>10.3f}"
                f"{read:>10.1%}"
            )
    return figures


def draw(figures: Mapping[str, float], path: Path) -> None:
    """Draw recall and attained score by the share of forwards, a line a similarity."""
    from matplotlib.figure import Figure

    with plain_text():
        figure = Figure(figsize=(6, 3.8), layout="constrained")
        axes = figure.subplots()
        for name in dict.fromkeys(key.split("/")[0] for key in figures):
            keys = [key.removesuffix("_recall") for key in figures if key.endswith("_recall")]
            keys = sorted(
                (key for key in keys if key.startswith(f"{name}/")),
                key=lambda key: figures[f"{key}_forwards"],
            )
            forwards = [100 * figures[f"{key}_forwards"] for key in keys]
            for measure, style in (("recall", "o-"), ("attained", "s--")):
                values = [figures[f"{key}_{measure}"] for key in keys]
                axes.plot(forwards, values, style, label=f"{name}: {measure}")
        axes.set_xlabel("forwards of the LM, % of the corpus")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _best(scores: Floats) -> float:
    """Return the mean of each query's best scores, over the queries."""
    return float(np.sort(scores, axis=1)[:, -DEPTH:].mean())


if __name__ == "__main__":
    sys.exit(run(main))
