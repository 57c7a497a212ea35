"""Decide labels from none to many: what each part of a `Classifier` adds, and the simplest rivals.

    python benchmarks/decide.py --json figures.json
    python benchmarks/decide.py --tasks sst2 data/news --draws 1 --quick

A frozen LM reads each text once under a prompt of 8 examples, and under one of none. From 0, 2, 8,
16 and 32 more examples of each label, drawn three times, these decide 300 test texts:

    label words             what the LM would answer, as it is
    words less their mean   less the mean over unlabelled texts (Zhou et al. 2024, eq. 5)
    head, last layer        what `--method head` was until now
    heads, five depths      the mean of their probabilities
    heads and words         joined log-linearly
    all three               with a head on MiniLM's vectors
    MiniLM: regression      scikit-learn's logistic regression; it has the prompt's 8 examples too
    MiniLM: nearest         the label of the nearest example; the same

Hypotheses, written before the first run (percent right, means over tasks, paired by text, Holm):

    D1  words less their mean beat the words as they are by 8 points without a label, p < 0.001
    D2  all three beat the last layer's head by 4 points at 8 and at 16 a label, p < 0.001, and
        lose on no task at 32 beyond noise
    D3  at 8, 16 and 32 they beat both rivals, p < 0.001
    D5  expected calibration error is at most 0.08 at 16 a label; of the texts that held-out
        examples call decidable at 5 % error at most 5 % are wrong, beyond noise
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import parse_flags, shared_parser, write_figures
from sklearn.linear_model import LogisticRegression

import pgra
from pgra.commands.common import say
from pgra.context import Context
from pgra.data.examples import DataArguments, load_splits
from pgra.data.tasks import Task
from pgra.exemplars.selector import build_prompt
from pgra.lm.prefix import PromptedEncoder, StateColumns
from pgra.prompts import prompt_template
from pgra.rerank.bank import query_keys
from pgra.rerank.head import fit_labels, softmax, word_logits
from pgra.rerank.states import StateBank
from pgra.types import Example

DEPTHS = (0.5, 0.67, 0.77, 0.9, 1.0)
TASKS = ("sst2", "trec", "cr", "rotten-tomatoes", "subj", "sms-spam")
SIZES = (0, 2, 8, 16, 32)
NUM_EXEMPLARS = 8
NUM_TEST = 300
Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Draw:
    """One draw of a task: exemplars of the prompt, others by label in the order of use, test."""

    task: Task
    exemplars: Sequence[Example]
    pool: Sequence[Example]
    places: Sequence[int]  # of each pool example among those of its label
    test: Sequence[Example]

    def take(self, size: int) -> list[int]:
        """Return the places in the pool of the first so many examples of each label."""
        return [row for row, place in enumerate(self.places) if place < size]


def read_draws(name: str, count: int) -> Iterator[Draw]:
    """Draw examples of a task; the test texts are the same in all draws."""
    folder = Path(name)
    task = Task.load(str(next(folder.glob("*.yaml")))) if folder.is_dir() else Task.load(name)
    found = {"sst2": "data/sst2", "trec": "data/trec", "cr": "data/cr", "subj": "data/plots"}
    source = name if folder.is_dir() else found.get(name)
    args = DataArguments(task=name, dataset_name=source, max_test_samples=NUM_TEST)
    splits = load_splits(task, args)
    for seed in range(count):
        order = np.random.default_rng(seed).permutation(len(splits.train))
        shuffled = [splits.train[row] for row in order]
        prompt = build_prompt(
            prompt_template(task),
            shuffled,
            task.prompt_words,
            num_exemplars=NUM_EXEMPLARS,
            seed=seed,
        )
        by_id = {example.id: example for example in shuffled}
        exemplars = [by_id[name] for name in prompt.exemplar_ids]
        seen = {str(example.text) for example in exemplars}
        counts: dict[str, int] = defaultdict(int)
        pool = []
        places = []
        for example in shuffled:
            label = str(example.label)
            if counts[label] < SIZES[-1] and example.text not in seen:
                pool.append(example)
                places.append(counts[label])
                seen.add(example.text)
                counts[label] += 1
        yield Draw(task, exemplars, pool, places, splits.test)


@dataclass(frozen=True)
class Reading:
    """States of the pool's and the test's texts under one prompt, and the words' rows."""

    pool: Any
    test: Any
    columns: StateColumns


def read_states(lm: pgra.CausalLM, draw: Draw, *, has_exemplars: bool, artifacts: Path) -> Reading:
    """Let the LM read a draw; states are kept."""
    task = draw.task
    prompt = build_prompt(
        prompt_template(task),
        draw.exemplars,
        task.prompt_words,
        num_exemplars=len(draw.exemplars) if has_exemplars else 0,
        method="random",
    )
    encoder = PromptedEncoder(lm, prompt, depths=DEPTHS)
    bank = StateBank(
        encoder, encoder.fingerprint, Context(artifacts=artifacts), shard_rows=512, suffix="-queries"
    )
    examples = [*draw.pool, *draw.test]
    bank.read_queries(examples, f"{task.name}")
    states = bank.states(query_keys(examples))
    count = len(draw.pool)
    columns = encoder.columns(list(task.prompt_words.values()))
    return Reading(states[:count], states[count:], columns)


def main() -> None:
    """Print the table."""


if __name__ == "__main__":
    main()
