"""What stands in `examples/` runs in an empty folder, and does what it says."""

import importlib
import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import pgra

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
SCRIPTS, NOTEBOOKS = sorted(EXAMPLES.glob("*.py")), sorted(EXAMPLES.glob("*.ipynb"))
LABELS = {"billing", "bug", "wish"}


@pytest.fixture(autouse=True)
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield
    for path in SCRIPTS:
        sys.modules.pop(path.stem, None)


@pytest.fixture
def example(capsys):
    """Run a script, and return the lines that it prints."""

    def run(name, *words):
        capsys.readouterr()
        assert importlib.import_module(name).main([*words]) == 0
        return capsys.readouterr().out.splitlines()

    return run


@pytest.mark.slow
def test_rerank_puts_the_likest_review_first(example):
    hits = example("rerank")
    assert len(hits) == 5
    assert hits[0].endswith("line 2  A funny and gentle picture.")


@pytest.mark.slow
def test_own_task_trains_measures_and_predicts(example):
    out = "\n".join(example("own_task"))
    run = pgra.Run.load("runs/tickets-pgra-seed42")
    assert run.metrics["n"] == 6
    assert run.metrics["metrics"]["accuracy"] > 1 / 3  # a third is chance
    assert {line["prediction"] for line in run.predictions} <= LABELS
    corpus = importlib.import_module("own_task").CORPUS
    read = re.findall(r"read beside it: (.+)", out)
    assert len({*read}) == 2
    assert {*read} <= {*corpus}


@pytest.mark.slow
def test_kate_answers_by_the_nearest_examples(example):
    answers = example("kate_endpoint")[-3:]
    assert [line.split()[0] for line in answers] == ["billing", "bug", "wish"]


@pytest.mark.slow
def test_the_assistant_recalls_and_uses_a_correction(example):
    out = example("support_assistant")
    said = [out[n + 1] for n, line in enumerate(out) if line.startswith("> ")]
    assert "6 in the evening" not in said[0]  # asked before it was corrected
    assert "6 in the evening" in said[1]
    assert "6 in the evening" not in said[2]  # the control: another question
    assert "\n".join(out).count("recalled") == 1


@pytest.mark.slow
def test_a_reranker_of_ones_own_orders_by_shared_words(example):
    lines = example("add_reranker", "--max_passages", "200")
    out = "\n".join(lines)
    scores = [float(score) for score in re.findall(r"^ +\d+ +(-?\d+\.\d{4}) ", out, re.M)]
    assert scores == sorted(scores, reverse=True)
    assert scores[0] > 1
    assert all(score.is_integer() for score in scores)  # the control: the first stage's are cosines


def test_csls_by_hand(monkeypatch):
    """A passage between all queries loses to one that is near one of them alone."""
    own = importlib.import_module("own_similarity")
    monkeypatch.setattr(own, "NEAREST", 2)
    similarity = own.Csls(queries=np.array([[1, 0], [0, 1], [-1, 0]], np.float32))
    half = 0.5**0.5
    passages = np.array([[5, 5], [3, 0], [0, 0]], np.float32)  # a hub, near one, like nothing
    queries = np.array([[2, 0], [1, 1]], np.float32)
    found = similarity.of_queries(queries, None) @ similarity.of_passages(passages).T
    cosines = np.array([[half, 1, 0], [1, half, 0]])
    np.testing.assert_allclose(found, 2 * cosines - [half, 0.5, 0], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_the_cells_of_a_notebook_run(notebook):
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text())["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            exec(compile(source, f"{notebook.name}, cell {number}", "exec"), names)
    assert names["hits"][0].text == "A funny and gentle picture."
    assert names["states"].shape == (6, 576)
