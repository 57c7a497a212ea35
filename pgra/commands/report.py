"""Runs as tables, figures and a page, and their evidence's labels, for `pgra worth RUNS`."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.artifacts import write_text
from pgra.commands.common import about, name_leading, quiet_libraries, say
from pgra.config import Arguments, arg, choose, parse_arguments
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.report.compare import Study
    from pgra.report.results import Group, Trial
    from pgra.report.tables import Sample

logger = logging.getLogger(__name__)
_PAGE_SAMPLES = 100  # queries of a task that a page shows
_FIGURES = (".pdf", ".png", ".svg")


@dataclass(kw_only=True)
class ReportArguments(Arguments):
    """Which runs, against what, and how it is shown."""

    paths: list[str] = arg(
        [],
        "Runs, folders of runs, grids, samples of lm-evaluation-harness (--log_samples); they may "
        "also stand first, bare.",
        must_be_given=True,
    )
    baseline: str | None = arg(
        None, "Row to compare with; default: the grid's, else fid, else plain."
    )
    reference: str | None = arg(
        None, "The paper's table, such as T2a, T6, T11 or AppF; default: the grid's."
    )
    output: list[str] = arg(
        [],
        "Files: tables (.txt, .md, .csv), a table's figure (.png, .svg, .pdf) or a page (.html).",
    )
    samples: int | None = arg(
        None,
        "Show this many queries with what each run read and said; those that differ come first.",
        least=1,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Put finished runs into one table, with tests and the paper's values.

    Examples:
      pgra report runs/
      pgra report runs/sst2-fid runs/sst2-pgra --baseline fid --reference T2a
      pgra report runs/k --output k.md k.svg
      pgra report runs/ --output all.csv
      pgra report runs/ --output report.html
      pgra report runs/icl-knn runs/icl-random --samples 3

    A path is a run, a folder of runs, a folder of several seeds, or a grid of pgra ablate; paths
    stand first. A grid has a table of its own and names the paper's table by itself. Bold, or with
    a star, is what beats the baseline by more than noise.
    """
    words = name_leading("--paths", argv)
    (args,) = parse_arguments([ReportArguments], words, prog="pgra report", **about(main))
    from pgra.report.results import load_collection
    from pgra.report.tables import TABLE_FORMATS, draw_study, save_figure

    groups = load_collection([Path(path) for path in args.paths])
    if args.samples is not None:
        if args.output:
            raise ConfigError("samples are shown, not written: leave out --samples or --output")
        say("\n\n".join(map(str, find_samples(groups, args.samples))))
        return 0
    for name in args.output:  # before anything is written
        choose("ending of --output", Path(name).suffix, (".html", *TABLE_FORMATS, *_FIGURES))
    studies = _compare(groups, args)
    for path in map(Path, args.output):
        if path.suffix == ".html":
            write_page(path, studies)
        elif path.suffix in TABLE_FORMATS:
            write_text(path, _tell(studies, path.suffix) + "\n")
        elif len(studies) > 1:
            named = ", ".join(f"'{study.group.title}'" for study in studies)
            raise ConfigError(f"a figure is of one table, and there are {named}: name fewer paths")
        else:
            save_figure(draw_study(studies[0]), path)
        logger.info("report: %s", path)
    if not args.output:
        say(_tell(studies, ".txt"))
    return 0


def write_page(
    path: Path, studies: "Sequence[Study]", *, title: str | None = None, lead: str = ""
) -> None:
    """Write the HTML page of some studies, with examples of what their runs read and said."""
    from pgra.report.tables import render_page

    title = title or ", ".join(study.group.title for study in studies)
    samples = find_samples([study.group for study in studies], _PAGE_SAMPLES)
    write_text(path, render_page(title, studies, samples, lead=lead))


def _tell(studies: "Sequence[Study]", kind: str) -> str:
    """Write the studies' tables in one of `TABLE_FORMATS`; as CSV they are one."""
    from pgra.report.tables import TABLE_FORMATS, detail_table, long_table, results_table

    tables = [table for study in studies for table in (results_table(study), detail_table(study))]
    if kind == ".csv":
        tables = [long_table(study) for study in studies]
        tables = [replace(tables[0], rows=[row for table in tables for row in table.rows])]
    return "\n\n".join(TABLE_FORMATS[kind](table) for table in tables)


def find_samples(groups: "Sequence[Group]", count: int) -> "list[Sample]":
    """Return queries, with what each run read and answered, as KATE's tables 5, 7 and 10 do.

    They are `count` of each task, those on which its runs differ first.

    Raises:
        DataError: If a pool that exemplars were chosen from is gone.
    """
    from pgra.report.tables import RunAnswer, Sample

    folders: dict[str, dict[Path, Trial]] = {}
    for run in (run for group in groups for run in group.runs):
        # The metric of written answers follows the task's name, a run for each.
        folders.setdefault(run.task.partition(" ")[0], {}).setdefault(run.folder, run)
    shown = []
    for task, runs in folders.items():
        lines = [{line["id"]: line for line in run.predictions} for run in runs.values()]
        shared = [name for name in lines[0] if all(name in each for each in lines)]
        shared.sort(key=lambda name: len({each[name]["prediction"] for each in lines}) == 1)
        pools = [_pool_texts(run) for run in runs.values()]
        for name in shared[:count]:
            first = lines[0][name]
            right = " | ".join(first.get("answers") or [str(first["label"])])
            answers = []
            for run, by_id, pool in zip(runs.values(), lines, pools, strict=True):
                line = by_id[name]
                is_label = None if "answers" in line else line["prediction"] == line["label"]
                is_right = line.get("is_right", is_label)
                who = f"{run.name}, seed {run.seed}"
                answers.append(
                    RunAnswer(who, line["prediction"], is_right, _read_before(line, pool))
                )
            shown.append(Sample(task, f"{name}: {_one_line(first['text'])}", right, answers))
    return shown


def _pool_texts(run: "Trial") -> Mapping[str, str]:
    """Return label and text of a run's exemplars by id; nothing where it has none."""
    if not any(line.get("exemplars") for line in run.predictions):
        return {}
    from pgra.methods.base import TaskData
    from pgra.runs import read_arguments

    pool = TaskData.read(read_arguments(run.folder, {}), is_trained=False).train
    return {one.id: f"{one.label}: {_one_line(one.text)}" for one in pool}


def _read_before(line: Mapping[str, Any], pool: Mapping[str, str]) -> list[str]:
    """Return a query's exemplars in the prompt's order, or its evidence, best first."""
    found = [
        (one["similarity"], pool.get(one["id"], one["id"])) for one in line.get("exemplars", [])
    ] or [(one["score"], _one_line(one["text"])) for one in line["evidence"]]
    return [f"{'' if score is None else f'{score:.3f}'!s:>7}  {text}" for score, text in found]


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _compare(groups: "Sequence[Group]", args: ReportArguments) -> "list[Study]":
    """Compare the runs of each group that has any."""
    from pgra.report.compare import compare_runs, load_reference

    studies = []
    for group in groups:
        if group.runs:
            name = args.reference or group.reference
            reference = None if name is None else load_reference(name)
            studies.append(compare_runs(group, baseline=args.baseline, reference=reference))
    return studies


@dataclass(kw_only=True)
class ConsistencyArguments(Arguments):
    """Whose evidence, and who labels it."""

    runs: list[str] = arg(
        [], "Finished runs, folders of them, or a grid of pgra ablate.", must_be_given=True
    )
    labeler: list[str] = arg([], "Plain runs, one for each task; default: those among --runs.")
    output_dir: str = arg("", "Where labels, tables and plots go.", must_be_given=True)
    plots: bool = arg(True, "Draw them too.", off="Tables only.")
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")


def consistency(argv: Sequence[str] | None = None) -> int:
    """Measure how often evidence has the label of its query.

    Examples:
      pgra train --task sst2 --method plain --output_dir runs/plain
      pgra train --task sst2 --method fid --output_dir runs/fid
      pgra train --task sst2 --output_dir runs/pgra
      pgra worth runs/pgra runs/fid --labeler runs/plain --output_dir runs/consistency
      pgra worth runs/ablate-opt_size --output_dir runs/consistency

    The plain reader gives each evidence text its pseudo-label; evidence is consistent with a query
    whose label that is: the paper's Table 10 and Figures 2 and 4.
    """
    words = name_leading("--runs", argv)
    (args,) = parse_arguments(
        [ConsistencyArguments], words, prog="pgra worth RUNS", **about(consistency)
    )
    quiet_libraries()
    from pgra.experiments.consistency import TABLES_FILE, report_consistency

    folder = Path(args.output_dir)
    report_consistency(
        [Path(name) for name in args.runs],
        folder,
        labelers=[Path(name) for name in args.labeler],
        device=args.device,
        plots=args.plots,
    )
    say((folder / TABLES_FILE).read_text(encoding="utf-8"))
    return 0
