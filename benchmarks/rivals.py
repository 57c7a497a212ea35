"""README's figures beside the simplest rival, in one run: what five lines of other code would do.

    python benchmarks/rivals.py --json figures.json
    python benchmarks/rivals.py --parts decide --quick

    decide  labels of support tickets (examples/tickets.csv, five folds, ten times) and of reviews
            (bundled:rotten-tomatoes, 16 labelled texts a class, five draws, 300 test texts):
            `Classifier` beside logistic regression and the nearest neighbour on MiniLM's vectors
    find    the demo's 255 questions on bundled:wikipedia-19k: does the first passage hold an
            answer? Likelihood of the first ten, beside BM25 and MiniLM alone

Each value is a mean over texts, with its 95 % interval (bootstrap over texts), and the difference
to the first row's, paired by text.
"""

import csv
import json
import tempfile
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
from pgra.report.metrics import bootstrap_mean, compare_means, has_answer, interval_95
from pgra.retrieval import open_retriever
from pgra.retrieval.base import RetrieverArguments

ROOT = Path(__file__).parents[1]
QUESTIONS = ("configs/demo-questions.jsonl", "notes/demo-questions-again.jsonl")
ENCODER = "bundled:minilm-l6"
DEPTH = 10
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


def find_passages(lm: str, name: str, *, count: int | None) -> dict[str, Values]:
    """Order a corpus for each question: whether the first passage holds an answer."""
    lines: list[str] = []
    for file in QUESTIONS:
        lines += (ROOT / file).read_text().splitlines()
    questions = [json.loads(line) for line in lines][:count]
    texts = [question["question"] for question in questions]
    reranker = pgra.Reranker(lm, by="likelihood")
    is_right: dict[str, Values] = {}
    with tempfile.TemporaryDirectory() as folder:
        context = Context(artifacts=Path(folder))
        corpus = open_corpus(CorpusArguments(corpus=name), context.artifacts)
        for title, retriever in (("MiniLM", "dense"), ("BM25", "bm25")):
            args = RetrieverArguments(retriever=retriever, encoder=ENCODER, num_candidates=DEPTH)
            first_stage = open_retriever(args, corpus, context)
            orders: dict[str, list[float]] = {title: [], f"{title}'s {DEPTH}, by likelihood": []}
            candidates = first_stage.retrieve(texts, DEPTH).rows
            for question, rows in zip(questions, candidates, strict=True):
                passages = corpus.texts(rows[rows >= 0])
                read = reranker.rank(question["question"], passages) if passages else []
                for order, first in zip(
                    orders.values(), (passages[:1], [hit.text for hit in read[:1]]), strict=True
                ):
                    order.append(bool(first) and has_answer(first[0], question["answers"]))
            is_right |= {name: np.array(order, np.float64) for name, order in orders.items()}
    return is_right


def main(argv: Sequence[str] | None = None) -> int:
    """Print a table for each part, and write the figures."""
    parser = shared_parser(__doc__ or "", quick="few texts", lm="bundled:smollm2-135m")
    parts = ["decide", "find"]
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts, help="all by default")
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
        tables["questions"] = find_passages(args.lm, args.corpus, count=10 if args.quick else None)
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
