"""What finished grids say of evidence that decides: figures and tests of docs/worth.md.

    pgra ablate two_cores_claims --output_dir runs/claims
    pgra ablate two_cores_dose --output_dir runs/dose

Of the claims: whether the first piece of evidence is the claim's source (H5). Readers as decided,
and cut at the median of their own scores over the test set, for one that is untrained leans to one
label. The figure shows the accuracy by the share of sources that the corpus holds, and by the
consistency of drawn evidence; untrained readers are cut at the median.

python benchmarks/doses.py --claims runs/claims --data data/claims --dose runs/dose --figure d.svg
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from measuring import parse_flags, shared_parser, write_figures

from pgra.cli import run
from pgra.commands.common import say
from pgra.report.figures import plain_text, save_figure
from pgra.report.metrics import compare_means
from pgra.report.results import Run, load_collection, read_lines
from pgra.report.tables import Cell, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FIRST_STAGE, NONE, DOT = "FiD", "T5", "PGRA, dot"

Values = npt.NDArray[np.float64]


def main(argv: Sequence[str] | None = None) -> int:
    """Read the runs, print the tables, and draw the figure."""
    parser = shared_parser(__doc__ or "", quick="no less: nothing is run")
    for name, about in (
        ("claims", "folder of two_cores_claims"),
        ("data", "folder of its claims"),
        ("dose", "folder of two_cores_dose"),
    ):
        parser.add_argument(f"--{name}", type=Path, required=True, help=about)
    parser.add_argument("--figure", type=Path, help="SVG or PNG")
    args = parse_flags(parser, argv)
    claims, doses = read_grid(args.claims), read_grid(args.dose)
    sources = {
        str(line["id"]): str(line["sentence"]) for line in read_lines(args.data / "test.jsonl")
    }
    tables = [source_table(claims, sources), median_table("Claims", claims)]
    tables.append(median_table("Doses", doses))
    say("\n\n".join(table.to_text() for table in tables))
    if args.figure is not None:
        draw(claims, doses, args.figure)
    means = {
        f"{grid}/{name}": float(np.mean([one.value for one in runs]))
        for grid, points in (("claims", claims), ("dose", doses))
        for name, runs in points.items()
    }
    write_figures(args.json, means)
    return 0


def read_grid(folder: Path) -> dict[str, list[Run]]:
    """Return a grid's finished runs by point."""
    points: dict[str, list[Run]] = {}
    for one in load_collection([folder]).groups[0].runs:
        points.setdefault(one.name, []).append(one)
    return points


def source_table(claims: Mapping[str, Sequence[Run]], sources: Mapping[str, str]) -> Table:
    """Return how often the first evidence is its claim's source, against the first stage's order.

    Orders depend on no seed: each point's first run is looked at.
    """
    found = {}
    for name, runs in claims.items():
        if (
            runs[0].examples != claims[FIRST_STAGE][0].examples
            or not runs[0].predictions[0]["evidence"]
        ):
            continue
        found[name] = np.array(
            [
                line["evidence"][0]["text"] == sources[str(line["id"])]
                for line in runs[0].predictions
            ],
            np.float64,
        )
    rows = []
    for name, is_source in found.items():
        gap = compare_means(is_source, found[FIRST_STAGE], seed=0)
        ends = (100 * gap.low, 100 * gap.high)
        rows.append([Cell(name), _percent(is_source), Cell.of(100 * gap.difference, "+z.1f")])
        rows[-1] += [Cell.interval(ends, "+z.1f"), Cell.of_p(gap.p)]
    columns = ["evidence", "source first", f"to {FIRST_STAGE}", "95 % interval", "p"]
    return Table("Is the first piece of evidence the claim's source?", columns, rows)


def median_table(title: str, points: Mapping[str, Sequence[Run]]) -> Table:
    """Return accuracies as decided, and cut at the median of all test queries' scores."""
    rows = [
        [
            Cell(name),
            _percent([one.value for one in runs]),
            _percent([cut_at_median(one) for one in runs]),
        ]
        for name, runs in points.items()
    ]
    return Table(f"{title}: accuracy", ["reader", "as decided", "cut at the median"], rows)


def cut_at_median(one: Run) -> float:
    """Return the accuracy of calling the upper half of the queries by the last label."""
    label = max(one.predictions[0]["scores"])
    chances = np.array([line["scores"][label] for line in one.predictions])
    truth = np.array([line["label"] == label for line in one.predictions])
    return float(((chances > np.median(chances)) == truth).mean())


def _percent(values: Sequence[float] | Values) -> Cell:
    return Cell.of(100 * float(np.mean(values)), ".1f")


def draw(
    claims: Mapping[str, Sequence[Run]], doses: Mapping[str, Sequence[Run]], path: Path
) -> None:
    """Draw accuracy by share of sources, and by consistency."""
    from matplotlib.figure import Figure

    with plain_text():
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        shares = {
            1.0 if name == FIRST_STAGE else float(name.rpartition("=")[2]): runs
            for name, runs in claims.items()
            if name == FIRST_STAGE or "r =" in name
        }
        _line(left, shares, "trained")
        _level(left, claims[NONE], "trained, no evidence", ":")
        _level(left, claims[DOT], "trained, PGRA's dot", "-.")
        place, untrained = [1.0], [100 * cut_at_median(claims[f"{FIRST_STAGE}, untrained"][0])]
        left.plot(place, untrained, "s", color="tab:orange", label="untrained")
        left.set_xlabel("share of the claims whose source is in the corpus")
        left.set_title("claims: evidence is a fact")
        drawn = {name: runs for name, runs in doses.items() if name.startswith("dose")}
        untrained = [100 * cut_at_median(runs[0]) for name, runs in drawn.items() if "," in name]
        trained = {float(n.split()[1]): runs for n, runs in drawn.items() if "," not in n}
        _line(right, trained, "trained")
        _level(right, doses[NONE], "trained, no evidence", ":")
        right.plot(sorted(trained), untrained, "s-", color="tab:orange", label="untrained")
        alone = 100 * cut_at_median(doses[f"{NONE}, untrained"][0])
        right.axhline(alone, color="tab:orange", linestyle=":", label="untrained, no evidence")
        right.set_xlabel("label consistency of the evidence")
        right.set_title("sst2: evidence is an opinion")
        left.set_ylabel("accuracy, %")
        for axes in (left, right):
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def _line(axes: "Axes", runs: Mapping[float, Sequence[Run]], label: str) -> None:
    values = [[100 * one.value for one in runs[place]] for place in sorted(runs)]
    means = [np.mean(own) for own in values]
    spreads = [np.std(own, ddof=1) if len(own) > 1 else 0.0 for own in values]
    axes.errorbar(sorted(runs), means, spreads, marker="o", capsize=3, label=label)


def _level(axes: "Axes", runs: Sequence[Run], label: str, style: str) -> None:
    value = 100 * np.mean([one.value for one in runs])
    axes.axhline(value, color="tab:blue", linestyle=style, label=label)


if __name__ == "__main__":
    sys.exit(run(main))
