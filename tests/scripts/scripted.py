"""Calls our scripts as a user would, on tiny models and files, and keeps what they say."""

import contextlib
import io
import json
from dataclasses import dataclass, field
from pathlib import Path

from conftest import SENTENCES, review_rows, write_jsonl

from pgra.cli import run
from pgra.commands.evaluate import main as evaluate_main
from pgra.commands.train import main as train_main

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Called:
    """What a script said and how it ended."""

    code: int
    out: str
    err: str

    @property
    def error(self):
        """The one line of a user's error; anything else fails the test."""
        told = [line for line in self.err.splitlines() if line.startswith("pgra: error: ")]
        assert self.code == 2, self.err
        assert len(told) == 1, self.err
        assert self.err.endswith(f"\n{told[0]}\n"), "the error is the last line"
        assert "Traceback" not in self.err
        return told[0].removeprefix("pgra: error: ")


def call(main, argv):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(main, argv)
    return Called(code, out.getvalue(), err.getvalue())


@dataclass
class Bench:
    """A folder with files and tiny models, and the flags that name them."""

    root: Path
    lm: Path
    encoder: Path
    t5: Path
    flags: dict[str, object] = field(default_factory=dict)

    def __post_init__(self):
        self.corpus = self.root / "corpus.txt"
        self.corpus.write_text("\n".join(SENTENCES) + "\n")
        self.train_file = write_jsonl(self.root / "train.jsonl", review_rows(40))
        self.test_file = write_jsonl(self.root / "test.jsonl", review_rows(12, start=20))
        self.artifacts = self.root / "artifacts"
        self.flags = {
            "task": "sst2",
            "train_file": self.train_file,
            "test_file": self.test_file,
            "corpus": self.corpus,
            "encoder": self.encoder,
            "lm": self.lm,
            "model_name_or_path": self.t5,
            "artifacts_dir": self.artifacts,
            "num_candidates": 6,
            "num_evidence": 2,
            "num_exemplars": 2,
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "seed": 1,
            "device": "cpu",
        }

    def argv(self, name, **changes):
        """Give train.py's arguments for the run of this name; None leaves a flag out."""
        flags = {**self.flags, "output_dir": self.run(name), **changes}
        given = {key: value for key, value in flags.items() if value is not None}
        lists = {key: value if isinstance(value, list) else [value] for key, value in given.items()}
        return [str(word) for key, words in lists.items() for word in (f"--{key}", *words)]

    def run(self, name):
        return self.root / "runs" / name

    def train(self, name, **changes):
        return call(train_main, self.argv(name, **changes))

    def make(self, name, **changes):
        """Train, which must succeed."""
        called = self.train(name, **changes)
        assert called.code == 0, called.err
        return called

    def evaluate(self, name, *words):
        return call(evaluate_main, ["--run", str(self.run(name)), *map(str, words)])

    def metrics(self, name):
        return read_json(self.run(name) / "metrics.json")

    def predictions(self, name):
        lines = (self.run(name) / "predictions.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]


def read_json(path):
    return json.loads(path.read_text())
