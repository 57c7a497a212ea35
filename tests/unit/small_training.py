"""A small training, for tests of it: in this process, or as one of several."""

import itertools
import json
import os
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import reader_inputs

from pgra.context import join_context
from pgra.errors import PgraError, Stopped
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts import Verbalizer
from pgra.reader.arguments import TrainingArguments
from pgra.reader.fid import FusionReader
from pgra.reader.predict import T5Classifier, decide
from pgra.reader.train import fit

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
        rows.append((f"{name}-{i}", segments, label))
    return rows


def tokens(t5_dir, items):
    return reader_inputs(load_tokenizer(find_model(str(t5_dir))), VERBALIZER, items)


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
    }
    return TrainingArguments(**{**values, **changes})


def classifier_of(reader, t5_dir, **changes):
    return T5Classifier(reader, load_tokenizer(find_model(str(t5_dir))), VERBALIZER, **changes)


def lively(folder):
    """Load a reader, livelier than T5's own start, so that errors show."""
    reader = FusionReader.from_source(find_model(str(folder)))
    generator = torch.Generator().manual_seed(5)
    for parameter in reader.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return reader


def train(
    t5_dir,
    arguments,
    *,
    rows=None,
    dev=None,
    reader=None,
    measure=accuracy,
    dropout=None,
    kind=T5Classifier,
    device="cpu",
):
    reader = reader or FusionReader.from_source(find_model(str(t5_dir)))
    if dropout is not None:
        set_dropout(reader, dropout)
    classifier = kind(reader, load_tokenizer(find_model(str(t5_dir))), VERBALIZER)
    context = replace(join_context(device), progress=False)
    inputs = tokens(t5_dir, dev or make_inputs(7, name="dev"))

    def evaluate():
        scores = classifier.score(inputs, context)
        decided = decide(inputs.example_ids, scores, VERBALIZER.labels)
        return measure(inputs.labels, [prediction.label for prediction in decided])

    progress = fit(
        classifier,
        tokens(t5_dir, rows or make_inputs(18)),
        arguments,
        context,
        folder=Path(arguments.output_dir) / "reader",
        evaluate=evaluate,
        metric="accuracy",
    )
    return reader, progress


def set_dropout(reader, rate):
    for module in reader.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = rate
        elif isinstance(getattr(module, "dropout", None), float):  # T5's attention keeps it
            module.dropout = rate
    reader.model.config.dropout_rate = rate


LONG = {
    "max_steps": 17,
    "eval_steps": 5,
    "logging_steps": 4,
    "per_device_train_batch_size": 2,
    "total_train_batch_size": 4,
}
"""Into the third epoch of 13 batches, 7 steps each: steps, epochs and measurements cross."""


def train_long(t5_dir, folder, *, dropout=None, **changes):
    """Train, going on if the folder holds a checkpoint: what the same command does."""
    arguments = make_arguments(folder, **{**LONG, **changes})
    return train(t5_dir, arguments, rows=make_inputs(26), dropout=dropout)


@contextmanager
def at_batch(
    number,
    act=lambda: None,
    *,
    breaks=False,
    kind=FusionReader,
):
    """Do something, or break the loss, when a training reads its so-manieth batch from here."""
    plain, calls = kind.forward, itertools.count(1)

    def forward(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        if next(calls) == number:
            act()
            output.loss = output.loss * float("nan") if breaks else output.loss
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "forward", forward)
        yield


def signal_self(number):
    return lambda: os.kill(os.getpid(), number)


def run_files(folder):
    """Give what must not depend on stops: the losses and the finished weights."""
    return {
        name: (folder / name).read_bytes() for name in ("losses.jsonl", "reader/model.safetensors")
    }


def losses(folder):
    """Give the losses of a training's file."""
    lines = (folder / "losses.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    return [row["loss"] for row in rows]


def train_told(t5_dir, folder, told):
    """Be one process of a long training: told are changes, a signal or NaN at a batch of a rank.

    Returns why it ended early, or "".
    """
    changes = dict(told)
    number, batch = changes.pop("signal", None), changes.pop("batch", 0)
    breaks = changes.pop("nan", False)
    is_mine = int(os.environ["RANK"]) == changes.pop("rank", 0)
    act = signal_self(number) if number else lambda: None
    with at_batch(batch if is_mine else 0, act, breaks=breaks):
        try:
            train_long(t5_dir, folder, **changes)
        except (PgraError, Stopped) as error:
            return str(error)
    return ""
