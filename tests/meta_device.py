"""A device that only looks like one: what a program would wait for, and what it would copy."""

from collections import Counter
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_QUESTIONS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero"}
_COPIES = {"_to_copy", "copy_", "cpu", "to"}


class MetaDevice(TorchDispatchMode):
    """Stands in for a GPU: tensors on "meta" have no numbers, and every operation is seen.

    Attributes:
        waits: How often each kind of answer or copy from the device was waited for.
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
                return torch.zeros(source.shape, dtype=kwargs.get("dtype") or source.dtype)
            if not source.is_meta and "meta" in asked:
                self.sent.append((source.nbytes, source.dtype))
        made = func(*args, **kwargs)
        is_new = isinstance(made, torch.Tensor) and made.is_meta and not func.is_view
        self.launches += is_new and name not in {"empty", "to", "detach"}
        return made


@contextmanager
def moved_to_meta(encoder):
    """Let an encoder run there; it cannot come back."""
    encoder.device = torch.device("meta")
    encoder.model.to("meta")
    with MetaDevice() as device:
        yield device
