"""What the benchmarks measure with: seconds, peak memory, and the machine's own matrix rate."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

MIB = 1 << 20


@dataclass
class Cost:
    """What a piece of work took.

    Attributes:
        seconds: Wall-clock time.
        peak_mib: Most memory above what was held before: the GPU's, or this process's on a CPU.
    """

    seconds: float = 0.0
    peak_mib: float = 0.0


@contextmanager
def measured(device: torch.device) -> Iterator[Cost]:
    """Measure what is done inside."""
    cost = Cost()
    with _peak(cost, device):
        wait_for(device)
        start = time.perf_counter()
        yield cost
        wait_for(device)
        cost.seconds = time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until a GPU has done all it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _peak(cost: Cost, device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        yield
        cost.peak_mib = (torch.cuda.max_memory_allocated(device) - before) / MIB
        return
    process, stop = psutil.Process(), threading.Event()
    before = highest = process.memory_info().rss

    def watch() -> None:
        nonlocal highest
        while not stop.wait(0.01):
            highest = max(highest, process.memory_info().rss)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()
    cost.peak_mib = (highest - before) / MIB


@torch.inference_mode()
def matrix_rate(device: torch.device, dtype: torch.dtype, *, seconds: float = 1.0) -> float:
    """Give the operations a second of the best of a few large matrix products.

    Args:
        device: Where.
        dtype: Of both matrices.
        seconds: Time for each size.
    """
    sizes = (4096, 8192) if device.type == "cuda" else (1024, 2048)
    best = 0.0
    for size in sizes:
        one, other = torch.randn(2, size, size, device=device).to(dtype)
        once = _seconds(lambda one=one, other=other: one @ other, device, 1)  # type: ignore[misc]
        repeats = max(2, int(seconds / max(once, 1e-5)))
        took = _seconds(lambda one=one, other=other: one @ other, device, repeats)  # type: ignore[misc]
        best = max(best, 2.0 * size**3 * repeats / took)
    return best


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    work()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return time.perf_counter() - start
