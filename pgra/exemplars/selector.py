"""Exemplars near a query: KATE (Liu et al. 2022) on a list, and in a run.

selector = pgra.ExemplarSelector(pool, encoder="bundled:minilm-l6")
selector.select("a query", k=8)             # the pool's own items, nearest first
selector.prompt("a query", k=8)             # them and the query, as an LM reads them
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, overload

import numpy as np

from pgra.artifacts import at_home
from pgra.config import from_values
from pgra.core import Example, Hit, check_device
from pgra.data.examples import class_names, open_rows
from pgra.data.read import Record, check_file, read_label, read_records, table_rows
from pgra.data.tasks import LABEL, GenerationTask, Task, check_slots, load_any_task
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError, DataError, show
from pgra.exemplars import SelectionArguments
from pgra.exemplars.selection import ExemplarPool, Selector, arrange
from pgra.exemplars.similarity import PoolSimilarity, open_similarity
from pgra.prompts.fewshot import PromptFormat, line_format, task_format
from pgra.prompts.template import PromptTemplate
from pgra.retrieval.neighbors import ExampleEncoder

# a text, or columns by name; the label of an item is ignored
Query = str | Mapping[str, Any] | Example


class ExemplarSelector:
    """Chooses labelled examples for a prompt: the query's nearest in a pool, KATE.

    Vectors are computed on first use and kept in memory; a run keeps them on disk.

    Attributes:
        items: The pool, as it was given and added to.
        args: The choice that is asked for.
        pool: The examples as they were read, and their leak guard.
        similarity: What compares them with a query; None where nothing does.
    """

    def __init__(
        self,
        pool: Iterable[Any] | str | Path,
        *,
        text: str | Sequence[str] = "text",
        label: str = LABEL,
        encoder: Any = SelectionArguments.encoder,
        selection: str = SelectionArguments.exemplars,
        likeness: str = SelectionArguments.likeness,
        order: str = SelectionArguments.order,
        leak_guard: bool = True,
        template: str | None = None,
        task: str | Path | Task | GenerationTask | None = None,
        seed: int = 0,
        device: str = "auto",
        **options: Any,
    ) -> None:
        r"""Read the pool and load the encoder.

        Args:
            pool: Dicts, (text, label) pairs, texts or `pgra.Example`s, mixed if all have a label or
                none has; a `datasets.Dataset`; a pandas table; or a file (.jsonl, .csv, .tsv). May
                be empty.
            text: Column that is compared, or several.
            label: Column of the answer, if the items have it.
            encoder: Hub id, folder or bundled:NAME; a `SentenceTransformer`; a `pgra.Encoder`,
                whose vectors are used as they are; or "bm25", by shared words.
            selection: knn (the nearest), random, balanced, fixed, official, or module:Class.
            likeness: Of vectors: cosine, dot or euclidean.
            order: Of a prompt: nearest-first (the paper's), nearest-last or random.
            leak_guard: Leave out examples whose text is the query's, or nearly (see
                `leak_jaccard`). Turn it off to show a known answer to the very question.
            template: How `prompt` writes an example: "Q: {question}\nA: {answer}", the columns in
                braces and the label last; default: a line for each, "Text: ..." "Label: ...".
            task: A task by name, YAML or loaded, whose columns, labels and prompt are used.
            seed: Of what is drawn, and of a random order.
            device: Where the encoder runs.
            options: Further arguments of `pgra icl`'s choice by name: farthest, redraw, pooling,
                leak_jaccard, ...

        Raises:
            ConfigError: If an argument is unknown or contradicts another.
            DataError: If the pool cannot be read, or an item lacks a column.
            ModelError: If the encoder cannot be found or loaded.
            ValueError: If the encoder is of a wrong type.
        """
        check_device(device, is_used=False)
        self._task = load_any_task(str(task)) if isinstance(task, str | Path) else task
        if template is not None and task is not None:
            raise ConfigError("template and task both say how a prompt is written: give one")
        self._texts = (text,) if isinstance(text, str) else tuple(text)
        self._label, self._template = label, template
        self._columns: Mapping[str, str] = {name: name for name in self._texts}
        if self._task is not None:
            self._columns = {name: name for name in self._task.inputs}
        if label in self._texts:
            raise ConfigError(f"'{label}' is a text column and the label: name different ones")
        loaded: ExampleEncoder | None = None
        if not isinstance(encoder, str | Path):
            is_ours = hasattr(encoder, "encode_examples")
            loaded = encoder if is_ours else Encoder.load(encoder, normalize=False, device=device)
            encoder = type(encoder).__name__
        named = {"exemplars": selection, "encoder": str(encoder), "likeness": likeness}
        named |= {"order": order, "exemplar_seed": seed, **options}
        self.args = from_values(SelectionArguments, named, num_exemplars=1)
        self.items: list[Any] = []
        self._examples: list[Example] = []
        self.pool = ExemplarPool(self._examples, self.args.leak_jaccard if leak_guard else None)
        self.similarity = open_similarity(self.args, self._examples, device=device, encoder=loaded)
        if self.similarity is not None:
            self.similarity.load()
        self._take(pool)

    @classmethod
    def of(
        cls, args: SelectionArguments, pool: ExemplarPool, similarity: PoolSimilarity | None
    ) -> Self:
        """Return the selector of a run, whose examples are read already."""
        made = cls.__new__(cls)
        made.args, made.pool, made.similarity = args, pool, similarity
        return made

    def under(self, args: SelectionArguments) -> Selector:
        """Return the class that chooses by other arguments from the same pool."""
        selector: Selector = args.selector(args, self.pool, self.similarity)
        return selector

    def __len__(self) -> int:
        return len(self.pool.examples)

    def __repr__(self) -> str:
        by = f" by {self.args.encoder}" if self.similarity is not None else ""
        return f"ExemplarSelector({len(self)} items, {self.args.exemplars}{by})"

    @overload
    def select(self, query: Query, k: int = ...) -> list[Any]: ...

    @overload
    def select(self, query: list[Query], k: int = ...) -> list[list[Any]]: ...

    def select(self, query: Query | list[Query], k: int = 8) -> list[Any]:
        """Return the pool's items for a query, nearest first; of a list of queries a list of each.

        Args:
            query: A text, or a mapping with the pool's text columns, such as an item of it; or a
                list of them, which are encoded together.
            k: How many; fewer where the pool has fewer beside copies and leaks.

        Raises:
            ConfigError: If the pool does not fit the selection.
            DataError: If a query lacks a column, or is no text.
            ValueError: If `k` is no whole number of at least 0.
        """
        asked = [self._query(one) for one in (query if isinstance(query, list) else [query])]
        found = [[self.items[hit.index] for hit in hits] for hits in self._choose(asked, k)]
        return found if isinstance(query, list) else found[0]

    def search(self, query: Query, k: int = 8) -> list[Hit]:
        """Return what `select` chooses, with its place in the pool and its similarity to the query.

        The score is NaN where nothing was compared. Arguments and errors are those of `select`.
        """
        return self._choose([self._query(query)], k)[0]

    def prompt(self, query: Query, k: int = 8) -> str:
        """Return the few-shot prompt of a query: its exemplars in `order`, then itself, unanswered.

        The arguments are those of `select`; with `k` 0 it is the query alone.

        Raises:
            ConfigError: If the template does not fit the pool.
            DataError: As `select`.
        """
        asked, style = self._query(query), self._style()
        (hits,) = self._choose([asked], k)
        rows = arrange(
            [hit.index for hit in hits],
            self.args.order,
            query=asked.text,
            seed=self.args.exemplar_seed or 0,
        )
        written = style.write([self.pool.examples[row] for row in rows], asked.fields)
        return written + style.template.gap.rstrip(" \t")

    def add(self, items: Any) -> None:
        """Add to the pool one dict, pair, text or `pgra.Example`, or several as of `pool`.

        Only the new items are encoded, on first use.

        Raises:
            DataError: If one cannot be read; then none is added.
        """
        is_pair = isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], str)
        self._take([items] if is_pair or isinstance(items, str | Mapping | Example) else items)

    def _take(self, pool: Any) -> None:
        items = _list_items(pool)
        if not items:
            return
        source = pool if hasattr(pool, "features") else items  # a data set names its classes
        read = self._read_task(source) if self._task else self._read_columns(source, items)
        first = len(self.items)
        self.items += items
        self._examples += [replace(one, id=f"pool-{first + at}") for at, one in enumerate(read)]
        self.pool = replace(self.pool)  # a new guard
        if self.similarity is not None:
            self.similarity = self.similarity.renewed()

    # What is chosen.

    def _choose(self, queries: Sequence[Example], k: int) -> list[list[Hit]]:
        if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 0:
            raise ValueError(f"k is {k!r}: give a whole number, 0 or more")
        count = min(int(k), len(self.pool.guard.distinct)) if self.items else 0
        if count == 0:
            return [[] for _ in queries]
        chosen = self.under(replace(self.args, num_exemplars=count)).choose(queries)
        return [
            [
                Hit(row, float(score), self.pool.examples[row].text)
                for row, score in zip(chosen.of(line), chosen.similarity[line], strict=False)
            ]
            for line in range(len(queries))
        ]

    # How items are read.

    def _read_task(self, rows: Any) -> list[Example]:
        """Read rows by the columns of a task, or of its hub's data set."""
        task = self._task
        assert task is not None
        raw = open_rows(task, rows, "pool")
        self._columns = {name: raw.columns[name] for name in task.inputs}
        labels = task.labels if isinstance(task, Task) else ()
        column, classes = raw.columns[task.target], raw.classes
        return [self._example(row, column, labels=labels, classes=classes) for row in raw.rows]

    def _read_columns(self, rows: Any, items: Sequence[Any]) -> list[Example]:
        first, label = len(self.items), self._label
        records = [
            Record(at, _fields_of(item, self._texts[0], label), f"pool[{first + at}]")
            for at, item in enumerate(items)
        ]
        pool = self.pool.examples
        is_labelled = pool[0].label is not None if pool else label in records[0].fields
        odd = [row for row in records if label in row.fields and not is_labelled]
        if odd:
            raise DataError(f"{odd[0].place} has a label, and the items before it have none")
        column, classes = label if is_labelled else None, class_names(rows, label)
        return [self._example(row, column, classes=classes) for row in records]

    def _example(
        self,
        row: Record,
        column: str | None,
        *,
        labels: Sequence[str] = (),
        classes: Sequence[str] | None = None,
    ) -> Example:
        fields = {name: row.text(own) for name, own in self._columns.items()}
        if column is None:
            return Example("", fields)
        value = row.fields.get(column)
        if isinstance(value, list | tuple) and value:  # of several answers the first
            row = replace(row, fields={**row.fields, column: value[0]})
        return Example("", fields, read_label(row, column, labels=labels, classes=classes))

    def _query(self, query: Any) -> Example:
        if isinstance(query, str) and len(self._columns) > 1:
            raise DataError(
                f"query is one text, and it has {', '.join(self._columns)}: give a dict"
            )
        if not isinstance(query, str | Mapping | Example):
            raise DataError(f"query is {show(query)}: give a text, or the columns of the pool")
        row = Record(0, _fields_of(query, next(iter(self._columns)), self._label), "query")
        fields = {  # by the columns of the pool, or as the task calls them
            name: row.text(own if own in row.fields else name)
            for name, own in self._columns.items()
        }
        if not any(fields.values()):
            raise DataError("query is empty: give words to compare")
        return Example("query", fields)

    # How a prompt is written.

    def _style(self) -> PromptFormat:
        """Return the task's format, the template's, or a line for each column."""
        if isinstance(self._task, Task):
            return task_format(self._task, "task")
        if self._task is not None:
            return line_format(self._task.frame, self._task.inputs)
        pool = self.pool.examples
        names = [*self._texts, *([self._label] if pool and pool[0].label is not None else [])]
        lines = [f"{name.replace('_', ' ').capitalize()}: {{{name}}}" for name in names]
        default = "\n".join(lines) if len(names) > 1 else f"{{{names[0]}}}"
        template = self._template or default
        check_slots("template", template, names)
        slot = f"{{{self._label}}}" if self._label in names else ""
        if not template.rstrip().endswith(slot):
            raise ConfigError(
                f"template '{template}' does not end with the answer: write it last, as in "
                f"'{{{names[0]}}} -> {slot}'"
            )
        head = template.rstrip().removesuffix(slot)
        body = head.rstrip()
        gap = head[len(body) :]
        return PromptFormat(PromptTemplate(body, "", self._texts, instruction="", gap=gap), {})


def _fields_of(item: Any, text: str, label: str) -> Mapping[str, Any]:
    """Return an item as columns."""
    if isinstance(item, Example):
        return {**item.fields, **({} if item.label is None else {label: item.label})}
    if isinstance(item, str):
        return {text: item}
    if isinstance(item, list | tuple) and len(item) == 2:
        return dict(zip((text, label), item, strict=True))
    if not isinstance(item, Mapping):
        raise DataError(
            f"an item of the pool is {show(item)}: give a text, a (text, label) pair, a dict or a "
            "pgra.Example"
        )
    return item


def _list_items(pool: Any) -> list[Any]:
    if isinstance(pool, str | Path):
        kind = check_file(path := at_home(pool), ("jsonl", "csv", "tsv"))
        rows = read_records(path) if kind == "jsonl" else table_rows(path, kind, ())
        return [dict(row.fields) for row in rows]
    if hasattr(pool, "iloc") and hasattr(pool, "to_dict"):  # pandas, whose iterator gives names
        records: list[Any] = pool.to_dict("records")
        return records
    if isinstance(pool, Mapping) or not isinstance(pool, Iterable):
        raise DataError(f"pool is {show(pool)}: give a list of items, one data set, or a file")
    return list(pool)
