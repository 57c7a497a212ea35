"""What a reader could gain from evidence, before one is trained: `pgra worth`.

The evidence of a query is a function of the query, so it tells a reader no more about the label
than the retriever's own models know (docs/worth.md). What that adds to what the reader knows is
counted in bits (V-information, Xu et al. 2020, arXiv 2002.10689):

    adds = H(label given reader) - H(label given reader and vote)

    reader   log-odds of labels by a head on the encoder's vectors of the queries
    vote     mean log-odds of a query's evidence, by a head on the LM's states (the LM's opinion),
             less their mean over drawn passages of the corpus
    H        mean log-loss of the test queries under softmax(a reader + b vote), the two weights
             fitted to the queries of other folds

No weight is negative, and a normal prior draws them to a = 1, b = 0 (of a standardised vote), so
that a vote which says nothing is left out. The reader alone gets its weight too: no gain is mere
calibration. The control is the LM's opinion of the query itself, without evidence.

This sees which labels evidence speaks for, not the facts that it holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgra.config import PgraArguments
from pgra.core import ALONE, Context, Json, Rows
from pgra.errors import ConfigError
from pgra.experiments.consistency import (
    RANDOM,
    Consistency,
    find_lines,
    measure_consistency,
    ways_of,
)
from pgra.methods.stages import Stages, neighbor_model, open_neighbors
from pgra.report.metrics import Difference, compare_means
from pgra.report.tables import Cell, Table
from pgra.rerank.bank import query_key
from pgra.rerank.head import (
    Doubles,
    Floats,
    Targets,
    affine,
    column_stats,
    fit_head,
    log_softmax,
    stratified_folds,
)
from pgra.rerank.prompted import PromptedReranker
from pgra.rerank.similarity import LabelHead, draw_keys, find_similarity

_FOLDS, _FOLD_QUERIES = 10, 5
_SEED = 0
_BLOCK = 8192  # passages whose states are looked at together
_LEAST = np.finfo(np.float32).tiny  # a chance may be 0 in float32
_MEANING = (
    "accuracy: of the reader, of the opinion, and of the vote: the label that most of a query's "
    "evidence has by the LM's opinion of it, centred at the corpus.",
    "adds: bits that it takes from the reader's log-loss, cross-fitted over the test queries.",
    "It sees the labels that evidence speaks for, not facts that it holds: where the label is a "
    "matter of fact (claims, questions), train with evidence and without.",
)


@dataclass(frozen=True, eq=False)
class Added:
    """What log-odds add to a reader's.

    Attributes:
        bits: The mean log-loss that they take away, in bits, with its bootstrap over queries.
        alone: Mean log-loss of the reader alone, in bits.
        accuracy: Share of the queries that reader and they decide rightly together.
    """

    bits: Difference
    alone: float
    accuracy: float

    @property
    def is_sure(self) -> bool:
        """Whether the 95 % interval lies above 0."""
        return self.bits.low > 0

    def as_json(self) -> dict[str, Json]:
        """Return its numbers."""
        gap = self.bits
        return {
            "bits": gap.difference,
            "bits_interval_95": [gap.low, gap.high],
            "bits_p": gap.p,
            "accuracy_with_reader": self.accuracy,
        }


def measure_added(reader: Doubles, vote: Doubles, targets: Targets) -> Added:
    """Measure what a vote adds to a reader (see the module's beginning).

    Args:
        reader: Log-odds of each of C labels, of n queries, (n, C).
        vote: The same of what may be added.
        targets: The number of each query's label, (n,).

    Raises:
        ConfigError: If there are too few queries for two folds.
    """
    folds = stratified_folds(targets, _num_folds(len(targets)))
    alone, both = _cross_fit([reader], targets, folds), _cross_fit([reader, vote], targets, folds)
    at = np.arange(len(targets))
    losses = [-chances[at, targets] / np.log(2) for chances in (alone, both)]
    return Added(
        compare_means(losses[0], losses[1], seed=_SEED),
        float(losses[0].mean()),
        float((both.argmax(axis=1) == targets).mean()),
    )


def _num_folds(count: int) -> int:
    """Return how many folds so many queries make."""
    if count < 2 * _FOLD_QUERIES:
        raise ConfigError(
            f"what evidence adds is measured across at least two folds of {_FOLD_QUERIES} test "
            f"queries, and there are {count} in all: give at least {2 * _FOLD_QUERIES}"
        )
    return min(_FOLDS, count // _FOLD_QUERIES)


def _cross_fit(parts: Sequence[Doubles], targets: Targets, folds: Targets) -> Doubles:
    """Return each query's log-chances by weights fitted to the other folds, (n, C)."""
    chances = np.empty_like(parts[0])
    for fold in range(folds.max() + 1):
        mine, rest = folds == fold, folds != fold
        told = [parts[0]]
        for part in parts[1:]:
            mean, spread = column_stats(part[rest].astype(np.float32))
            told.append((part - mean) / spread)
        values = np.stack(told, axis=-1)  # (n, C, 1 or 2)
        chances[mine] = log_softmax(values[mine] @ _fit(values[rest], targets[rest]))
    return chances


def _fit(values: Doubles, targets: Targets) -> Doubles:
    """Return the weights of log-odds (n, C, K) that make labels most likely, (K,)."""
    from scipy.optimize import minimize  # a third of a second to import

    count, num_labels, size = values.shape
    truth = np.eye(num_labels)[targets]
    start = np.eye(size)[0]  # the reader as it is, and nothing else

    def loss(weights: Doubles) -> tuple[float, Doubles]:
        chances, away = log_softmax(values @ weights), weights - start
        slope = np.einsum("nc,nck->k", np.exp(chances) - truth, values)
        return (away @ away / 2 - (chances * truth).sum()) / count, (slope + away) / count

    bounds = [(0, None)] * size  # a vote for a label is not taken to speak against it
    found: Doubles = minimize(loss, start, jac=True, method="L-BFGS-B", bounds=bounds).x
    return found


@dataclass(frozen=True, eq=False)
class Worth:
    """What evidence is worth to a task's readers.

    Attributes:
        task: Its name.
        queries: How many test queries it was measured on.
        train: Training examples by label; those in the prompt are left out.
        corpus_labels: Shares of the drawn passages by label that the LM's head says of them, not
            centred: the labeler's prior.
        drawn: How many passages these are.
        lm: Which LM has the opinion.
        encoder: What the cheap reader reads by.
        reader: Accuracy of the cheap reader: on test, and on train out of fold.
        opinion: The same of the LM's opinion.
        ways: Label consistency of each way, by the opinion's pseudo-labels.
        added: What each way's evidence adds to the reader, in the same order.
        control: What the opinion of the query itself adds.
    """

    task: str
    queries: int
    train: Mapping[str, int]
    corpus_labels: Mapping[str, float]
    drawn: int
    lm: str
    encoder: str
    reader: tuple[float, float]
    opinion: tuple[float, float]
    ways: Sequence[Consistency]
    added: Sequence[Added]
    control: Added

    @property
    def best(self) -> Added:
        """What the way that adds most adds; of equals the first."""
        return max(self.added, key=lambda one: one.bits.difference)

    def conclude(self) -> str:
        """Say in a sentence whether to train with evidence."""
        gap = self.best.bits
        verdict = "train with it" if self.best.is_sure else "the interval holds 0, train without"
        if gap.high < 0:
            verdict = "the interval lies below 0, train without"
        bits = (gap.difference, gap.low, gap.high, self.control.bits.difference)
        most, low, high, opinion = (f"{value:z.2f}" for value in bits)
        return (
            f"evidence can add at most {most} bits ({low} to {high}) to a reader of "
            f"{sum(self.train.values())} labels, the LM's opinion alone {opinion}: {verdict}"
        )

    def as_json(self) -> dict[str, Json]:
        """Return all figures."""
        both = zip(self.ways, self.added, strict=True)
        ways = [{**way.as_json(), **added.as_json()} for way, added in both]
        for way in ways:
            del way["by_count"], way["seeds"], way["task"]  # no reader decided anything
        kept = ("task", "queries", "lm", "encoder")
        return {
            **{name: getattr(self, name) for name in kept},
            "train_labels": dict(self.train),
            "corpus": {"passages": self.drawn, "labels_uncentred": dict(self.corpus_labels)},
            "reader": {**_accuracies(self.reader), "log_loss_bits": self.control.alone},
            "opinion": {**_accuracies(self.opinion), **self.control.as_json()},
            "ways": ways,
            "train_with_evidence": self.best.is_sure,
            "conclusion": self.conclude(),
        }

    def table(self) -> Table:
        """Return reader, opinion and ways as a table."""
        columns = ["", "accuracy", "consistency", "distinct", "hub", "adds (bits)"]
        columns += ["95 % interval", "reader with it"]
        rows = [_row("reader", self.reader[0]), _row("LM's opinion", self.opinion[0], self.control)]
        for way, added in zip(self.ways, self.added, strict=True):
            own = [_percent(way.score), Cell.of(way.distinct), _percent(way.hub)]
            rows.append(_row(way.name, way.vote, added, own))
        ahead = 100 * (self.opinion[0] - self.reader[0])
        shares = (f"{label} {100 * share:.1f} %" for label, share in self.corpus_labels.items())
        notes = (
            f"Reader: a head on vectors of {self.encoder}, log-loss {self.control.alone:.3f} bits; "
            f"opinion: one on states of {self.lm}. "
            f"Out of fold they decide {100 * self.reader[1]:.1f} and {100 * self.opinion[1]:.1f} % "
            f"of the {sum(self.train.values())} training examples rightly.",
            f"The opinion of {self.drawn} passages of the corpus, not centred: "
            f"{', '.join(shares)}.",
            f"The LM's opinion is {ahead:.1f} points better than the reader: gains go with that."
            if ahead > 0
            else "The reader is as good as the LM's opinion, or better: little is to be gained.",
        )
        title = f"What evidence is worth: {self.task}, {self.queries} test queries, "
        return Table(f"{title}d = {self.ways[0].depth}", columns, rows, [*_MEANING, *notes])


def _accuracies(both: tuple[float, float]) -> dict[str, Json]:
    return {"accuracy": both[0], "accuracy_on_train": both[1]}


def _percent(value: float) -> Cell:
    return Cell.of(100 * value, ".1f")


def _row(
    name: str, accuracy: float, added: Added | None = None, own: Sequence[Cell] = (Cell(""),) * 3
) -> list[Cell]:
    told = [Cell("")] * 3
    if added is not None:
        gap = added.bits
        told = [Cell.of(gap.difference, "z.3f"), Cell.interval([gap.low, gap.high], "z.3f")]
        told.append(_percent(added.accuracy))
    return [Cell(name), _percent(accuracy), *own, *told]


def measure_worth(
    args: PgraArguments, similarities: Sequence[str] = (), *, context: Context = ALONE
) -> Worth:
    """Measure what each way's evidence would add to a reader; nothing is trained but heads.

    The LM's opinion is what similarity `head` is made of. What the LM reads is kept in the bank,
    for training too.

    Args:
        args: The task, corpus and models; d is how much evidence votes.
        similarities: Ways to order beside the first stage; none: that of `args`, whitened and head.
        context: Who shares the LM's work.

    Raises:
        ConfigError: If there is nothing to compare, the second stage keeps no states, a label has
            no training example, or there are too few test queries.
        PgraError: As the stages say.
    """
    names = similarities or [args.rerank.similarity, "whitened", "head"]
    for name in names:
        find_similarity(name)  # before the LM reads anything
    ways = ways_of(args, list(dict.fromkeys(names)))
    del ways[RANDOM]
    if args.rerank.reranker != "prompted" or args.rerank.per_query or args.rerank.num_prefixes > 1:
        raise ConfigError(
            "worth looks at states under one prompt, and this second stage keeps none: use "
            "--reranker prompted, --num_prefixes 1 and --exemplars balanced"
        )
    stages = Stages.read(replace(args, rerank=replace(args.rerank, similarity="head")), context)
    data, labels = stages.data, list(stages.data.labels)
    _num_folds(len(data.test))
    assert isinstance(stages.reranker, PromptedReranker)  # it refuses a label without an example
    train, test = (
        np.array([labels.index(str(example.label)) for example in examples])
        for examples in (data.train, data.test)
    )
    known, asked = (
        open_neighbors(replace(data, train=examples), args, stages.context).vectors(stages.context)
        for examples in (data.train, data.test)
    )
    cheap = fit_head(known, train, len(labels))
    reader = _centred(affine((asked - cheap.stats[0]) / cheap.stats[1], cheap.weights))

    stages.find(("test",))
    head, drawn = stages.reranker.fitting.similarity, draw_keys(np.arange(len(stages.corpus)))
    assert isinstance(head, LabelHead)
    learnt = np.isin([query_key(example) for example in data.train], head.keys)
    seen = [example for example, is_known in zip(data.train, learnt, strict=True) if is_known]
    stages.reranker.prepare(seen, drawn[None])  # they may be gone since the head was fitted
    said = [np.log(np.maximum(stages.reranker.opinions(own), _LEAST)) for own in (data.test, seen)]
    bank = stages.reranker.bank
    del stages  # and with it the LM

    def speaks_for(rows: Rows) -> Doubles:
        """Return the log-odds of different passages, not centred at the corpus, (n, C)."""
        odds, order = np.empty((len(rows), len(labels))), np.argsort(rows)
        for block in bank.blocks(rows, rows=_BLOCK):
            at = order[np.searchsorted(rows, block.keys, sorter=order)]
            odds[at] = _centred(head.logits(block.states, head.weights))
        return odds

    prior, ways_found, added = _centred(head.prior[None]), [], []
    for way, own in ways.items():
        lines = find_lines(Stages.read(own, context))
        texts = {line["row"]: line["text"] for query in lines for line in query["evidence"]}
        odds = dict(zip(texts, speaks_for(np.array([*texts], np.int64)) - prior, strict=True))
        pseudo = {text: labels[int(odds[row].argmax())] for row, text in texts.items()}
        ways_found.append(measure_consistency(way, data.task.name, [lines], pseudo, labels=labels))
        votes = [  # of no evidence 0: it says nothing
            np.mean([odds[line["row"]] for line in query["evidence"]] or 0 * prior, axis=0)
            for query in lines
        ]
        added.append(measure_added(reader, np.array(votes), test))
    shares = np.bincount(speaks_for(drawn).argmax(axis=1), minlength=len(labels)) / len(drawn)
    return Worth(
        task=data.task.name,
        queries=len(test),
        train=dict(zip(labels, np.bincount(train).tolist(), strict=True)),
        corpus_labels=dict(zip(labels, shares.tolist(), strict=True)),
        drawn=len(drawn),
        lm=args.rerank.lm,
        encoder=neighbor_model(args),
        reader=(_accuracy(reader, test), cheap.accuracy),
        opinion=(_accuracy(said[0], test), _accuracy(said[1], train[learnt])),
        ways=ways_found,
        added=added,
        control=measure_added(reader, _centred(said[0]), test),
    )


def _centred(logits: Floats) -> Doubles:
    """Return log-odds: logits (n, C) less their mean over labels."""
    odds: Doubles = logits - logits.mean(axis=1, keepdims=True, dtype=np.float64)
    return odds


def _accuracy(odds: Floats | Doubles, targets: Targets) -> float:
    return float((odds.argmax(axis=1) == targets).mean())
