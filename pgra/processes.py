"""The processes of `accelerate launch`, seen from one of them, and the machine they are on."""

import atexit
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.types import Worker

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

LONGEST_WAIT = timedelta(days=7)
"""How long processes wait for each other: one may encode or read long after the others are done."""


def no_wait() -> None:
    """Wait for nobody: the barrier of a single process."""


@dataclass(frozen=True)
class Processes:
    """This process among those of a job.

    Attributes:
        worker: Its share of the units of work.
        barrier: Waits until all processes are there.
    """

    worker: Worker = Worker()  # noqa: RUF009 (frozen)
    barrier: Callable[[], None] = no_wait


def join_processes(device: str) -> Processes:
    """Join the other processes of `accelerate launch`; alone, wait for nobody."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return Processes()
    import torch
    from accelerate import PartialState

    # Without `cpu`, accelerate takes each process for the only one where there is no GPU.
    on_cpu = device == "cpu" or not torch.cuda.is_available()
    state = PartialState(cpu=on_cpu, timeout=LONGEST_WAIT)
    atexit.register(state.destroy_process_group)
    return Processes(Worker(state.process_index, state.num_processes), state.wait_for_everyone)


def cpu_group() -> "ProcessGroup":
    """Give the group in which these processes exchange what lies on the CPU.

    The default group cannot be counted on for that: on GPUs accelerate makes it with NCCL alone,
    which refuses such tensors. The first call makes the group, so all processes must make it.
    """
    import torch.distributed as dist

    return _cpu_group_beside(dist.group.WORLD)


@cache
def _cpu_group_beside(default: "ProcessGroup") -> "ProcessGroup":  # noqa: ARG001 (the key)
    import torch.distributed as dist

    group: ProcessGroup = dist.new_group(backend="gloo", timeout=LONGEST_WAIT)
    return group


def machine_memory() -> int:
    """Give the bytes of memory of this machine, or of the container this runs in."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        return min(whole, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    except (OSError, ValueError):  # no such container; "max" where it has no limit
        return whole
