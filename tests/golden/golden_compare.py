"""Tells where two records differ."""

import json
import math
from collections.abc import Iterator

TOLERANCE = 1e-4
"""Relative or absolute: the last digits of another processor differ."""


def differences(expected: object, actual: object, path: str = "") -> Iterator[str]:
    """Say where two records differ, each place with both values, the first one first."""
    if isinstance(expected, list) and isinstance(actual, list) and len(expected) == len(actual):
        expected = dict(enumerate(expected))
        actual = dict(enumerate(actual))
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in {**expected, **actual}:
            yield from differences(expected.get(key), actual.get(key), f"{path} / {key}")
    elif not _is_same(expected, actual):
        shown = [json.dumps(value, ensure_ascii=False)[:300] for value in (expected, actual)]
        yield f"{path}: expected {shown[0]}, it is {shown[1]}"


def _is_same(expected: object, actual: object) -> bool:
    if isinstance(expected, float) and isinstance(actual, float):
        return math.isclose(expected, actual, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(expected) is type(actual) and expected == actual
