"""Runs as one table or figure, with intervals, tests and the paper's values: `pgra report`."""

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import say
from pgra.config import choose, parse_arguments
from pgra.errors import ConfigError, unknown_name

if TYPE_CHECKING:
    from pgra.report.compare import ReferenceTable, Study
    from pgra.report.results import Group

EXAMPLE = """examples:
  pgra report runs/
  pgra report runs/sst2-fid runs/sst2-pgra --baseline fid --reference T2a
  pgra report runs/k --output k.tex --figure k.svg
  pgra report runs/ --output all.csv
  pgra report runs/ --html report.html

A path is a run, a folder of runs, a folder of several seeds, or a grid of pgra ablate; paths stand
first. A grid has a table of its own and names the paper's table by itself. Bold, or with a star, is
what beats the baseline by more than noise.
"""
logger = logging.getLogger(__name__)
_FORMAT_OF = {".md": "markdown", ".tex": "latex", ".csv": "csv", ".txt": "text"}
_FORMATS = tuple(_FORMAT_OF.values())
_NO_REFERENCE = "none"


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class ReportArguments:
    """Which runs, against what, and how it is told."""

    paths: list[str] = field(
        default_factory=list,
        metadata={"help": "Runs, folders of runs, grids; they may also stand first, bare."},
    )
    baseline: str | None = _arg(
        None, "Row to compare with; default: the grid's, else fid, else plain."
    )
    reference: str | None = _arg(
        None, "The paper's table, such as T2a, T6, T11 or AppF; none; default: the grid's."
    )
    format: str | None = _arg(
        None, "text, markdown, latex or csv (all numbers); default: by the name of --output."
    )
    output: str | None = _arg(None, "File to write (.txt, .md, .tex, .csv); default: show it.")
    figure: str | None = _arg(None, "Draw it too: a file that ends in .png, .svg or .pdf.")
    html: str | None = _arg(
        None,
        "Write a page to look through too: tables, plots, and every example with what each run "
        "read and said. One file that ends in .html and asks for nothing else.",
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if not self.paths:
            raise ConfigError("no runs are named: pgra report RUN_OR_FOLDER ...")
        if self.format is not None:
            choose("format", self.format, _FORMATS)
        elif self.output is not None and Path(self.output).suffix.lower() not in _FORMAT_OF:
            raise ConfigError(
                f"output is '{self.output}': end its name in {', '.join(_FORMAT_OF)}, or give "
                "--format"
            )

    @property
    def chosen_format(self) -> str:
        """Give the format: as asked for, else by the file's name, else for a terminal."""
        suffix = Path(self.output or "report.txt").suffix.lower()
        return self.format or _FORMAT_OF[suffix]


def main(argv: Sequence[str] | None = None) -> int:
    """Compare runs and tell it."""
    (args,) = parse_arguments(
        [ReportArguments],
        _name_leading_paths(argv),
        prog="pgra report",
        description="Put finished runs into one table, with tests and the paper's values.",
        epilog=EXAMPLE,
    )
    from pgra.report.results import load_collection

    _check_early(args)
    collection = load_collection([Path(path) for path in args.paths])
    for folder in collection.unfinished:
        logger.warning("report: %s is not measured (yet), and left out", folder)
    compared = _compare(collection.groups, args)
    if args.html is not None:
        _check_page(compared)
    text = _write(compared, args.chosen_format)
    if args.figure is not None:
        _draw(compared, Path(args.figure))
    if args.html is not None:
        _write_page(compared, Path(args.html))
    if args.output is None:
        say(text)
    else:
        _save(Path(args.output), text)
    return 0


def _name_leading_paths(argv: Sequence[str] | None) -> list[str]:
    words = list(sys.argv[1:] if argv is None else argv)
    return ["--paths", *words] if words and not words[0].startswith("-") else words


def _check_early(args: ReportArguments) -> None:
    """Refuse what can be refused before anything is read."""
    from pgra.report.compare import load_reference
    from pgra.report.page import check_figure_path, check_page_path

    if args.figure is not None:
        check_figure_path(Path(args.figure))
    if args.html is not None:
        check_page_path(Path(args.html))
    if args.reference not in (None, _NO_REFERENCE):
        load_reference(args.reference)


@dataclass(frozen=True)
class _Compared:
    study: "Study"
    reference: "ReferenceTable | None"


def _compare(groups: "Sequence[Group]", args: ReportArguments) -> list[_Compared]:
    """Compare the runs of each group that has any; the baseline must be a row of one at least."""
    from pgra.report.compare import compare_runs
    from pgra.report.results import row_names

    rows: dict[str, None] = {}
    compared = []
    for group in groups:
        if not group.runs:
            logger.warning("report: '%s' has no finished run yet", group.title)
            continue
        names = {**dict.fromkeys(row_names(group)), **dict.fromkeys(group.points)}
        rows.update(names)
        asked = args.baseline if args.baseline in names else None
        study = compare_runs(group, baseline=asked)
        compared.append(_Compared(study, _find_reference(group, args.reference)))
    if args.baseline is not None and args.baseline not in rows:
        raise ConfigError(unknown_name("baseline", args.baseline, rows))
    return compared


def _find_reference(group: "Group", asked: str | None) -> "ReferenceTable | None":
    """Give the table asked for, else the grid's if it holds results of tasks."""
    from pgra.report.compare import METRIC, load_reference

    if asked is not None:
        return None if asked == _NO_REFERENCE else load_reference(asked)
    if group.reference is None:
        return None
    table = load_reference(group.reference)
    return table if table.measure == METRIC else None


def _write(compared: Sequence[_Compared], kind: str) -> str:
    from pgra.report.compare import long_table, summarise
    from pgra.report.tables import FORMATS

    if kind == "csv":
        tables = [long_table(each.study, each.reference) for each in compared]
        return replace(tables[0], rows=[row for table in tables for row in table.rows]).to_csv()
    tables = [table for each in compared for table in summarise(each.study, each.reference)]
    return "\n\n".join(FORMATS[kind](table) for table in tables)


def _draw(compared: Sequence[_Compared], path: Path) -> None:
    from pgra.report.page import plot_study

    if len(compared) > 1:
        titles = ", ".join(f"'{each.study.group.title}'" for each in compared)
        raise ConfigError(f"--figure draws one table, and there are {titles}: name fewer paths")
    plot_study(compared[0].study, path, compared[0].reference)
    logger.info("report: %s", path)


def _check_page(compared: Sequence[_Compared]) -> None:
    """Refuse what the page cannot show: it sorts examples into right and wrong."""
    for run in (run for each in compared for run in each.study.group.runs):
        if run.each is not None:
            raise ConfigError(
                f"--html shows which examples are right, and {run.task} of {run.folder} is a "
                "measure of texts that are neither: leave --html out, or that run"
            )


def _write_page(compared: Sequence[_Compared], path: Path) -> None:
    from pgra.report.page import write_page

    title = compared[0].study.group.title if len(compared) == 1 else "Results"
    write_page(path, title, [(each.study, each.reference) for each in compared])
    logger.info("report: %s", path)


def _save(path: Path, text: str) -> None:
    from pgra.artifacts import write_text

    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text + "\n")
    logger.info("report: %s", path)
