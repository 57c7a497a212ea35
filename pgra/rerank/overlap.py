"""Three steps of one job at once: the next unit is read while this one runs and the last is kept.

Reading and keeping wait for tokeniser and disk, and let go of Python's lock while they do; so two
threads beside the caller's are enough to hide them behind an LM.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

U = TypeVar("U")
T = TypeVar("T")
V = TypeVar("V")
R = TypeVar("R")


def run_overlapped(
    units: Sequence[U],
    prepare: Callable[[U], T],
    compute: Callable[[T], V],
    *,
    keep: Callable[[U, V], R],
) -> list[R]:
    """Take units in order through three steps that run side by side.

    At most one unit is prepared ahead and one waits to be kept. An error in any step, or Ctrl-C,
    ends all three: what is being kept then is kept whole, later units are not begun.

    Args:
        units: What to do, in this order.
        prepare: Reads a unit, in a thread of its own; never two at once.
        compute: Runs in the caller's thread.
        keep: Writes a unit's result, in a thread of its own; in order, never two at once.

    Returns:
        What `keep` gave, in order.
    """
    kept: list[R] = []
    behind: Future[R] | None = None
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        for unit, ready in zip(units, _prepared(units, prepare, reader), strict=True):
            value = compute(ready)
            if behind is not None:
                kept.append(behind.result())
            behind = writer.submit(keep, unit, value)
        if behind is not None:
            kept.append(behind.result())
    return kept


def _prepared(
    units: Sequence[U], prepare: Callable[[U], T], reader: ThreadPoolExecutor
) -> Iterator[T]:
    """Give prepared units, one ahead of what is asked for; the first runs through all alone.

    A model sets itself up with its first batch, and may need the tokeniser for that, which must
    not serve two threads at once.
    """
    ahead: Future[T] | None = None
    for number, unit in enumerate(units):
        ready = prepare(unit) if ahead is None else ahead.result()
        if 0 < number < len(units) - 1:
            ahead = reader.submit(prepare, units[number + 1])
        yield ready
