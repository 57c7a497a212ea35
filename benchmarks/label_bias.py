"""What taking out the label bias does, and what evidence gains then: docs/worth.md, B1 to B4.

    pgra ablate two_cores --tasks subj --drop_readers --output_dir runs/two_cores
    python benchmarks/label_bias.py runs/two_cores --json figures.json

Reads finished grids whose readers decide without the bias, and decides their texts once more with
it. All numbers are percent right; differences are means over seeds and then tasks, paired by text,
with the interval and p that reports have (pgra/report/metrics.py). Beside them stands the
simplest rival, which learns from the same examples: logistic regression on MiniLM's vectors. Run it
where the grid ran.
"""

import json
from argparse import RawDescriptionHelpFormatter
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measuring import FlagParser, parse_flags, write_figures
from sklearn.linear_model import LogisticRegression

import pgra
from pgra.arrays import Values
from pgra.commands.common import say
from pgra.data.examples import DataArguments, load_splits
from pgra.data.tasks import load_any_task
from pgra.errors import ConfigError
from pgra.report.metrics import (
    Difference,
    average_differences,
    compare_means,
    interval_95,
)

METHODS = ("FiD-random", "FiD", "PGRA-dot", "PGRA", "Head-alone")  # folders of two_cores
RIVAL = "MiniLM and regression"


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


def decide_by_vectors(folder: Path) -> Values:
    """Return whether the rival decides each text of a run's test set rightly, (1, texts)."""
    arguments = json.loads((folder / "arguments.json").read_text())["data"]
    task = load_any_task(arguments["task"])
    splits = load_splits(task, DataArguments(**arguments))
    encoder = pgra.Encoder("bundled:minilm-l6", device="cpu")
    vectors = encoder.encode([example.text for example in splits.train])
    model = LogisticRegression(max_iter=1000)
    model.fit(vectors, [str(example.label) for example in splits.train])
    decided = model.predict(encoder.encode([example.text for example in splits.test]))
    truth = [str(example.label) for example in splits.test]
    return np.array([decided == truth], np.float64)


def uses_seed(seeds: Mapping[str, Path]) -> bool:
    """Whether another seed could give another run."""
    return all(json.loads((p / "metrics.json").read_text())["uses_seed"] for p in seeds.values())


def read_grids(folders: Sequence[Path]) -> dict[str, dict[str, Cell]]:
    """Return the cells of grids by task, then method; only seeds that all have."""
    runs: dict[str, dict[str, dict[str, Path]]] = defaultdict(lambda: defaultdict(dict))
    for grid in folders:
        for path in sorted(grid.rglob("seed-*/metrics.json")):
            run = path.parent
            task = str(json.loads(path.read_text())["task"])
            seeds = runs[task][run.parent.name]
            if run.name in seeds:
                raise ConfigError(
                    f"{seeds[run.name]} and {run} are one cell: name one grid of them"
                )
            seeds[run.name] = run
    cells: dict[str, dict[str, Cell]] = {}
    for task, methods in runs.items():
        seeded = [{*seeds} for seeds in methods.values() if uses_seed(seeds)]
        shared = sorted(set.intersection(*seeded))
        if not shared or not {"T5", *METHODS} <= {*methods}:
            continue
        cells[task] = {}
        for name, seeds in methods.items():
            cell = [seeds[seed] for seed in shared] if uses_seed(seeds) else [*seeds.values()]
            both = np.array([read_run(path) for path in cell], np.float64)
            cells[task][name] = Cell(bias_in=both[:, 0], bias_out=both[:, 1])
        by_vectors = decide_by_vectors(cell[0])
        cells[task][RIVAL] = Cell(by_vectors, by_vectors)
    return cells


def show(difference: Difference) -> str:
    """Return a difference as a sentence of percent."""
    low, high = interval_95(difference.draws)
    mean = 100 * difference.difference
    return f"{mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}), p {difference.p:.4f}"


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
    parser = FlagParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", type=Path, help="what pgra ablate wrote")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parse_flags(parser)
    cells = read_grids(args.folders)
    figures: dict[str, float] = {}
    for task, methods in cells.items():
        say(f"\n{task}: percent right by seed, with the bias in -> out")
        for name, cell in methods.items():
            change = compare_means(cell.bias_out.mean(axis=0), cell.bias_in.mean(axis=0), seed=0)
            say(f"  {name:<22} {cell.seeds():<44} {show(change)}")
            figures[f"{task}, {name}: bias in"] = 100 * float(cell.bias_in.mean())
            figures[f"{task}, {name}: bias out"] = 100 * float(cell.bias_out.mean())
            if len(cell.bias_in) > 1:
                spread = 100 * float(cell.bias_in.mean(axis=1).std(ddof=1))
                figures[f"{task}, {name}: spread, bias in"] = spread
                spread = 100 * float(cell.bias_out.mean(axis=1).std(ddof=1))
                figures[f"{task}, {name}: spread, bias out"] = spread
    for word in ("in", "out"):
        ending = f"spread, bias {word}"
        spreads = [value for name, value in figures.items() if name.endswith(ending)]
        say(f"\nmean spread over seeds, bias {word}: {np.mean(spreads):.2f} points")
        for method in (*METHODS, RIVAL):
            say(f"  {method:<22} less T5: {gain(cells, method, 'T5', out=word == 'out')}")
        say(f"  PGRA less FiD: {gain(cells, 'PGRA', 'FiD', out=word == 'out')}")
    write_figures(args.json, figures)


if __name__ == "__main__":
    main()
