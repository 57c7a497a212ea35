"""Token budgets that fitted: what an out-of-memory back-off taught, kept for the next run.

One small JSON under the pgra home folder, by device, LM and way of reading. It is a cache: deleting
it costs one more back-off, and a damaged or unwritable one costs a warning, never a run.
"""

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from pgra.data.packages import cache_dir
from pgra.io import canonical_json, write_json
from pgra.models.causal_lm import CausalLM

logger = logging.getLogger(__name__)

FILE = "budgets.json"
_GIB = 1 << 30


def recall_budget(lm: CausalLM, kind: str) -> int | None:
    """Give the budget that last fitted this LM on this device; None if none was ever too large.

    Args:
        lm: The LM, on its device.
        kind: How it reads, such as "packed": each way has its own memory.
    """
    return _read(_path()).get(_key(lm, kind))


def remember_budget(lm: CausalLM, kind: str, tokens: int) -> None:
    """Keep the budget that fitted after a back-off; the last word on an LM and device stands.

    Args:
        lm: The LM, on its device.
        kind: How it reads.
        tokens: Tokens in one batch.

    Raises:
        ValueError: If `tokens` is below 1.
    """
    if tokens < 1:
        raise ValueError(f"tokens is {tokens}: it must be at least 1")
    path = _path()
    try:
        with _turn(path):  # read inside it, or what another job wrote meanwhile would be lost
            write_json(path, {**_read(path), _key(lm, kind): int(tokens)})
        logger.warning("%d tokens are remembered in %s: delete it to forget them", tokens, path)
    except OSError as error:
        logger.warning("the token budget is not remembered: %s (%s)", path, error.strerror)


def _path() -> Path:
    return cache_dir() / FILE


def _key(lm: CausalLM, kind: str) -> str:
    parts = [describe_device(lm.device), canonical_json(dict(lm.fingerprint)), kind]
    if lm.device_map != "none":  # the same states, but less room beside the weights, or more
        parts.append(f"device map {lm.device_map}")
    return " | ".join(parts)


def describe_device(device: torch.device) -> str:
    """Name a device by what decides how much fits: a GPU by model and memory, else the machine."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return f"{found.name}, {round(found.total_memory / _GIB)} GiB"
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{device.type}, {round(memory / _GIB)} GiB"


@contextlib.contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait for the right to write; the system takes it back if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with (path.parent / f".{path.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read(path: Path) -> dict[str, int]:
    """Read what is there; entries that cannot be are passed over, and gone with the next write."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read and is not used: %s", path, error)
        return {}
    if not isinstance(found, dict):
        logger.warning("%s is damaged and is not used: it holds no mapping", path)
        return {}
    # A bool is an int to Python, but no budget.
    sound = {key: value for key, value in found.items() if type(value) is int and value >= 1}
    if len(sound) < len(found):
        wrong = next(key for key in found if key not in sound)
        logger.warning("%s is damaged: %r is not used", path, found[wrong])
    return sound
