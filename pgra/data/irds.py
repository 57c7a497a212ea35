"""Data sets of `ir_datasets`, named irds:NAME: documents, queries and judgements.

Its library (the extra `trec`) downloads and parses them: https://ir-datasets.com.
"""

from collections.abc import Iterator
from typing import Any

from pgra.data.read import Record
from pgra.errors import DataError, reading, show, unknown_name

IRDS = "irds:"


def find_irds(name: str, part: str) -> Any:
    """Return the data set irds:NAME, which has the part "docs", "queries" or "qrels".

    Raises:
        DataError: If there is no such set, or it lacks the part.
    """
    import ir_datasets

    key = name.removeprefix(IRDS)
    registry = ir_datasets.registry
    try:
        data_set = registry[key]
    except KeyError:
        raise DataError(unknown_name("data set of ir_datasets", key, registry)) from None
    if not data_set.has(part):
        subsets = [n for n in registry if n.startswith(f"{key}/") and registry[n].has(part)]
        raise DataError(f"'{name}' has no {part}; its subsets that have: {show(subsets)}")
    return data_set


def read_irds(name: str, part: str) -> Iterator[Any]:
    """Yield the entries of a part, named tuples of the library's.

    Raises:
        DataError: As `find_irds`, or if it cannot be downloaded or read.
    """
    data_set = find_irds(name, part)
    with reading(name):
        yield from getattr(data_set, f"{part}_iter")()


def irds_records(name: str, part: str) -> Iterator[Record]:
    """Yield documents or queries by their fields, and `id` and `text`: the default text.

    Those without a default text have only the `text` that may be among their fields. Raises as
    `read_irds`.
    """
    for entry in read_irds(name, part):
        fields = {**entry._asdict(), "id": entry[0]}
        if hasattr(entry, "default_text"):
            fields["text"] = entry.default_text()
        yield Record(fields, f"{name}, '{entry[0]}'")
