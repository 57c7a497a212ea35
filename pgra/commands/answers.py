"""How `pgra predict` shows an answer: as JSON, or laid out for a person."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Union

if TYPE_CHECKING:
    from pgra.evaluation.results import EvidenceLine
    from pgra.pipelines.icl_predict import PromptedAnswer
    from pgra.pipelines.predict import Answer

Shown = Union["Answer", "PromptedAnswer"]


def as_json(answer: Shown) -> dict[str, Any]:
    """Give an answer as `predictions.jsonl` has it."""
    from pgra.pipelines.icl_predict import PromptedAnswer

    fields = dict(answer.query.fields)
    told: dict[str, Any] = {
        "text": answer.query.text,
        **({"fields": fields} if len(fields) > 1 else {}),
        "prediction": answer.prediction.label,
        "scores": dict(answer.prediction.scores),
    }
    if isinstance(answer, PromptedAnswer):
        return {**told, **answer.more}
    told["evidence"] = [line.as_json() for line in answer.evidence]
    if answer.unaided is not None:
        told["memory"] = [one.as_json() for one in answer.corrections]
        told["without_memory"] = dict(answer.unaided.scores)
    return told


def show(answer: Shown, num_shown: int) -> str:
    """Lay out an answer for a person."""
    from pgra.pipelines.icl_predict import PromptedAnswer

    lines = [
        f"query: {answer.query.text}",
        f"label: {_decided(answer.prediction.label, answer.prediction.scores)}",
    ]
    if isinstance(answer, PromptedAnswer):
        return "\n".join([*lines, *_show_prompt(answer, num_shown)])
    if answer.unaided is not None:
        lines += [_show_correction(one.as_json()) for one in answer.corrections]
        lines.append(f"without: {_decided(answer.unaided.label, answer.unaided.scores)}")
    shown = answer.evidence[:num_shown]
    if shown:
        with_share = shown[0].attention is not None
        lines.append(f"evidence, {len(shown)} of {len(answer.evidence)}, best first:")
        share = "attention  " if with_share else ""
        lines.append(f"  stage-1 rank    score  stage-2 score  {share}passage")
        lines += [_show_line(line) for line in shown]
    return "\n".join(lines)


def _decided(label: str, scores: Mapping[str, float]) -> str:
    chances = sorted(scores.items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {chance:.3f}" for name, chance in chances)
    return f"{label}  (probabilities: {told})" if told else label


def _show_correction(told: Mapping[str, Any]) -> str:
    key, feedback = (json.dumps(told[name], ensure_ascii=False) for name in ("key", "feedback"))
    unused = "" if told.get("is_shown", True) else " (no room in the prompt)"
    return f"memory: entry {told['entry']} at {told['score']:.3f}{unused}: {key} -> {feedback}"


def _show_prompt(answer: "PromptedAnswer", num_shown: int) -> list[str]:
    corrections: Any = answer.more.get("memory", [])
    lines = [_show_correction(told) for told in corrections]
    shown = answer.examples[:num_shown]
    if shown:
        number = len(answer.examples)
        lines.append(f"exemplars, {len(shown)} of {number}, in the prompt's order:")
        lines += [f"  {example.label}: {example.text}" for example in shown]
    return lines


def _show_line(line: "EvidenceLine") -> str:
    share = "" if line.attention is None else f"{line.attention:>9.3f}  "
    head = f"  {line.stage1_rank:>12}{line.stage1_score:>9.3f}{line.score:>15.3f}  {share}"
    return f"{head}{line.text}"
