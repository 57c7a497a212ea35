"""What a run of in-context learning leaves: predictions with their exemplars, metrics, the vote."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from pgra.artifacts import digest, write_json, write_lines
from pgra.core import UNDECIDED, Json, Prediction
from pgra.data.tasks import Task
from pgra.exemplars.selection import Chosen, majority, vote_shares
from pgra.methods.answers import Answered
from pgra.methods.base import bundled_notes
from pgra.methods.kate_arguments import no_number
from pgra.methods.kate_inputs import IclInputs, IclRun, Recalled
from pgra.prompts.fitting import Fit
from pgra.report.metrics import RIGHT, WRONG, Decisions, compare_systems, mcnemar
from pgra.report.results import (
    METRICS_FILE,
    PREDICTIONS_FILE,
    RunRecord,
    describe_run,
    write_results,
)
from pgra.report.text_metrics import Written, measure_written, normalize_answer

_BOOTSTRAP_SEED = 0
_VOTE_NOTE = "no LM: the majority of the exemplars; of a tie the nearest's"
_FROZEN_NOTE = "the LM is frozen: seeds are of the exemplars"
_EXACT = "exact_match"
_DRAWS = 2000


@dataclass(frozen=True)
class Shown:
    """What stood in each query's prompt.

    Attributes:
        chosen: What was chosen, and what the leak guard left out.
        rows: Of the pool, in the prompt's order.
        fit: What did not fit; None where there was no prompt.
        recalled: What a memory gave; None where there was no prompt.
    """

    chosen: Chosen
    rows: Sequence[Sequence[int]]
    fit: Fit | None = None
    recalled: Recalled | None = None

    @classmethod
    def whole(cls, chosen: Chosen) -> Self:
        """Give all that was chosen, in the order of choice."""
        return cls(chosen, [chosen.of(place) for place in range(len(chosen.rows))])

    def line(self, place: int, inputs: IclInputs) -> dict[str, Json]:
        """Give what `predictions.jsonl` tells of a query's exemplars."""
        near = dict(
            zip(self.chosen.of(place), self.chosen.similarity[place].tolist(), strict=False)
        )
        told: dict[str, Json] = {
            "exemplars": [
                {"id": self._id(row, inputs), "similarity": no_number(near.get(row, math.nan))}
                for row in self.rows[place]
            ],
            "near_duplicates": int(self.chosen.num_dropped[place]),
        }
        if self.fit is not None:
            told["over_budget"] = int(self.fit.num_dropped[place])
            told["prompt_tokens"] = int(self.fit.num_tokens[place])
        if self.recalled is not None:
            told |= self.recalled.line(place, self.rows[place])
        return told

    def _id(self, row: int, inputs: IclInputs) -> str:
        return inputs.pool[row].id if self.recalled is None else self.recalled.example(row).id

    def memory_counts(self, inputs: IclInputs) -> dict[str, Json]:
        """Give what `metrics.json` tells of a memory; nothing where there is none."""
        return {} if self.recalled is None else self.recalled.counts(inputs.queries, self.rows)

    def counts(self) -> dict[str, Json]:
        """Give what `metrics.json` tells of all exemplars."""
        dropped = self.chosen.num_dropped
        told: dict[str, Json] = {
            "exemplars": sum(map(len, self.rows)),
            "near_duplicates": int(dropped.sum()),
            "queries_with_near_duplicates": int((dropped > 0).sum()),
            "copies_in_pool": self.chosen.num_copies,
        }
        if self.fit is not None:
            told |= {
                "over_budget": int(self.fit.num_dropped.sum()),
                "queries_over_budget": int((self.fit.num_dropped > 0).sum()),
                "mean_prompt_tokens": round(float(self.fit.num_tokens.mean()), 1),
            }
        return told


def vote_all(inputs: IclInputs, chosen: Chosen) -> list[Answered]:
    """Let each query's exemplars vote: KATE's kNN baseline.

    Written answers count as equal where exact match takes them so; the nearest's words are given.

    Args:
        inputs: Whose labels they have.
        chosen: Nearest first; a query without any is undecided.
    """
    answered = []
    for place, query in enumerate(inputs.queries):
        targets = [str(inputs.pool[row].label) for row in chosen.of(place)]
        if inputs.references:
            plain = [normalize_answer(target) for target in targets]
            decided = targets[plain.index(majority(plain))] if targets else ""
            answered.append(Answered(Prediction(query.id, decided, {}), {}))
            continue
        shares = vote_shares(targets, inputs.labels) if targets else [0.0] * len(inputs.labels)
        decided = majority(targets) if targets else UNDECIDED
        scores = dict(zip(inputs.labels, shares, strict=True))
        answered.append(Answered(Prediction(query.id, decided, scores), {}))
    return answered


def write_run(
    folder: Path,
    run: IclRun,
    inputs: IclInputs,
    shown: Shown,
    answered: Sequence[Answered],
    *,
    seed: int,
    seconds: Mapping[str, float],
    made: Mapping[str, Json],
) -> dict[str, Any]:
    """Write predictions, then metrics.

    Args:
        folder: The run.
        run: Its arguments.
        inputs: Pool and queries.
        shown: The prompts' exemplars.
        answered: One for each query.
        seed: Of the exemplars.
        seconds: Wall-clock time by stage.
        made: What decides the run.

    Returns:
        The content of `metrics.json`.
    """
    predictions = [answer.prediction for answer in answered]
    undecided = sum(prediction.label == UNDECIDED for prediction in predictions)
    is_vote = run.icl.decide_by == "vote"
    vote: dict[str, Json] = {}
    if run.selection.compares and not is_vote:
        vote = {"knn_vote": compare_vote(inputs, shown.chosen, predictions)}
    memory = shown.memory_counts(inputs)
    remembered: dict[str, Json] = {"memory": memory} if memory else {}
    record = RunRecord(
        task=inputs.task.name,
        split="test",
        metric=inputs.metric,
        labels=[*inputs.labels, *([UNDECIDED] if undecided else [])],
        seed=seed,
        seconds=seconds,
        fingerprints={**inputs.fingerprint, "run": digest(dict(made))},
        notes=[*_notes(run, inputs, shown, undecided), _VOTE_NOTE if is_vote else _FROZEN_NOTE],
        system=run.system,
        more={"exemplars": shown.counts(), **remembered, **vote},
    )
    more = [{**answer.more, **shown.line(i, inputs)} for i, answer in enumerate(answered)]
    if inputs.references:
        return _write_texts(folder, record, inputs, predictions, more)
    nothing: list[list[Any]] = [[] for _ in answered]
    return write_results(folder, record, inputs.queries, predictions, nothing, more=more)


def _write_texts(
    folder: Path,
    record: RunRecord,
    inputs: IclInputs,
    predictions: Sequence[Prediction],
    more: Sequence[Mapping[str, Json]],
) -> dict[str, Any]:
    """Write what is measured on texts: each query's own values, then all metrics."""
    found = _measure_texts(inputs, [prediction.label for prediction in predictions])
    lines: list[Json] = []
    for i, (reference, prediction) in enumerate(zip(inputs.references, predictions, strict=True)):
        values = {name: round(each[i], 6) for name, each in found.each.items()}
        lines.append(
            {
                "id": reference.example.id,
                "text": reference.example.text,
                "label": reference.example.label,
                "answers": list(reference.answers),
                "prediction": prediction.label,
                **({"is_right": values.pop(_EXACT) == 1} if _EXACT in values else {}),
                **values,
                **({"bleu_counts": list(found.counts[i])} if found.counts else {}),
                **({"is_overlap": reference.table.is_overlap} if reference.table else {}),
                "evidence": [],
                **more[i],
            }
        )
    write_lines(folder / PREDICTIONS_FILE, lines)
    told = describe_run(record, found.values, _interval(record.metric, found), n=len(lines))
    write_json(folder / METRICS_FILE, told)
    return told


def _measure_texts(inputs: IclInputs, texts: Sequence[str]) -> Written:
    assert not isinstance(inputs.task, Task)
    return measure_written(inputs.task, texts, inputs.references)


def _interval(metric: str, found: Written) -> list[float] | None:
    """Give a 95 % interval over queries; BLEU is of all texts together and has none."""
    if metric not in found.each:
        return None
    values = np.array(found.each[metric])
    rows = np.random.default_rng(_BOOTSTRAP_SEED).integers(len(values), size=(_DRAWS, len(values)))
    low, high = np.percentile(values[rows].mean(axis=1), [2.5, 97.5])
    return [float(low), float(high)]


def _notes(run: IclRun, inputs: IclInputs, shown: Shown, undecided: int) -> list[str]:
    models = [run.completer.lm] if run.icl.decide_by != "vote" else []
    models += [run.selection.encoder] if run.selection.compares else []
    names = [run.data.dataset_name or "", run.icl.query_dataset_name or ""]
    notes = bundled_notes(models, names)
    counts, number = shown.counts(), len(inputs.queries)
    if inputs.shared:
        notes.append(f"{inputs.shared} test texts also stand in the pool's source")
    if counts["copies_in_pool"]:
        notes.append(
            f"{counts['copies_in_pool']} of {len(inputs.pool)} examples of the pool are copies of "
            "an earlier one, text and label, and were not shown"
        )
    if counts["near_duplicates"]:
        notes.append(
            f"leak guard: {counts['near_duplicates']} examples, nearly the text of "
            f"{counts['queries_with_near_duplicates']} of {number} queries, were not shown to them"
        )
    if counts.get("over_budget"):
        notes.append(
            f"{counts['queries_over_budget']} of {number} prompts hold fewer exemplars than asked "
            f"for, {counts['over_budget']} in all, to fit the LM's window"
        )
    if memory := shown.memory_counts(inputs):
        notes.append(
            f"memory: {memory['queries_with_memory']} of {number} queries were shown a correction; "
            f"{memory['queries_that_were_corrected']} of these are the very text that was "
            "corrected, for which it was meant: no leak"
        )
    if undecided:
        notes.append(f"{undecided} of {number} answers are no label's word, and count as wrong")
    return notes


def compare_vote(
    inputs: IclInputs, chosen: Chosen, predictions: Sequence[Prediction]
) -> dict[str, Json]:
    """Compare with the vote of the same neighbors: does the LM add anything?

    Returns:
        The vote's metric; how much better the LM is, with a 95 % interval of the paired bootstrap
        over queries and McNemar's p, where a query is right or wrong.
    """
    ours = [prediction.label for prediction in predictions]
    votes = [answer.prediction.label for answer in vote_all(inputs, chosen)]
    if not inputs.references:
        truth = [str(query.label) for query in inputs.queries]
        extra = [UNDECIDED] if UNDECIDED in (*ours, *votes) else []
        return _compare(inputs.metric, truth, ours, votes, [*inputs.labels, *extra])
    found, other = _measure_texts(inputs, ours), _measure_texts(inputs, votes)
    if inputs.metric != _EXACT:
        value, own = other.values[inputs.metric], found.values[inputs.metric]
        return {"metric": inputs.metric, "value": value, "difference": own - value}
    sides = [[RIGHT if one == 1 else WRONG for one in side.each[_EXACT]] for side in (found, other)]
    return _compare(_EXACT, [RIGHT] * len(ours), sides[0], sides[1], [RIGHT, WRONG])


def _compare(
    metric: str,
    truth: Sequence[str],
    ours: Sequence[str],
    votes: Sequence[str],
    names: Sequence[str],
) -> dict[str, Json]:
    sides = [Decisions(metric, truth, decided, names) for decided in (ours, votes)]
    gap = compare_systems(sides[:1], sides[1:], seed=_BOOTSTRAP_SEED)
    return {
        "metric": metric,
        "value": sides[1].value,
        "difference": gap.difference,
        "interval_95": [gap.low, gap.high],
        "mcnemar_p": mcnemar(sides[0].correct, sides[1].correct),
    }
