"""A device that only looks like one: what a program would wait for, and what it would copy."""

import sys
from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pgra.lm.batching import send

_QUESTIONS = {
    *("_local_scalar_dense", "equal", "is_nonzero", "item", "masked_select", "nonzero"),
}
_COPIES = {"_to_copy", "copy_", "cpu", "to"}
_NO_KERNELS = {"_unsafe_view", "detach", "empty", "empty_like", "new_empty", "to"}


class MetaDevice(TorchDispatchMode):
    """Stands in for a GPU: tensors on "meta" have no numbers, and every operation is seen.

    Attributes:
        waits: How often each kind of answer or copy was waited for: copies from the device, and
            those to it that do not go by `send`. Answers are yes, and what is copied is ones.
        sent: Bytes and dtype of each copy to the device.
        launches: Operations on the device that make something new.
    """

    def __init__(self):
        super().__init__()
        self.waits, self.sent, self.launches = Counter(), [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [each for each in args if isinstance(each, torch.Tensor)]
        if name in _QUESTIONS and tensors[0].is_meta:
            self.waits[name] += 1
            return True
        if name in _COPIES:
            source = tensors[-1]
            asked = {str(each) for each in (*args, kwargs.get("device"))}
            asked |= {str(tensors[0].device)} if name == "copy_" else {name}
            if source.is_meta and "cpu" in asked:
                self.waits["copy to the host"] += 1
                return torch.ones(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not source.is_meta and "meta" in asked:
                self.sent.append((source.nbytes, source.dtype))
                if not _is_sending():
                    self.waits["copy to the device"] += 1
        made = func(*args, **kwargs)
        first = made[0] if isinstance(made, tuple) else made
        is_new = isinstance(first, torch.Tensor) and first.is_meta and not func.is_view
        is_idle = name == "dropout" and not args[2]  # where nothing is trained
        self.launches += is_new and not is_idle and name not in _NO_KERNELS
        return made


def _is_sending():
    frame = sys._getframe()
    while frame is not None and frame.f_code is not send.__code__:
        frame = frame.f_back
    return frame is not None


@contextmanager
def moved_to_meta(encoder):
    """Let an encoder run there; it cannot come back."""
    encoder.device = torch.device("meta")
    encoder.model.to("meta")
    with MetaDevice() as device:
        yield device
