"""What taking out the label bias does, and what evidence gains then: docs/worth.md, B1 to B4.

    pgra ablate two_cores --tasks subj --drop_readers --output_dir runs/two_cores
    python benchmarks/label_bias.py runs/two_cores --json figures.json

Reads finished grids whose readers decide without the bias, and decides their texts once more with
it. All numbers are percent right; differences are means over seeds and then tasks, paired by text,
with a 95 % interval (bootstrap over texts) and the p of a sign flip.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measuring import write_figures

from pgra.commands.common import say
from pgra.report.metrics import (
    Difference,
    average_differences,
    compare_means,
    interval_95,
    sign_flip,
)

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cell:
    """The seeds of one method on one task: is each text decided rightly, (seeds, texts)?"""

    bias_in: Values
    bias_out: Values

    def seeds(self) -> str:
        """Return the accuracies of all seeds, with the bias in and out."""
        before = " ".join(f"{value:.1f}" for value in 100 * self.bias_in.mean(axis=1))
        after = " ".join(f"{value:.1f}" for value in 100 * self.bias_out.mean(axis=1))
        return f"{before} -> {after}"


def read_run(folder: Path) -> tuple[list[bool], list[bool]]:
    """Return whether each text is decided rightly with the reader's label bias in, and out."""
    lines = [json.loads(line) for line in (folder / "predictions.jsonl").open()]
    bias_out = [line["prediction"] == line["label"] for line in lines]
    record = folder / "reader" / "pgra.json"
    if not record.is_file():  # no reader
        return bias_out, bias_out
    calibration = json.loads(record.read_text())["calibration"]
    if not calibration["bias"]:
        return bias_out, bias_out
    labels = list(lines[0]["scores"])
    chances = np.array([[line["scores"][label] for label in labels] for line in lines])
    scores = calibration["temperature"] * np.log(np.maximum(chances, 1e-300))
    best = (scores - calibration["bias"]).argmax(axis=1)
    bias_in = [labels[place] == line["label"] for place, line in zip(best, lines, strict=True)]
    return bias_in, bias_out


def read_grids(folders: Sequence[Path]) -> dict[str, dict[str, Cell]]:
    """Return the cells of grids by task, then method; only seeds that all methods have."""
    runs: dict[str, dict[str, dict[str, Path]]] = defaultdict(dict)
    for folder in folders:
        for point in json.loads((folder / "grid.json").read_text())["points"]:
            seeds = {seed: folder / place for seed, place in point["seeds"].items()}
            finished = {s: path for s, path in seeds.items() if (path / "metrics.json").is_file()}
            runs[Path(point["task"]).stem][point["name"]] = finished
    cells: dict[str, dict[str, Cell]] = {}
    for task, methods in runs.items():
        shared = sorted(set.intersection(*({*seeds} for seeds in methods.values())))
        if not shared:
            continue
        cells[task] = {}
        for name, seeds in methods.items():
            both = np.array([read_run(seeds[seed]) for seed in shared], np.float64)
            cells[task][name] = Cell(bias_in=both[:, 0], bias_out=both[:, 1])
    return cells


def show(difference: Difference) -> str:
    """Return a difference as a sentence of percent."""
    low, high = interval_95(difference.draws)
    p = sign_flip(difference.parts) if difference.parts is not None else float("nan")
    mean = 100 * difference.difference
    return f"{mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}), p {p:.4f}"


def gain(cells: Mapping[str, Mapping[str, Cell]], method: str, other: str, *, out: bool) -> str:
    """Return what a method gains over another, on average over tasks."""
    differences = []
    for methods in cells.values():
        a = methods[method].bias_out if out else methods[method].bias_in
        b = methods[other].bias_out if out else methods[other].bias_in
        differences.append(compare_means(a.mean(axis=0), b.mean(axis=0), seed=0))
    return show(average_differences(differences))


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", nargs="+", type=Path, help="what pgra ablate wrote")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    cells = read_grids(args.folders)
    figures: dict[str, float] = {}
    for task, methods in cells.items():
        say(f"\n{task}: percent right by seed, with the bias in -> out")
        for name, cell in methods.items():
            change = compare_means(cell.bias_out.mean(axis=0), cell.bias_in.mean(axis=0), seed=0)
            say(f"  {name:<12} {cell.seeds():<44} {show(change)}")
            spreads = [values.mean(axis=1).std() for values in (cell.bias_in, cell.bias_out)]
            figures[f"{task}, {name}: bias in"] = 100 * float(cell.bias_in.mean())
            figures[f"{task}, {name}: bias out"] = 100 * float(cell.bias_out.mean())
            figures[f"{task}, {name}: spread, bias in"] = 100 * float(spreads[0])
            figures[f"{task}, {name}: spread, bias out"] = 100 * float(spreads[1])
    for word in ("in", "out"):
        ending = f"spread, bias {word}"
        spreads = [value for name, value in figures.items() if name.endswith(ending)]
        say(f"\nmean spread over seeds, bias {word}: {np.mean(spreads):.2f} points")
        for method in ("FiD random", "FiD", "PGRA, dot", "PGRA", "Head alone"):
            say(f"  {method:<12} less T5: {gain(cells, method, 'T5', out=word == 'out')}")
        say(f"  PGRA less FiD: {gain(cells, 'PGRA', 'FiD', out=word == 'out')}")
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
