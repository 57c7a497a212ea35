"""What a reader could gain from evidence, before one is trained: `pgra worth`.

The evidence of a query is a function of the query, so it tells a reader no more about the label
than the retriever's own models know (docs/worth.md). What that adds to what the reader knows is
counted in bits (`pgra.experiments.added`):

    reader   log-odds of labels by a head on the encoder's vectors of the queries
    vote     mean log-odds of a query's evidence, by a head on the LM's states (the LM's opinion),
             less their mean over drawn passages of the corpus

The control is the LM's opinion of the query itself, without evidence.

This sees which labels evidence speaks for, not the facts that it holds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pgra.config import PgraArguments
from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Json, Rows
from pgra.errors import ConfigError
from pgra.experiments.added import Added, measure_added, num_folds
from pgra.experiments.consistency import (
    RANDOM,
    Consistency,
    find_lines,
    measure_consistency,
    ways_of,
)
from pgra.experiments.curve import Curve, Texts, Way, centred, check_counts, measure_curve
from pgra.methods.stages import Stages, neighbor_model, open_neighbors
from pgra.report.tables import Cell, Table
from pgra.rerank.bank import query_key
from pgra.rerank.head import (
    Doubles,
    Floats,
    Targets,
    affine,
    fit_head,
)
from pgra.rerank.prompted import PromptedReranker
from pgra.rerank.similarity import LabelHead, draw_keys, find_similarity

_BLOCK = 8192  # passages whose states are looked at together
_LEAST = np.finfo(np.float32).tiny  # a chance may be 0 in float32
_MEANING = (
    "accuracy: of the reader, of the opinion, and of the vote: the label that most of a query's "
    "evidence has by the LM's opinion of it, centred at the corpus.",
    "adds: bits that it takes from the reader's log-loss, cross-fitted over the test queries, as "
    "the reader with it is.",
    "It sees the labels that evidence speaks for, not facts that it holds: where the label is a "
    "matter of fact (claims, questions), train with evidence and without.",
)


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
        curve: The same of readers of fewer labels; None where nobody asked.
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
    curve: Curve | None = None

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
            "reader": {
                **_accuracies(self.reader),
                "accuracy_with_weights": self.control.accuracy_alone,
                "log_loss_bits": self.control.alone,
            },
            "opinion": {**_accuracies(self.opinion), **self.control.as_json()},
            "ways": ways,
            "train_with_evidence": self.best.is_sure,
            "conclusion": self.conclude(),
            **({} if self.curve is None else {"curve": self.curve.as_json()}),
        }

    def table(self) -> Table:
        """Return reader, opinion and ways as a table."""
        columns = ["", "accuracy", "consistency", "distinct", "hub", "adds (bits)"]
        columns += ["95 % interval", "reader with it"]
        rows = [_row("reader", self.reader[0]), _row("LM's opinion", self.opinion[0], self.control)]
        rows[0][-1] = _percent(self.control.accuracy_alone)
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
    args: PgraArguments,
    similarities: Sequence[str] = (),
    *,
    num_labels: Sequence[int] = (),
    num_draws: int = 20,
    context: Context = ALONE,
) -> Worth:
    """Measure what each way's evidence would add to a reader; nothing is trained but heads.

    The LM's opinion is what similarity `head` is made of. What the LM reads is kept in the bank,
    for training too.

    Args:
        args: The task, corpus and models; d is how much evidence votes.
        similarities: Ways to order beside the first stage; none: that of `args`, whitened and head.
        num_labels: Measure readers of so many labels too (`pgra.experiments.curve`).
        num_draws: Draws of each of these numbers.
        context: Who shares the LM's work.

    Raises:
        ConfigError: If there is nothing to compare, the second stage keeps no states, a label has
            no training example, so many labels cannot be drawn, or there are too few test queries.
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
    num_folds(len(data.test))
    keys = [
        np.array([query_key(example) for example in examples], np.int64)
        for examples in (data.train, data.test)
    ]
    pool = np.flatnonzero(np.isin(keys[0], draw_keys(np.unique(keys[0]))))
    pool = np.sort(pool[np.unique(keys[0][pool], return_index=True)[1]])  # each text once
    check_counts(num_labels, len(pool), len(labels))
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
    reader = centred(affine((asked - cheap.stats[0]) / cheap.stats[1], cheap.weights))

    stages.find(("test",))
    head, drawn = stages.reranker.fitting.similarity, draw_keys(np.arange(len(stages.corpus)))
    assert isinstance(head, LabelHead)
    learnt = np.isin(keys[0], head.keys)
    seen = [example for example, is_known in zip(data.train, learnt, strict=True) if is_known]
    stages.reranker.prepare(seen, drawn[None])  # they may be gone since the head was fitted
    said = [np.log(np.maximum(stages.reranker.opinions(own), _LEAST)) for own in (data.test, seen)]
    bank, query_bank = stages.reranker.bank, stages.reranker.query_bank
    num_rows = len(stages.corpus)
    del stages  # and with it the LM

    def speaks_for(rows: Rows) -> Doubles:
        """Return the log-odds of different passages, not centred at the corpus, (n, C)."""
        odds, order = np.empty((len(rows), len(labels))), np.argsort(rows)
        for block in bank.blocks(rows, rows=_BLOCK):
            at = order[np.searchsorted(rows, block.keys, sorter=order)]
            odds[at] = centred(head.logits(block.states, head.weights))
        return odds

    prior, ways_found, added = centred(head.prior[None]), [], []
    evidence: dict[str, Way] = {}
    for way, own in ways.items():
        stages = Stages.read(own, context)
        lines = find_lines(stages)
        evidence[way] = stages.evidence["test"].candidates.top(args.rerank.num_evidence).rows
        if own.rerank.reranker != "none" and issubclass(
            find_similarity(own.rerank.similarity), LabelHead
        ):
            evidence[way] = stages.candidates["test"].candidates
            if own.is_exhaustive:
                every = np.arange(num_rows)[None]
                evidence[way] = Candidates(every, np.zeros(every.shape, np.float32))
        del stages
        texts = {line["row"]: line["text"] for query in lines for line in query["evidence"]}
        odds = dict(zip(texts, speaks_for(np.array([*texts], np.int64)) - prior, strict=True))
        pseudo = {text: labels[int(odds[row].argmax())] for row, text in texts.items()}
        ways_found.append(measure_consistency(way, data.task.name, [lines], pseudo, labels=labels))
        votes = [  # of no evidence 0: it says nothing
            np.mean([odds[line["row"]] for line in query["evidence"]] or 0 * prior, axis=0)
            for query in lines
        ]
        added.append(measure_added(reader, np.array(votes), test))
    curve = None
    if num_labels:
        found = [way.rows if isinstance(way, Candidates) else way for way in evidence.values()]
        rows = np.unique(np.concatenate([part.ravel() for part in found]))
        rows = rows[rows != MISSING_ROW]
        known_texts = Texts(
            labels=(train[pool], test),
            keys=(keys[0][pool], keys[1]),
            vectors=(known[pool], asked),
            states=(query_bank.states(keys[0][pool]), query_bank.states(keys[1])),
            drawn=bank.states(drawn),
            rows=rows,
            passages=bank.states(rows),
        )
        curve = measure_curve(
            known_texts,
            evidence,
            num_labels,
            num_draws,
            depth=args.rerank.num_evidence,
            topic_weight=args.rerank.topic_weight,
        )
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
        control=measure_added(reader, centred(said[0]), test),
        curve=curve,
    )


def _accuracy(odds: Floats | Doubles, targets: Targets) -> float:
    return float((odds.argmax(axis=1) == targets).mean())
