"""A process of several that is killed is named by those that are left."""

import os
import signal
import socket
import subprocess
import sys

import pytest

JOB = """
import atexit, os, signal, sys, weakref
import pgra.core
from pgra.cli import run
from pgra.core import join_context

if "elsewhere" in sys.argv:  # as on two machines
    pgra.core.gethostname = lambda: os.environ["RANK"]

groups = []
# The last of all hooks: a thread of a group that is left may abort the process from here on.
atexit.register(lambda: any(group() for group in groups) and print("a group is left"))

def main(words):
    context = join_context("cpu")
    groups.append(weakref.ref(pgra.core.cpu_group()))
    if os.environ["RANK"] in words:
        os.kill(os.getpid(), signal.SIGKILL)
    context.barrier()
    return 0

sys.exit(run(main, sys.argv[1:]))
"""


def _run(*killed):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", JOB, *killed],
            env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[0] for process in processes]
    assert "a group is left" not in "".join(told)
    return [process.returncode for process in processes], told


@pytest.mark.slow
def test_the_others_say_which_process_was_lost():
    codes, told = _run("1")
    assert codes == [1, -signal.SIGKILL]
    assert "process 1 of 2 was lost" in told[0]
    assert "Traceback" not in told[0]
    codes, told = _run("1", "elsewhere")  # whose processes cannot be looked at
    assert codes == [1, -signal.SIGKILL]
    assert "another process of 2 was lost" in told[0]
    assert "Traceback" not in told[0]
    codes, told = _run()  # the control
    assert codes == [0, 0]
    assert "lost" not in "".join(told)
