"""Is one system of a memory better than another? The same steps, by seed, with McNemar's test."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pgra.evaluation.statistics import Spread, combine_p, mcnemar, mean_sd_interval
from pgra.memory.measures import running_accuracy
from pgra.pipelines.memory_stream import StreamResult, Variant

Key = tuple[str, float]
"""System and clarification probability."""


@dataclass(frozen=True)
class Claim:
    """What one system has over another, in accuracy of the understanding.

    Attributes:
        better: The one that is claimed to be better.
        worse: The other.
        final: Gap over all steps, by seed.
        area: Gap of the areas under the running curves, by seed.
        p_value: Of McNemar's tests of all seeds together (`combine_p`).
        cost: Prompt tokens of the first for one of the second, all seeds together.
    """

    better: Variant
    worse: Variant
    final: Spread
    area: Spread
    p_value: float
    cost: float


def compare_systems(results: Sequence[StreamResult]) -> list[Claim]:
    """Compare what the paper does: GROW with NO-MEM, MEM with GROW and NO-MEM, p with a lower p.

    Args:
        results: Of `run_streams`; only seeds that both have are compared.
    """
    by_key: dict[Key, dict[int, StreamResult]] = {}
    for one in results:
        key = (one.variant.system, one.variant.probability)
        by_key.setdefault(key, {})[one.variant.seed] = one
    return [_compare(by_key[better], by_key[worse]) for better, worse in _pairs(list(by_key))]


def _pairs(keys: Sequence[Key]) -> list[tuple[Key, Key]]:
    """Pair what is compared: with no memory, with GROW at the same p, with the next lower p."""
    found = []
    for system, p in keys:
        if system == "no-mem":
            continue
        below = [key for key in keys if key[0] == "no-mem"]
        if system == "mem" and ("grow", p) in keys:
            below.append(("grow", p))
        lower = [q for other, q in keys if other == system and q < p]
        if lower:
            below.append((system, max(lower)))
        found += [((system, p), worse) for worse in below]
    return found


def _compare(better: Mapping[int, StreamResult], worse: Mapping[int, StreamResult]) -> Claim:
    seeds = sorted(set(better) & set(worse))
    ours = [[t.understood for t in better[seed].taken] for seed in seeds]
    others = [[t.understood for t in worse[seed].taken] for seed in seeds]
    final = [_mean(a) - _mean(b) for a, b in zip(ours, others, strict=True)]
    area = [
        _mean(running_accuracy(a)) - _mean(running_accuracy(b))
        for a, b in zip(ours, others, strict=True)
    ]
    tokens = [
        sum(t.num_prompt_tokens for seed in seeds for t in side[seed].taken)
        for side in (better, worse)
    ]
    return Claim(
        better=better[seeds[0]].variant,
        worse=worse[seeds[0]].variant,
        final=mean_sd_interval(final),
        area=mean_sd_interval(area),
        p_value=combine_p([mcnemar(a, b) for a, b in zip(ours, others, strict=True)]),
        cost=tokens[0] / max(1, tokens[1]),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
