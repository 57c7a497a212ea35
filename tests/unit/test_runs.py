import json

import pytest
from planted_runs import edit, plant, plant_grid

from pgra.errors import ArtifactError
from pgra.report.results import load_collection, load_run, load_runs


def test_a_run_is_read_with_what_it_decided(tmp_path):
    run = load_run(plant(tmp_path / "r", system="fid", task="cr", seed=3, n=8, wrong=[0, 5]))
    assert (run.system, run.task, run.seed, run.name) == ("fid", "cr", 3, "r")
    assert run.value == pytest.approx(6 / 8)
    assert run.decisions.correct == [False, True, True, True, True, False, True, True]
    assert run.setting("retriever.num_candidates") == 150
    assert run.setting("retriever.unknown") is None
    assert run.setting("unknown.name") is None
    assert run.predictions[5]["evidence"][0]["text"] == "evidence 5"


def test_a_path_is_a_run_a_folder_of_runs_several_seeds_or_a_grid(tmp_path):
    plant(tmp_path / "runs/a")
    plant(tmp_path / "runs/many/seed-0", system="fid")
    plant(tmp_path / "runs/many/seed-1", system="fid", seed=1)
    assert [run.name for run in load_runs([tmp_path / "runs/a"])] == ["a"]
    assert [run.name for run in load_runs([tmp_path / "runs"])] == ["a", "seed-0", "seed-1"]
    assert [run.seed for run in load_runs([tmp_path / "runs/many"])] == [0, 1]
    plant_grid(tmp_path / "runs/k", {"k=8": {"value": 8, "seeds": {0: [], 1: None}}})
    found = load_collection([tmp_path / "runs"])
    assert [len(group.runs) for group in found.groups] == [1, 3]
    grid = found.groups[0]
    assert [(gone.name, gone.task, gone.seed) for gone in grid.missing] == [("k=8", "sst2", 1)]
    assert grid.runs[0].point == {"retriever.num_candidates": 8}


def test_a_folder_counts_once_however_often_it_is_named(tmp_path):
    plant(tmp_path / "runs/a")
    link = tmp_path / "runs/b"
    link.symlink_to(tmp_path / "runs/a")
    assert len(load_runs([tmp_path / "runs", tmp_path / "runs/a", tmp_path / "runs/../runs"])) == 1


def test_a_run_that_is_not_finished_is_told_and_not_counted(tmp_path):
    plant(tmp_path / "runs/a")
    (tmp_path / "runs/b").mkdir()
    (tmp_path / "runs/b/run.json").write_text("{}")
    found = load_collection([tmp_path / "runs"])
    assert found.unfinished == [tmp_path / "runs/b"]
    assert len(found.groups[0].runs) == 1


def test_an_artefact_and_what_lies_within_a_run_is_not_looked_into(tmp_path):
    plant(tmp_path / "runs/a")
    plant(tmp_path / "runs/a/checkpoint-1")
    plant(tmp_path / "runs/bank/inner")
    (tmp_path / "runs/bank/manifest.json").write_text("{}")
    assert [run.name for run in load_runs([tmp_path / "runs"])] == ["a"]


@pytest.mark.parametrize(
    ("method", "system"), [("t5", "plain"), ("pgra-exhaustive", "exhaustive"), ("fid", "fid")]
)
def test_an_older_run_tells_its_system_by_its_method(tmp_path, method, system):
    folder = plant(tmp_path / "a")
    edit(folder / "metrics.json", system=None)
    (folder / "run.json").write_text(json.dumps({"method": method}))
    assert load_run(folder).system == system


def test_a_value_that_is_no_number_is_refused(tmp_path):
    folder = plant(tmp_path / "a", wrong=[1])
    edit(folder / "metrics.json", value=float("nan"))
    with pytest.raises(ArtifactError, match="accuracy is nan, and 0.9750 by its predictions"):
        load_run(folder)


def test_examples_tell_one_test_set_from_another(tmp_path):
    one = load_run(plant(tmp_path / "a", n=10)).decisions.examples
    assert load_run(plant(tmp_path / "b", n=10, wrong=[1])).decisions.examples == one
    assert load_run(plant(tmp_path / "c", n=12)).decisions.examples != one
    assert load_run(plant(tmp_path / "d", n=10, text="other")).decisions.examples != one


def test_nothing_there_is_refused(tmp_path):
    with pytest.raises(ArtifactError, match="nowhere is no folder: give a run"):
        load_runs([tmp_path / "nowhere"])
    with pytest.raises(ArtifactError, match=r"no finished run \(with metrics.json\) in .*: train"):
        load_runs([tmp_path])
    plant_grid(tmp_path / "g", {"k=8": {"value": 8, "seeds": {0: None}}})
    with pytest.raises(ArtifactError, match="no finished run"):
        load_runs([tmp_path / "g"])


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("metrics.json", "{", "metrics.json is damaged .*delete .* again, or give another"),
        ("metrics.json", "[]", "a list, not an object"),
        ("metrics.json", "{}", r"metrics.json is damaged \(no 'task'\)"),
        ("predictions.jsonl", "{\n", "predictions.jsonl is damaged"),
        ("predictions.jsonl", "[]\n", "line 1 is no object"),
        ("predictions.jsonl", '{"id": 1, "label": "bad"}\n', "line 1 has no 'prediction'"),
        ("arguments.json", "nothing", "arguments.json is damaged"),
    ],
)
def test_a_damaged_file_is_refused_by_name(tmp_path, name, text, message):
    folder = plant(tmp_path / "a")
    (folder / name).write_text(text)
    with pytest.raises(ArtifactError, match=message):
        load_run(folder)


def test_metrics_that_do_not_follow_from_the_predictions_are_refused(tmp_path):
    folder = plant(tmp_path / "a", n=10, wrong=[1])
    edit(folder / "metrics.json", value=0.95)
    with pytest.raises(ArtifactError, match=r"accuracy is 0.9500, and 0.9000 by its predictions"):
        load_run(folder)
    edit(folder / "metrics.json", value=0.9, n=11)
    with pytest.raises(ArtifactError, match="n is 11, there are 10 predictions"):
        load_run(folder)
    edit(folder / "metrics.json", n=10, metric="rouge")
    with pytest.raises(ArtifactError, match="metric rouge is unknown"):
        load_run(folder)
    edit(folder / "metrics.json", metric="accuracy")
    assert load_run(folder).value == 0.9


@pytest.mark.parametrize("damage", [{"points": None}, {"points": [{}]}, {"axes": None}])
def test_a_damaged_grid_is_refused(tmp_path, damage):
    root = plant_grid(tmp_path / "g", {"k=8": {"value": 8, "seeds": {0: []}}})
    edit(root / "grid.json", **damage)
    with pytest.raises(ArtifactError, match="grid.json is damaged"):
        load_runs([root])
