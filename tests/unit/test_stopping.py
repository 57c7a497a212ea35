import signal

import pytest
import torch
import torch.distributed as dist
from processes import launch
from small_training import signal_self

from pgra.context import join_context
from pgra.parallel import gather
from pgra.reader.resume import Stopper


def agree():
    """Be one of two processes, of which the second's time is up."""
    dist.init_process_group(backend="cuda:gloo")
    rank = dist.get_rank()
    with pytest.raises(RuntimeError, match="No backend type associated with device type cpu"):
        dist.all_reduce(torch.ones(1))
    stopper = Stopper(world=2, minutes=1e-9 if rank == 1 else None)
    context = join_context("cpu")
    context.barrier()
    return stopper.stop_code(has_more=True), gather([rank, str(rank)], context.worker)


def test_a_signal_is_heard_only_meanwhile():
    before = signal.getsignal(signal.SIGTERM)
    stopper = Stopper()
    with stopper.listening():
        signal_self(signal.SIGTERM)()
        assert (stopper.code, stopper.stop_code(has_more=True)) == (143, 143)
    assert signal.getsignal(signal.SIGTERM) == before
    assert Stopper(minutes=60).stop_code(has_more=True) == 0
    out_of_time = Stopper(minutes=1e-9)
    assert [out_of_time.stop_code(has_more=more) for more in (True, False)] == [124, 0]


@pytest.mark.slow
def test_processes_on_gpus_agree_wait_and_share():
    """On GPUs their default group is of NCCL alone; this one refuses CPU tensors as that does."""
    assert launch(agree) == [(124, [0, "0", 1, "1"])] * 2
