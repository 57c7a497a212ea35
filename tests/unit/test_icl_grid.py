"""Grids of `pgra icl`: one LM for all points, a run a draw, what is taken up and refused."""

import json
import re

import pytest
import yaml

from pgra.cli import main
from pgra.commands.ablate import resolve_icl_point
from pgra.errors import ConfigError
from pgra.experiments import grid as icl_grid
from pgra.experiments.grid import grid_names, make_icl_runs, read_grid
from pgra.report.compare import load_reference

ICL_GRIDS = [name for name in grid_names() if read_grid(name).command == "icl"]
POINTS = [
    {"name": "random", "exemplars": "random", "redraw": True},
    {"name": "closest", "exemplars": "knn"},
    {"name": "vote", "exemplars": "knn", "decide_by": "vote"},
]


@pytest.fixture
def write(tmp_path, review_files, encoder_dir, lm_dirs):
    def write(name="mine", **values):
        base = {
            "task": "sst2",
            "train_file": str(review_files["train"]),
            "test_file": str(review_files["test"]),
            "lm": str(lm_dirs["gpt2"]),
            "encoder": str(encoder_dir),
            "num_exemplars": 2,
            "artifacts_dir": str(tmp_path / "artifacts"),
            "device": "cpu",
        }
        told = {"command": "icl", "seeds": [0, 1], "base": base, "points": POINTS, **values}
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(told, sort_keys=False))
        return str(path)

    return write


@pytest.fixture
def ablate(tmp_path, capsys):
    def ablate(path, *words):
        code = main(["ablate", path, "--output_dir", str(tmp_path / "grid"), *words])
        told = capsys.readouterr()
        return code, told.out, told.err

    return ablate


def runs_of(name, root, *words, seeds=(0, 1), demo=False):
    grid = read_grid(name, demo=demo)
    return make_icl_runs(
        grid, seeds, root, lambda task, point: resolve_icl_point(grid, task, point, words, root)
    )


def test_only_what_draws_is_run_with_every_seed(write, tmp_path):
    runs = runs_of(write(), tmp_path, seeds=(3, 1))
    assert [(run.point.name, run.seed) for run in runs] == [
        *(("random", 3), ("random", 1), ("closest", 3), ("vote", 3))
    ]
    assert [run.run.selection.exemplar_seed for run in runs] == [3, 1, 3, 3]
    assert runs[1].folder == tmp_path / "random" / "seed-1"
    shuffled = write("shuffled", points=[{"name": "x", "order": "random"}])
    assert [run.seed for run in runs_of(shuffled, tmp_path, seeds=(3, 1))] == [3, 1]


def test_a_grid_opens_its_lm_once_and_is_taken_up(write, ablate, tmp_path, monkeypatch):
    opened = []
    real = icl_grid.open_lm
    monkeypatch.setattr(icl_grid, "open_lm", lambda run, of: opened.append(run) or real(run, of))
    path = write(baseline={"exemplars": "random"})
    code, out, err = ablate(path)
    assert code == 0, err
    assert len(opened) == 1
    _, _, *rows = out.partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert [row.split()[0] for row in rows] == ["random", "closest", "vote"]
    told = json.loads((tmp_path / "grid" / "grid.json").read_text())
    assert told["axes"] == ["selection.exemplars", "selection.redraw", "icl.decide_by"]
    assert {p["name"]: list(p["seeds"]) for p in told["points"]} == {
        **{"random": ["0", "1"], "closest": ["0"], "vote": ["0"]},
    }
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "grid").rglob("metrics.json")}
    code, again, _ = ablate(path)
    assert code == 0
    assert again == out
    # What no seed decides is compared with both draws; these are equal, so seeds test nothing.
    tested = out.partition("every value")[2].splitlines()
    assert any(line.startswith("closest") and line.rstrip().endswith(" of 2") for line in tested)
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "grid").rglob("metrics.json")}


def test_another_lm_is_opened_anew(write, ablate, monkeypatch, lm_dirs):
    opened = []
    real = icl_grid.open_lm
    monkeypatch.setattr(
        icl_grid, "open_lm", lambda run, of: opened.append(run.completer.lm) or real(run, of)
    )
    lms = [str(lm_dirs["gpt2"]), str(lm_dirs["opt"])]
    points = [{"name": f"LM {i}", "lm": lm} for i, lm in enumerate(lms)]
    code, _, err = ablate(write(points=points))
    assert code == 0, err
    assert opened == lms


def test_a_dry_run_counts_prompts_and_writes_nothing(write, ablate, tmp_path):
    code, out, _ = ablate(write(), "--dry-run")
    assert code == 0
    table = [line.split() for line in out.splitlines()]
    assert ["sst2", "random", "2", "0", "12", "24"] in table
    assert ["sst2", "closest", "1", "0", "12", "12"] in table
    assert ["sst2", "vote", "1", "0", "12", "0", "no", "LM"] in table
    assert "at most 36 prompts in all" in out
    assert not (tmp_path / "grid").exists()
    _, calibrated, _ = ablate(write(points=[{"calibrate": True}]), "--dry-run")
    assert ["sst2", "calibrate=yes", "1", "0", "12", "48"] in [
        line.split() for line in calibrated.splitlines()
    ]


def test_a_point_that_fails_is_told_and_the_others_are_made(write, ablate, tmp_path):
    points = [{"name": "all", "num_exemplars": 9999}, {"name": "two", "num_exemplars": 2}]
    code, out, _ = ablate(write(points=points))
    assert code == 1
    assert "failed: all, seed 0" in out
    assert (tmp_path / "grid" / "two" / "seed-0" / "metrics.json").is_file()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--drop_readers"], "the grid 'mine' trains none: leave it out"),
        (["--exemplar_seed", "3"], "a grid runs several seeds: give --seeds"),
        (["--axis", "exemplar_seed=1,2"], "'exemplar_seed' cannot be an axis"),
        (["--axis", "num_evidence=1,2"], "unknown axis 'num_evidence'.*See pgra icl --help"),
        (["--axis", "order=up"], "point 'random, order=up': unknown order 'up'"),
        (["--max_steps", "3"], "unknown argument '--max_steps'"),
    ],
)
def test_what_is_no_grid_of_icl_is_refused(write, ablate, tmp_path, words, told):
    code, _, err = ablate(write(), *words)
    assert code == 2
    assert re.search(told, err)
    assert not (tmp_path / "grid").exists()


def test_an_unknown_command_is_refused(write):
    with pytest.raises(ConfigError, match="command: unknown command 'vote'. Known: icl, train"):
        read_grid(write(command="vote"))


def test_the_help_of_such_a_grid_is_that_of_icl(capsys):
    assert main(["ablate", "kate_t2", "--help"]) == 0
    told = capsys.readouterr().out
    assert "--leak_jaccard" in told
    assert "--dry_run" in told
    assert "--per_device_train_batch_size" not in told


@pytest.mark.parametrize(
    ("name", "demo"),
    sorted({(name, demo) for name in ICL_GRIDS for demo in (False, name.startswith("kate"))}),
)
def test_every_shipped_grid_of_icl_resolves(name, demo, tmp_path):
    runs = runs_of(name, tmp_path, demo=demo)
    assert len(runs) >= 1
    assert len({run.folder for run in runs}) == len(runs)
    grid = read_grid(name, demo=demo)
    if grid.reference is not None:
        assert load_reference(grid.reference).rows


def test_there_is_a_grid_for_every_table_and_figure_of_kate():
    assert {"kate_t1", "kate_t2", "kate_t3", "kate_t4", "kate_t6", "kate_t8"} <= set(ICL_GRIDS)
    assert {"kate_f2l", "kate_f2r"} <= set(ICL_GRIDS)


@pytest.mark.parametrize(
    ("name", "beside"),
    [
        ("kate_t1", ["Random, mean of 5 trials"]),
        ("kate_t2", ["Closest", "Farthest"]),
        (
            "kate_t3",
            ["Random", "kNN (roberta)", "KATE (roberta)", "KATE (nli)", "KATE (nli+sts-b)"],
        ),
        (
            "kate_t4",
            ["Random", "kNN (roberta)", "KATE (roberta)", "KATE (nli)", "KATE (nli+sts-b)"],
        ),
        (
            "kate_t6",
            ["Random", "kNN (roberta)", "KATE (roberta)", "KATE (nli)", "KATE (nli+sts-b)"],
        ),
        ("kate_t8", ["Random orders, mean of 3", "Default", "Reverse"]),
        ("two_cores_kate", ["Random", "KATE (nli+sts-b)", None, "kNN (roberta)"]),
    ],
)
def test_points_stand_beside_the_papers_rows(name, beside, tmp_path):
    table = load_reference(read_grid(name).reference)
    first = {run.point.name: run.run for run in reversed(runs_of(name, tmp_path))}
    found = [
        table.find_row_of({**_flat(run), "system": run.system}) for run in reversed(first.values())
    ]
    assert found == beside


def _flat(run):
    parts = run.sections().values()
    return {name: value for part in parts for name, value in part.items()}
