"""Work that several processes or threads share."""

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Unit = TypeVar("Unit")
T = TypeVar("T")
V = TypeVar("V")

# How long processes wait for each other: one may read long after the others are done.
LONGEST_WAIT = timedelta(days=7)


@dataclass(frozen=True)
class Worker:
    """One process of a job: number `rank`, from 0, of `world` that share its work by files.

    Attributes:
        is_part: It waits for no other process, as a job of a Slurm array; a later command finishes.
    """

    rank: int = 0
    world: int = 1
    is_part: bool = False

    @property
    def is_main(self) -> bool:
        """Whether this process writes manifests and reports; each part reports."""
        return self.rank == 0 or self.is_part

    def share(self, units: Sequence[Unit]) -> list[Unit]:
        """Return every `world`-th unit, from `rank`."""
        return list(units[self.rank :: self.world])

    def order(self, units: Sequence[Unit]) -> list[Unit]:
        """Return this worker's units, then from the end those of others."""
        others = [unit for number, unit in enumerate(units) if number % self.world != self.rank]
        return [*self.share(units), *reversed(others)]

    def claim(self, units: Sequence[Unit], record: Callable[[Unit], Path]) -> Iterator[Unit]:
        """Yield this worker's units, then unclaimed ones of other workers, in their `order`.

        A unit is done when the file `record` is there. A worker claims a unit by creating
        `claim_path` of it, and removes that when the unit is done. A claim that was left by a
        killed process of the same rank counts as its own.
        """
        for unit in self.order(units):
            claim = claim_path(record(unit))
            claim.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError), claim.open("x") as file:  # O_EXCL
                file.write(str(self.rank))
            try:
                owner = claim.read_text()
            except FileNotFoundError:  # another worker finished it meanwhile
                continue
            if owner == str(self.rank) and not record(unit).exists():
                yield unit
            elif owner == str(self.rank):
                claim.unlink(missing_ok=True)


def claim_path(record: Path) -> Path:
    """Return the file that a worker creates to claim the unit of a record."""
    return record.with_name(f".{record.stem}.taken.partial")


@cache
def cpu_group() -> "ProcessGroup":
    """Return the group for tensors on the CPU, which NCCL refuses; the first call is collective."""
    import torch.distributed as dist

    atexit.register(_leave_groups)
    group: ProcessGroup = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    return group


def _leave_groups() -> None:
    """End the groups and their threads, which could abort the process at Python's exit."""
    import torch.distributed as dist

    cpu_group.cache_clear()
    if dist.is_initialized():
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Wait until all processes are there; unlike NCCL's barrier it keeps no GPU busy."""
    import torch.distributed as dist

    dist.barrier(group=cpu_group())


def gather(items: list[Unit], worker: Worker) -> list[Unit]:
    """Return the items of all processes, by rank; they are pickled."""
    if worker.world == 1:
        return items
    import torch.distributed as dist

    lists: list[list[Unit]] = [[]] * worker.world
    dist.all_gather_object(lists, items, group=cpu_group())
    return list(chain(*lists))


def run_overlapped(
    units: Iterable[Unit],
    prepare: Callable[[Unit], T],
    compute: Callable[[T], V],
    *,
    keep: Callable[[Unit, V], object],
) -> None:
    """Prepare, compute and keep units in order, the three steps side by side.

    `prepare` and `keep` each have a thread, and never run twice at once; `compute` runs in the
    caller's. At most one unit is prepared ahead. An error, or Ctrl-C, ends all three; what is being
    kept is kept whole. The first unit runs alone, since a model sets itself up with it.
    """
    ahead: Future[T] | None = None
    written: Future[object] | None = None
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        for number, (unit, after) in enumerate(pairwise(chain(units, [None]))):
            assert unit is not None
            ready = prepare(unit) if ahead is None else ahead.result()
            ahead = reader.submit(prepare, after) if number and after is not None else None
            value = compute(ready)
            if written is not None:
                written.result()
            written = writer.submit(keep, unit, value)
        if written is not None:
            written.result()


class Turn:
    """A lock for an object that threads share; a copy of the object has one of its own.

    The thread that holds it may enter again.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def __reduce__(self) -> tuple[type["Turn"], tuple[()]]:
        return Turn, ()
