"""What passes between stages, and what a user gives from Python.

Axes: B queries, K candidates a query.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeGuard

import numpy as np
from numpy.typing import ArrayLike

from pgra.arrays import Rows, Scores, Values
from pgra.errors import DataError, show

Json = object  # anything that `json.dumps` takes; mypy has no finite JSON type
Fields = Mapping[str, Json]  # of a fingerprint or a record
MISSING_ROW = -1
_ROUNDING = 1e-6  # of a query's largest score: less spread than this is float32's own
UNDECIDED = "(no label)"  # an LM that writes freely wrote no label's word: always wrong


@dataclass(frozen=True)
class Example:
    """One query of a task.

    Attributes:
        id: Unique within its split, such as "test-17".
        fields: The task's inputs by name.
        label: Its name; None where it is unknown.
    """

    id: str
    fields: Mapping[str, str]
    label: str | None = None

    @property
    def text(self) -> str:
        """All inputs as one text, in the task's order: what the first stage searches with."""
        return " ".join(self.fields.values())


@dataclass(frozen=True)
class Candidates:
    """What a retriever or reranker returns: corpus rows, best first.

    Attributes:
        rows: (B, K) int64, ties by row, `MISSING_ROW` where there are fewer than K.
        scores: (B, K) float32, higher is better, -inf where a row is missing.
    """

    rows: Rows
    scores: Scores

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or self.rows.shape != self.scores.shape:
            raise ValueError(f"rows are {self.rows.shape}, scores are {self.scores.shape}")

    @classmethod
    def best(cls, rows: Rows, scores: Scores, k: int) -> Self:
        """Sort each query's rows best first (ties by row, missing last), and keep the first k.

        `rows` and `scores` are (B, K') in any order; where K' < k, missing rows are added.

        Raises:
            ValueError: If the score of a row is NaN.
        """
        rows = np.asarray(rows, dtype=np.int64)
        scores = np.asarray(scores, dtype=np.float32)
        scores = np.where(rows == MISSING_ROW, np.float32(-np.inf), scores)
        if np.isnan(scores).any():
            raise ValueError("a score is NaN")
        last = np.iinfo(np.int64).max
        order = np.lexsort((np.where(rows == MISSING_ROW, last, rows), -scores), axis=-1)[:, :k]
        best = cls.missing(len(rows), k)
        best.rows[:, : order.shape[1]] = np.take_along_axis(rows, order, 1)
        best.scores[:, : order.shape[1]] = np.take_along_axis(scores, order, 1)
        return best

    @classmethod
    def missing(cls, num_queries: int, k: int) -> Self:
        """Return only missing rows, (B, k), to be filled line by line."""
        shape = (num_queries, k)
        return cls(np.full(shape, MISSING_ROW), np.full(shape, -np.inf, dtype=np.float32))

    def fill(self, line: int, rows: ArrayLike, scores: ArrayLike) -> None:
        """Put the best of a query's rows, (K'), into its line; see `best`."""
        best = self.best(np.array([rows]), np.array([scores]), self.rows.shape[1])
        self.rows[line] = best.rows
        self.scores[line] = best.scores

    def top(self, n: int) -> "Candidates":
        """Keep each query's first n."""
        return Candidates(self.rows[:, :n], self.scores[:, :n])

    def standardized(self) -> Values:
        """Return z-scores (B, K): each query's less their mean, over their standard deviation.

        They are 0 where a row is missing, or all scores are equal.
        """
        present = self.rows != MISSING_ROW
        values = np.where(present, self.scores, 0).astype(np.float64)
        count = np.maximum(1, present.sum(axis=1, keepdims=True))
        off = np.where(present, values - values.sum(axis=1, keepdims=True) / count, 0)
        spread = np.sqrt((off**2).sum(axis=1, keepdims=True) / count)
        varies = spread > _ROUNDING * np.abs(values).max(axis=1, initial=0, keepdims=True)
        standard: Values = off / np.where(varies, spread, 1) * varies
        return standard

    def __len__(self) -> int:
        return len(self.rows)


@dataclass(frozen=True)
class Hit:
    """A text that was found or ranked.

    Attributes:
        index: Its place among the given texts, from 0.
        score: Higher is better.
    """

    index: int
    score: float
    text: str


@dataclass(frozen=True)
class Prediction:
    """A decision on one example.

    Attributes:
        label: The one with the highest score, ties by the task's order of labels; or `UNDECIDED`.
        scores: Probability by label; they sum to 1, or are all 0 where nothing was decided.
    """

    example_id: str
    label: str
    scores: Mapping[str, float]


# A text of a task's first input, or each input by name.
Query = str | Mapping[str, Any] | Example


def is_query(queries: Any) -> TypeGuard[Query]:
    """Whether this is a single query, not several."""
    return isinstance(queries, str | Mapping | Example)


def as_list(name: str, values: Any, wanted: str = "a list") -> list[Any]:
    """Return several things as a list, a pandas table's rows as mappings.

    Raises:
        DataError: If it is one text, a mapping, or nothing that iterates.
    """
    if hasattr(values, "iloc") and hasattr(values, "columns"):  # it would iterate over its names
        values = values.to_dict("records")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise DataError(f"{name} is {show(values)}: give {wanted}")
    return list(values)


def as_texts(name: str, values: Any) -> list[str]:
    """Return texts as a list; a DataError if it is not a list, or as of `as_text`."""
    texts = as_list(name, values, "a list of texts")
    if texts and isinstance(texts[0], Mapping):
        raise DataError(f"{name} holds rows, {show(texts[0])}: give the texts of one column")
    return [as_text(f"{name}[{number}]", text) for number, text in enumerate(texts)]


def as_text(name: str, text: Any) -> str:
    """Return a text as it is, blank or not; a DataError if it cannot be kept as UTF-8."""
    if not isinstance(text, str):
        raise DataError(f"{name} is {show(text)}, not text")
    if not is_utf8(text):
        raise DataError(f"{name} holds a NUL or half a surrogate pair: {show(text)}")
    return text


def is_utf8(text: str) -> bool:
    """Whether a text can be kept as UTF-8: it holds no NUL and no half surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def as_query(name: str, text: Any) -> str:
    """Return a query's text, stripped; a DataError if it is blank or not text."""
    stripped = as_text(name, text).strip()
    if not stripped:
        raise DataError(f"{name} is blank: give words to read")
    return stripped


def read_queries(
    queries: Any, inputs: Sequence[str], columns: Mapping[str, str] | None = None
) -> list[Example]:
    """Return a query, or each of several, as the inputs of a task, stripped.

    A text is the first input, and others are blank, as of a passage. `columns` are other keys of a
    mapping by input; what is neither is ignored.

    Raises:
        DataError: If a query lacks an input, is blank, or holds something that is not text.
    """
    listed = [queries] if is_query(queries) else as_list("queries", queries, "a text, or a list")
    examples = []
    for number, query in enumerate(listed):
        name = f"query {number}"
        fields = query.fields if isinstance(query, Example) else query
        if isinstance(query, Mapping) and columns:
            renamed = {name: query[key] for name, key in columns.items() if key in query}
            fields = {**query, **renamed}
        if isinstance(query, str):
            fields = {**dict.fromkeys(inputs, ""), inputs[0]: query}
        if not isinstance(fields, Mapping) or not {*inputs} <= {*fields}:
            raise DataError(f"{name} is {show(query)}: give a text for each of {', '.join(inputs)}")
        texts = {field: as_text(f"{name}, '{field}',", fields[field]).strip() for field in inputs}
        as_query(name, "".join(texts.values()))
        examples.append(Example(f"query-{number}", texts))
    return examples


def check_count(name: str, value: Any) -> None:
    """Raise a ValueError if a value is not a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise ValueError(f"{name} is {value!r}: give a whole number from 1 on")
