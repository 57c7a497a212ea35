"""The papers' own tables (`configs/reference/`), to print beside ours."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pgra.config import config_root, read_yaml
from pgra.errors import ConfigError, unknown_name
from pgra.evaluation.runs import Run
from pgra.types import Json

AVERAGE = "average"
METRIC = "metric"
_INDEX = ("same_as", "notes")
_PAPERS = ("pgra", "kate")


@dataclass(frozen=True)
class Note:
    """What a reader of a table must know.

    Attributes:
        text: In a sentence or two.
        task: It concerns this task only; None for all.
    """

    text: str
    task: str | None = None


@dataclass(frozen=True)
class ReferenceTable:
    """One table of the paper.

    Attributes:
        name: Such as "T2a".
        title: What it is, and under which setting.
        columns: Tasks, and "average" where it is printed.
        rows: Values as printed (in hundredths), by row, in the columns' order.
        match: Of a row, which run it stands beside: values by argument, and "system".
        notes: Artefacts and settings.
        measure: What the values are: "metric", or another word where they are not the tasks'
            metrics.
    """

    name: str
    title: str
    columns: Sequence[str]
    rows: Mapping[str, Sequence[float]]
    match: Mapping[str, Mapping[str, Json]]
    notes: Sequence[Note]
    measure: str = METRIC

    def value(self, row: str, column: str) -> float | None:
        """Give a printed value; None where the paper has none."""
        if column not in self.columns:
            return None
        return self.rows[row][self.columns.index(column)]

    def average(self, row: str, tasks: Sequence[str]) -> float | None:
        """Give the mean over some tasks: as printed for all of the table's, else of its cells.

        Args:
            row: Of the table.
            tasks: Which; None is given if the paper lacks one of them.
        """
        own = {column for column in self.columns if column != AVERAGE}
        if set(tasks) == own and AVERAGE in self.columns:
            return self.value(row, AVERAGE)
        if not tasks or not own.issuperset(tasks):
            return None
        return sum(self.value(row, task) or 0.0 for task in tasks) / len(tasks)

    def find_row(self, run: Run) -> str | None:
        """Give the row that stands beside a run: all its names match, and it has most of them."""
        # What decided is told by the run: `--num_evidence 0` is plain, whatever --system says.
        return self.find_row_of({**_settings(run), "system": run.system})

    def find_row_of(self, known: Mapping[str, Any]) -> str | None:
        """Give the row that stands beside a run with these arguments and this "system"."""
        fits = [
            (len(wanted), row)
            for row, wanted in self.match.items()
            if all(name in known and known[name] == value for name, value in wanted.items())
        ]
        return max(fits, key=lambda fit: fit[0])[1] if fits else None

    def told_of(self, tasks: Sequence[str]) -> list[str]:
        """Give the notes that concern some tasks."""
        return [note.text for note in self.notes if note.task is None or note.task in tasks]


def _settings(run: Run) -> dict[str, Any]:
    sections = [values for values in run.arguments.values() if isinstance(values, Mapping)]
    return {name: value for section in sections for name, value in section.items()}


@cache
def load_references() -> Mapping[str, ReferenceTable]:
    """Read all tables, by name; a figure that shows a table's values is another name of it.

    Raises:
        ConfigError: If the YAML is damaged.
    """
    tables: dict[str, ReferenceTable] = {}
    for paper in _PAPERS:
        tables |= _read_paper(config_root() / "reference" / f"{paper}.yaml")
    return tables


def _read_paper(path: Path) -> dict[str, ReferenceTable]:
    values = read_yaml(path)
    try:
        notes = {name: Note(**note) for name, note in values["notes"].items()}
        tables = {
            name: _read_table(name, table, notes)
            for name, table in values.items()
            if name not in _INDEX
        }
        aliases = {name: tables[other] for name, other in values["same_as"].items()}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} is damaged ({error}): restore it") from None
    return {**tables, **aliases}


def load_reference(name: str) -> ReferenceTable:
    """Read one of the papers' tables.

    Raises:
        ConfigError: If there is none of this name.
    """
    tables = load_references()
    if name not in tables:
        raise ConfigError(unknown_name("reference", name, tables))
    return tables[name]


def _read_table(name: str, values: Mapping[str, Any], notes: Mapping[str, Note]) -> ReferenceTable:
    columns = list(values["columns"])
    rows = {str(row): [float(cell) for cell in cells] for row, cells in values["rows"].items()}
    for row, cells in rows.items():
        if len(cells) != len(columns):
            raise ValueError(f"{name}, row {row}: {len(cells)} values, {len(columns)} columns")
    match = dict(values.get("match", {}))
    if not match.keys() <= rows.keys():
        raise ValueError(f"{name} matches rows it does not have")
    return ReferenceTable(
        name,
        str(values["title"]),
        columns,
        rows,
        match,
        [notes[note] for note in values.get("notes", ())],
        str(values.get("measure", METRIC)),
    )
