"""Running a grid: what points share, what is taken up, what a failing one leaves."""

import json
import os
import signal
import sys
from dataclasses import asdict, replace
from unittest.mock import Mock

import pytest
import yaml
from processes import FORKS, warm_up
from transformers import GPT2Model

from pgra.artifacts import lock_folder
from pgra.cli import main
from pgra.commands.ablate import resolve_point
from pgra.context import ALONE
from pgra.data.corpus import open_corpus
from pgra.errors import ArtifactError
from pgra.experiments.costs import Cost
from pgra.experiments.grid import make_runs, read_grid, write_grid
from pgra.lm.base import DEPTHS
from pgra.lm.load import find_model, load_config
from pgra.methods.stages import Stages
from pgra.reader import train
from pgra.reader.fid import FusionReader
from pgra.reader.resume import save_checkpoint

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


STORES = ("artifacts", "own")


def be_part(words, steps):
    """Be a part of a grid, which is killed once it has so many checkpoints; None: never."""
    saved = []

    def save(home, *args):
        save_checkpoint(home, *args)
        saved.append(home)
        if len(saved) == steps:
            os.kill(os.getpid(), signal.SIGKILL)

    train.save_checkpoint = save
    sys.exit(main(words))


@pytest.mark.parametrize("count", [2, 3])
def test_parts_share_a_grid_and_take_up_the_run_of_a_killed_one(write, tmp_path, capsys, count):
    warm_up()
    path = write(
        grid={"num_evidence": [1, 2, 4]}, base={"max_steps": 4, "save_steps": 2, "eval_steps": 2}
    )
    words = ["ablate", path, "--output_dir"]
    capsys.readouterr()
    assert main([*words, str(tmp_path / "alone"), "--artifacts_dir", str(tmp_path / "own")]) == 0
    expected = capsys.readouterr().out
    root = tmp_path / "shared"
    parts = []
    for number in range(count):
        args = ([*words, str(root), "--shard", f"{number}/{count}"], None if number else 1)
        parts.append(FORKS.Process(target=be_part, args=args))
    parts[0].start()
    parts[0].join()
    assert parts[0].exitcode == -signal.SIGKILL
    assert list(root.rglob("checkpoint-2"))
    for part in parts[1:]:
        part.start()
    for part in parts[1:]:
        part.join()
        assert part.exitcode == 0
    assert len(list(root.rglob("metrics.json"))) == 3
    shards = [len([*(tmp_path / name).glob("banks/*/*.safetensors")]) for name in STORES]
    assert shards[0] == shards[1] > 0  # read once
    assert main([*words, str(root)]) == 0
    assert capsys.readouterr().out == expected.replace(str(tmp_path / "alone"), str(root))


def test_a_run_of_another_job_is_left_to_it(write, tmp_path, capsys):
    path = write(grid={"num_evidence": [1, 2]})
    root = tmp_path / "grid"
    with lock_folder(root / "num_evidence=1" / "seed-0"):
        assert main(["ablate", path, "--output_dir", str(root), "--shard", "0/2"]) == 0
        assert "1 of 2 runs are left" in capsys.readouterr().out
        assert main(["ablate", path, "--output_dir", str(root)]) == 1
    assert "is in use by another pgra job" in capsys.readouterr().out
    assert main(["ablate", path, "--output_dir", str(root), "--shard", "2/2"]) == 2
    other = write("other", grid={"num_evidence": [1, 2]})
    assert main(["ablate", other, "--output_dir", str(root), "--shard", "0/2"]) == 2


def test_a_grids_data_and_models_are_looked_for(write, capsys):
    for name, lm, code in (("all", {}, 0), ("none", {"lm": "no/where"}, 1)):
        assert main(["list", "--resolve", write(name, base=lm)]) == code
        *lines, last = capsys.readouterr().out.splitlines()
        assert last == f"{code} of {len(lines)} are missing"
        assert any("model no/where: MISSING" in line for line in lines) == bool(code)


def test_costs_count_what_is_shared_once(write, tmp_path):
    path = write(base={"retriever": "dense", "similarity": "head"})
    _, runs = runs_of(path, tmp_path / "runs", seeds=(0, 1))
    one = Cost.of([runs[0].args])
    both = Cost.of([run.args for run in runs])
    args = runs[0].args
    lm = load_config(find_model(args.rerank.lm))
    encoder = load_config(find_model(args.retriever.encoder))
    rows = len(open_corpus(args.corpus, args.runtime.artifacts_dir))
    assert list(one.indexes.values()) == [rows * encoder.hidden_size * 6]
    ((size, _),) = one.states.values()
    assert size == rows * lm.hidden_size * 2 * len(DEPTHS)
    t5 = FusionReader.from_source(find_model(args.reader.model_name_or_path))
    assert one.readers == 4 * t5.model.num_parameters()
    assert one.training == 6 * t5.model.num_parameters() * 4 * 2 * 67
    assert (both.indexes, both.states) == (one.indexes, one.states)
    assert (both.readers, both.training) == (2 * one.readers, 2 * one.training)
    assert not both.unknown
    hours = one.training / 0.096 / 989e12 / 3600
    assert f"{hours:,.1f} to train readers" in both.describe("h100")[1]
    assert len(both.describe(None)) == 1
