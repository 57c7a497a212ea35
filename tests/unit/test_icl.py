"""`pgra icl` on tiny models: what it leaves, reuses and refuses; it agrees with `--system icl`."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
from conftest import with_rerank
from pgra.commands.icl import main
from pgra.lm.open import CompleterArguments
from pgra.methods.icl import run as run_system
from pgra.methods.kate_arguments import IclArguments
from pgra.methods.kate_inputs import IclRun

from pgra.artifacts import lock_folder
from pgra.config import DataArguments
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.exemplars import SelectionArguments
from pgra.methods.kate import run_icl, run_icl_seeds
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.report.results import check_comparable, load_collection, row_names


@pytest.fixture
def run(tmp_path, review_files, encoder_dir, lm_dirs):
    return IclRun(
        data=DataArguments(
            task="sst2",
            train_file=str(review_files["train"]),
            test_file=str(review_files["test"]),
        ),
        completer=CompleterArguments(lm=str(lm_dirs["gpt2"])),
        selection=SelectionArguments(encoder=str(encoder_dir), num_exemplars=3),
        icl=IclArguments(
            artifacts_dir=str(tmp_path / "artifacts"),
            output_dir=str(tmp_path / "runs" / "{task}-{system}"),
            device="cpu",
        ),
    )


def having(run, **changes):
    """Change arguments wherever they stand."""
    parts = {}
    for name in ("data", "completer", "selection", "icl"):
        part = getattr(run, name)
        own = {key: changes.pop(key) for key in list(changes) if hasattr(part, key)}
        parts[name] = replace(part, **own)
    assert not changes
    return IclRun(**parts)


def lines_of(folder):
    return [json.loads(line) for line in (folder / "predictions.jsonl").read_text().splitlines()]


def test_a_run_leaves_predictions_with_their_exemplars(run):
    outcome = run_icl(run)
    assert outcome.folder.name == "sst2-icl-knn"
    lines = lines_of(outcome.folder)
    assert len(lines) == 12
    for line in lines:
        near = [shown["similarity"] for shown in line["exemplars"]]
        assert len(near) == 3
        assert near == sorted(near, reverse=True)
        assert (line["over_budget"], line["near_duplicates"]) == (0, 0)
        assert sum(line["scores"].values()) == pytest.approx(1)
    prompt = (outcome.folder / "prompt.txt").read_text()
    assert prompt.startswith("Follow the demonstrations:\n")
    assert prompt.count("The answer is") == 4
    assert outcome.metrics["exemplars"]["exemplars"] == 36
    assert outcome.metrics["knn_vote"]["metric"] == "accuracy"


def test_copies_in_the_pool_are_counted_and_told(run, review_files, caplog):
    path = review_files["train"]
    first, *_ = lines = path.read_text().splitlines()
    assert '"positive"' in first
    other = first.replace('"positive"', '"negative"')  # the control: another label is no copy
    path.write_text("".join(f"{line}\n" for line in (*lines, first, other)))
    with caplog.at_level("INFO"):
        metrics = run_icl(run).metrics
    assert metrics["exemplars"]["copies_in_pool"] == 1
    told = "1 of 42 examples"
    assert [note for note in metrics["notes"] if note.startswith(told)]
    assert f"pool: {told} are copies" in caplog.text


def test_what_is_finished_is_taken_up_and_another_run_is_refused(run):
    first = run_icl(run)
    again = run_icl(run)
    assert (first.reused, again.reused) == (False, True)
    assert again.metrics == first.metrics
    with pytest.raises(
        ArtifactError, match=r"sst2-icl-knn was made with num_exemplars 3.*asks for 2"
    ):
        run_icl(having(run, num_exemplars=2))


def test_answers_that_are_there_are_not_asked_again(run, caplog):
    caplog.set_level("INFO")
    first = run_icl(run)
    assert "the LM was asked 12 prompts, 0 were answered before" in caplog.text
    other = having(run, output_dir=run.icl.output_dir + "-again")
    second = run_icl(other)
    assert "the LM was asked 0 prompts, 12 were answered before (reused)" in caplog.text
    assert lines_of(second.folder) == lines_of(first.folder)
    third = run_icl(having(other, order="nearest-last", output_dir=run.icl.output_dir + "-last"))
    assert "the LM was asked 12 prompts, 0 were answered before" in caplog.text.split("asked 0")[1]
    assert [line["scores"] for line in lines_of(third.folder)] != [
        line["scores"] for line in lines_of(first.folder)
    ]


def test_it_decides_as_the_system_icl_under_neighbors_of_the_same_pool(run, args, tmp_path):
    """Two paths, one method: states from a bank and the head, or a completer's scores."""
    # The other one holds a dev set out of the pool: here it is the file's last two examples.
    rows = Path(run.data.train_file).read_text().splitlines(keepends=True)
    train, dev = tmp_path / "pool.jsonl", tmp_path / "dev.jsonl"
    train.write_text("".join(rows[:-2]))
    dev.write_text("".join(rows[-2:]))
    knn = with_rerank(args, exemplars="knn", num_exemplars=3, num_evidence=0)
    data = replace(knn.data, train_file=str(train), validation_file=str(dev))
    knn = replace(knn, data=data, runtime=replace(knn.runtime, system="icl"))
    folder = tmp_path / "sister"
    run_system(knn, ReaderTrainingArguments(output_dir=str(folder), use_cpu=True))
    ours = run_icl(having(run, train_file=str(train)))
    for mine, theirs in zip(lines_of(ours.folder), lines_of(folder), strict=True):
        assert mine["id"] == theirs["id"]
        for label, chance in mine["scores"].items():
            assert chance == pytest.approx(theirs["scores"][label], abs=1e-4)


def test_seeds_of_a_draw_give_mean_and_spread(run):
    random = having(run, exemplars="random", redraw=True)
    summary = run_icl_seeds(random, [0, 1, 2])
    values = [outcome.metrics["value"] for outcome in summary.outcomes.values()]
    assert summary.values["mean"] == pytest.approx(np.mean(values))
    assert summary.values["sd"] == pytest.approx(np.std(values, ddof=1))
    shown = [
        [line["exemplars"] for line in lines_of(outcome.folder)]
        for outcome in summary.outcomes.values()
    ]
    assert shown[0] != shown[1]
    with pytest.raises(ConfigError, match="'knn' in order 'nearest-first' draws nothing"):
        run_icl_seeds(run, [0, 1])


def test_runs_stand_in_one_report(run, tmp_path):
    for one in (run, having(run, decide_by="vote", output_dir=str(tmp_path / "runs" / "vote"))):
        run_icl(one)
    for far in (False, True):
        run_icl(
            having(run, farthest=far, num_exemplars=2, output_dir=str(tmp_path / f"runs/{far}"))
        )
    (group,) = load_collection([tmp_path / "runs"]).groups
    check_comparable(group)
    assert sorted(row_names(group)) == [
        "icl-farthest",
        "icl-knn num_exemplars=2",
        "icl-knn num_exemplars=3",
        "vote-knn",
    ]


def test_two_jobs_do_not_share_a_run_folder(run):
    with lock_folder(run.folder), pytest.raises(ArtifactError, match="in use by another pgra job"):
        run_icl(run)
    assert not (run.folder / "metrics.json").exists()
    assert (run_icl(run).folder / "metrics.json").is_file()  # the control: nobody holds it


def test_the_vote_needs_no_lm_and_follows_the_nearest(run):
    voted = run_icl(having(run, decide_by="vote", lm="no/such-lm", num_exemplars=1))
    asked = run_icl(having(run, output_dir=run.icl.output_dir + "-lm", num_exemplars=1))
    assert voted.metrics["value"] == asked.metrics["knn_vote"]["value"]
    for line in lines_of(voted.folder):
        assert line["scores"][line["prediction"]] == 1
    with pytest.raises(ConfigError, match="decide_by 'vote' is the neighbors' vote"):
        run_icl(having(run, decide_by="vote", exemplars="random"))


@pytest.mark.parametrize("how", ["kate", "task"])
def test_written_labels_are_read_and_others_count_as_wrong(run, how):
    outcome = run_icl(having(run, decide_by="generation", prompt_format=how, max_new_tokens=4))
    lines = lines_of(outcome.folder)
    assert all("written" in line for line in lines)
    wrong = [line for line in lines if line["prediction"] == "(no label)"]
    assert wrong  # a tiny LM writes no label
    assert all(sum(line["scores"].values()) == 0 for line in wrong)
    assert any("are no label's word" in note for note in outcome.metrics["notes"])


def test_calibration_asks_three_more_prompts_a_query(run, caplog):
    caplog.set_level("INFO")
    plain = run_icl(run)
    fixed = having(run, exemplars="fixed", calibrate=True)
    run_icl(fixed)
    assert "the LM was asked 15 prompts" in caplog.text  # one prefix for all: three in all
    own = run_icl(having(run, calibrate=True, output_dir=run.icl.output_dir + "-calibrated"))
    told = [[line["scores"] for line in lines_of(one.folder)] for one in (plain, own)]
    assert told[0] != told[1]


def test_prompts_that_are_too_long_lose_exemplars_and_say_so(run):
    wide = run_icl(run)
    most = max(line["prompt_tokens"] for line in lines_of(wide.folder))
    narrow = having(run, lm_window=most - 10, output_dir=run.icl.output_dir + "-narrow")
    outcome = run_icl(narrow)
    lines = lines_of(outcome.folder)
    assert any(line["over_budget"] for line in lines)
    assert all(len(line["exemplars"]) + line["over_budget"] == 3 for line in lines)
    for line, whole in zip(lines, lines_of(wide.folder), strict=True):
        assert line["exemplars"] == whole["exemplars"][: len(line["exemplars"])]
    assert any("to fit the LM's window" in note for note in outcome.metrics["notes"])


@pytest.mark.parametrize("encoder", ["bm25", "prompted"])
def test_other_encoders_choose_other_exemplars(run, encoder):
    shown = []
    for name in (run.selection.encoder, encoder):
        one = run_icl(having(run, encoder=name, output_dir=f"{run.icl.output_dir}-{len(shown)}"))
        shown.append([[e["id"] for e in line["exemplars"]] for line in lines_of(one.folder)])
    assert shown[0] != shown[1]


def test_named_exemplars_stand_before_every_query(run, tmp_path):
    path = tmp_path / "shown.txt"
    path.write_text("7\ntrain-2\n11\n")
    outcome = run_icl(having(run, exemplars="fixed", exemplar_file=str(path)))
    for line in lines_of(outcome.folder):
        assert [e["id"] for e in line["exemplars"]] == ["train-7", "train-2", "train-11"]
        assert {e["similarity"] for e in line["exemplars"]} == {None}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("1\n2\n", "names 2 exemplars, and num_exemplars is 3"),
        ("1\n2\n40\n", "line 3: '40' is no example of the pool: give a row from 0 to 39"),
        ("1\ntrain-1\n2\n", "line 2: 'train-1' stands there twice"),
    ],
)
def test_a_wrong_list_of_exemplars_is_refused(run, tmp_path, text, told):
    path = tmp_path / "shown.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=told):
        run_icl(having(run, exemplars="fixed", exemplar_file=str(path)))
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": None}, "--task is missing"),
        ({"num_exemplars": 41}, "num_exemplars is 41, but the pool holds only 40 examples"),
        ({"validation_file": "x.jsonl"}, "validation_file chooses a checkpoint"),
        ({"query_dataset_name": "x"}, "queries are named twice"),
        ({"max_new_tokens": 5}, "label words are scored, not written"),
        ({"encoder": "bm25", "farthest": True}, "'bm25' has no farthest examples"),
    ],
)
def test_what_cannot_be_is_refused(run, changes, told):
    with pytest.raises((ConfigError, DataError), match=told):
        run_icl(having(run, **changes))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"exemplar_file": "x"}, "exemplar_file is .*, and exemplars is knn"),
        ({"likeness": "euclid"}, "unknown likeness 'euclid'. Did you mean 'euclidean'"),
        ({"decide_by": "vote", "calibrate": True}, "calibrate changes scores of label words"),
        ({"prompt_format": "gpt"}, "unknown prompt_format 'gpt'"),
    ],
)
def test_arguments_that_contradict_each_other_are_refused(run, changes, told):
    with pytest.raises(ConfigError, match=told):
        having(run, **changes)


def test_arguments_are_told_apart_by_what_decides(run):
    sections = run.sections()
    assert sections["runtime"]["artifacts_dir"] == run.icl.artifacts_dir
    flat = {name for part in sections.values() for name in part}
    parts = (getattr(run, name) for name in ("data", "completer", "selection", "icl"))
    every = {name for part in parts for name in asdict(part)}
    assert flat == every


def test_the_command_runs_and_tells_of_all_seeds(run, capsys):
    asked = {
        "task": "sst2",
        "train_file": run.data.train_file,
        "test_file": run.data.test_file,
        "lm": run.completer.lm,
        "exemplars": "random",
        "num_exemplars": "2",
        "artifacts_dir": run.icl.artifacts_dir,
        "output_dir": run.icl.output_dir,
        "device": "cpu",
    }
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    assert main([*words, "--redraw", "--seeds", "0", "3"]) == 0
    told = capsys.readouterr().out
    assert "sst2-icl-random/seed-0: sst2 test accuracy" in told
    assert "mean ± sample sd of 2 seeds: 0 3;" in told
    assert (Path(str(run.icl.output_dir).replace("{task}-{system}", "sst2-icl-random"))).is_dir()
    with pytest.raises(ConfigError, match="seeds holds 3 twice"):
        main([*words, "--seeds", "3", "3"])
