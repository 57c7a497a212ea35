"""Measures the label consistency of runs' evidence: `pgra consistency`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pgra.commands.common import quiet_libraries, say
from pgra.config import at_least, parse_arguments
from pgra.errors import ConfigError

EXAMPLE = """examples:
  python train.py --task sst2 --system plain --output_dir runs/plain
  python train.py --task sst2 --system fid --output_dir runs/fid
  python train.py --task sst2 --output_dir runs/pgra
  pgra consistency --labeler runs/plain --runs runs/pgra runs/fid --output_dir runs/consistency
  pgra ablate label_consistency --output_dir runs/grid
  pgra consistency --runs runs/grid --output_dir runs/grid/consistency

The plain reader gives each evidence text its pseudo-label; evidence is consistent with a query
whose label that is. With --no_centre these are the paper's Table 10 and Figures 2 and 4.
"""


@dataclass(kw_only=True)
class ConsistencyArguments:
    """Whose evidence, and who labels it."""

    runs: list[str] = field(
        default_factory=list,
        metadata={"help": "Finished runs, folders of them, or a grid of pgra ablate."},
    )
    labeler: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Finished runs of --num_evidence 0, one for each task; default: the plain runs "
            "among --runs."
        },
    )
    baseline: str | None = field(
        default=None,
        metadata={"help": "Row to compare with; default: the grid's, else fid, else the first."},
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Where labels, tables and plots go."}
    )
    depth: int | None = field(
        default=None, metadata={"help": "Look at each query's best so many evidence; default: all."}
    )
    centre: bool = field(
        default=True,
        metadata={
            "help": "Centre the labeler at its medians over 1,000 passages of the runs' corpus, so "
            "that it does not call nearly all of it one label; --no_centre: the paper's labels."
        },
    )
    plots: bool = field(default=True, metadata={"help": "Draw (needs matplotlib)."})
    device: str = field(
        default="auto", metadata={"help": "auto (a GPU if there is one), cpu, cuda, cuda:1, ..."}
    )

    def __post_init__(self) -> None:
        """Refuse to do nothing."""
        if not self.runs:
            raise ConfigError("--runs is missing: give the folders of finished runs with evidence")
        if self.output_dir is None:
            raise ConfigError("--output_dir is missing: say where labels, tables and plots go")
        at_least("depth", self.depth, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, write and show."""
    (args,) = parse_arguments(
        [ConsistencyArguments],
        argv,
        prog="pgra consistency",
        description="Measure how often evidence has the label of its query.",
        epilog=EXAMPLE,
    )
    quiet_libraries()
    from pgra.experiments.consistency import TABLES_FILE, report_consistency

    report = report_consistency(
        [Path(name) for name in args.runs],
        Path(args.output_dir),
        labelers=[Path(name) for name in args.labeler],
        baseline=args.baseline,
        depth=args.depth,
        centre=args.centre,
        device=args.device,
        plots=args.plots,
    )
    say("\n\n".join(table.to_text() for table in report.tables))
    say(f"\n{report.num_read} texts were read. Written: {report.folder / TABLES_FILE}")
    return 0
