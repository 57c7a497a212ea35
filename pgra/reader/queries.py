"""Queries as people give them, checked against what a task takes."""

from collections.abc import Mapping, Sequence

from pgra.data.textfile import is_utf8
from pgra.errors import ConfigError, unknown_name
from pgra.types import Example

Query = str | Mapping[str, str]
"""A text (of the task's first input), or a text for each of the task's inputs."""


def read_queries(queries: Sequence[Query], *, task: str, inputs: Sequence[str]) -> list[Example]:
    """Give queries a task's fields.

    Args:
        queries: As they were given.
        task: The task's name, for messages.
        inputs: Its inputs, in order.

    Raises:
        ConfigError: If one is not what the task takes.
    """
    if isinstance(queries, str | Mapping):
        raise ConfigError("queries is a single query: give a list of them, such as ['a text']")
    return [
        Example(f"query-{number}", _read_fields(query, task, inputs, where=f"query {number}"))
        for number, query in enumerate(queries)
    ]


def _read_fields(query: Query, task: str, inputs: Sequence[str], *, where: str) -> dict[str, str]:
    if isinstance(query, str):
        query = {name: query if place == 0 else "" for place, name in enumerate(inputs)}
    if not isinstance(query, Mapping):
        raise ConfigError(f"{where} is a {type(query).__name__}: give a text or a mapping")
    lacking = [name for name in inputs if name not in query]
    if lacking:
        raise ConfigError(f"{where} has no '{lacking[0]}': task '{task}' needs it")
    for name, text in query.items():
        if name not in inputs:
            raise ConfigError(f"{where}: {unknown_name('input', str(name), inputs)}")
        if not isinstance(text, str) or not is_utf8(text):
            raise ConfigError(f"{where}: '{name}' is {text!a}, not clean text")
    fields = {name: query[name].strip() for name in inputs}
    if not any(fields.values()):
        raise ConfigError(f"{where} is empty: give words to read")
    return fields
