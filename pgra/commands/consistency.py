"""Measures the label consistency of runs' evidence: `pgra consistency`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import about, quiet_libraries, say
from pgra.config import Arguments, arg, parse_arguments


@dataclass(kw_only=True)
class ConsistencyArguments(Arguments):
    """Whose evidence, and who labels it."""

    runs: list[str] = arg(
        [], "Finished runs, folders of them, or a grid of pgra ablate.", must_be_given=True
    )
    labeler: list[str] = arg(
        [],
        "Finished runs of --num_evidence 0, one for each task; default: the plain runs among "
        "--runs.",
    )
    baseline: str | None = arg(
        None, "Row to compare with; default: the grid's, else fid, else the first."
    )
    output_dir: str = arg("", "Where labels, tables and plots go.", must_be_given=True)
    plots: bool = arg(True, "Draw them too.", off="Tables only.")
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, cuda:1, ...")


def main(argv: Sequence[str] | None = None) -> int:
    """Measure how often evidence has the label of its query.

    Examples:
      pgra train --task sst2 --method plain --output_dir runs/plain
      pgra train --task sst2 --method fid --output_dir runs/fid
      pgra train --task sst2 --output_dir runs/pgra
      pgra consistency --labeler runs/plain --runs runs/pgra runs/fid --output_dir runs/consistency
      pgra consistency --runs runs/ablate-opt_size --output_dir runs/consistency

    The plain reader gives each evidence text its pseudo-label; evidence is consistent with a query
    whose label that is: the paper's Table 10 and Figures 2 and 4.
    """
    (args,) = parse_arguments([ConsistencyArguments], argv, prog="pgra consistency", **about(main))
    quiet_libraries()
    from pgra.experiments.consistency import TABLES_FILE, report_consistency

    folder = Path(args.output_dir)
    report = report_consistency(
        [Path(name) for name in args.runs],
        folder,
        labelers=[Path(name) for name in args.labeler],
        baseline=args.baseline,
        device=args.device,
        plots=args.plots,
    )
    say("\n\n".join(table.to_text() for table in report.tables))
    say(f"\n{report.num_read} texts were read. Written: {folder / TABLES_FILE}")
    return 0
