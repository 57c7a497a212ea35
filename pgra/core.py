"""What everything else is made of: examples, candidates, predictions, a job's context.

Axes: B queries, K candidates a query, N evidence read, P corpus passages.
"""

import atexit
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeGuard, TypeVar

import numpy as np
import numpy.typing as npt

from pgra.errors import DataError, ModelError, show

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float32]
Unit = TypeVar("Unit")
T = TypeVar("T")
V = TypeVar("V")
Json = object  # anything that `json.dumps` takes; mypy has no finite JSON type

MISSING_ROW = -1
UNDECIDED = "(no label)"  # an LM that writes freely wrote no label's word: always wrong


@dataclass(frozen=True)
class Example:
    """One query of a task.

    Attributes:
        id: Unique within its split, such as "test-17".
        fields: The task's inputs by name.
        label: Its name; None where it is unknown.
    """

    id: str
    fields: Mapping[str, str]
    label: str | None = None

    @property
    def text(self) -> str:
        """All inputs as one text, in the task's order: what the first stage searches with."""
        return " ".join(self.fields.values())


@dataclass(frozen=True)
class Candidates:
    """What a retriever or reranker returns: corpus rows, best first.

    Attributes:
        rows: (B, K) int64, ties by row, `MISSING_ROW` where there are fewer than K.
        scores: (B, K) float32, higher is better, -inf where a row is missing.
    """

    rows: Rows
    scores: Scores

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape != self.scores.shape:
            raise ValueError(f"rows are {self.rows.shape}, scores are {self.scores.shape}")

    @classmethod
    def best(cls, rows: Rows, scores: Scores, k: int) -> Self:
        """Sort each query's rows best first (ties by row, missing last), and keep the first k.

        `rows` and `scores` are (B, K') in any order; where K' < k, missing rows are added.

        Raises:
            ValueError: If the score of a row is NaN.
        """
        rows = np.asarray(rows, dtype=np.int64)
        scores = np.asarray(scores, dtype=np.float32)
        scores = np.where(rows == MISSING_ROW, np.float32(-np.inf), scores)
        if np.isnan(scores).any():
            raise ValueError("a score is NaN")
        last = np.iinfo(np.int64).max
        order = np.lexsort((np.where(rows == MISSING_ROW, last, rows), -scores), axis=-1)[:, :k]
        rows = np.take_along_axis(rows, order, 1)
        scores = np.take_along_axis(scores, order, 1)
        found = cls.missing(len(rows), k)
        found.rows[:, : rows.shape[1]], found.scores[:, : rows.shape[1]] = rows, scores
        return found

    @classmethod
    def missing(cls, num_queries: int, k: int) -> Self:
        """Return only missing rows, (B, k), to be filled line by line."""
        shape = (num_queries, k)
        return cls(np.full(shape, MISSING_ROW), np.full(shape, -np.inf, dtype=np.float32))

    def top(self, n: int) -> "Candidates":
        """Keep each query's first n."""
        return Candidates(self.rows[:, :n], self.scores[:, :n])

    def __len__(self) -> int:
        return len(self.rows)


def log_softmax(logits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the logarithm of the softmax of each row, (B, C), in the dtype of the logits."""
    logits = logits - logits.max(axis=1, keepdims=True)
    chances: npt.NDArray[Any] = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return chances


@dataclass(frozen=True)
class Hit:
    """A text that was found or ranked.

    Attributes:
        index: Its place among the given texts, from 0.
        score: Higher is better.
    """

    index: int
    score: float
    text: str


@dataclass(frozen=True)
class Prediction:
    """A decision on one example.

    Attributes:
        label: The one with the highest score, ties by the task's order of labels; or `UNDECIDED`.
        scores: Probability by label; they sum to 1, or are all 0 where nothing was decided.
    """

    example_id: str
    label: str
    scores: Mapping[str, float]


@dataclass(frozen=True)
class Worker:
    """This process's share of the work: its `rank`, from 0, of `world` processes."""

    rank: int = 0
    world: int = 1

    @property
    def is_main(self) -> bool:
        """Whether this process writes manifests and reports."""
        return self.rank == 0

    def share(self, units: Sequence[Unit]) -> list[Unit]:
        """Return every `world`-th unit, from `rank`."""
        return list(units[self.rank :: self.world])

    def take(
        self,
        units: Sequence[Unit],
        place: Callable[[Unit], Path],
        is_done: Callable[[Unit], bool],
    ) -> Iterator[Unit]:
        """Yield the units that nobody else has taken: this share, then the others' last ones.

        A unit is taken by making the file `place`, which who finishes it removes. What was left by
        a killed process of the same rank is taken again.
        """
        own = self.share(range(len(units)))
        for i in [*own, *sorted({*range(len(units))} - {*own}, reverse=True)]:
            path = place(units[i])
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                with path.open("x") as file:  # O_EXCL
                    file.write(str(self.rank))
            except FileExistsError:
                if path.read_text() != str(self.rank):
                    continue
            if is_done(units[i]):
                path.unlink()
            else:
                yield units[i]


# How long processes wait for each other: one may read long after the others are done.
LONGEST_WAIT = timedelta(days=7)


def check_device(name: object, *, is_used: bool = True) -> None:
    """Raise a ModelError, which names the GPUs there are, if a device is not there.

    `name` is torch's, or "auto". Unless `is_used`, no memory of a GPU is taken.
    """
    if not isinstance(name, str):
        raise ValueError(f"device is {name!r:.80}: give its name, such as cpu")
    if name in ("auto", "cpu"):  # without torch, which takes seconds to load
        return
    import torch

    count = torch.cuda.device_count() if name.startswith("cuda") else 0
    there = [f"cuda:{number}" for number in range(count)]
    if there and name in ("cuda", *there) and not is_used:
        return
    try:
        torch.empty(0, device=torch.device(name))
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        wanted = ", ".join([*there, "auto or cpu"])
        raise ModelError(f"cannot use device '{name}': {reason}. Use {wanted}.") from None


# What a user gives from Python, checked where it enters.


# A text of a task's first input, or each input by name.
Query = str | Mapping[str, Any] | Example


def is_query(queries: Any) -> TypeGuard[Query]:
    """Whether this is a single query, not several."""
    return isinstance(queries, str | Mapping | Example)


def as_list(name: str, given: Any, wanted: str = "a list") -> list[Any]:
    """Return several things as a list, a pandas table's rows as mappings.

    Raises:
        DataError: If it is one text, a mapping, or nothing that iterates.
    """
    if hasattr(given, "iloc") and hasattr(given, "columns"):  # it would iterate over its names
        given = given.to_dict("records")
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise DataError(f"{name} is {show(given)}: give {wanted}")
    return list(given)


def as_texts(name: str, given: Any) -> list[str]:
    """Return texts as a list; a DataError if it is not a list, or as of `as_text`."""
    texts = as_list(name, given, "a list of texts")
    if texts and isinstance(texts[0], Mapping):
        raise DataError(f"{name} holds rows, {show(texts[0])}: give the texts of one column")
    return [as_text(f"{name}[{number}]", text) for number, text in enumerate(texts)]


def as_text(name: str, text: Any) -> str:
    """Return a text as it is, blank or not; a DataError if it cannot be kept as UTF-8."""
    if not isinstance(text, str):
        raise DataError(f"{name} is {show(text)}, not text")
    if not is_utf8(text):
        raise DataError(f"{name} holds a NUL or half a surrogate pair: {show(text)}")
    return text


def is_utf8(text: str) -> bool:
    """Whether a text can be kept as UTF-8: it holds no NUL and no half surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def as_query(name: str, text: Any) -> str:
    """Return what is searched or decided with, stripped; a DataError if it is blank or no text."""
    stripped = as_text(name, text).strip()
    if not stripped:
        raise DataError(f"{name} is blank: give words to read")
    return stripped


def read_queries(queries: Any, inputs: Sequence[str]) -> list[Example]:
    """Return a query, or each of several, as the inputs of a task, stripped.

    A text is the first input, and others are blank, as of a passage. Other keys of a mapping are
    ignored.

    Raises:
        DataError: If a query lacks an input, is blank, or holds what is no text.
    """
    listed = [queries] if is_query(queries) else as_list("queries", queries, "a text, or a list")
    examples = []
    for number, query in enumerate(listed):
        name = f"query {number}"
        fields = query.fields if isinstance(query, Example) else query
        if isinstance(query, str):
            fields = {**dict.fromkeys(inputs, ""), inputs[0]: query}
        if not isinstance(fields, Mapping) or not {*inputs} <= {*fields}:
            raise DataError(f"{name} is {show(query)}: give a text for each of {', '.join(inputs)}")
        texts = {field: as_text(f"{name}, '{field}',", fields[field]).strip() for field in inputs}
        as_query(name, "".join(texts.values()))
        examples.append(Example(f"query-{number}", texts))
    return examples


def check_count(name: str, value: Any) -> None:
    """Raise a ValueError if a value is no whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is {value!r}: give a whole number from 1 on")


@dataclass(frozen=True)
class Context:
    """Where a job runs, with whom, and how loudly; results do not depend on it.

    Attributes:
        barrier: Waits until all processes are there.
        artifacts: Root of what is computed once and shared by runs.
        device: "auto", "cpu", "cuda:1", ...; a ModelError if it is not there.
        shared: What the runs of one command keep in memory: the LM of the run before.
        part: Its share where several commands do one job, as in a Slurm array; None: the whole.
    """

    worker: Worker = Worker()
    barrier: Callable[[], None] = lambda: None
    artifacts: Path = Path("artifacts")
    device: str = "auto"
    progress: bool = True
    shared: dict[str, Any] = field(default_factory=dict, compare=False)
    part: Worker | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "artifacts", Path(self.artifacts))  # callers give texts too
        check_device(self.device, is_used=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes manifests and reports."""
        return self.worker.is_main

    @property
    def shows_progress(self) -> bool:
        return self.progress and self.worker.is_main


ALONE = Context()  # one process, the default folder and device


def join_context(device: str, artifacts: Path = ALONE.artifacts) -> Context:
    """Join the other processes of `accelerate launch`; alone, wait for nobody."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Context(artifacts=artifacts, device=device)
    import torch
    from accelerate import PartialState

    # Without `cpu`, accelerate takes each process for the only one where there is no GPU.
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)
    cpu_group()  # which all must make, so here
    worker = Worker(state.process_index, state.num_processes)
    return Context(worker, wait_for_all, artifacts, device)


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

    parts: list[list[Unit]] = [[] for _ in range(worker.world)]
    dist.all_gather_object(parts, items, group=cpu_group())
    return [item for part in parts for item in part]


# Three steps of one job at once: the next unit is read while this one runs and the last is kept.
#
# Reading and keeping wait for tokenizer and disk, and release Python's lock while they do; so two
# threads beside the caller's are enough to hide their time.


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
    kept: Future[object] | None = None
    with ThreadPoolExecutor(1) as reader, ThreadPoolExecutor(1) as writer:
        for number, (unit, after) in enumerate(pairwise(chain(units, [None]))):
            assert unit is not None
            ready = prepare(unit) if ahead is None else ahead.result()
            ahead = reader.submit(prepare, after) if number and after is not None else None
            value = compute(ready)
            if kept is not None:
                kept.result()
            kept = writer.submit(keep, unit, value)
        if kept is not None:
            kept.result()


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


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container this runs in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such container; "max" where it has no limit
        return whole
