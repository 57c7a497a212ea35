"""`pgra icl` in several processes says what it says in one, and asks no prompt twice."""

import re

import pytest
from conftest import write_jsonl
from scripted import call, finish, review_rows

from pgra.commands.icl import main
from pgra.evaluation.run_files import read_lines

LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "-m", "pgra"]


@pytest.fixture
def argv(tmp_path, lm_dirs, encoder_dir):
    flags = {
        "task": "sst2",
        "train_file": write_jsonl(tmp_path / "train.jsonl", review_rows(40)),
        "test_file": write_jsonl(tmp_path / "test.jsonl", review_rows(12, start=20)),
        "lm": lm_dirs["gpt2"],
        "encoder": encoder_dir,
        "num_exemplars": 3,
        "order": "random",
        "device": "cpu",
    }
    flat = [str(word) for name, value in flags.items() for word in (f"--{name}", value)]

    def of(name, *more):
        places = {"artifacts_dir": tmp_path / name, "output_dir": tmp_path / "runs" / name}
        return [*flat, *(str(w) for k, v in places.items() for w in (f"--{k}", v)), *more]

    return of


@pytest.mark.slow
def test_two_processes_answer_as_one(argv, tmp_path):
    told = finish([*LAUNCH, "icl", *argv("two", "--seeds", "0", "1")])
    assert told.count("mean ± sample sd of 2 seeds") == 1  # one speaks
    assert re.findall(r"the LM was asked (\d+) prompts", told)[0] == "12"
    assert call(main, argv("one", "--seeds", "0", "1")).code == 0
    for seed in ("seed-0", "seed-1"):
        files = (tmp_path / "runs" / name / seed / "predictions.jsonl" for name in ("one", "two"))
        one, two = (list(read_lines(file)) for file in files)
        assert len(one) == 12
        assert [line["exemplars"] for line in one] == [line["exemplars"] for line in two]
        assert [line["prediction"] for line in one] == [line["prediction"] for line in two]
    again = finish([*LAUNCH, "icl", *argv("two", "--seeds", "0", "1")])
    assert again.count(" is finished (reused)") == 2
