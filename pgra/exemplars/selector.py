"""Exemplars near a query: KATE (Liu et al. 2022) on a list, and in a run.

selector = pgra.ExemplarSelector(pool, encoder="bundled:minilm-l6")
selector.select("a query", k=8)             # the pool's own items, nearest first
selector.prompt("a query", k=8)             # them and the query, as an LM reads them
"""

import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pgra.config import from_values
from pgra.data.examples import open_rows
from pgra.data.read import read_label
from pgra.data.tasks import LABEL, AnyTask, GenerationTask, LocalSource, Task, load_any_task
from pgra.encoders import as_encoder
from pgra.errors import ConfigError
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selection import ExemplarPool, arrange, draw_rows, open_similarity
from pgra.parallel import Turn
from pgra.prompts import FewShotPrompt, PromptFormat, PromptTemplate, task_format
from pgra.types import Example, Query, as_list, check_count, is_query, read_queries

logger = logging.getLogger(__name__)


class ExemplarSelector:
    """Chooses labelled examples for a prompt: the query's nearest in a pool, KATE.

    Vectors are computed on first use and kept in memory; a run keeps them on disk.

    Attributes:
        items: The pool, as it was given and added to.
    """

    def __init__(
        self,
        pool: Iterable[Any],
        *,
        text: str | Sequence[str] = "text",
        label: str = LABEL,
        encoder: Any = SelectionArguments.encoder,
        selection: str = SelectionArguments.exemplars,
        metric: str = SelectionArguments.vector_metric,
        order: str = SelectionArguments.order,
        leak_guard: bool = True,
        template: str | None = None,
        task: str | Path | AnyTask | None = None,
        seed: int = 0,
        device: str = "auto",
        **options: Any,
    ) -> None:
        r"""Read the pool and load the encoder.

        Args:
            pool: Labelled dicts, (text, label) pairs or `pgra.Example`s, a `datasets.Dataset` or a
                pandas table; may be empty.
            text: Column that is compared, or several.
            label: Column of the answer.
            encoder: Hub id, folder or bundled:NAME; a `pgra.Encoder`, whose vectors are used as
                they are; another loaded model, as of `pgra.Encoder`; or "bm25", by shared
                words.
            selection: knn (the nearest), random, balanced, fixed, or module:Class.
            metric: Of vectors: cosine, dot or euclidean.
            order: Of a prompt: nearest-first (the paper's), nearest-last or random.
            leak_guard: Leave out examples whose text is the query's, or nearly (see
                `leak_jaccard`). Turn it off to show a known answer to the very question.
            template: How `prompt` writes an example: "Q: {question}\nA: {answer}", the columns in
                braces, a space and the label last; default: a line for each, "Text: ...".
            task: A task by name, YAML or loaded, whose columns, labels and prompt are used.
            seed: Of what is drawn, and of a random order.
            device: Where the encoder runs.
            options: Further arguments of `pgra icl`'s choice by name: farthest, redraw, pooling,
                leak_jaccard, ...

        Raises:
            ConfigError: If an argument is unknown or contradicts another.
            DataError: If an item of the pool cannot be read, or lacks a column.
            ModelError: If the encoder cannot be found or loaded.
            ValueError: If the encoder is of a wrong type.
        """
        if template is not None and task is not None:
            raise ConfigError("template and task both say how a prompt is written: give one")
        if task is None:
            task = pool_task((text,) if isinstance(text, str) else tuple(text), label, template)
        self._task = load_any_task(str(task)) if isinstance(task, str | Path) else task
        self._columns = {name: name for name in self._task.inputs}
        loaded = None
        if not isinstance(encoder, str | Path):
            loaded = as_encoder(encoder, normalize=False, device=device)
            encoder = type(encoder).__name__
        values = {
            "exemplars": selection,
            "encoder": str(encoder),
            "vector_metric": metric,
            "order": order,
            "exemplar_seed": seed,
            **options,
        }
        self._args = from_values(SelectionArguments, values, num_exemplars=1)
        self._turn = Turn()
        self.items: list[Any] = []
        self._examples: list[Example] = []
        self._pool = ExemplarPool(self._examples, self._args.leak_jaccard if leak_guard else None)
        self._similarity = open_similarity(
            self._args, self._examples, device=device, encoder=loaded
        )
        self._take(pool)

    def __len__(self) -> int:
        return len(self.items)

    def select(self, query: Query | Iterable[Query], k: int = 8) -> list[Any]:
        """Return the pool's items for a query, nearest first; of a list of queries a list of each.

        Args:
            query: A text, or a mapping with the pool's text columns, such as an item of it, whose
                label is ignored; or a list of them, which are encoded together.
            k: How many; fewer where the pool has fewer beside copies and leaks.

        Raises:
            ConfigError: If the pool does not fit the selection.
            DataError: If a query lacks a column, is blank, or is not a text.
            ValueError: If `k` is not a whole number of at least 0.
        """
        chosen = self._choose(self._queries(query), k)
        items = [[self.items[row] for row in rows] for rows in chosen]
        return items[0] if is_query(query) else items

    def prompt(self, query: Query, k: int = 8) -> str:
        """Return the few-shot prompt of a query: its exemplars in `order`, then itself, unanswered.

        The arguments are those of `select`; with `k` 0 it is the query alone.

        Raises:
            DataError: As `select`.
        """
        (example,) = self._queries([query])
        (rows,) = self._choose([example], k)
        seed = self._args.exemplar_seed or 0
        rows = arrange(rows, self._args.order, query=example.text, seed=seed)
        exemplars = [self._examples[row] for row in rows]
        return task_format(self._task).write(exemplars, example.fields)

    def add(self, items: Any) -> None:
        """Add to the pool one dict, pair, text or `pgra.Example`, or several.

        Only the new items are encoded, on first use.

        Raises:
            DataError: If one cannot be read; then none is added.
        """
        is_pair = isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], str)
        self._take([items] if is_pair or isinstance(items, str | Mapping | Example) else items)

    def _take(self, pool: Any) -> None:
        items = as_list("pool", pool, "a list of items, or one data set")
        if not items:
            return
        raw = open_rows(self._task, pool if hasattr(pool, "features") else items, "pool")
        self._columns = {name: raw.columns[name] for name in self._task.inputs}
        target = raw.columns[self._task.target]
        examples: list[Example] = []
        for row in raw.rows:
            fields = {name: row.text(column) for name, column in self._columns.items()}
            answers = row.fields.get(target)
            if isinstance(answers, list | tuple) and answers:  # of several the first
                row = replace(row, fields={target: answers[0]})
            label = read_label(row, target, labels=self._task.labels, classes=raw.classes)
            number = len(self.items) + len(examples)
            examples.append(Example(f"pool-{number}", fields, label))
        with self._turn:
            self.items += items
            self._examples += examples
            self._pool = replace(self._pool)  # a new guard
            if self._similarity is not None:
                self._similarity = self._similarity.renewed()

    # What is chosen.

    def _choose(self, queries: Sequence[Example], k: int) -> list[list[int]]:
        """Return rows of the pool."""
        if k:
            check_count("k", k)
        with self._turn:
            count = min(int(k), len(self._pool.guard.distinct)) if self.items else 0
            if count == 0:
                return [[] for _ in queries]
            args = replace(self._args, num_exemplars=count)
            chosen = args.open(self._pool, self._similarity).choose(queries)
            return [chosen.of(line) for line in range(len(queries))]

    def _queries(self, queries: Any) -> list[Example]:
        """Read queries, whose columns have the names of the task's inputs, or of the pool's."""
        return read_queries(queries, self._task.inputs, self._columns)


@dataclass(frozen=True, kw_only=True)
class _PoolTask(GenerationTask):
    """A pool's columns and prompt as a task, whose answers are the labels."""

    target = LABEL
    file_kinds = Task.file_kinds


def pool_task(
    inputs: tuple[str, ...], label: str = LABEL, template: str | None = None
) -> _PoolTask:
    """Return the task of a pool that has its own columns, and any labels."""
    if label in inputs:
        raise ConfigError(f"'{label}' is a text column and the label: name different ones")
    if template is None:
        names = (*inputs, label)
        template = "\n".join(f"{n.replace('_', ' ').capitalize()}: {{{n}}}" for n in names)
    frame = template.removesuffix(f" {{{label}}}")
    if frame == template:
        raise ConfigError(f"template '{template}' does not end with a space and {{{label}}}")
    return _PoolTask(
        name="pool",
        inputs=inputs,
        local=LocalSource(columns={LABEL: label}),
        kind="question",
        frame=frame,
        metrics=("exact_match",),
        num_exemplars=1,
    )


# PGRA's prompts: exemplars drawn for a whole task.
#
# One draw serves all splits and the corpus, so that all states are in one space.


def build_prompt(
    template: PromptTemplate,
    examples: Sequence[Example],
    words: Mapping[str, str],
    *,
    num_exemplars: int,
    method: str = "balanced",
    seed: int = 0,
) -> FewShotPrompt:
    """Draw exemplars from a labelled training set, in file order, and write the prefix.

    `words` have the task's order of labels; without any, where answers are written, "balanced" and
    "official" are "random". `num_exemplars` is the paper's m; the method (of
    `DRAWN_EXEMPLARS`) "official" takes its own number, 8 to 11 of 8. The seed decides choice and
    order.

    Raises:
        ConfigError: If there are fewer training examples than asked for.
    """
    if num_exemplars == 0:
        return FewShotPrompt(template)
    if len(examples) < num_exemplars:
        raise ConfigError(
            f"num_exemplars is {num_exemplars}, of {len(examples)} training examples: lower it"
        )
    labels = {row: example.label for row, example in enumerate(examples)}
    if not words and method in ("balanced", "official"):
        method = "random"
    rows = draw_rows(method, labels, list(words), num_exemplars, random.Random(seed))
    return PromptFormat(template, words).prompt([examples[row] for row in rows])
