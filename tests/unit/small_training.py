"""A small training, for tests of it: in this process, or as a script that may be killed."""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pgra.errors import Stopped
from pgra.models.fid import FusionReader
from pgra.models.loading import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.checkpoints import last_checkpoint
from pgra.reader.train import train_reader
from pgra.reader.trainer import set_dropout
from pgra.types import ReaderInput

# Targets of two and of four tokens: a mean of batches' means is not the mean over tokens.
VERBALIZER = Verbalizer(
    {"negative": "terrible", "positive": "great success"}, "{text} <extra_id_0>"
)
GOOD, BAD = ["warm", "funny", "praised"], ["dull", "lifeless", "wastes"]
THINGS = ["film", "story", "plot", "acting", "album"]


def make_inputs(count, *, name="train", extra=()):
    rows = []
    for i in range(count):
        label, words = ("positive", GOOD) if i % 2 else ("negative", BAD)
        query = f"A {words[i // 2 % 3]} {THINGS[i % 5]} <extra_id_0>"
        segments = tuple(f"{query} {text}" for text in extra) or (query,)
        rows.append(ReaderInput(f"{name}-{i}", segments, label))
    return rows


def accuracy(labels, predictions):
    right = sum(a == b for a, b in zip(labels, predictions, strict=True))
    return {"accuracy": right / len(labels)}


def make_arguments(folder, **changes):
    values = {
        "output_dir": str(folder),
        "max_steps": 6,
        "eval_steps": 3,
        "logging_steps": 1,
        "learning_rate": 5e-3,
        "per_device_train_batch_size": 4,
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return ReaderTrainingArguments(**{**values, **changes})


def train(t5_dir, arguments, *, rows=None, dev=None, reader=None, measure=accuracy, dropout=None):
    reader = reader or FusionReader.from_name(str(t5_dir))
    if dropout is not None:
        set_dropout(reader, dropout)
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    result = train_reader(
        reader,
        tokenizer,
        rows or make_inputs(18),
        dev or make_inputs(7, name="dev"),
        verbalizer=VERBALIZER,
        measure=measure,
        metric="accuracy",
        arguments=arguments,
    )
    return reader, result


LONG = {
    "max_steps": 24,
    "eval_steps": 5,
    "logging_steps": 4,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
}
"""Over three epochs of 13 batches, 7 steps each: steps, epochs, log lines and measurements cross."""
LONG_ROWS = 26


def train_long(t5_dir, folder, **changes):
    """Train, going on if the folder holds a checkpoint: what the same command does."""
    go_on = {} if last_checkpoint(folder) is None else {"resume_from_checkpoint": "true"}
    arguments = make_arguments(folder, **{**LONG, **go_on, **changes})
    return train(t5_dir, arguments, rows=make_inputs(LONG_ROWS))


@contextmanager
def at_batch(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Do something in the middle of a training, when it reads its so-manieth batch from here."""
    plain, calls = FusionReader.forward, itertools.count(1)

    def forward(self, *args, **kwargs):
        if next(calls) == number:
            act()
        return plain(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusionReader, "forward", forward)
        yield


def signal_self(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def run_files(folder: Path) -> dict[str, bytes]:
    """Give what must not depend on stops: the losses and the finished weights."""
    return {
        name: (folder / name).read_bytes() for name in ("losses.jsonl", "reader/model.safetensors")
    }


def log_lines(result) -> list[dict]:
    """Give what was logged, without times."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(("runtime", "_second"))}
        for entry in result.history
        if "train_runtime" not in entry
    ]


def script(*words: object, processes: int = 1) -> subprocess.CompletedProcess:
    """Run this file with arguments, in as many processes."""
    here = Path(__file__).parent
    paths = [str(here.parents[1]), str(here.parent), str(here)]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return subprocess.run(
        [sys.executable, *(launch if processes > 1 else []), __file__, *map(str, words)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def main(t5_dir: str, folder: str, told: str) -> int:
    """Train as a script: `told` is JSON with changes, and a signal at a batch of a process."""
    asked = json.loads(told)
    number, batch, rank = asked.pop("signal", None), asked.pop("batch", 0), asked.pop("rank", 0)
    is_mine = int(os.environ.get("RANK", "0")) == rank
    act = signal_self(signal.Signals(number)) if number and is_mine else lambda: None
    with at_batch(batch, act):
        try:
            train_long(Path(t5_dir), Path(folder), **asked)
        except Stopped as stop:
            print("STOPPED", stop, flush=True)
            return stop.code
    return 0


if __name__ == "__main__":
    from pgra.cli import _configure_logging

    _configure_logging()
    code = main(*sys.argv[1:])
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(code)
