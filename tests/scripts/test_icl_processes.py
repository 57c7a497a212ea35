"""`pgra icl` in several processes says what it says in one, and asks no prompt twice."""

import pytest
import yaml
from conftest import write_jsonl
from scripted import finish, review_rows, run_apart

from pgra.artifacts import lock_folder
from pgra.report.results import read_lines

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "pgra"]


@pytest.fixture
def grid(tmp_path, lm_dirs, encoder_dir):
    """Give the words that run a grid of two points in a folder of a name."""
    points = [{"name": "drawn", "exemplars": "random"}, {"name": "near", "exemplars": "knn"}]
    base = {
        "task": "sst2",
        "train_file": str(write_jsonl(tmp_path / "train.jsonl", review_rows(40))),
        "test_file": str(write_jsonl(tmp_path / "test.jsonl", review_rows(12, start=20))),
        "lm": str(lm_dirs["gpt2"]),
        "encoder": str(encoder_dir),
        "num_exemplars": 3,
    }
    file = tmp_path / "two.yaml"
    told = {"seeds": [0], "base": {"method": "kate", **base}, "points": points}
    file.write_text(yaml.safe_dump(told))

    refused = tmp_path / "refused.yaml"
    many = [{"name": "many", "num_exemplars": 999}, points[0]]
    refused.write_text(yaml.safe_dump({**told, "points": many}))

    def of(name, file):
        places = ["--output_dir", tmp_path / "runs" / name, "--artifacts_dir", tmp_path / name]
        return ["ablate", file, *places, "--device", "cpu"]

    return {
        name: [str(word) for word in of(name, refused if name == "refused" else file)]
        for name in ("one", "two", "held", "refused")
    }


@pytest.mark.slow
def test_a_grid_in_two_processes_is_one_of_one_and_a_held_folder_ends_both(grid, tmp_path):
    assert finish([*LAUNCH, *grid["two"]]).count("the LM was asked 12 prompts") == 2
    finish(["-m", "pgra", *grid["one"]])
    for point in ("drawn", "near"):
        files = (tmp_path / "runs" / n / point / "seed-0/predictions.jsonl" for n in ("one", "two"))
        one, two = ([line["prediction"] for line in read_lines(file)] for file in files)
        assert one == two
        assert len(one) == 12
    with lock_folder(tmp_path / "runs" / "held" / "drawn" / "seed-0"):
        code, told = launch(grid["held"])
    assert code != 0  # not waited for: only the main process holds folders
    assert "seed-0 is in use by another pgra job" in told


@pytest.mark.slow
def test_what_all_processes_refuse_is_passed_over(grid, tmp_path):
    code, told = launch(grid["refused"])
    assert code != 0
    assert "many, seed 0 failed: " in told
    assert (tmp_path / "runs/refused/drawn/seed-0/metrics.json").is_file()
    assert not (tmp_path / "runs/refused/many/seed-0/metrics.json").exists()


def launch(words):
    """Run pgra in two processes that may fail; give the exit code and what was said."""
    done = run_apart([*LAUNCH, *words], timeout=300)
    return done.returncode, done.stdout
