"""What evidence is worth to the reader as it is, before it is trained: `pgra worth`.

    gain(x) = log2 p(y | x, evidence) - log2 p(y | x)        bits, of a training query x

Its mean estimates the V-information that evidence has for this reader beside the query (Xu et al.
2020, "A Theory of Usable Information under Computational Constraints", arXiv 2002.10689). The
reader is the untrained T5 of `--method pgra`, or the causal LM of `--method ralm`. Its scores s of
C labels become the probabilities softmax(a s + b), with a temperature and a bias a label that are
fitted to the queries of the other folds, with evidence and without alike: what calibration gives is
no gain. A similarity that learns labels is fitted to the other folds too. Where answers are written
p is that of the likeliest right one.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.arrays import Scores, log_softmax
from pgra.artifacts import artifact_dir, build_once, digest, write_sealed
from pgra.context import Context
from pgra.data.text import copy_key
from pgra.errors import ConfigError, ModelError
from pgra.methods.arguments import OPTIONS, SOURCES, RunArguments, WorthArguments
from pgra.methods.base import open_method
from pgra.methods.stages import Stages
from pgra.reader.calibration import centred, fit_scale_and_bias
from pgra.report.compare import LEVEL
from pgra.report.metrics import Values, compare_means, holm
from pgra.report.results import EvidenceLine, read_object
from pgra.report.tables import Table
from pgra.rerank import FitData, ReadyReranker, find_reranker
from pgra.rerank.head import stratified_folds
from pgra.rerank.similarity import learns_labels
from pgra.rerank.states import BankedReranker
from pgra.types import Candidates, Example, Json

CONTROL = "random"
_FILE = "worth.json"
_LEAST = 64  # queries: with fewer an interval is wider than most gains
_SEED = 0
_FELT = 0.1  # bits from which a query counts as helped or hurt
Places = npt.NDArray[np.intp]
Lines = Sequence[Sequence[EvidenceLine]]


def measure_worth(args: RunArguments, how: WorthArguments, context: Context) -> dict[str, Any]:
    """Measure what each source of evidence is worth, or return what was measured before.

    Returns:
        "rows", one a source and number of evidence; "best", of those that surely gain the one of
        the highest lower bound, else None; "changes" of the reranker's arguments to train with it,
        or without evidence; "why", a sentence with the flags; "queries", "without" and "notes".

    Raises:
        ConfigError: If the method reads no evidence of several sources, or examples are too few.
        PgraError: If method or first stage cannot be opened.
    """
    if args.runtime.method not in ("pgra", "ralm") or "reranker" in context.shared:
        given = f"--method {args.runtime.method}, or a reranker from Python"
        raise ConfigError(f"worth compares the evidence of --method pgra and ralm, not of {given}")
    if args.rerank.per_query:
        raise ConfigError("worth compares the evidence of one prompt: use --exemplars balanced")
    asking = Asking(args, how, context)

    def build(aside: Path) -> Mapping[str, Json]:
        write_sealed(aside / _FILE, found := asking.measure())
        return {"queries": found["queries"], "rows": len(found["rows"])}

    made_of = asking.fingerprint
    folder = artifact_dir(context.artifacts / "worth", asking.method.data.task.name, made_of)
    build_once(folder, stage="worth", fingerprint=made_of, build=build)
    return read_object(folder / _FILE)


def take_evidence(args: RunArguments, changes: Mapping[str, Any]) -> RunArguments:
    """Return a run's arguments with others of the reranker, and its options."""
    rerank = replace(args.rerank, **changes)
    options = args.rerank_options
    if rerank.reranker != args.rerank.reranker:
        cls = OPTIONS["reranker"].get(rerank.reranker)
        options = cls() if cls else None
    return args.having(rerank=rerank, rerank_options=options)


class Asking:
    """Training queries of a run, its reader as it is, and the candidates; no LM has read yet.

    Attributes:
        targets: The number of each query's label, (n,); 0 where answers are written.
        folds: Each query's, (n,).
        sources: By name, the reranker's arguments.
    """

    def __init__(self, args: RunArguments, how: WorthArguments, context: Context) -> None:
        """Open the method, draw queries, and find the first stage's candidates and the control's.

        Errors are those of `measure_worth`.
        """
        most = args.retriever.num_candidates
        own = vars(args.rerank)
        self.depths = sorted({min(depth, most) for depth in how.depths})
        given = {name: own[name] for name in ("reranker", "similarity", "topic_weight")}
        is_known = given["reranker"] in ("likelihood", "none", "prompted")
        names = how.sources or [*SOURCES, *(() if is_known else ("given",))]
        self.sources = {name: {"topic_weight": 0.0, **SOURCES.get(name, given)} for name in names}
        # Opening a method fills in what is not given.
        args = RunArguments(copy.deepcopy(args.sections))
        if hasattr(args.reader, "decode"):  # the other way has no probabilities
            args = args.change("reader", decode="verbalizer")
        self.args = args.change("rerank", num_evidence=self.depths[-1])
        self.context = Context(artifacts=context.artifacts, device=context.device)
        reads = any(find_reranker(one["reranker"]).reads_lm for one in self.sources.values())
        first = {"reranker": "prompted" if reads else "none", "similarity": "dot"}
        self.method: Any = open_method(take_evidence(self.args, first), self.context)
        data = self.method.data
        if len(data.train) < _LEAST:
            raise ConfigError(
                f"worth asks {_LEAST} training examples or more, not {len(data.train)}: give more"
            )
        drawn = np.random.default_rng(_SEED).permutation(len(data.train))[: how.num_queries]
        self.queries = [data.train[place] for place in sorted(drawn.tolist())]
        self.data = replace(data, train=self.queries, dev=(), test=())
        truth = [data.labels.index(str(one.label)) if data.labels else 0 for one in self.queries]
        self.targets = np.array(truth)
        self.folds = stratified_folds(self.targets, [query.text for query in self.queries])
        drawing = replace(args.retriever, retriever="random", index_dir=None)
        control = self.args.having(retriever=drawing, retriever_options=None)
        self.candidates = [self._find(self.args), self._find(control)]
        training = self.args.sections.get("training")
        made_of = self.method.identity()
        made_of |= {n: self.method.fingerprints[n] for n in ("corpus", "reranker", "train")}
        is_known = is_known and not args.rerank_options
        opened = None if is_known else self._stages(self.args, data.train).reranker
        self.fingerprint: dict[str, Any] = {
            **{name: value for name, value in made_of.items() if not hasattr(training, name)},
            **{**how.deciding(), "sources": self.sources},
            "given": opened and dict(opened.fingerprint),
            "candidates": [digest(found.rows.tolist()) for found in self.candidates],
        }

    def _find(self, args: RunArguments) -> Candidates:
        stages = self._stages(take_evidence(args, {"reranker": "none"}), ())
        stages.find_candidates(("train",))
        return stages.candidates["train"].candidates

    def _stages(self, args: RunArguments, train: Sequence[Example]) -> Stages:
        """Return the stages of the queries, with a reranker fitted to `train`; one LM for all."""
        opened = self.method.stages
        context = self.context
        reference = FitData(train, self.data.task.prompt_words)
        if args.rerank.reranker == "prompted":
            ready = ReadyReranker({}, partial(BankedReranker, opened.reranker.encoder))
            context = replace(context, shared={"reranker": ready})
        return Stages(args, context, opened.prompt, self.data, reference=reference)

    def measure(self) -> dict[str, Any]:
        """Measure all sources: what `measure_worth` returns."""
        found: dict[str, tuple[Lines, int]] = {}
        notes = []
        for name in self.sources:
            try:
                found[name] = self.find_evidence(name)
            except (ConfigError, ModelError) as error:
                notes.append(f"{name} is left out: {error}")
        self.method.stages.release()
        if not found:
            raise ConfigError("; ".join(notes))
        if self.args.trains:
            self.method.open_reader()
        bare, without = self._ask([[] for _ in self.queries])
        rows: list[dict[str, Any]] = []
        for name, (lines, forwards) in found.items():
            for depth in self.depths:
                chances, right = self._ask([line[:depth] for line in lines])
                row = {"source": name, "d": depth, **compare(chances, bare), **right}
                rows.append({**row, "forwards": forwards})
        known = {"queries": len(bare), "without": {"bits": float(-bare.mean()), **without}}
        return {"rows": rows, **known, "notes": notes, **choose(rows, self.sources)}

    def find_evidence(self, name: str) -> tuple[Lines, int]:
        """Return each query's evidence, and how many texts or pairs the LM must read for it.

        A similarity that learns labels is fitted, for the queries of a fold, to all examples but
        them.
        """
        args = take_evidence(self.args, self.sources[name])
        first = self.candidates[name == CONTROL]
        is_prompted = args.rerank.reranker == "prompted"
        train = self.method.data.train
        learns = is_prompted and learns_labels(args.rerank.similarity)
        folds = self.folds if learns else np.zeros_like(self.folds)
        lines: list[list[EvidenceLine]] = [[] for _ in self.queries]
        for fold in np.unique(folds):
            places = np.flatnonzero(folds == fold)
            some = [self.queries[place] for place in places]
            hidden = {copy_key(query.text) for query in some} if learns else ()
            rest = [example for example in train if copy_key(example.text) not in hidden]
            stages = self._stages(args, rest)
            own = Candidates(first.rows[places], first.scores[places])
            stages.reranker.prepare(some, own.rows)
            best = stages.lines(own, stages.reranker.rerank(some, own))
            for place, evidence in zip(places, best, strict=True):
                lines[place] = evidence
            if not is_prompted:
                stages.release()
        return lines, stages.reranker.count_texts(self.queries, first.rows)

    def _ask(self, lines: Lines) -> tuple[Values, dict[str, float]]:
        """Return log2 of the right answers' probabilities, (n,), and the accuracy of labels."""
        inputs = self.method.new_inputs(self.queries, lines)
        if not self.data.labels:
            return np.asarray(self.method.score_answers(inputs, self.queries)) / np.log(2), {}
        chances = calibrate(self.method.score(inputs), self.targets, self.folds)
        accuracy = float((chances.argmax(axis=1) == self.targets).mean())
        return chances[np.arange(len(chances)), self.targets] / np.log(2), {"accuracy": accuracy}


def choose(rows: Sequence[dict[str, Any]], sources: Mapping[str, Mapping[str, Any]]) -> Any:
    """Adjust each row's p for all of them (Holm); return "best", "changes" and "why".

    The best is among those that gain with p at most `LEVEL`; the control is never it.
    """
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p"] = p

    def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
        is_sure = row["bits"] > 0 and row["p"] <= LEVEL
        return row["source"] != CONTROL, is_sure, row["low"]

    best = max(rows, key=rank)
    is_worth = all(rank(best)[:2])
    changes = {**sources[best["source"]], "num_evidence": best["d"]}
    flags = " ".join(f"--{name} {value}" for name, value in changes.items() if value != 0.0)
    why = (
        f"best is {best['source']} with d = {best['d']}, {best['bits']:+.3f} bits a query "
        f"({best['low']:+.3f} to {best['high']:+.3f}, p {best['p']:.2g}): train with "
    )
    if is_worth:
        return {"best": best, "changes": changes, "why": why + flags}
    why = f"no evidence is surely worth anything to this reader: {why}--num_evidence 0"
    return {"best": None, "changes": {"num_evidence": 0}, "why": why}


def compare(chances: Values, bare: Values) -> dict[str, float]:
    """Compare log2 of right answers' probabilities, (n,) each: what evidence adds to `bare`."""
    gap = compare_means(chances, bare, seed=_SEED)
    gains = chances - bare
    low, high = gap.interval
    shares = {"helped": float((gains > _FELT).mean()), "hurt": float((gains < -_FELT).mean())}
    # By signs alone: the bootstrap's p is never so small that Holm over 51 rows leaves it sure.
    return {"bits": gap.difference, "low": low, "high": high, "p": gap.exact_p, **shares}


def calibrate(scores: Scores, targets: Places, folds: Places) -> Values:
    """Return labels' log-probabilities, (n, C), calibrated as a run is, on the other folds.

    A ModelError if a score is no finite number.
    """
    values = centred(scores)
    chances = np.empty_like(values)
    for fold in np.unique(folds):
        rest = folds != fold
        scale, bias = fit_scale_and_bias(scores[rest], targets[rest])
        chances[~rest] = log_softmax(scale * values[~rest] + bias)
    return chances


def worth_table(worth: Mapping[str, Any]) -> Table:
    """Return the rows as a table; the choice and the flags stand below it."""
    count = worth["queries"]
    bits = worth["without"]["bits"]
    title = f"Evidence for the reader as it is: {count} queries, of {bits:.3f} bits each without"
    rows = [{"source": "without", "accuracy": worth["without"].get("accuracy")}, *worth["rows"]]
    forms = {
        **{"source": "", "d": "", "bits": "+.3f", "low": "+.3f", "high": "+.3f", "p": ".3f"},
        **{"helped": ".0%", "hurt": ".0%", "accuracy": ".1%", "forwards": ""},
    }
    return Table.of(title, rows, forms, [*worth["notes"], _MEANING, worth["why"]])


_MEANING = (
    "low to high: 95 % interval over resamples of queries, of this row alone; p of no gain, by "
    f"signs and Holm over all rows, decides (at most {LEVEL}); helped, hurt: queries that gain or "
    f"lose more than {_FELT} bits; accuracy after calibration; forwards: texts or pairs that the "
    "LM reads for a source, which others may share; random is the control, and never chosen."
)
