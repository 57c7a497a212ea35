"""Exemplars near a query, from Python: KATE (Liu et al. 2022) without a run, a task or a folder.

    selector = pgra.ExemplarSelector(pool, encoder="bundled:minilm-l6")
    selector.select("a query", k=8)             # the pool's own items, nearest first
    selector.prompt("a query", k=8)             # them and the query, as an LM reads them

It chooses as `pgra icl` does under the same names (`pgra.exemplars`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload

import numpy as np

from pgra.artifacts import at_home
from pgra.config import choose, find_class, from_values
from pgra.core import Example, Hit, check_device
from pgra.data.bundled import BUNDLED, bundled_task_files
from pgra.data.examples import class_names, find_classes, open_rows
from pgra.data.read import (
    Record,
    check_file,
    clean_text,
    read_label,
    read_lines,
    read_records,
    table_rows,
)
from pgra.data.tasks import GenerationTask, Task, check_slots, load_any_task
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError, DataError, show
from pgra.exemplars import BM25, SELECTORS, SelectionArguments
from pgra.exemplars.selection import ExemplarPool, Selector, arrange
from pgra.exemplars.similarity import open_similarity
from pgra.prompts.fewshot import FORMATS, PromptFormat, line_format, task_format
from pgra.prompts.template import PromptTemplate
from pgra.retrieval.neighbors import ExampleEncoder

# a text, or columns by name; the label of an item is ignored
Query = str | Mapping[str, Any] | Example
Pool = Iterable[Any] | str | Path
_KINDS = ("jsonl", "csv", "tsv", "txt")
_TEXT, _LABEL = "text", "label"


@dataclass(frozen=True)
class _Columns:
    """Text columns by input, in the order read; the label's; names of numbered classes."""

    texts: Mapping[str, str]
    label: str | None
    classes: Sequence[str] | None = None


class ExemplarSelector:
    """Chooses labelled examples for a prompt: the query's nearest in a pool, KATE.

    Vectors are computed on first use and kept in memory; nothing is written to disk.

    Attributes:
        items: The pool, as it was given and added to.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        text: str | Sequence[str] | None = None,
        label: str | None = None,
        encoder: Any = SelectionArguments.encoder,
        selection: str = SelectionArguments.exemplars,
        likeness: str = SelectionArguments.likeness,
        order: str = SelectionArguments.order,
        leak_guard: bool | float = True,
        template: str | None = None,
        task: str | Path | Task | GenerationTask | None = None,
        seed: int = 0,
        device: str = "auto",
        **options: Any,
    ) -> None:
        r"""Read the pool and load the encoder.

        Args:
            pool: Dicts, (text, label) pairs, texts or `pgra.Example`s, mixed if all have a label or
                none has; a `datasets.Dataset`; a pandas table; or a file (.jsonl, .csv, .tsv, .txt
                with a text a line, bundled:NAME). May be empty.
            text: Column that is compared, or several; default: "text", or the task's inputs.
            label: Column of the answer; default: "label", or the task's, if the items have it.
            encoder: Hub id, folder or bundled:NAME; a `SentenceTransformer`; a `pgra.Encoder`,
                whose vectors are used as they are; or "bm25", by shared words.
            selection: knn (the nearest), random, balanced, fixed, official, or module:Class;
                "bm25" is knn by shared words.
            likeness: Of vectors: cosine, dot or euclidean.
            order: Of a prompt: nearest-first (the paper's), nearest-last or random.
            leak_guard: Leave out examples whose text is the query's, or nearly: True for a share of
                common words of 0.9, or another share. Turn it off to show a known answer to the
                very question.
            template: How `prompt` writes an example: "Q: {question}\nA: {answer}", the columns in
                braces and the label last; default: a line for each, "Text: ..." "Label: ...".
            task: A task by name, YAML or loaded, whose columns, labels and prompt are used.
            seed: Of what is drawn, and of a random order.
            device: Where the encoder runs.
            options: Further arguments of `pgra icl`'s choice by name: farthest, redraw, pooling,
                prompt_format, ...

        Raises:
            ConfigError: If an argument is unknown or contradicts another.
            DataError: If the pool cannot be read, or an item lacks a column.
            ModelError: If the encoder cannot be found or loaded.
            ValueError: If the encoder is of a wrong type.
        """
        check_device(device, is_used=False)
        if template is not None and task is not None:
            raise ConfigError("template and task both say how a prompt is written: give one")
        if selection == BM25:
            selection, encoder = "knn", BM25
        find_class("selector", selection, SELECTORS)
        name = str(encoder) if isinstance(encoder, str | Path) else type(encoder).__name__
        loaded: ExampleEncoder | None = None
        if not isinstance(encoder, str | Path):
            is_ours = hasattr(encoder, "encode_examples")
            loaded = encoder if is_ours else Encoder.load(encoder, normalize=False, device=device)
        self._task = load_any_task(str(task)) if isinstance(task, str | Path) else task
        format_name = options.pop("prompt_format", None)
        if format_name is not None and not isinstance(self._task, Task):
            raise ConfigError("prompt_format is of a task with labels: give task, or leave it out")
        self._format_name = str(format_name or "task")
        choose("prompt_format", self._format_name, FORMATS)
        self._template = template
        told = {"exemplars": selection, "encoder": name, "likeness": likeness, "order": order}
        self._args = from_values(
            SelectionArguments, {**told, "exemplar_seed": seed, **options}, num_exemplars=1
        )
        if not isinstance(leak_guard, bool | int | float):
            raise ConfigError(f"leak_guard is {leak_guard!r}: give True, False or a share up to 1")
        if not isinstance(leak_guard, bool):
            self._args = replace(self._args, leak_jaccard=float(leak_guard))
        self._jaccard = self._args.leak_jaccard if leak_guard else None
        self._asked_text = (text,) if isinstance(text, str) else None if text is None else (*text,)
        self._asked_label = label
        self._columns: _Columns | None = None
        self._format: PromptFormat | None = None
        self.items: list[Any] = []
        self._examples: list[Example] = []
        self._similarity = (
            open_similarity(self._args, self._examples, None, device=device, encoder=loaded)
            if self._args.compares
            else None
        )
        if self._similarity is not None:
            self._similarity.load()
        self._pool = ExemplarPool(self._examples, self._jaccard)
        self._take(pool)

    def __len__(self) -> int:
        return len(self.items)

    def __repr__(self) -> str:
        by = f" by {self._args.encoder}" if self._similarity is not None else ""
        guard = "off" if self._jaccard is None else f"{self._jaccard:g}"
        return (
            f"ExemplarSelector({len(self)} items, {self._args.exemplars}{by}, leak guard {guard})"
        )

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
        queries = query if isinstance(query, list) else [query]
        asked = [self._query(each, n) for n, each in enumerate(queries)]
        found = [[self.items[hit.index] for hit in hits] for hits in self._choose(asked, k)]
        return found if isinstance(query, list) else found[0]

    def search(self, query: Query, k: int = 8) -> list[Hit]:
        """Return what `select` chooses, with its place in the pool and its similarity to the query.

        The score is NaN where nothing was compared. Arguments and errors are those of `select`.
        """
        return self._choose([self._query(query, 0)], k)[0]

    def prompt(self, query: Query, k: int = 8) -> str:
        """Return the few-shot prompt of a query: its exemplars in `order`, then itself, unanswered.

        The arguments are those of `select`; with `k` 0 it is the query alone.

        Raises:
            ConfigError: If template or task do not fit the pool.
            DataError: As `select`.
        """
        asked = self._query(query, 0)
        (hits,) = self._choose([asked], k)
        rows, seed = [hit.index for hit in hits], self._args.exemplar_seed or 0
        rows = arrange(rows, self._args.order, query=asked.text, seed=seed)
        style = self._format or self._find_format(tuple(asked.fields), None)
        told = style.write([self._examples[row] for row in rows], asked.fields)
        return told + style.template.gap.rstrip(" \t")

    def add(self, items: Any) -> None:
        """Add to the pool one dict, pair, text or `pgra.Example`, or several.

        Only the new items are encoded, on first use.

        Raises:
            DataError: If one cannot be read; then none is added.
        """
        is_pair = isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], str)
        is_one = is_pair or isinstance(items, str | Mapping | Example)
        self._take([items] if is_one else items)

    # What is chosen.

    def _choose(self, queries: Sequence[Example], k: int) -> list[list[Hit]]:
        if not isinstance(k, int | np.integer) or isinstance(k, bool) or k < 0:
            raise ValueError(f"k is {k!r}: give a whole number, 0 or more")
        count = min(int(k), len(self._pool.guard.distinct)) if self.items else 0
        if count == 0:
            return [[] for _ in queries]
        args = replace(self._args, num_exemplars=count)
        selector: Selector = args.selector(args, self._pool, self._similarity)
        chosen = selector.choose(queries)
        return [
            [
                Hit(row, float(score), self._examples[row].text)
                for row, score in zip(chosen.of(line), chosen.similarity[line], strict=False)
            ]
            for line in range(len(queries))
        ]

    # How items are read.

    def _take(self, pool: Any) -> None:
        items = _list_items(pool)
        if not items:
            return
        columns = self._with_classes(self._columns or self._find_columns(items[0], pool), pool)
        first = len(self.items)
        read = [
            self._read(item, columns, f"pool[{first + n}]", f"pool-{first + n}")
            for n, item in enumerate(items)
        ]
        if self._columns is None:
            self._format = self._find_format(tuple(columns.texts), columns.label)
            self._columns = columns
        self.items += items
        self._examples += read
        self._pool = ExemplarPool(self._examples, self._jaccard)
        if self._similarity is not None:
            self._similarity = self._similarity.renewed()

    def _find_columns(self, item: Any, pool: Any) -> _Columns:
        """Find the columns: those asked for, else the task's, else those of the first item."""
        task, asked = self._task, self._asked_text
        own = tuple(item.fields) if isinstance(item, Example) else (_TEXT,)
        inputs = task.inputs if task else asked or own
        columns = dict(zip(inputs, inputs, strict=True))
        usual = _LABEL
        if task is not None:
            usual = task.target
            if isinstance(item, Mapping):  # they may have the names of its hub's or its files
                is_set = hasattr(pool, "features") and hasattr(pool, "select")
                raw = open_rows(task, pool.select([0]) if is_set else [item], "pool")
                columns = {n: raw.columns[n] for n in inputs}
                usual = raw.columns[usual]
        if asked is not None:
            if len(asked) != len(inputs):
                raise ConfigError(
                    f"text names {', '.join(asked)}, and task '{task.name if task else ''}' reads "
                    f"{', '.join(inputs)}: name a column for each"
                )
            columns = dict(zip(inputs, asked, strict=True))
        if isinstance(item, Mapping):
            has_label = usual in item
        elif isinstance(item, Example):
            has_label = item.label is not None
        else:
            has_label = isinstance(item, list | tuple)
        label = self._asked_label or (usual if has_label else None)
        if label in columns.values():
            raise ConfigError(f"'{label}' is a text column and the label: name different ones")
        return _Columns(columns, label)

    def _with_classes(self, columns: _Columns, pool: Any) -> _Columns:
        """Add the names of a data set's classes."""
        if not hasattr(pool, "features") or columns.label is None:
            return columns
        if isinstance(self._task, Task):
            classes = find_classes(self._task, pool, columns.label)
        else:
            classes = class_names(pool, columns.label)
        return replace(columns, classes=classes)

    def _read(self, item: Any, columns: _Columns, place: str, name: str) -> Example:
        fields = _fields_of(item, columns.texts, place)
        if isinstance(item, Mapping):
            found = item.get(columns.label) if columns.label else None
            if columns.label is not None and columns.label not in item:
                raise Record(0, item, place).lacks(columns.label)
        elif isinstance(item, Example):
            found = item.label
        else:
            found = item[1] if isinstance(item, list | tuple) else None
        if columns.label is None:
            if found is not None:
                raise DataError(f"{place} has a label, and the items before it have none")
            return Example(name, fields)
        return Example(name, fields, self._label(found, columns, place))

    def _label(self, value: Any, columns: _Columns, place: str) -> str:
        """Return a label's name, of several answers the first."""
        column = str(columns.label)
        value = value[0] if isinstance(value, list | tuple) and value else value
        known = self._task.labels if isinstance(self._task, Task) else ()
        row = Record(0, {column: value}, place)
        return read_label(row, column, labels=known, classes=columns.classes)

    def _query(self, query: Any, number: int) -> Example:
        own = self._task.inputs if self._task else self._asked_text or (_TEXT,)
        texts = self._columns.texts if self._columns else dict(zip(own, own, strict=True))
        if isinstance(query, tuple):
            raise DataError(
                f"query is {show(query)}: give a text, or a mapping of the pool's columns"
            )
        fields = _fields_of(query, texts, "query")
        if not any(fields.values()):
            raise DataError("query is empty: give words to compare")
        return Example(f"query-{number}", fields)

    # How a prompt is written.

    def _find_format(self, inputs: tuple[str, ...], label: str | None) -> PromptFormat:
        """Return the task's format, the template's, or a line for each column."""
        if isinstance(self._task, Task):
            return task_format(self._task, self._format_name)
        if self._task is not None:
            return line_format(self._task.frame, self._task.inputs)
        template = self._template
        if template is None:
            names = [*inputs, *([label] if label else [])]
            words = [name.replace("_", " ").capitalize() for name in names]
            lines = [f"{word}: {{{name}}}" for word, name in zip(words, names, strict=True)]
            template = "\n".join(lines) if len(names) > 1 else f"{{{names[0]}}}"
        check_slots("template", template, [*inputs, *([label] if label else [])])
        head, slot, tail = template.partition(f"{{{label}}}") if label else (template, " ", "")
        if not slot:
            raise ConfigError(
                f"template does not show the answer: end it with {{{label}}}, as in "
                f"'{{{inputs[0]}}} -> {{{label}}}'"
            )
        if tail.strip():
            raise ConfigError(
                f"template goes on with {tail.strip()!r} after {{{label}}}, which the LM is to "
                "write: put it before"
            )
        body = head.rstrip()
        shown = PromptTemplate(body, "", inputs, instruction="", gap=head[len(body) :])
        return PromptFormat(shown, {})


def _list_items(pool: Any) -> list[Any]:
    if isinstance(pool, str | Path):
        return _file_items(str(pool))
    if isinstance(pool, Mapping):
        raise DataError(
            f"pool is a {type(pool).__name__} of {', '.join(map(str, pool))}: give a list of "
            "items, or one split, such as pool['train']"
        )
    if hasattr(pool, "iloc") and hasattr(pool, "to_dict"):  # pandas, whose iterator gives names
        rows: list[Any] = pool.to_dict("records")
        return rows
    if not isinstance(pool, Iterable):
        raise DataError(
            f"pool is a {type(pool).__name__}: give a list of dicts, (text, label) pairs or "
            "texts, a datasets.Dataset, or a file"
        )
    return list(pool)


def _file_items(name: str) -> list[Any]:
    """Return a file's rows: dicts, or texts of a .txt."""
    if name.startswith(BUNDLED):
        path = bundled_task_files(name.removeprefix(BUNDLED))["train"]
    else:
        path = at_home(name)
    kind = check_file(path, _KINDS)
    if kind == "txt":
        return [text for line in read_lines(path) if (text := line.text.strip())]
    rows = read_records(path) if kind == "jsonl" else table_rows(path, kind, ())
    return [dict(row.fields) for row in rows]


def _fields_of(item: Any, texts: Mapping[str, str], place: str) -> dict[str, str]:
    """Return an item's texts by input; its label is not read."""
    if isinstance(item, Example):
        row = Record(0, item.fields, place)
        return {name: row.text(name) for name in texts}
    if isinstance(item, Mapping):
        row = Record(0, item, place)
        is_named = any(column in item for column in texts.values())  # else as the task names them
        return {name: row.text(column if is_named else name) for name, column in texts.items()}
    if isinstance(item, list | tuple):
        if len(item) != 2:
            raise DataError(f"{place} has {len(item)} parts: give a (text, label) pair")
        item = item[0]
    if not isinstance(item, str):
        raise DataError(
            f"{place} is a {type(item).__name__}: give a text, a (text, label) pair, a dict or a "
            "pgra.Example"
        )
    (name, *others) = texts
    if others:
        raise DataError(f"{place} is one text, and {', '.join(texts)} are asked for: give a dict")
    return {name: clean_text(place, name, item)}
