"""Shows finished runs: tables, a figure, a page, and examples."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.artifacts import write_text
from pgra.commands.common import name_leading, parse, say
from pgra.config import Arguments, arg, choose
from pgra.errors import ConfigError, one_line, reading
from pgra.run_folder import read_object

if TYPE_CHECKING:
    from pgra.report.compare import Study
    from pgra.report.results import FinishedRun, Group
    from pgra.report.tables import Sample, Table

logger = logging.getLogger(__name__)
_PAGE_SAMPLES = 100  # queries of a task that a page shows
_FIGURES = (".pdf", ".png", ".svg")


@dataclass(kw_only=True)
class ReportArguments(Arguments):
    """Which runs, against what, and how it is shown."""

    paths: list[str] = arg(
        [],
        "Runs, folders of runs, grids, the JSON of pgra worth; they may also stand first, bare.",
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
        "Show this many queries with what each run read and answered; differing ones first.",
        least=1,
    )


def main(argv: Sequence[str]) -> int:
    """Put finished runs into one table, with tests and the paper's values.

    Examples:
      pgra report runs/
      pgra report runs/sst2-fid runs/sst2-pgra --baseline fid --reference T2a
      pgra report runs/k --output k.md k.svg
      pgra report runs/ --output all.csv
      pgra report runs/ --output report.html
      pgra report runs/icl-knn runs/icl-random --samples 3
      pgra report worth.json --output worth.html

    A path is a run, a folder of runs, a folder of several seeds, or a grid of pgra ablate; paths
    stand first. A grid has a table of its own and names the paper's table by itself. Bold, or with
    a star, is what beats the baseline by more than noise.
    """
    (args,) = parse(main, [ReportArguments], name_leading("--paths", argv))
    from pgra.report.compare import compare_runs, load_reference
    from pgra.report.results import load_collection
    from pgra.report.tables import TABLE_FORMATS, draw_study, save_figure, worth_table

    files = [path for path in args.paths if path.endswith(".json")]
    worths = []
    for file in files:
        with reading(Path(file)):
            worths.append(worth_table(read_object(Path(file))))
    folders = [Path(path) for path in args.paths if path not in files]
    groups = load_collection(folders) if folders else []
    if args.samples is not None:
        if args.output:
            raise ConfigError("samples are shown, not written: leave out --samples or --output")
        say("\n\n".join(map(str, find_samples(groups, args.samples))))
        return 0
    for name in args.output:  # before anything is written
        choose("ending of --output", Path(name).suffix, (".html", *TABLE_FORMATS, *_FIGURES))
    studies = []
    for group in groups:
        name = args.reference or group.reference
        reference = None if name is None else load_reference(name)
        studies.append(compare_runs(group, baseline=args.baseline, reference=reference))
    for path in map(Path, args.output):
        if path.suffix == ".html":
            write_page(path, studies, tables=worths)
        elif path.suffix in TABLE_FORMATS:
            write_text(path, _render(studies, worths, path.suffix) + "\n")
        elif len(studies) != 1:
            raise ConfigError(f"a figure is of one table, not of {len(studies)}: name other paths")
        else:
            save_figure(draw_study(studies[0]), path)
        logger.info("report: %s", path)
    if not args.output:
        say(_render(studies, worths, ".txt"))
    return 0


def write_page(
    path: Path,
    studies: "Sequence[Study]",
    *,
    tables: "Sequence[Table]" = (),
    title: str = "Results",
    lead: str = "",
) -> None:
    """Write the HTML page of some studies, with examples of what their runs read and answered."""
    from pgra.report.tables import render_page

    samples = find_samples([study.group for study in studies], _PAGE_SAMPLES)
    write_text(path, render_page(title, studies, samples, tables=tables, lead=lead))


def _render(studies: "Sequence[Study]", worths: "Sequence[Table]", kind: str) -> str:
    """Write tables in one of `TABLE_FORMATS`; as CSV the studies' are one."""
    from pgra.report.tables import TABLE_FORMATS, detail_table, long_table, results_table

    tables = [*worths]
    if kind == ".csv" and studies:
        tables.append(long_table(studies))
    else:
        for study in studies:
            tables += [results_table(study), detail_table(study)]
    return "\n\n".join(TABLE_FORMATS[kind](table) for table in tables)


def find_samples(groups: "Sequence[Group]", count: int) -> "list[Sample]":
    """Return queries, with what each run read and answered, as KATE's tables 5, 7 and 10 do.

    They are `count` of each task, those on which its runs differ first.

    Raises:
        DataError: If a pool that exemplars were chosen from is gone.
    """
    from pgra.report.tables import RunAnswer, Sample

    tasks: dict[str, dict[Path, FinishedRun]] = {}
    for run in chain.from_iterable(group.runs for group in groups):
        # The metric of written answers follows the task's name, a run for each.
        tasks.setdefault(run.task.partition(" ")[0], {}).setdefault(run.folder, run)
    samples = []
    for task, by_folder in tasks.items():
        runs = by_folder.values()
        lines_of = [{line["id"]: line for line in run.predictions} for run in runs]
        pools = [_pool_texts(run) for run in runs]
        shared = [key for key in lines_of[0] if all(key in lines for lines in lines_of)]
        shared.sort(key=lambda key: len({lines[key]["prediction"] for lines in lines_of}) == 1)
        for key in shared[:count]:
            query = lines_of[0][key]
            right = " | ".join(query.get("answers") or [str(query["label"])])
            answers = []
            for run, lines, pool in zip(runs, lines_of, pools, strict=True):
                line = lines[key]
                is_right = line["prediction"] == line["label"]
                answer = RunAnswer(
                    f"{run.name}, seed {run.seed}",
                    line["prediction"],
                    line.get("is_right", None if "answers" in line else is_right),
                    _read_before(line, pool),
                )
                answers.append(answer)
            samples.append(Sample(task, f"{key}: {one_line(query['text'])}", right, answers))
    return samples


def _pool_texts(run: "FinishedRun") -> Mapping[str, str]:
    """Return label and text of a run's exemplars by id; nothing where it has none."""
    if not any(line.get("exemplars") for line in run.predictions):
        return {}
    from pgra.methods.base import TaskData
    from pgra.runs import read_arguments

    pool = TaskData.read(read_arguments(run.folder, {}), is_trained=False).train
    return {example.id: f"{example.label}: {one_line(example.text)}" for example in pool}


def _read_before(line: Mapping[str, Any], pool: Mapping[str, str]) -> list[str]:
    """Return a query's exemplars in the prompt's order, or its evidence, best first."""
    texts = [(x["similarity"], pool.get(x["id"], x["id"])) for x in line.get("exemplars", ())]
    if not texts:
        texts = [(x["score"], one_line(x["text"])) for x in line["evidence"]]
    lines = []
    for score, text in texts:
        number = "" if score is None else f"{score:.3f}"
        lines.append(f"{number:>7}  {text}")
    return lines
