"""BLEU and PARENT in reports: measures of texts, resampled as the queries are."""

import json

import numpy as np
import pytest

from pgra.artifacts import write_sealed
from pgra.data.answers import AnsweredExample, Table
from pgra.report.compare import compare_runs
from pgra.report.metrics import bleu_counts, bleu_of_counts
from pgra.report.results import load_collection

RIGHT = ["the red house stands on a hill", "two men walk to the old mill", "it rains in May"]
NEAR = ["the red house stands on the hill", "two men walk to the mill", "it rains in June"]
FAR = ["a house", "men at the mill walk there now", "rain"]
TRUTH = [AnsweredExample("", {}, answers=(text,), table=Table("", [], [])) for text in RIGHT]


def plant(folder, texts, parent, *, method="icl-knn", seed=0):
    """Write a run as pgra icl does, its first query of the overlap subset, the others not."""
    folder.mkdir(parents=True)
    counts = bleu_counts(texts, TRUTH)
    lines = []
    for i, text in enumerate(texts):
        told = {"id": f"test-{i}", "text": f"table {i}", "label": RIGHT[i], "answers": [RIGHT[i]]}
        more = {"prediction": text, "is_overlap": i == 0, "evidence": []}
        lines.append({**told, **more, "bleu_counts": counts[i], "parent": parent[i]})
    (folder / "predictions.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    values = {}
    for name, rows in (("", [0, 1, 2]), ("overlap/", [0]), ("nonoverlap/", [1, 2])):
        values[f"{name}bleu"] = bleu_of_counts(np.sum([counts[i] for i in rows], axis=0).tolist())
        values[f"{name}parent"] = float(np.mean([parent[i] for i in rows]))
        values[f"{name}parent_recall"] = 0.5
    told = {"method": method, "task": "totto", "split": "test", "n": 3, "metric": "bleu"}
    told |= {"value": values["bleu"], "interval_95": None, "metrics": values, "seed": seed}
    write_sealed(folder / "metrics.json", {**told, "notes": [], "files": {}})
    write_sealed(folder / "arguments.json", {"selection": {"order": "nearest-first"}})
    return folder


def test_each_measure_has_a_column_with_its_interval(tmp_path):
    plant(tmp_path / "near", NEAR, [0.9, 0.5, 0.1])
    plant(tmp_path / "far", FAR, [0.2, 0.2, 0.2], method="icl-random")
    (group,) = load_collection([tmp_path])
    study = compare_runs(group, baseline="icl-random")
    assert sorted(study.tasks) == [
        *("totto bleu", "totto nonoverlap/bleu", "totto nonoverlap/parent"),
        *("totto overlap/bleu", "totto overlap/parent", "totto parent"),
    ]
    found = study.results["icl-knn", "totto nonoverlap/parent"]
    assert found.mean == pytest.approx(0.3)
    assert found.interval == (pytest.approx(0.1), pytest.approx(0.5))
    assert found.runs[0].n == 2
    told = study.comparisons["icl-knn", "totto bleu"]
    assert told.gap.difference > 0
    assert study.columns == study.tasks
