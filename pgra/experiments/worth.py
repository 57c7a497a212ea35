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

from pgra.arrays import Indices, Scores, Values, log_softmax
from pgra.artifacts import artifact_dir, build_once, digest, write_sealed
from pgra.context import Context
from pgra.data.text import copy_key
from pgra.errors import ConfigError, ModelError
from pgra.methods.arguments import SOURCES, RunArguments, WorthArguments
from pgra.methods.base import find_options, open_method
from pgra.methods.stages import Stages
from pgra.reader.calibration import centred, fit_scale_and_bias
from pgra.report.compare import LEVEL
from pgra.report.metrics import compare_means, holm
from pgra.report.results import EvidenceLine
from pgra.report.tables import Table
from pgra.rerank import FitData, ReadyReranker, find_reranker
from pgra.rerank.head import stratified_folds
from pgra.rerank.similarity import learns_labels
from pgra.rerank.states import BankedReranker
from pgra.run_folder import read_object
from pgra.types import Candidates, Example, Fields

CONTROL = "random"
_FILE = "worth.json"
_LEAST = 64  # queries: with fewer an interval is wider than most gains
_SEED = 0
_FELT = 0.1  # bits from which a query counts as helped or hurt
Lines = Sequence[Sequence[EvidenceLine]]


def measure_worth(args: RunArguments, options: WorthArguments, context: Context) -> dict[str, Any]:
    """Measure what each source of evidence is worth, or return what was measured before.

    Returns:
        "rows", one a source and number of evidence; "best", of those that surely gain the one of
        the highest lower bound, else None; "changes" of the reranker's arguments to train with it,
        or without evidence; "why", a sentence with the flags; "queries", "without" and "notes".

    Raises:
        ConfigError: If the method reads no evidence of several sources, or examples are too few.
        PgraError: If method or first stage cannot be opened.
    """
    method = args.runtime.method
    if method not in ("pgra", "ralm"):
        raise ConfigError(f"worth compares the evidence of --method pgra and ralm, not of {method}")
    study = WorthStudy(args, options, context)

    def build(aside: Path) -> Fields:
        result = study.measure()
        write_sealed(aside / _FILE, result)
        return {"queries": result["queries"], "rows": len(result["rows"])}

    folder = artifact_dir(context.artifacts / "worth", study.data.task.name, study.fingerprint)
    build_once(folder, stage="worth", fingerprint=study.fingerprint, build=build)
    return read_object(folder / _FILE)


def take_evidence(args: RunArguments, changes: Mapping[str, Any]) -> RunArguments:
    """Return a run's arguments with others of the reranker, and its options."""
    rerank = replace(args.rerank, **changes)
    options = args.rerank_options
    if rerank.reranker != args.rerank.reranker:
        cls = find_options({"reranker": rerank.reranker}).get("rerank_options")
        options = None if cls is None else cls()
    return args.having(rerank=rerank, rerank_options=options)


class WorthStudy:
    """Training queries of a run, its reader as it is, and the candidates; no LM has read yet.

    Attributes:
        targets: The number of each query's label, (n,); 0 where answers are written.
        folds: Each query's, (n,).
        sources: By name, the reranker's arguments.
        fingerprint: All that the result depends on.
    """

    def __init__(self, args: RunArguments, options: WorthArguments, context: Context) -> None:
        """Open the method, draw queries, and find the first stage's candidates and the control's.

        Errors are those of `measure_worth`.
        """
        most = args.retriever.num_candidates
        self.depths = sorted({min(depth, most) for depth in options.depths})
        rerank = vars(args.rerank)
        of_run = {name: rerank[name] for name in ("reranker", "similarity", "topic_weight")}
        is_ours = of_run["reranker"] in {source["reranker"] for source in SOURCES.values()}
        every = list(SOURCES) if is_ours else [*SOURCES, "given"]
        self.sources = {
            name: {"topic_weight": 0.0, **SOURCES.get(name, of_run)}
            for name in options.sources or every
        }
        # Opening a method fills in what is not given.
        args = RunArguments(copy.deepcopy(args.sections))
        if hasattr(args.reader, "decode"):  # the other way has no probabilities
            args = args.change("reader", decode="verbalizer")
        self.args = args.change("rerank", num_evidence=self.depths[-1])
        self.context = Context(artifacts=context.artifacts, device=context.device)
        first = {"reranker": "none", "similarity": "dot"}
        if any(find_reranker(source["reranker"]).reads_lm for source in self.sources.values()):
            first["reranker"] = "prompted"
        self.method: Any = open_method(take_evidence(self.args, first), self.context)
        data = self.method.data
        if len(data.train) < _LEAST:
            raise ConfigError(
                f"worth asks {_LEAST} training examples or more, not {len(data.train)}: give more"
            )
        order = np.random.default_rng(_SEED).permutation(len(data.train))
        self.queries = [data.train[i] for i in sorted(order[: options.num_queries].tolist())]
        self.data = replace(data, train=self.queries, dev=(), test=())
        targets = [0] * len(self.queries)
        if data.labels:
            targets = [data.labels.index(str(query.label)) for query in self.queries]
        self.targets = np.array(targets)
        self.folds = stratified_folds(self.targets, [query.text for query in self.queries])
        drawing = replace(args.retriever, retriever="random", index_dir=None)
        control = self.args.having(retriever=drawing, retriever_options=None)
        self.candidates = self._find_candidates(self.args)
        self.drawn = self._find_candidates(control)
        training = self.args.sections.get("training")
        identity = self.method.identity()
        identity |= {n: self.method.fingerprints[n] for n in ("corpus", "reranker", "train")}
        self.fingerprint: dict[str, Any] = {
            name: value for name, value in identity.items() if not hasattr(training, name)
        }
        reranker = None
        if not is_ours or args.rerank_options:
            reranker = dict(self._stages(self.args, data.train).reranker.fingerprint)
        self.fingerprint |= {
            **options.deciding(),
            "sources": self.sources,
            "given": reranker,
            "candidates": [digest(c.rows.tolist()) for c in (self.candidates, self.drawn)],
        }

    def _find_candidates(self, args: RunArguments) -> Candidates:
        stages = self._stages(take_evidence(args, {"reranker": "none"}), ())
        stages.find_candidates(("train",))
        return stages.candidates["train"].candidates

    def _stages(self, args: RunArguments, train: Sequence[Example]) -> Stages:
        """Return the stages of the queries, with a reranker fitted to `train`; one LM for all."""
        opened = self.method.stages
        reference = FitData(train, self.data.task.prompt_words)
        ready = None
        if args.rerank.reranker == "prompted":
            ready = ReadyReranker({}, partial(BankedReranker, encoder=opened.reranker.encoder))
        return Stages(
            args, self.context, opened.prompt, self.data, reference=reference, ready=ready
        )

    def measure(self) -> dict[str, Any]:
        """Measure all sources: what `measure_worth` returns."""
        evidence: dict[str, tuple[Lines, int]] = {}
        notes = []
        for name in self.sources:
            try:
                evidence[name] = self.find_evidence(name)
            except (ConfigError, ModelError) as error:
                notes.append(f"{name} is left out: {error}")
        self.method.stages.release()
        if not evidence:
            raise ConfigError("; ".join(notes))
        if self.args.trains:
            self.method.open_reader()
        bare, without = self._read([[] for _ in self.queries])
        rows: list[dict[str, Any]] = []
        for name, (lines, forwards) in evidence.items():
            for depth in self.depths:
                chances, accuracy = self._read([line[:depth] for line in lines])
                row = {"source": name, "d": depth, **compare(chances, bare), **accuracy}
                rows.append({**row, "forwards": forwards})
        return {
            "rows": rows,
            "queries": len(bare),
            "without": {"bits": float(-bare.mean()), **without},
            "notes": notes,
            **choose(rows, self.sources),
        }

    def find_evidence(self, name: str) -> tuple[Lines, int]:
        """Return each query's evidence, and how many texts or pairs the LM must read for it.

        A similarity that learns labels is fitted, for the queries of a fold, to all examples but
        them.
        """
        args = take_evidence(self.args, self.sources[name])
        first = self.drawn if name == CONTROL else self.candidates
        is_prompted = args.rerank.reranker == "prompted"
        learns = is_prompted and learns_labels(args.rerank.similarity)
        folds = self.folds if learns else np.zeros_like(self.folds)
        lines: list[list[EvidenceLine]] = [[] for _ in self.queries]
        for fold in np.unique(folds):
            members = np.flatnonzero(folds == fold)
            queries = [self.queries[i] for i in members]
            hidden = {copy_key(query.text) for query in queries} if learns else ()
            train = [x for x in self.method.data.train if copy_key(x.text) not in hidden]
            stages = self._stages(args, train)
            candidates = Candidates(first.rows[members], first.scores[members])
            stages.reranker.prepare(queries, candidates.rows)
            best = stages.reranker.rerank(queries, candidates)
            for i, evidence in zip(members, stages.lines(candidates, best), strict=True):
                lines[i] = evidence
            if stages.ready is None:  # its LM serves no other source
                stages.release()
        return lines, stages.reranker.count_texts(self.queries, first.rows)

    def _read(self, lines: Lines) -> tuple[Values, dict[str, float]]:
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
    others = [row for row in rows if row["source"] != CONTROL]
    sure = [row for row in others if row["bits"] > 0 and row["p"] <= LEVEL]
    best = max(sure or others or rows, key=lambda row: row["low"])
    changes = {**sources[best["source"]], "num_evidence": best["d"]}
    flags = " ".join(f"--{name} {value}" for name, value in changes.items() if value != 0.0)
    why = (
        f"best is {best['source']} with d = {best['d']}, {best['bits']:+.3f} bits a query "
        f"({best['low']:+.3f} to {best['high']:+.3f}, p {best['p']:.2g}): train with "
    )
    if sure:
        return {"best": best, "changes": changes, "why": why + flags}
    why = f"no evidence is surely worth anything to this reader: {why}--num_evidence 0"
    return {"best": None, "changes": {"num_evidence": 0}, "why": why}


def compare(chances: Values, bare: Values) -> dict[str, float]:
    """Compare log2 of right answers' probabilities, (n,) each: what evidence adds to `bare`."""
    gap = compare_means(chances, bare, seed=_SEED)
    gains = chances - bare
    return {
        "bits": gap.difference,
        "low": gap.interval[0],
        "high": gap.interval[1],
        # By signs alone: the bootstrap's p is never so small that Holm over 51 rows leaves it sure.
        "p": gap.exact_p,
        "helped": float((gains > _FELT).mean()),
        "hurt": float((gains < -_FELT).mean()),
    }


def calibrate(scores: Scores, targets: Indices, folds: Indices) -> Values:
    """Return labels' log-probabilities, (n, C), calibrated as a run is, on the other folds.

    A ModelError if a score is not a finite number.
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
        "source": "",
        "d": "",
        "bits": "+.3f",
        "low": "+.3f",
        "high": "+.3f",
        "p": ".3f",
        "helped": ".0%",
        "hurt": ".0%",
        "accuracy": ".1%",
        "forwards": "",
    }
    return Table.of(title, rows, forms, [*worth["notes"], _MEANING, worth["why"]])


_MEANING = (
    "low to high: 95 % interval over resamples of queries, of this row alone; p of no gain, by "
    f"signs and Holm over all rows, decides (at most {LEVEL}); helped, hurt: queries that gain or "
    f"lose more than {_FELT} bits; accuracy after calibration; forwards: texts or pairs that the "
    "LM reads for a source, which others may share; random is the control, and never chosen."
)
