"""A search decides on the dev set alone, and goes on where it was stopped."""

import shutil

import pytest
from conftest import write_jsonl
from scripted import contents, read_json, review_rows

pytestmark = pytest.mark.slow

GRID = {
    "num_evidence": 0,
    "max_steps": 3,
    "dev_fraction": 0.4,
    "search": "grid",
    "search_learning_rates": [1e-5, 2e-2],
    "search_batch_sizes": "4",
    "per_device_train_batch_size": None,
}


@pytest.fixture(scope="module")
def grid(bench):
    return bench.make("grid", **GRID)


def points(folder):
    return sorted(path.name for path in folder.glob("lr*"))


def test_the_best_on_dev_wins_and_only_it_is_measured_on_the_test_set(bench, grid):
    folder = bench.run("grid")
    found = read_json(folder / "search.json")
    dev = {one["folder"]: one["dev_value"] for one in found["tried"]}
    assert points(folder) == sorted(dev) == ["lr0.02-batch4-seed1", "lr1e-05-batch4-seed1"]
    assert (found["winner"], found["metric"]) == (max(dev, key=dev.get), "dev accuracy")
    for name, value in dev.items():
        assert read_json(folder / name / "training.json")["value"] == value
        given = read_json(folder / name / "arguments.json")["training"]
        assert name.startswith(f"lr{given['learning_rate']:g}-batch")
        names, is_winner = set(contents(folder / name)), name == found["winner"]
        assert ("metrics.json" in names) == ("predictions.jsonl" in names) == is_winner
        assert not any(name.startswith("checkpoint-") for name in names)
    assert grid.out.count("sst2 test accuracy") == grid.out.count("<- kept") == 1


def test_the_test_set_has_no_say(bench, grid):
    """Its labels turned round: the same points, dev values and winner; another test value."""
    turned = {"positive": "negative", "negative": "positive"}
    rows = [{**row, "label": turned[str(row["label"])]} for row in review_rows(12, start=20)]
    other = write_jsonl(bench.root / "turned.jsonl", rows)
    bench.make("turned", **GRID, test_file=other)
    one, two = (read_json(bench.run(name) / "search.json") for name in ("grid", "turned"))
    assert (one["tried"], one["winner"]) == (two["tried"], two["winner"])
    assert two["test"]["value"] == pytest.approx(1 - one["test"]["value"])


def test_a_finished_search_is_taken_up_a_stopped_one_goes_on_and_seeds_are_the_winners(bench, grid):
    before = contents(bench.run("grid"))
    assert bench.train("grid", **GRID).code == 0
    assert contents(bench.run("grid")) == before
    broken = bench.run("broken")
    shutil.copytree(bench.run("grid"), broken)
    shutil.rmtree(broken / "lr0.02-batch4-seed1")
    (broken / "search.json").unlink()
    called = bench.make("broken", **GRID, seed=None, seeds=[1, 2])
    assert (broken / "search.json").read_bytes() == before["search.json"]
    weights = "lr0.02-batch4-seed1/reader/model.safetensors"
    assert (broken / weights).read_bytes() == before[weights]
    winner = read_json(broken / "search.json")["winner"]
    runs = read_json(broken / "summary.json")["runs"]
    assert [run["folder"] for run in runs] == [winner, winner.replace("seed1", "seed2")]
    assert "mean ± sample sd of 2 seeds" in called.out
