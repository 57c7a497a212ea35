"""Finished runs with planted decisions, written as a run writes them."""

import numpy as np

from pgra.artifacts import write_sealed
from pgra.report.results import Decisions, EvidenceLine, load_measures, write_results
from pgra.types import Example, Prediction

NAMES = ("bad", "good")


def load_run(folder):
    """Read a run of one measure."""
    return load_measures(folder)[0]


def labels_of(n):
    return [NAMES[i % 2] for i in range(n)]


def decided(labels, wrong, names=NAMES):
    """Give decisions that are right but at some places."""
    return [names[1 - names.index(x)] if i in set(wrong) else x for i, x in enumerate(labels)]


def plant(
    folder,
    *,
    method="pgra",
    task="sst2",
    seed=0,
    n=40,
    wrong=(),
    metric="accuracy",
    arguments=None,
    text="text",
    fingerprints=None,
    set_aside=8,
    notes=(),
    names=NAMES,
    evidence=None,
):
    """Write a run that decides n examples, half of each label, wrongly at some places."""
    folder.mkdir(parents=True, exist_ok=True)
    labels = [names[i % 2] for i in range(n)]
    marks = {"train": "a" * 64, "test": "c" * 64, **({} if method == "icl" else {"dev": "b" * 64})}
    about = {
        **{"method": method, "task": task, "split": "test", "metric": metric, "seed": seed},
        **{"uses_seed": method not in ("icl", "knn"), "seconds": {"training": 1.0}},
        "sizes": {"train": n, "set_aside": 0 if method == "fid" else set_aside},
        **{"fingerprints": fingerprints or marks, "notes": list(notes)},
    }
    examples = [Example(f"test-{i}", {"text": f"{text} {i}"}, x) for i, x in enumerate(labels)]
    predictions = [
        Prediction(e.id, x, {name: float(name == x) for name in names})
        for e, x in zip(examples, decided(labels, wrong, names), strict=True)
    ]
    lines = [
        [EvidenceLine(row, text, row + 1, 0.5, 0.25) for row, text in enumerate(texts)]
        for texts in evidence or ([f"evidence {i}"] for i in range(n))
    ]
    depth, reranker = 0 if method == "plain" else 16, "none" if method == "fid" else "prompted"
    values = {
        "runtime": {"method": method, "device": "cpu"},
        "data": {"task": task, "split_seed": 0, "dev_fraction": 0.1},
        "retriever": {"num_candidates": 150},
        "rerank": {"num_evidence": depth, "num_exemplars": 8, "reranker": reranker},
        "training": {"seed": seed, "learning_rate": 1e-4, "output_dir": str(folder)},
    }
    for section, changes in (arguments or {}).items():
        values[section] = {**values.get(section, {}), **changes}
    write_sealed(folder / "arguments.json", values)
    write_results(folder, about, names, examples, Decisions(predictions, lines))
    return folder


def plant_grid(
    root, points, *, axis="num_candidates", section="retriever", tasks=("sst2",), **grid
):
    """Write grid.json: points are {name: {"value":, "seeds": {seed: wrong or None}}}."""
    written = []
    for task in tasks:
        for name, point in points.items():
            seeds = {}
            for seed, wrong in point["seeds"].items():
                place = f"{task}/{name}/seed-{seed}"
                seeds[str(seed)] = place
                if wrong is not None:
                    arguments = {section: {axis: point["value"]}}
                    plant(root / place, task=task, seed=seed, wrong=wrong, arguments=arguments)
            values = {axis: point["value"]}
            written.append({"name": name, "task": task, "values": values, "seeds": seeds})
    values = {
        "name": "k",
        "title": "Candidates",
        "axes": [axis],
        "reference": None,
        "baseline": None,
        "points": written,
        **grid,
    }
    root.mkdir(parents=True, exist_ok=True)
    write_sealed(root / "grid.json", values)
    return root


def places(n, share, seed):
    """Draw places at random, a share of n."""
    return np.random.default_rng(seed).choice(n, size=round(n * share), replace=False).tolist()
