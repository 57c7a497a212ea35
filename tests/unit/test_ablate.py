"""Running a grid: what points share, what is taken up, what a failing one leaves."""

import json
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import yaml
from transformers import GPT2Model

from pgra.cli import main
from pgra.commands.ablate import resolve_point
from pgra.context import ALONE
from pgra.errors import ArtifactError
from pgra.experiments.grid import make_runs, read_grid, write_grid
from pgra.methods.stages import Stages

pytestmark = pytest.mark.slow


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


def runs_of(path, root, *words, seeds=(0,), asked=None, **changes):
    grid = replace(read_grid(path), **changes)
    return grid, make_runs(
        grid, seeds, root, lambda task, point: resolve_point(grid, task, point, words, root), asked
    )


def test_sweeps_of_k_and_d_read_what_the_first_run_reads_and_no_more(write, monkeypatch, tmp_path):
    spy = Mock(side_effect=GPT2Model.forward)
    monkeypatch.setattr(GPT2Model, "forward", lambda *args, **how: spy(*args, **how))

    def read(name, **grid):
        """Run both retrieval stages of all points; count the LM's batches so far."""
        for run in runs_of(write(name, grid=grid), tmp_path / "grid")[1]:
            Stages.read(run.args, ALONE).find()
        return spy.call_count

    first = read("first", num_candidates=[8])
    assert read("k", num_candidates=[4, 2]) == read("d", num_evidence=[1, 4]) == first > 0
    assert read("other", exemplar_seed=[1]) > first  # the control: another bank


def test_a_grid_goes_on_in_its_folder_and_in_no_other(write, tmp_path):
    points = [{"name": "a", "num_evidence": 1, "seeds": [13, 21]}, {"name": "b", "num_evidence": 2}]
    root, path = tmp_path / "grid", write(points=points, reference="T6")
    grid, runs = runs_of(path, root, seeds=())
    assert [(run.point.name, run.args.seed) for run in runs] == [("a", 13), ("a", 21), ("b", 0)]
    asked = runs_of(path, root, seeds=(5,))[1]  # those of the command line
    assert [(run.point.name, run.args.seed) for run in asked] == [("a", 5), ("b", 5)]
    for _ in range(2):  # again: it goes on
        write_grid(grid, runs, root)
        assert json.loads((root / "grid.json").read_text())["reference"] == "T6"
    (tmp_path / "run.json").write_text("{}")
    for folder, name in ((root, "other"), (tmp_path, "mine")):
        with pytest.raises(ArtifactError, match=str(folder)):
            write_grid(replace(grid, name=name), runs, folder)


def test_several_tasks_have_a_folder_each_and_their_own_arguments(write, tmp_path):
    path = write(
        tasks=["sst2", "mr"],
        by_task={"mr": {"learning_rate": 1.0e-4, "max_steps": 9}},
        grid={"max_steps": [2]},
    )
    runs = runs_of(path, tmp_path)[1]
    for run, task in zip(runs, ("sst2", "mr"), strict=True):
        assert (run.args.data.task, run.args.folder.parts[-3]) == (task, task)
    for share in (True, False):
        found = runs_of(path, tmp_path, share=share)[1]
        folders = {run.args.runtime.artifacts_dir for run in found}
        assert (str(tmp_path / "max_steps=2/artifacts") in folders) != share
    (only,) = runs_of(path, tmp_path, asked=["mr"])[1]  # all may follow where one was first
    assert only.args.folder == runs[1].args.folder
    assert [run.args["training"].learning_rate for run in runs] == [None, 1e-4]
    assert [run.args["training"].max_steps for run in runs] == [2, 2]  # the axis wins


def test_a_failing_point_does_not_stop_the_others(write, tmp_path, capsys):
    def ablate(*words):
        flags = ["--output_dir", str(tmp_path / "grid"), "--device", "cpu", "--drop_readers"]
        assert main(["ablate", path, *flags, *words]) == 1
        return capsys.readouterr()

    path = write(points=[{"method": "fid"}, {"num_candidates": 99}], labels={"method": ""})
    said = ablate()
    assert "num_candidates (99)" in said.out
    folder = tmp_path / "grid/fid/seed-0"
    assert not (folder / "reader/model.safetensors").exists()
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    assert f"run: {folder} is finished (reused)" in ablate().err
    assert "(now 2): choose another" in ablate("--max_steps", "2").err  # no resume
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
