"""`pgra ablate` of KATE in several processes says what it says in one, and asks no prompt twice."""

import pytest
import yaml
from scripted import Bench, run_apart

from pgra.artifacts import lock_folder
from pgra.report.results import read_lines

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.slow
def test_a_grid_in_two_processes_is_one_of_one_and_a_held_folder_ends_both(
    tmp_path, lm_dirs, encoder_dir, t5_dir
):
    flags = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir).flags
    names = ("task", "train_file", "test_file", "lm", "encoder")
    base = {"method": "kate", "num_exemplars": 3, **{name: str(flags[name]) for name in names}}
    points = [
        {"name": "many", "num_exemplars": 999},  # which all processes refuse
        {"name": "drawn", "exemplars": "random"},
        {"name": "near", "exemplars": "knn"},
    ]
    grid = tmp_path / "grid.yaml"
    grid.write_text(yaml.safe_dump({"seeds": [0], "base": base, "points": points}))

    def ablate(name, *launch):
        places = ["--output_dir", tmp_path / "runs" / name, "--artifacts_dir", tmp_path / name]
        words = [*launch, "-m", "pgra", "ablate", grid, *places, "--device", "cpu"]
        done = run_apart([str(word) for word in words], timeout=300)
        assert done.returncode != 0
        return done.stdout

    for name, launch in (("one", ()), ("two", LAUNCH)):
        told = ablate(name, *launch)
        assert "many, seed 0 failed: " in told
        assert told.count("the LM was asked 12 prompts") == 2
    for point in ("drawn", "near"):
        files = (tmp_path / "runs" / n / point / "seed-0/predictions.jsonl" for n in ("one", "two"))
        one, two = ([line["prediction"] for line in read_lines(file)] for file in files)
        assert one == two
        assert len(one) == 12
    assert not (tmp_path / "runs/two/many/seed-0/metrics.json").exists()
    with lock_folder(tmp_path / "runs/held/drawn/seed-0"):  # not waited for: only the main process
        assert "seed-0 is in use by another pgra job" in ablate("held", *LAUNCH)  # holds folders
    with lock_folder(tmp_path / "runs/held"):
        assert "held is in use by another pgra job: wait" in ablate("held")
