"""What a run of in-context learning leaves: predictions with their exemplars, metrics, the vote."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from pgra.evaluation.metrics import measure, paired_bootstrap
from pgra.evaluation.results import RunRecord, write_results
from pgra.evaluation.statistics import mcnemar
from pgra.icl.arguments import no_number
from pgra.icl.budget import Fit
from pgra.icl.deciding import Answered
from pgra.icl.selection import Chosen
from pgra.icl.voting import majority, vote_shares
from pgra.io import digest
from pgra.pipelines.icl_inputs import IclInputs, IclRun
from pgra.pipelines.notes import bundled_notes
from pgra.types import UNDECIDED, Json, Prediction

_BOOTSTRAP_SEED = 0
_VOTE_NOTE = "no LM: the majority of the exemplars' labels; of a tie the nearest's"
_FROZEN_NOTE = "the LM is frozen: seeds are of the exemplars"


@dataclass(frozen=True)
class Shown:
    """What stood in each query's prompt.

    Attributes:
        chosen: What was chosen, and what the leak guard left out.
        rows: Of the pool, in the prompt's order.
        fit: What did not fit; None where there was no prompt.
    """

    chosen: Chosen
    rows: Sequence[Sequence[int]]
    fit: Fit | None = None

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
                {"id": inputs.splits.train[row].id, "similarity": no_number(near[row])}
                for row in self.rows[place]
            ],
            "near_duplicates": int(self.chosen.num_dropped[place]),
        }
        if self.fit is not None:
            told["over_budget"] = int(self.fit.num_dropped[place])
            told["prompt_tokens"] = int(self.fit.num_tokens[place])
        return told

    def counts(self) -> dict[str, Json]:
        """Give what `metrics.json` tells of all exemplars."""
        dropped = self.chosen.num_dropped
        told: dict[str, Json] = {
            "exemplars": sum(map(len, self.rows)),
            "near_duplicates": int(dropped.sum()),
            "queries_with_near_duplicates": int((dropped > 0).sum()),
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

    Args:
        inputs: Whose labels they have.
        chosen: Nearest first; a query without any is undecided.
    """
    labels, answered = list(inputs.task.labels), []
    for place, query in enumerate(inputs.splits.test):
        targets = [str(inputs.splits.train[row].label) for row in chosen.of(place)]
        shares = vote_shares(targets, labels) if targets else [0.0] * len(labels)
        decided = majority(targets) if targets else UNDECIDED
        scores = dict(zip(labels, shares, strict=True))
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
    more: dict[str, Json] = {"exemplars": shown.counts()}
    if run.selection.compares and not is_vote:
        more["knn_vote"] = compare_vote(inputs, shown.chosen, predictions)
    record = RunRecord(
        task=inputs.task.name,
        split="test",
        metric=inputs.task.metric,
        labels=[*inputs.task.labels, *([UNDECIDED] if undecided else [])],
        seed=seed,
        seconds=seconds,
        fingerprints={**inputs.fingerprint, "run": digest(dict(made))},
        notes=[*_notes(run, inputs, shown, undecided), _VOTE_NOTE if is_vote else _FROZEN_NOTE],
        system=run.system,
        more=more,
    )
    lines = [{**answer.more, **shown.line(place, inputs)} for place, answer in enumerate(answered)]
    nothing: list[list[Any]] = [[] for _ in answered]
    return write_results(folder, record, inputs.splits.test, predictions, nothing, more=lines)


def _notes(run: IclRun, inputs: IclInputs, shown: Shown, undecided: int) -> list[str]:
    models = [run.completer.lm] if run.icl.decide_by != "vote" else []
    models += [run.selection.encoder] if run.selection.compares else []
    names = [run.data.dataset_name or "", run.icl.query_dataset_name or ""]
    notes = bundled_notes(models, names)
    counts, number = shown.counts(), len(inputs.splits.test)
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
    if undecided:
        notes.append(f"{undecided} of {number} answers are no label's word, and count as wrong")
    return notes


def compare_vote(
    inputs: IclInputs, chosen: Chosen, predictions: Sequence[Prediction]
) -> dict[str, Json]:
    """Compare with the vote of the same neighbors: does the LM add anything?

    Returns:
        The vote's metric; how much better the LM is, with a 95 % interval of the paired bootstrap
        over queries; McNemar's p.
    """
    metric, truth = inputs.task.metric, [str(query.label) for query in inputs.splits.test]
    ours = [prediction.label for prediction in predictions]
    votes = [answer.prediction.label for answer in vote_all(inputs, chosen)]
    extra = [UNDECIDED] if UNDECIDED in (*ours, *votes) else []
    names = [*inputs.task.labels, *extra]
    gap = paired_bootstrap(metric, truth, ours, votes, names, seed=_BOOTSTRAP_SEED)
    right = [np.array([a == b for a, b in zip(truth, side, strict=True)]) for side in (ours, votes)]
    return {
        "metric": metric,
        "value": measure(metric, truth, votes, names)[metric],
        "difference": gap.difference,
        "interval_95": [gap.low, gap.high],
        "mcnemar_p": mcnemar(right[0].tolist(), right[1].tolist()),
    }
