"""`train.py --system NAME` for systems that train nothing, as a user gives it."""

import pytest
from scripted import Bench, contents, read_json


@pytest.fixture(scope="module")
def bench(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    return Bench(tmp_path_factory.mktemp("systems"), lm_dirs["gpt2"], encoder_dir, t5_dir)


@pytest.mark.parametrize("system", ["icl", "knn"])
def test_a_system_is_run_and_taken_up_by_its_name(bench, system):
    flags = {"system": system, "num_evidence": None, "max_steps": None}
    folder = bench.root / "runs" / f"sst2-{system}-seed1"
    flags["output_dir"] = bench.root / "runs" / "{task}-{method}-seed{seed}"
    called = bench.train(system, **flags)
    assert called.code == 0, called.err
    assert f"{folder}: sst2 test accuracy" in called.out
    assert "note: the seed decides nothing here" in called.out
    assert read_json(folder / "metrics.json")["system"] == system
    before = contents(folder)
    assert "(reused)" in bench.train(system, **flags).out
    assert contents(folder) == before
    other = bench.train(system, **{**flags, "output_dir": folder, "seed": 2}).error
    assert "was made with seed 1, this run asks for 2: choose another --output_dir" in other


def test_what_does_not_suit_a_system_is_refused(bench):
    plain = {"system": "knn", "num_evidence": None}
    told = bench.train("x", search="grid", **plain).error
    assert told.startswith("search 'grid' is for readers (exhaustive, fid, pgra, plain, random), ")
    told = bench.train("x", push_to_hub=True, **plain).error
    assert told.startswith("push_to_hub is for readers")
    told = bench.train("x", system="knn").error  # the bench asks for 2 of evidence
    assert told.startswith("num_evidence is 2, and system 'knn' is the one with num_evidence 0: ")
    assert not bench.run("x").exists()
    bench.train("y", **plain, num_neighbors=1)
    told = bench.evaluate("y").error
    assert "holds no trained reader" in told
