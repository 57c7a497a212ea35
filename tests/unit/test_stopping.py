import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_training import signal_self

from pgra.reader.resume import Stopper

TWICE = """
import os, signal, sys
from pgra.reader.resume import Stopper
stopper = Stopper()
with stopper.listening():
    os.kill(os.getpid(), signal.SIGTERM)
    print(stopper.code, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("still here", flush=True)
"""

AGREE = """
import json, sys
from types import SimpleNamespace
import torch
import torch.distributed as dist
from pgra.errors import Stopped
from pgra.reader.resume import Stopper

dist.init_process_group(backend="cuda:gloo")
rank = dist.get_rank()
try:
    dist.all_reduce(torch.ones(1))
    refused = ""
except RuntimeError as error:
    refused = str(error).splitlines()[0]
stopper = Stopper(world=2, minutes=1e-9 if rank == 1 else None)
told = stopper.agree(stopper.wish, 7 - rank)
state = SimpleNamespace(global_step=3, max_steps=9, epoch=0.5)
args = SimpleNamespace(eval_strategy="no", logging_strategy="no", save_strategy="steps")
stopper.end_step(args, state, SimpleNamespace(should_save=False), code=told[0])
code = 0
try:
    stopper.after_save(state)
except Stopped as stop:
    code = stop.code
sys.stdout.write(json.dumps([rank, refused, told, code]) + "\\n")
sys.stdout.flush()
dist.destroy_process_group()
"""


def python(*words):
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    return subprocess.run(
        [sys.executable, *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_signal_is_heard_only_meanwhile():
    before = signal.getsignal(signal.SIGTERM)
    stopper = Stopper()
    with stopper.listening():
        signal_self(signal.SIGTERM)()
        assert (stopper.code, stopper.wish) == (143, 143)
    assert signal.getsignal(signal.SIGTERM) == before
    assert Stopper(minutes=60).wish == 0
    assert Stopper(minutes=1e-9).wish == 124
    several = Stopper(world=2)
    with several.listening():  # what a launcher passes on is one signal
        signal_self(signal.SIGTERM)()
        signal_self(signal.SIGTERM)()
    assert several.code == 143


@pytest.mark.slow
def test_a_second_signal_leaves_at_once():
    done = python("-c", TWICE)
    assert done.stdout == "143\n"
    assert done.returncode == -signal.SIGTERM


@pytest.mark.slow
def test_processes_on_gpus_agree_and_leave_together(tmp_path):
    """On GPUs their default group is of NCCL alone; this one refuses CPU tensors as that does."""
    file = tmp_path / "agree.py"
    file.write_text(AGREE)
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(file)]
    done = python(*launch)
    assert done.returncode == 0, done.stderr[-2000:]
    told = sorted(json.loads(line) for line in done.stdout.splitlines())
    refused = "No backend type associated with device type cpu"
    assert told == [[rank, refused, [124, 7], 124] for rank in (0, 1)]
