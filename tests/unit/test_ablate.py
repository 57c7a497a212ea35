"""Running a grid: what points share, what is taken up, what a failing one leaves."""

from dataclasses import asdict, replace

import pytest
import yaml
from transformers import GPT2Model

from pgra.cli import main
from pgra.commands.ablate import resolve_point
from pgra.core import ALONE
from pgra.errors import ArtifactError
from pgra.experiments.grid import grid_record, in_order, make_runs, read_grid, write_grid
from pgra.methods.stages import Stages

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def no_budget_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))


@pytest.fixture
def write(tmp_path, args):
    """Write a grid on tiny models: everything but what is varied is in its base."""
    small = {
        **asdict(args.data),
        "corpus": args.corpus.corpus,
        "encoder": args.retriever.encoder,
        "retriever": "bm25",
        "num_candidates": 8,
        "lm": args.rerank.lm,
        "num_evidence": 2,
        "num_exemplars": 4,
        "model_name_or_path": args.reader.model_name_or_path,
        "artifacts_dir": str(tmp_path / "artifacts"),
        "device": "cpu",
        "max_steps": 1,
        "per_device_train_batch_size": 4,
    }

    def write(name="mine", base=None, **values):
        path = tmp_path / f"{name}.yaml"
        values = {"base": {**small, **(base or {})}, "seeds": [0], **values}
        path.write_text(yaml.safe_dump(values, sort_keys=False))
        return str(path)

    return write


@pytest.fixture
def ablate(tmp_path, capsys):
    """Call the command; give its exit code, and what it said."""

    def ablate(path, *words, name="grid"):
        flags = ["--output_dir", str(tmp_path / name), "--device", "cpu", *words]
        code = main(["ablate", path, *flags])
        said = capsys.readouterr()
        return code, said.out, said.err

    return ablate


@pytest.fixture
def forwards(monkeypatch):
    """Count the batches that the LM reads."""
    counts, forward = [], GPT2Model.forward

    def count(self, *args, **kwargs):
        counts.append(1)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(GPT2Model, "forward", count)
    return counts


def runs_of(path, root, *words, seeds=(0,), **changes):
    grid = replace(read_grid(path), **changes)
    return grid, make_runs(
        grid, seeds, root, lambda task, point: resolve_point(grid, task, point, words, root)
    )


def find_all(path, tmp_path):
    """Run both retrieval stages of all points, in the grid's order."""
    for run in in_order(runs_of(path, tmp_path / "grid")[1]):
        Stages.read(run.args, ALONE).find()


def test_sweeps_of_k_and_d_read_what_the_first_run_reads_and_no_more(write, forwards, tmp_path):
    find_all(write("first", grid={"num_candidates": [8]}), tmp_path)
    first = len(forwards)
    assert first > 0
    find_all(write("k", grid={"num_candidates": [2, 4, 8]}), tmp_path)
    find_all(write("d", grid={"num_evidence": [1, 4]}), tmp_path)
    assert len(forwards) == first  # not one batch more
    find_all(write("other", grid={"exemplar_seed": [1]}), tmp_path)  # the control: another bank
    assert len(forwards) > first


def test_a_grid_goes_on_in_its_folder_and_in_no_other(write, tmp_path):
    root = tmp_path / "grid"
    grid, runs = runs_of(write(grid={"num_evidence": [1, 2]}, reference="T6"), root)
    write_grid(grid, runs, root)
    written = (root / "grid.json").read_bytes()
    assert b'"T6"' in written
    write_grid(grid, runs, root)  # again: it goes on
    assert {path.name: path.read_bytes() for path in root.iterdir()} == {"grid.json": written}
    with pytest.raises(ArtifactError, match="holds the grid 'mine', this one is 'other': choose"):
        write_grid(replace(grid, name="other"), runs, root)
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is a run itself: choose another --output_dir"):
        write_grid(grid, runs, tmp_path)


def test_a_point_may_have_seeds_of_its_own_which_the_command_line_replaces(write, tmp_path):
    points = [{"name": "a", "num_evidence": 1, "seeds": [13, 21]}, {"name": "b", "num_evidence": 2}]
    path = write(points=points)

    def seeds_of(**how):
        runs = runs_of(path, tmp_path, **how)[1]
        return {name: [run.seed for run in runs if run.point.name == name] for name in "ab"}

    assert seeds_of(seeds=()) == {"a": [13, 21], "b": [0]}
    assert seeds_of(seeds=(5, 6)) == {"a": [5, 6], "b": [5, 6]}  # the control


def test_several_tasks_have_a_folder_each_and_their_own_arguments(write, tmp_path):
    path = write(
        tasks=["sst2", "mr"],
        by_task={"mr": {"learning_rate": 1.0e-4, "max_steps": 9}},
        grid={"max_steps": [2]},
    )
    grid, runs = runs_of(path, tmp_path)
    assert [(run.folder.relative_to(tmp_path).as_posix(), run.args.data.task) for run in runs] == [
        ("sst2/max_steps=2/seed-0", "sst2"),
        ("mr/max_steps=2/seed-0", "mr"),
    ]
    for share in (True, False):
        found = runs_of(path, tmp_path, share=share)[1]
        folders = {run.args.runtime.artifacts_dir for run in found}
        assert (str(tmp_path / "max_steps=2/artifacts") in folders) != share
    (only,) = runs_of(path, tmp_path, asked=["mr"])[1]  # all may follow where one was first
    assert only.folder == runs[1].folder
    assert [run.args["training"].learning_rate for run in runs] == [None, 1e-4]
    assert [run.args["training"].max_steps for run in runs] == [2, 2]  # the axis wins
    points = grid_record(grid, runs, tmp_path)["points"]
    assert [(point["task"], point["values"]) for point in points] == [
        ("sst2", {"training.max_steps": 2}),
        ("mr", {"training.max_steps": 2}),
    ]


def test_a_failing_point_is_told_and_the_others_are_taken_up_without_their_readers(
    write, ablate, tmp_path
):
    path = write(points=[{"method": "plain"}, {"num_candidates": 99}], labels={"method": ""})
    code, out, err = ablate(path, "--drop_readers")
    assert code == 1
    assert "failed: num_candidates=99, seed 0: num_candidates (99) exceeds the corpus" in out
    assert "1 of 2 runs failed; the same command tries them again" in out
    lines = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "missing" in lines["num_candidates=99"]
    assert "missing" not in lines["plain"]
    assert "Traceback" not in err
    folder = tmp_path / "grid/plain/seed-0"
    assert not (folder / "reader/model.safetensors").exists()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    for words, told in (
        ((), f"run: {folder} is finished (reused)"),
        (("--max_steps", "2"), "with max_steps 1, this run asks for 2"),  # it is no resume
    ):
        code, _, err = ablate(path, *words)
        assert code == 1
        assert told in err
        assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
