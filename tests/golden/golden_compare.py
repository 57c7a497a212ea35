"""Tells where two records differ."""

import json
import math
import re
from collections.abc import Iterator, Mapping

TOLERANCE = 1e-4
"""Relative or absolute: the last digits of another processor differ."""
_NUMBER = re.compile(r"-?\d+\.\d+(?:e[-+]\d+)?")


def differences(expected: object, actual: object, path: str = "") -> Iterator[str]:
    """Say where two records differ, each place with both values, the first one first."""
    if isinstance(expected, list) and isinstance(actual, list):
        if len(expected) != len(actual):
            yield f"{path}: expected {len(expected)} items, there are {len(actual)}"
        pairs = list(zip(expected, actual, strict=False))
        expected = {number: one for number, (one, _) in enumerate(pairs)}
        actual = {number: other for number, (_, other) in enumerate(pairs)}
    if isinstance(expected, dict) and isinstance(actual, dict):
        for key in [*expected, *(key for key in actual if key not in expected)]:
            here = f"{path} / {key}" if path else str(key)
            if key in expected and key in actual:
                yield from differences(expected[key], actual[key], here)
            elif key in expected:
                yield f"{here}: expected {_short(expected[key])}, it is not there"
            else:
                yield f"{here}: not expected, it is {_short(actual[key])}"
    elif not _is_same(expected, actual):
        yield f"{path}: expected {_short(expected)}, it is {_short(actual)}"


def _is_same(expected: object, actual: object) -> bool:
    if isinstance(expected, bool) or isinstance(actual, bool):
        return expected is actual
    if isinstance(expected, float) and isinstance(actual, float | int):
        return math.isclose(expected, actual, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    if isinstance(expected, str) and isinstance(actual, str):
        return _is_same_text(expected, actual)
    return type(expected) is type(actual) and expected == actual


def _is_same_text(expected: str, actual: str) -> bool:
    """Compare words exactly, and numbers to the last digit that is written of them."""
    if expected == actual:
        return True
    if _NUMBER.sub("<>", expected) != _NUMBER.sub("<>", actual):
        return False
    pairs = zip(_NUMBER.findall(expected), _NUMBER.findall(actual), strict=True)
    return all(
        math.isclose(float(a), float(b), rel_tol=TOLERANCE, abs_tol=_last_digit(a, b))
        for a, b in pairs
    )


def _last_digit(*written: str) -> float:
    decimals = max(len(number.split("e")[0].partition(".")[2]) for number in written)
    return max(1.01 * 10.0**-decimals, TOLERANCE)


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 300 else f"{text[:300]}..."


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Give what is not a mapping, or an empty one, with its path."""
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from leaves(item, f"{path}.{key}" if path else str(key))
    else:
        yield path, value
