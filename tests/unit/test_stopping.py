import json
import signal

import pytest
from small_training import script, signal_self

from pgra.reader.resume import Stopper

AGREE = """
import json, sys
import torch
import torch.distributed as dist
from pgra.core import gather, join_context
from pgra.reader.resume import Stopper

dist.init_process_group(backend="cuda:gloo")
rank = dist.get_rank()
try:
    dist.all_reduce(torch.ones(1))
    refused = ""
except RuntimeError as error:
    refused = str(error).splitlines()[0]
stopper = Stopper(world=2, minutes=1e-9 if rank == 1 else None)
context = join_context("cpu")
context.barrier()
shared = gather([rank, str(rank)], context.worker)
said = [refused, stopper.agree(stopper.wish), shared]
sys.stdout.write(json.dumps(said) + "\\n")
sys.stdout.flush()
"""


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
def test_processes_on_gpus_agree_wait_and_share(tmp_path):
    """On GPUs their default group is of NCCL alone; this one refuses CPU tensors as that does."""
    file = tmp_path / "agree.py"
    file.write_text(AGREE)
    done = script(processes=2, file=file)
    assert done.returncode == 0, done.stderr[-2000:]
    refused = "No backend type associated with device type cpu"
    told = [refused, 124, [0, "0", 1, "1"]]
    assert [json.loads(line) for line in done.stdout.splitlines()] == [told] * 2
