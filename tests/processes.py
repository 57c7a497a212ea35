"""Runs functions in processes that are forks of one warm process, which imported all before."""

import atexit
import multiprocessing
import os
import signal
import sys
import weakref
from functools import cache
from multiprocessing.forkserver import ensure_running

import pytest

FORKS = multiprocessing.get_context("forkserver")
LONGEST_SECONDS = 150  # of a launched process, which takes seconds


@cache
def warm_up():
    """Start the warm process, with one thread, and no network."""
    wanted = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    FORKS.set_forkserver_preload(["conftest", "warm"])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in wanted.items():
            patch.setenv(name, value)
        ensure_running()


def launch(function, *args, processes=2):
    """Give what a function gives in each of some processes, which torchrun's own agent starts.

    Raises:
        ChildFailedError: One of them ended otherwise; the agent has ended the others.
    """
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    warm_up()
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        max_restarts=0,
        start_method="forkserver",
        signals_to_handle="SIGHUP",  # the others stay pytest's
    )
    given = elastic_launch(config, _be)(function, args)
    return [given[rank] for rank in range(processes)]


def _be(function, args):
    """Be one of the processes, to Python's own end, which a fork does not come to by itself."""
    import torch.distributed as dist

    from pgra.parallel import cpu_group

    signal.alarm(LONGEST_SECONDS)  # it ends one that hangs, and the agent ends the others
    given = function(*args)
    group = weakref.ref(cpu_group()) if dist.is_initialized() else lambda: None
    atexit._run_exitfuncs()
    assert group() is None, "a thread of a group that is left may abort the process"
    return given
