"""What benchmarks share: flags, figures; seconds, peak memory, the machine's own matrix rate."""

import argparse
import logging
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn

import psutil
import torch

from pgra.artifacts import package_versions, write_json
from pgra.commands.common import quiet_libraries, say
from pgra.errors import ConfigError
from pgra.lm.kernels import packed_for
from pgra.types import Json

MIB = 1 << 20


class FlagParser(argparse.ArgumentParser):
    """Reports a mistake as any user's error is reported."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}. See --help.")


def shared_parser(about: str, *, quick: str, lm: str | None = None) -> argparse.ArgumentParser:
    """Give a parser with the flags that benchmarks have in common.

    Args:
        about: Shown above the flags, as it is.
        quick: What `--quick` does.
        lm: The default of `--lm`; None leaves that flag to the caller.
    """
    parser = FlagParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    if lm is not None:
        parser.add_argument("--lm", default=lm, help="hub id, folder or bundled:NAME")
    parser.add_argument("--corpus", default="bundled:wikipedia-19k")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    return parser


def parse_flags(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> argparse.Namespace:
    """Read the flags, refuse a `--json` that cannot be written, and quiet everybody else.

    Raises:
        ConfigError: If a flag is wrong, or the figures would have no place once they are there.
    """
    args = parser.parse_args(argv)
    if args.json is not None:
        _check_target(args.json)
    logging.getLogger("pgra").setLevel(logging.WARNING)  # tables are all that is wanted
    quiet_libraries()
    return args


def _check_target(path: Path) -> None:
    if path.is_dir():
        raise ConfigError(f"--json {path} is a folder: name a file in it")
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(
            f"--json {path} cannot be written ({error.strerror}): name a file in a folder that is "
            "there and that you may write to"
        ) from None


def positive(text: str) -> int:
    """Read a flag's whole number of 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"it is {value}, and must be at least 1")
    return value


def show_figures(title: str, figures: Mapping[str, float]) -> None:
    """Print figures, one a line."""
    say("\n".join([title, *(f"  {name:<48}{value:>14.6g}" for name, value in figures.items())]))


def write_figures(path: Path | None, figures: Mapping[str, float], **more: Json) -> None:
    """Write what `--json` asks for, if it asks; the file is whole at any time."""
    if path is not None:
        write_json(path, {"figures": dict(figures), "versions": dict(package_versions()), **more})


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
    process = psutil.Process()
    stop = threading.Event()
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
def matrix_rate(
    device: torch.device,
    dtype: torch.dtype,
    *,
    seconds: float = 1.0,
    sizes: Sequence[int] | None = None,
) -> float:
    """Give the operations a second of the best of a few large matrix products.

    On a CPU in float32 also by a layer whose weight is laid out for oneDNN, which may be faster.

    Args:
        device: Where.
        dtype: Of both matrices.
        seconds: Time for each size.
        sizes: Rows and columns of both; None: two that are large there.
    """
    sizes = sizes or ((4096, 8192) if device.type == "cuda" else (1024, 2048))
    best = 0.0
    for size in sizes:
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        layer = torch.nn.Linear(size, size, bias=False, device=device, dtype=dtype)
        with packed_for(layer):
            for product in (partial(torch.matmul, left, right), partial(layer, left)):
                once = _seconds(product, device, 1)
                repeats = max(2, int(seconds / max(once, 1e-5)))
                best = max(best, 2.0 * size**3 * repeats / _seconds(product, device, repeats))
    return best


@torch.inference_mode()
def copy_rate(device: torch.device, *, num_bytes: int, repeats: int = 5) -> float:
    """Give the bytes a second that a copy within the device reads and writes, the best of a few."""
    source = torch.ones(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = partial(target.copy_, source)
    return 2.0 * num_bytes / min(_seconds(copy, device, 1) for _ in range(repeats))


def _seconds(work: Callable[[], object], device: torch.device, repeats: int) -> float:
    work()
    wait_for(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait_for(device)
    return time.perf_counter() - start
