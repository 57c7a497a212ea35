"""What a stream measured: accuracy over time, by type, and what the look-ups did."""

from collections.abc import Mapping, Sequence
from statistics import correlation, fmean

from pgra.memory.simulator import Taken
from pgra.types import Json

LAST = 100
"""Steps at the end whose accuracy is told apart: what the system can do once it has learned."""


def running_accuracy(outcomes: Sequence[bool]) -> list[float]:
    """Give the share of the steps up to each that went well, (n,), as the paper plots it."""
    running, right = [], 0
    for number, outcome in enumerate(outcomes, 1):
        right += outcome
        running.append(right / number)
    return running


def correlate(first: Sequence[bool], second: Sequence[bool]) -> float | None:
    """Give the correlation of two outcomes (phi); None where one of them is always the same."""
    if len(set(first)) < 2 or len(set(second)) < 2:
        return None
    return correlation(list(map(float, first)), list(map(float, second)))


def measure(taken: Sequence[Taken]) -> dict[str, Json]:
    """Measure a whole stream.

    Args:
        taken: Its steps, in order.

    Returns:
        Accuracy of the understanding and of the answer (of all steps, of the last 100, and the mean
        of the running accuracy, which is the area under its curve); by type; what look-ups did;
        tokens of prompts and of outputs.
    """
    understood = [one.understood for one in taken]
    kinds = sorted({one.kind for one in taken})
    return {
        "n": len(taken),
        "understood": fmean(understood),
        "understood_area": fmean(running_accuracy(understood)),
        f"understood_last_{LAST}": fmean(understood[-LAST:]),
        "understood_by_type": {
            kind: fmean(one.understood for one in taken if one.kind == kind) for kind in kinds
        },
        "answered": fmean(one.answered for one in taken),
        "answered_area": fmean(running_accuracy([one.answered for one in taken])),
        "clarifications": sum(one.clarified for one in taken),
        "prompt_tokens": sum(one.num_prompt_tokens for one in taken),
        "new_tokens": sum(one.num_new_tokens for one in taken),
        "lookups": measure_lookups(taken),
    }


def measure_lookups(taken: Sequence[Taken]) -> dict[str, Json]:
    """Say what the clarifications did that were found in the memory.

    Args:
        taken: A stream's steps.

    Returns:
        How many were used; the share of those after which the question was understood (the paper's
        "effective", 97 %) and of those given for a question of another type.
    """
    used = [one for one in taken if one.used_memory]
    return {
        "used": len(used),
        "effective": fmean(one.understood for one in used) if used else None,
        "wrong_type": fmean(one.is_wrong_kind for one in used) if used else None,
    }


def compare_with(taken: Sequence[Taken], without: Sequence[Taken]) -> dict[str, Json]:
    """Say which look-ups helped and which hurt, beside the same stream without a memory.

    Args:
        taken: The stream's steps.
        without: The same questions, with NO-MEM.

    Returns:
        Shares of the steps with a clarification from the memory that are understood with it and not
        without (helped), the other way round (hurt), and either way or neither (no change).

    Raises:
        ValueError: If the questions are not the same.
    """
    if [one.question for one in taken] != [one.question for one in without]:
        raise ValueError("the two streams ask different questions")
    pairs = [
        (one.understood, bare.understood)
        for one, bare in zip(taken, without, strict=True)
        if one.used_memory
    ]
    if not pairs:
        return {"helped": None, "hurt": None, "no_change": None}
    helped = fmean(now and not before for now, before in pairs)
    hurt = fmean(before and not now for now, before in pairs)
    return {"helped": helped, "hurt": hurt, "no_change": 1 - helped - hurt}


def wrong_type_pairs(taken: Sequence[Taken]) -> list[Mapping[str, Json]]:
    """List the collisions that a stream ran into, the most frequent first.

    Returns:
        For each pair of types: what was asked, what was found, one example of each, how often, and
        how often the question was understood all the same.
    """
    found: dict[tuple[str, str], list[Taken]] = {}
    for one in taken:
        if one.is_wrong_kind:
            found.setdefault((one.kind, str(one.matched_kind)), []).append(one)
    ordered = sorted(found.items(), key=lambda item: -len(item[1]))
    return [
        {
            "asked": asked,
            "found": other,
            "question": ones[0].question,
            "key": ones[0].matched_key,
            "score": ones[0].score,
            "times": len(ones),
            "understood": sum(one.understood for one in ones),
        }
        for (asked, other), ones in ordered
    ]
