"""The experiment of docs/worth.md: whether evidence can help a reader, on four tasks.

For each task and draw of exemplars, kept under --output_dir so that a stopped call goes on:

    how often the best 16 of all passages have their query's label, by each similarity       (H1)
    readers of few labels: alone, with evidence's vote, with the LM's opinion         (H2, H3, H6)
    the same evidence by states of an earlier layer, chosen on training examples             (H7)

The labeler of a task is a plain reader, trained first if it is not there. Differences are paired
over test queries, whose values are means over draws; p by Holm over the tasks, and, over draws, of
all tasks' draws together.

python benchmarks/worth.py --output_dir runs/worth --figures figures --json figures.json
python benchmarks/worth.py --quick -- --lm gpt2      # flags of train.py stand behind --
"""

import argparse
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import parse_flags, positive, shared_parser, write_figures

from pgra.artifacts import write_sealed
from pgra.cli import main as pgra
from pgra.cli import run
from pgra.commands.ablate import resolve_point
from pgra.commands.common import say
from pgra.config import PgraArguments
from pgra.core import ALONE
from pgra.errors import PgraError
from pgra.experiments.consistency import Consistency, compare_evidence
from pgra.experiments.curve import OPINION, READER
from pgra.experiments.grid import read_grid
from pgra.experiments.worth import measure_worth
from pgra.methods.stages import Stages
from pgra.report.figures import plain_text, save_figure
from pgra.report.metrics import Difference, compare_means, holm, sign_flip
from pgra.report.results import METRICS_FILE, read_object
from pgra.report.tables import Cell, Table
from pgra.rerank import Reference, RerankRequest
from pgra.rerank.layer import compare_layers

TASKS = ("sst2-instruction", "rotten-tomatoes", "cr-instruction", "trec-instruction")
SIMILARITIES = ("dot", "whitened", "label_words", "head")
HEAD, DOT, WORDS = "exhaustive head", "exhaustive dot", "exhaustive label_words"
DEPTH = 16
MARGIN = 0.01
QUICK = {"max_passages": 300, "max_train_samples": 60, "max_test_samples": 40, "num_candidates": 20}

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sizes:
    """How much is measured of each task and draw.

    Attributes:
        draws: Draws of exemplars.
        counts: Numbers of labels of readers.
        label_draws: Draws of so many labels.
        steps: Of a labeler's training, of 16 examples each.
        flags: Of train.py, for all.
    """

    draws: int
    counts: Sequence[int]
    label_draws: int
    steps: int
    flags: Sequence[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is not measured yet, and print the tables."""
    parser = shared_parser(__doc__ or "", quick="rotten-tomatoes at a small size, one draw")
    parser.set_defaults(corpus="wiki_1m.txt")
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    parser.add_argument("--draws", type=positive, default=3, help="of the exemplars")
    parser.add_argument("--output_dir", type=Path, help="keep what was measured; default: nowhere")
    parser.add_argument("--figures", type=Path, help="folder for gain.svg and layer.svg")
    parser.add_argument("flags", nargs="*", help="flags of train.py, behind --")
    args = parse_flags(parser, argv)
    sizes = _sizes(args)
    kept = (
        tempfile.TemporaryDirectory() if args.output_dir is None else nullcontext(args.output_dir)
    )
    with kept as folder:
        found = {task: measure(task, Path(folder) / task, sizes) for task in args.tasks}
        layers = {task: measure_layer(task, Path(folder) / task, sizes) for task in args.tasks}
    told = [consistency_table(found), reader_table(found), test_table(found, layers)]
    told.append(rho_table(found, layers))
    say("\n\n".join(table.to_text() for table in told))
    if args.figures is not None:
        draw_gain(found, args.figures / "gain.svg")
        draw_layers(found, layers, args.figures / "layer.svg")
    write_figures(args.json, figures_of(told))
    return 0


def _sizes(args: argparse.Namespace) -> Sizes:
    shared = ["--corpus", args.corpus, "--device", args.device]
    if not args.quick:
        return Sizes(args.draws, (16, 32, 104, 392), 20, 60, [*shared, *args.flags])
    args.tasks = ["rotten-tomatoes"]
    if args.corpus == "wiki_1m.txt":
        shared[1] = "bundled:wikipedia-19k"
    small = [word for name, value in QUICK.items() for word in (f"--{name}", str(value))]
    return Sizes(1, (16, 32), 4, 4, [*shared, *small, *args.flags])


# Measuring: one file a task and draw.


def read_args(task: str, folder: Path, flags: Sequence[str], **rerank: Any) -> PgraArguments:
    """Return the arguments of the grid's point of similarity head, with some of its own."""
    grid = read_grid("two_cores_worth")
    point = next(point for point in grid.cells if point.values.get("similarity") == "head")
    args = resolve_point(grid, task, point, flags, folder).pgra
    return replace(
        args,
        rerank=replace(args.rerank, bank="full", num_evidence=DEPTH, evidence="passages", **rerank),
    )


def open_labeler(task: str, folder: Path, sizes: Sizes) -> Path:
    """Return a plain reader of 1,600 examples, trained unless it is there."""
    labeler = folder / "labeler"
    if not (labeler / METRICS_FILE).is_file():
        values = read_grid("two_cores_worth")
        given = {**values.base, **values.by_task.get(task, {})}
        own = {"task": task, "method": "plain", "output_dir": labeler, "max_steps": sizes.steps}
        own |= {"per_device_train_batch_size": 16}
        for name in ("dataset_name", "learning_rate", "model_name_or_path", "max_test_samples"):
            own.setdefault(name, given[name])
        for name in ("eval_strategy", "save_strategy"):
            own[name] = "no"
        own |= {"load_best_model_at_end": False, "max_dev_samples": given["max_dev_samples"]}
        if sizes.flags.count("--max_train_samples") == 0:
            own["max_train_samples"] = 1600
        words = [word for name, value in own.items() for word in (f"--{name}", str(value))]
        if pgra(["train", *words, *sizes.flags]):
            raise PgraError(f"the labeler {labeler} was not trained: the lines above say why")
    return labeler


def measure(task: str, folder: Path, sizes: Sizes) -> list[dict[str, Any]]:
    """Measure each draw of exemplars, unless its file is there."""
    found = []
    for draw in range(sizes.draws):
        path = folder / f"draw-{draw}.json"
        if not path.is_file():
            args = read_args(task, folder, sizes.flags, exemplar_seed=draw)
            labeler = open_labeler(task, folder, sizes)
            evidence = compare_evidence(args, labeler, folder)
            worth = measure_worth(
                args, SIMILARITIES, num_labels=sizes.counts, num_draws=sizes.label_draws
            )
            assert worth.curve is not None
            points = [
                {
                    "labels": point.count,
                    "right": {way: own.mean(axis=0).tolist() for way, own in point.right.items()},
                    "opinion": point.votes[OPINION].tolist(),
                    "gains": point.gains(),
                }
                for point in worth.curve.points
            ]
            write_sealed(path, {**_key(sizes), "ways": _ways(evidence.runs), "points": points})
        found.append(_read(path, sizes))
    return found


def measure_layer(task: str, folder: Path, sizes: Sizes) -> dict[str, Any]:
    """Measure the first draw's evidence at the layer that training examples choose."""
    path = folder / "layer.json"
    if not path.is_file():
        args = read_args(task, folder, sizes.flags, lm_layer="auto")
        labeler = open_labeler(task, folder, sizes)
        evidence = compare_evidence(args, labeler, folder, similarities=["dot", "whitened", "head"])
        write_sealed(path, {**_key(sizes), "ways": _ways(evidence.runs), **_choice(args)})
    return _read(path, sizes)


def _key(sizes: Sizes) -> dict[str, Any]:
    """Return what a file was measured with; more draws may follow."""
    return {"counts": list(sizes.counts), "flags": list(sizes.flags)}


def _read(path: Path, sizes: Sizes) -> dict[str, Any]:
    found = read_object(path)
    if (before := {name: found.get(name) for name in _key(sizes)}) != _key(sizes):
        raise PgraError(
            f"{path} was measured with {before}, and now asked for is {_key(sizes)}: "
            "give another --output_dir"
        )
    return found


def _choice(args: PgraArguments) -> dict[str, Any]:
    """Return the chosen layer, the LM's depth, and a head's accuracy by layer."""
    stages = Stages.read(args, ALONE)
    reference = Reference(stages.data.train, stages.data.choice.prompt_words)
    request = RerankRequest(
        args=args.rerank,
        prompt=stages.prompt,
        corpus=stages.corpus,
        context=stages.context,
        reference=reference,
    )
    found = compare_layers(request)
    return {"layer": found["layer"], "accuracy": found["accuracy"]}


def _ways(runs: Sequence[Consistency]) -> dict[str, Any]:
    kept = ("vote", "distinct", "hub")
    return {
        one.name: {"shares": one.shares.tolist(), **{name: getattr(one, name) for name in kept}}
        for one in runs
    }


# Tables. What was found of a task is one mapping a draw of exemplars.


Found = Mapping[str, Sequence[Mapping[str, Any]]]
Pair = tuple[Values, Values]
"""Of two sides a value of each draw and test query, (draws, n)."""


def consistency_table(found: Found) -> Table:
    """Return consistency and vote of each way by task, means over draws."""
    ways = list(next(iter(found.values()))[0]["ways"])
    columns = ["evidence", *(name for task in found for name in (_short(task), "vote"))]
    rows = [[Cell(way)] for way in ways]
    for row, way in zip(rows, ways, strict=True):
        for draws in found.values():
            own = [draw["ways"][way] for draw in draws]
            row += [_percent(np.mean([one[name] for one in own])) for name in ("shares", "vote")]
    return Table(f"Label consistency of the best {DEPTH}", columns, rows, ["Means over draws."])


def reader_table(found: Found) -> Table:
    """Return the accuracy of readers of few labels by task, means over draws."""
    first = next(iter(found.values()))[0]["points"]
    ways, rows = list(first[0]["right"]), []
    for task, draws in found.items():
        for number, point in enumerate(first):
            own = [draw["points"][number]["right"] for draw in draws]
            cells = [_percent(np.mean([right[way] for right in own])) for way in ways]
            rows.append([Cell(f"{_short(task)}, {point['labels']}"), *cells])
    return Table("Accuracy of readers, joined with votes", ["task, labels", *ways], rows)


def test_table(found: Found, layers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the hypotheses' differences, task by task and over all draws."""

    def evidence(way: str, other: str) -> dict[str, Pair]:
        return {
            task: (
                _stack(d["ways"][way]["shares"] for d in draws),
                _stack(d["ways"][other]["shares"] for d in draws),
            )
            for task, draws in found.items()
        }

    def readers(number: int, way: str, other: str) -> dict[str, Pair]:
        return {
            task: (
                _stack(d["points"][number]["right"][way] for d in draws),
                _stack(d["points"][number]["right"][other] for d in draws),
            )
            for task, draws in found.items()
        }

    pairs = {"H1 head - dot": evidence(HEAD, DOT), "H1 head - label_words": evidence(HEAD, WORDS)}
    points = next(iter(found.values()))[0]["points"]
    for number, point in enumerate(points):
        pairs[f"H2 {point['labels']} labels, head - dot"] = readers(number, "head", "dot")
    for number, point in enumerate(points):
        pairs[f"H3 {point['labels']} labels, head - opinion"] = readers(number, "head", OPINION)
    pairs["H7 auto - last"] = {
        task: (
            _stack([layer["ways"][HEAD]["shares"]]),
            _stack([found[task][0]["ways"][HEAD]["shares"]]),
        )
        for task, layer in layers.items()
    }
    rows = [row for name, own in pairs.items() for row in _test(name, own)]
    columns = ["", "task", "points", "95 % interval", "p", "within a point", "draws above"]
    notes = [
        "Paired over test queries, whose values are means over draws; p by Holm over the tasks.",
        "within a point: the larger p of two one-sided tests, by Holm over the tasks.",
        "all: the mean over tasks and draws, p by sign flips of these.",
    ]
    return Table("Differences", columns, rows, notes)


def _test(name: str, pairs: Mapping[str, Pair]) -> list[list[Cell]]:
    gaps = [compare_means(a.mean(axis=0), b.mean(axis=0), seed=0) for a, b in pairs.values()]
    apart, equal = holm([gap.p for gap in gaps]), holm([_equal(gap) for gap in gaps])
    by_draw = [100 * (a.mean(axis=1) - b.mean(axis=1)) for a, b in pairs.values()]
    rows = [
        [
            Cell(name),
            Cell(_short(task)),
            Cell.of(100 * gap.difference, "+z.1f"),
            Cell.interval((100 * gap.low, 100 * gap.high), "+z.1f"),
            Cell.of_p(p),
            Cell.of_p(same),
            Cell(f"{(draws > 0).sum()} of {len(draws)}"),
        ]
        for task, gap, p, same, draws in zip(pairs, gaps, apart, equal, by_draw, strict=True)
    ]
    every = np.concatenate(by_draw)
    cells = [Cell.of(every.mean(), "+z.1f"), Cell(""), Cell.of_p(sign_flip(every)), Cell("")]
    return [*rows, [Cell(name), Cell("all"), *cells, Cell(f"{(every > 0).sum()} of {len(every)}")]]


def _equal(gap: Difference) -> float:
    """Return the larger p of the two one-sided tests that a difference is below a point."""
    beyond = [(gap.draws <= -MARGIN).sum(), (gap.draws >= MARGIN).sum()]
    return float((max(beyond) + 1) / (len(gap.draws) + 1))


def rho_table(found: Found, layers: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return Spearman's rho of gain and (vote - reader), and the layer that was chosen, by task."""
    from scipy.stats import spearmanr

    rows = []
    for task, draws in found.items():
        gains = [gain for draw in draws for point in draw["points"] for gain in point["gains"]]
        rho = spearmanr([one["gain"] for one in gains], [one["vote_ahead"] for one in gains])
        layer = layers[task]
        auto, last = layer["ways"][HEAD], draws[0]["ways"][HEAD]
        rows.append(
            [
                Cell(_short(task)),
                Cell.of(float(rho.statistic), ".2f"),
                Cell.of(len(gains)),
                Cell(f"{layer['layer']} of {max(map(int, layer['accuracy']))}"),
                _percent(last["vote"]),
                _percent(auto["vote"]),
            ]
        )
    columns = ["task", "rho", "pairs", "layer", "vote, last layer", "vote, this layer"]
    return Table("H6: rho of gain and (vote - reader); H7: the layer of auto", columns, rows)


def figures_of(tables: Sequence[Table]) -> dict[str, float]:
    """Return every number of the tables by row and column."""
    return {
        "/".join([*[cell.text for cell in row if cell.value is None][:2], column]): cell.value
        for table in tables
        for row in table.rows
        for column, cell in zip(table.columns, row, strict=True)
        if cell.value is not None
    }


def _stack(values: Iterable[Sequence[float]]) -> Values:
    return np.array(list(values), np.float64)


def _percent(share: float) -> Cell:
    return Cell.of(100 * float(share), ".1f")


def _short(task: str) -> str:
    return task.removesuffix("-instruction")


# Figures.


def draw_gain(found: Found, path: Path) -> None:
    """Draw what readers gain against how far the LM's opinion is ahead of them."""
    from matplotlib.figure import Figure

    with plain_text():
        figure = Figure(figsize=(6, 4.2), layout="constrained")
        axes = figure.subplots()
        shown = {OPINION: ("o", "none", "0.2"), "head": ("o", "tab:blue", "tab:blue")}
        shown["dot"] = ("s", "tab:orange", "tab:orange")
        for way, (marker, face, edge) in shown.items():
            places = [
                (
                    100 * (np.mean(point["opinion"]) - np.mean(point["right"][READER])),
                    100 * (np.mean(point["right"][way]) - np.mean(point["right"][READER])),
                )
                for draws in found.values()
                for draw in draws
                for point in draw["points"]
            ]
            label = {OPINION: "the opinion itself, no evidence"}.get(way, f"evidence by {way}")
            axes.scatter(
                *np.transpose(places), marker=marker, facecolors=face, edgecolors=edge, label=label
            )
        axes.axhline(0, color="0.6", linewidth=1)
        axes.axvline(0, color="0.6", linewidth=1)
        axes.set_xlabel("LM's opinion - reader, points of accuracy")
        axes.set_ylabel("gain of the reader, points of accuracy")
        axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


def draw_layers(found: Found, layers: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Draw by layer a head's accuracy on training examples, and the consistency of its evidence."""
    from matplotlib.figure import Figure

    with plain_text():
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2)
        for task, layer in layers.items():
            depths = np.array(list(map(int, layer["accuracy"])))
            values = 100 * np.array(list(layer["accuracy"].values()))
            shares, chosen = depths / depths.max(), depths == layer["layer"]
            (line,) = left.plot(shares, values, marker=".", label=_short(task))
            left.plot(shares[chosen], values[chosen], "o", color=line.get_color(), markersize=10)
            ends = [layer, found[task][0]]
            scores = [100 * np.mean(one["ways"][HEAD]["shares"]) for one in ends]
            right.plot([shares[chosen][0], 1.0], scores, "o-", label=_short(task))
        left.set_ylabel("accuracy of a head, %")
        left.set_title("large: the choice of auto")
        right.set_ylabel("consistency of the head's evidence, %")
        for axes in (left, right):
            axes.set_xlabel("layer / depth, about the share of the time")
            axes.legend(frameon=False)
            axes.spines[["top", "right"]].set_visible(False)
    save_figure(figure, path)


if __name__ == "__main__":
    sys.exit(run(main))
