"""README's figures beside the simplest rival, in one run: what five lines of other code would do.

    python benchmarks/rivals.py --json figures.json
    python benchmarks/rivals.py --parts decide --quick

    decide  labels of support tickets (examples/tickets.csv, five folds, ten times) and of reviews
            (bundled:rotten-tomatoes, 16 labelled texts a class, five draws, 300 test texts):
            `Classifier` beside logistic regression and the nearest neighbour on MiniLM's vectors
    find    the demo's 255 questions on bundled:wikipedia-19k, or others (--questions, --corpus):
            does the first passage hold an answer? MiniLM's first 20, BM25's and both, in their own
            order and by the LM's likelihood, with and without the first stage's score

Each value is a mean over texts, with its 95 % interval (bootstrap over texts), and the difference
to the first row's, paired by text.
"""

import csv
import json
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measuring import parse_flags, shared_parser, write_figures
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold

import pgra
from pgra.cli import run
from pgra.commands.common import say
from pgra.context import Context
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.data.examples import DataArguments, load_splits
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
Pairs = Sequence[tuple[str, str]]
Decider = Callable[[Pairs, Sequence[str]], list[str]]  # labelled texts, texts to decide: labels


def deciders(lm: pgra.CausalLM, encoder: pgra.Encoder) -> dict[str, Decider]:
    """Return ways to decide texts from a few labelled ones, by name."""

    def regress(train: Pairs, texts: Sequence[str]) -> list[str]:
        vectors = encoder.encode([text for text, _ in train])
        model = LogisticRegression(max_iter=1000).fit(vectors, [label for _, label in train])
        return list(model.predict(encoder.encode(list(texts))))

    def take_nearest(train: Pairs, texts: Sequence[str]) -> list[str]:
        vectors = encoder.encode([text for text, _ in train])
        products = encoder.encode(list(texts)) @ vectors.T
        return [train[row][1] for row in products.argmax(axis=1)]

    def read(num_exemplars: int) -> Decider:
        def decide(train: Pairs, texts: Sequence[str]) -> list[str]:
            classifier = pgra.Classifier(lm, train, num_exemplars=num_exemplars)
            return [prediction.label for prediction in classifier.predict(list(texts))]

        return decide

    return {
        "MiniLM and logistic regression": regress,
        "MiniLM's nearest neighbour": take_nearest,
        "Classifier": read(0),
        "Classifier, 6 examples in its prompt": read(6),
    }


def decide_tickets(ways: Mapping[str, Decider], *, repeats: int) -> dict[str, Values]:
    """Cross-validate: how often each ticket is decided rightly, by the way's name."""
    with (ROOT / "examples" / "tickets.csv").open() as file:
        tickets = [(row["text"], row["label"]) for row in csv.DictReader(file)]
    texts = [text for text, _ in tickets]
    labels = [label for _, label in tickets]
    is_right = {name: np.zeros((repeats, len(tickets))) for name in ways}
    for repeat in range(repeats):
        folds = StratifiedKFold(5, shuffle=True, random_state=repeat)
        for train, test in folds.split(texts, labels):
            for name, decide in ways.items():
                decided = decide([tickets[i] for i in train], [texts[i] for i in test])
                right = [label == labels[i] for label, i in zip(decided, test, strict=True)]
                is_right[name][repeat, test] = right
    return {name: values.mean(axis=0) for name, values in is_right.items()}


def decide_reviews(ways: Mapping[str, Decider], *, draws: int, count: int) -> dict[str, Values]:
    """Learn from 16 reviews a class: how often each test review is decided rightly."""
    task = pgra.Task.load("rotten-tomatoes")
    splits = load_splits(task, DataArguments(dataset_name="bundled:rotten-tomatoes"))
    train = splits.train
    test = splits.test
    chosen = np.random.default_rng(0).permutation(len(test))[:count]
    texts = [test[i].text for i in chosen]
    labels = [test[i].label for i in chosen]
    is_right = {name: np.zeros((draws, count)) for name in ways}
    for draw in range(draws):
        pairs: list[tuple[str, str]] = []
        order = np.random.default_rng(draw).permutation(len(train))
        for label in task.labels:
            of_label = [i for i in order if train[i].label == label]
            pairs += [(train[i].text, label) for i in of_label[:16]]
        for name, decide in ways.items():
            is_right[name][draw] = [
                a == b for a, b in zip(decide(pairs, texts), labels, strict=True)
            ]
    return {name: values.mean(axis=0) for name, values in is_right.items()}


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
        asked = range(len(questions))
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
    """Print a table for each part, and write the figures."""
    parser = shared_parser(__doc__ or "", quick="few texts", lm="bundled:smollm2-135m")
    parts = ["decide", "find"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="all by default")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, help="of find, as .jsonl")
    parser.add_argument("--count", type=int, help="of questions, drawn; default: all")
    parser.add_argument("--artifacts_dir", type=Path, help="kept; default: a temporary folder")
    args = parse_flags(parser, argv)
    tables: dict[str, dict[str, Values]] = {}
    if "decide" in args.parts:
        lm = pgra.CausalLM(args.lm, device=args.device)
        ways = deciders(lm, pgra.Encoder(ENCODER, device=args.device))
        tables["tickets"] = decide_tickets(ways, repeats=1 if args.quick else 10)
        tables["reviews"] = decide_reviews(
            ways,
            draws=1 if args.quick else 5,
            count=20 if args.quick else 300,
        )
    if "find" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            by_measure = find_passages(
                args.lm,
                args.corpus,
                args.questions,
                args.artifacts_dir or Path(folder),
                count=10 if args.quick else args.count,
            )
        tables |= {f"questions, an answer {name}": rows for name, rows in by_measure.items()}
    figures: dict[str, float] = {}
    for title, rows in tables.items():
        rival = next(iter(rows.values()))
        say(f"\n{title}, n = {len(rival)}: % right (95 % interval), points to the first row")
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
