"""Where a job runs: its device, its folder of artifacts, its processes."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from pgra.errors import ModelError
from pgra.parallel import LONGEST_WAIT, Worker, cpu_group, wait_for_all


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
    gpus = [f"cuda:{number}" for number in range(count)]
    if gpus and name in ("cuda", *gpus) and not is_used:
        return
    try:
        torch.empty(0, device=torch.device(name))
    except (RuntimeError, AssertionError, ImportError) as error:
        reason = str(error).strip().splitlines()[0].partition(". ")[0].rstrip(".")
        usable = ", ".join([*gpus, "auto or cpu"])
        raise ModelError(f"cannot use device '{name}': {reason}. Use {usable}.") from None


@dataclass(frozen=True)
class Context:
    """Where a job runs, with whom, and how loudly; results do not depend on it.

    Attributes:
        barrier: Waits until all processes are there.
        artifacts: Root of what is computed once and shared by runs.
        device: "auto", "cpu", "cuda:1", ...; a ModelError if it is not there.
    """

    worker: Worker = field(default_factory=Worker)
    barrier: Callable[[], None] = lambda: None
    artifacts: Path = Path("artifacts")
    device: str = "auto"
    progress: bool = True

    def __post_init__(self) -> None:
        check_device(self.device, is_used=False)

    @property
    def is_main(self) -> bool:
        """Whether this process writes manifests and reports."""
        return self.worker.is_main

    def unshared(self) -> "Context":
        """Return the context of work that each part of a job does by itself."""
        return replace(self, worker=Worker()) if self.worker.is_part else self

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


def machine_memory() -> int:
    """Return the bytes of memory of this machine, or of the container this runs in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such container; "max" where it has no limit
        return whole
