"""Runs and grids are read back with checks; what is damaged is refused by name."""

import pytest
from planted_runs import load_run, plant, plant_grid

from pgra.errors import ArtifactError
from pgra.methods.arguments import RunArguments
from pgra.report.results import load_collection
from pgra.runs import Run


def found_in(*paths):
    return [run for group in load_collection(paths) for run in group.runs]


def test_a_run_is_read_with_what_it_decided(tmp_path):
    run = load_run(plant(tmp_path / "r", method="fid", task="cr", seed=3, n=8, wrong=[0, 5]))
    assert (run.method, run.task, run.seed, run.name) == ("fid", "cr", 3, "r")
    assert run.value == pytest.approx(6 / 8)
    assert run.outcomes.parts.tolist() == [0, 1, 1, 1, 1, 0, 1, 1]
    assert run.values["num_candidates"] == 150
    assert run.predictions[5]["evidence"][0]["text"] == "evidence 5"


def test_a_path_is_a_run_a_folder_of_runs_several_seeds_or_a_grid(tmp_path):
    plant(tmp_path / "runs/a")
    plant(tmp_path / "runs/many/seed-0", method="fid")
    plant(tmp_path / "runs/many/seed-1", method="fid", seed=1)
    assert [run.name for run in found_in(tmp_path / "runs/a")] == ["a"]
    assert [run.name for run in found_in(tmp_path / "runs")] == ["a", "seed-0", "seed-1"]
    assert [run.seed for run in found_in(tmp_path / "runs/many")] == [0, 1]
    plant_grid(tmp_path / "runs/k", {"k=8": {"value": 8, "seeds": {0: [], 1: None}}})
    grid, others = load_collection([tmp_path / "runs"])
    assert (len(grid.runs), len(others.runs)) == (1, 3)
    assert [(gone.name, gone.task, gone.seed) for gone in grid.missing] == [("k=8", "sst2", 1)]
    assert grid.points == {"k=8": {"num_candidates": 8}}


def test_what_is_not_finished_is_left_out(tmp_path, caplog):
    plant(tmp_path / "runs/a")
    plant(tmp_path / "runs/a/checkpoint-1")
    plant(tmp_path / "runs/bank/inner")
    (tmp_path / "runs/bank/manifest.json").write_text("{}")
    (tmp_path / "runs/begun").mkdir()
    (tmp_path / "runs/begun/run.json").write_text("{}")
    (found,) = load_collection([tmp_path / "runs"])
    assert f"{tmp_path / 'runs/begun'} is not measured" in caplog.text
    assert [run.name for run in found.runs] == ["a"]


FILES = ("metrics.json", "predictions.jsonl", "arguments.json")


def plant_whole(folder, **changes):
    """Write a run whose metrics tell of its arguments too, as those of a real run do."""
    plant(folder, n=4, **changes)
    return plant(folder, n=4, **changes)


@pytest.mark.parametrize("name", FILES[1:])
def test_a_file_of_another_run_is_named_where_one_was_swapped(tmp_path, name):
    one, other = (plant_whole(tmp_path / str(i), wrong=[i], seed=i) for i in (1, 2))
    assert load_run(one).value == load_run(other).value  # of which nothing tells
    (one / name).write_bytes((other / name).read_bytes())
    with pytest.raises(ArtifactError, match=str(one)):
        load_run(one)
    for file in FILES:
        (one / file).write_bytes((other / file).read_bytes())
    assert load_run(one).seed == 2  # the control: a copy


def test_a_changed_number_is_shown_nowhere(tmp_path):
    folder = plant(tmp_path / "a", n=10, wrong=[1])
    run = Run(folder, RunArguments({}))
    assert (load_run(folder).value, run.metrics["value"]) == (0.9, 0.9)  # the control
    path = folder / "metrics.json"
    path.write_text(path.read_text().replace("0.9", "0.95"))
    for show in (lambda: load_run(folder), lambda: run.metrics):
        with pytest.raises(ArtifactError, match="metrics.json"):
            show()
