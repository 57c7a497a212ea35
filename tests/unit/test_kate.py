"""KATE on tiny models: what a run leaves, reuses and refuses, with and without a memory."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import write_jsonl
from method_runs import having, kate_run, lines_of, run_of

from pgra.artifacts import lock_folder
from pgra.commands.train import icl as command
from pgra.config import DataArguments
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.memory.labels import PromptMemoryArguments
from pgra.memory.log import FeedbackLog
from pgra.report.results import check_comparable, load_collection, row_names
from pgra.report.text_metrics import is_exact_match
from pgra.runs import Predictor, evaluate_run, run, run_seeds

FIRST, NEAR = "A great film number 20.", "a GREAT film, number 2"  # FIRST: the first test text
PLACES = ["Rome", "Paris", "Oslo", "Bern", "Riga", "Kyiv"]


@pytest.fixture
def kate(tmp_path, review_files, encoder_dir, lm_dirs):
    data = DataArguments(
        task="sst2",
        train_file=str(review_files["train"]),
        test_file=str(review_files["test"]),
    )
    return kate_run(data, tmp_path, lm=lm_dirs["gpt2"], encoder=str(encoder_dir), num_exemplars=3)


@pytest.fixture
def written(tmp_path, lm_dirs):
    pool = [
        {"question": f"where is the town hall of {place}?", "answers": [place, f"The {place}"]}
        for place in PLACES
    ]
    asked = [
        {"question": f"where stands the {place} town hall?", "answers": [f"in {place}", place]}
        for place in PLACES[:3]
    ]
    data = DataArguments(
        task="webquestions",
        train_file=str(write_jsonl(tmp_path / "pool.jsonl", pool)),
        test_file=str(write_jsonl(tmp_path / "asked.jsonl", asked)),
    )
    return kate_run(data, tmp_path, lm=lm_dirs["gpt2"], encoder="bm25", num_exemplars=2)


@pytest.fixture
def memory(tmp_path):
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        log.write(NEAR, "negative", task="sst2")
        log.write(FIRST, "yes", task="another")
    path = str(tmp_path / "memory.sqlite")
    return {"memory": path, "memory_lookup": "edit", "memory_threshold": -1}


def test_a_run_leaves_predictions_with_their_exemplars(kate):
    outcome = run(kate)
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


def test_what_is_finished_is_taken_up_and_another_run_is_refused(kate):
    first, again = run(kate), run(kate)
    assert (first.reused, again.reused) == (False, True)
    assert again.metrics == first.metrics
    with pytest.raises(ArtifactError, match=r"was made with num_exemplars 3.*asks for 2"):
        run(having(kate, num_exemplars=2))


def test_answers_that_are_there_are_not_asked_again(kate, caplog):
    caplog.set_level("INFO")
    first = run(kate)
    assert "the LM was asked 12 prompts, 0 were answered before" in caplog.text
    second = run(having(kate, name="again"))
    assert "the LM was asked 0 prompts, 12 were answered before (reused)" in caplog.text
    assert lines_of(second.folder) == lines_of(first.folder)
    third = run(having(kate, order="nearest-last", name="last"))
    assert "the LM was asked 12 prompts, 0 were answered before" in caplog.text.split("asked 0")[1]
    scores = [[line["scores"] for line in lines_of(each.folder)] for each in (third, first)]
    assert scores[0] != scores[1]


def test_the_baseline_icl_reads_the_prompt_of_pgras_second_stage(kate, args, tmp_path):
    """Guo et al. 2023, section 3.1: "the same templates as ours in the second stage"."""
    ours = run(run_of(args, "plain", tmp_path / "plain"))
    baseline = having(kate, method="icl", exemplars="balanced", num_exemplars=4, name="icl")
    theirs = run(having(baseline, exemplar_seed=0))
    prompts = [(each.folder / "prompt.txt").read_text() for each in (ours, theirs)]
    assert prompts[0].strip() == prompts[1].strip()
    other = run(having(baseline, exemplar_seed=1, name="other"))  # the control
    assert (other.folder / "prompt.txt").read_text().strip() != prompts[0].strip()


def test_seeds_of_a_draw_give_mean_and_spread(kate):
    summary = run_seeds(having(kate, exemplars="random", redraw=True), [0, 1, 2])
    values = [outcome.metrics["value"] for outcome in summary.outcomes.values()]
    assert summary.values["mean"] == pytest.approx(np.mean(values))
    assert summary.values["sd"] == pytest.approx(np.std(values, ddof=1))
    shown = [
        [line["exemplars"] for line in lines_of(outcome.folder)]
        for outcome in summary.outcomes.values()
    ]
    assert shown[0] != shown[1]
    single = run(having(kate, exemplars="random", redraw=True, seed=1, name="single"))
    assert lines_of(single.folder) == lines_of(summary.outcomes[1].folder)
    with pytest.raises(ConfigError, match="exemplar_seed is 5, and --seeds names several"):
        run_seeds(having(kate, exemplars="random", exemplar_seed=5, name="both"), [0, 1])


def test_runs_stand_in_one_report(kate, tmp_path):
    for name, changes in {
        "near": {},
        "vote": {"decide_by": "vote"},
        "two": {"num_exemplars": 2},
        "far": {"num_exemplars": 2, "farthest": True},
    }.items():
        run(having(kate, name=name, **changes))
    (group,) = load_collection([tmp_path / "runs"]).groups
    check_comparable(group)
    assert sorted(row_names(group)) == [
        "icl-farthest",
        "icl-knn num_exemplars=2",
        "icl-knn num_exemplars=3",
        "vote-knn",
    ]


def test_two_jobs_do_not_share_a_run_folder(kate):
    with lock_folder(kate.folder), pytest.raises(ArtifactError, match="in use by another pgra job"):
        run(kate)
    assert not (kate.folder / "metrics.json").exists()
    assert (run(kate).folder / "metrics.json").is_file()  # the control: nobody holds it


def test_the_vote_needs_no_lm_and_follows_the_nearest(kate):
    voted = run(having(kate, decide_by="vote", lm="no/such-lm", num_exemplars=1, name="vote"))
    asked = run(having(kate, num_exemplars=1))
    assert voted.metrics["value"] == asked.metrics["knn_vote"]["value"]
    for line in lines_of(voted.folder):
        assert line["scores"][line["prediction"]] == 1
    with pytest.raises(ConfigError, match="decide_by 'vote' is the neighbors' vote"):
        run(having(kate, decide_by="vote", exemplars="random", name="random"))


@pytest.mark.parametrize("how", ["kate", "task"])
def test_written_labels_are_read_and_others_count_as_wrong(kate, how):
    outcome = run(having(kate, decide_by="generation", prompt_format=how, max_new_tokens=4))
    lines = lines_of(outcome.folder)
    assert all("written" in line for line in lines)
    wrong = [line for line in lines if line["prediction"] == "(no label)"]
    assert wrong  # a tiny LM writes no label
    assert all(sum(line["scores"].values()) == 0 for line in wrong)
    assert any("are no label's word" in note for note in outcome.metrics["notes"])


def test_calibration_asks_three_more_prompts_a_set_of_exemplars(kate, caplog):
    caplog.set_level("INFO")
    run(having(kate, exemplars="fixed", calibrate=True, name="fixed"))
    assert "the LM was asked 15 prompts" in caplog.text  # one prefix for all: three in all
    told = [
        [line["scores"] for line in lines_of(run(having(kate, calibrate=on, name=str(on))).folder)]
        for on in (False, True)
    ]
    assert told[0] != told[1]


def test_prompts_that_are_too_long_lose_exemplars_and_say_so(kate):
    wide = run(kate)
    most = max(line["prompt_tokens"] for line in lines_of(wide.folder))
    outcome = run(having(kate, lm_window=most - 10, name="narrow"))
    lines = lines_of(outcome.folder)
    assert any(line["over_budget"] for line in lines)
    assert all(len(line["exemplars"]) + line["over_budget"] == 3 for line in lines)
    for line, whole in zip(lines, lines_of(wide.folder), strict=True):
        assert line["exemplars"] == whole["exemplars"][: len(line["exemplars"])]
    assert any("to fit the LM's window" in note for note in outcome.metrics["notes"])


def test_encoders_and_named_exemplars_choose_other_ones(kate, tmp_path):
    path = tmp_path / "shown.txt"
    path.write_text("7\ntrain-2\n11\n")
    ids = {}
    for name, changes in {
        "encoder": {},
        "bm25": {"encoder": "bm25"},
        "prompted": {"encoder": "prompted"},
        "fixed": {"exemplars": "fixed", "exemplar_file": str(path)},
    }.items():
        lines = lines_of(run(having(kate, name=name, **changes)).folder)
        ids[name] = tuple(tuple(e["id"] for e in line["exemplars"]) for line in lines)
    assert len(set(ids.values())) == 4
    assert set(ids["fixed"]) == {("train-7", "train-2", "train-11")}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"task": None}, "--task is missing"),
        ({"num_exemplars": 41}, "num_exemplars is 41, but the pool holds only 40 examples"),
        ({"validation_file": "x.jsonl"}, "validation_file chooses a checkpoint"),
        ({"query_dataset_name": "x"}, "queries are named twice"),
        ({"max_new_tokens": 5}, "label words are scored, not written"),
        ({"encoder": "bm25", "farthest": True}, "'bm25' has no farthest examples"),
        ({"exemplar_file": "x"}, "exemplar_file is x, and exemplars is knn"),
        ({"decide_by": "vote", "calibrate": True}, "calibrate is True, and decide_by is vote"),
    ],
)
def test_what_cannot_be_is_refused_and_leaves_no_folder(kate, changes, told):
    with pytest.raises((ConfigError, DataError), match=told):
        run(having(kate, **changes))
    assert not (kate.folder / "metrics.json").exists()


def test_the_command_runs_and_tells_of_all_seeds(kate, tmp_path, capsys):
    asked = {
        "task": "sst2",
        "train_file": kate.data.train_file,
        "test_file": kate.data.test_file,
        "lm": kate["completer"].lm,
        "exemplars": "random",
        "num_exemplars": "2",
        "artifacts_dir": kate.runtime.artifacts_dir,
        "output_dir": str(tmp_path / "runs" / "{task}-{method}"),
        "device": "cpu",
    }
    words = [word for name, value in asked.items() for word in (f"--{name}", value)]
    assert command([*words, "--redraw", "--seeds", "0", "3"]) == 0
    out = capsys.readouterr().out
    assert "sst2-icl-random/seed-0: sst2 test accuracy" in out
    assert "mean ± sample sd of 2 seeds: 0 3;" in out
    assert (tmp_path / "runs" / "sst2-icl-random" / "summary.json").is_file()


# Tasks whose answers are written.


def test_answers_are_written_and_compared_with_all_that_are_right(written):
    outcome = run(written)
    lines = lines_of(outcome.folder)
    for line in lines:
        assert line["is_right"] == is_exact_match(line["prediction"], line["answers"])
        assert "\n" not in line["prediction"]
        assert len(line["answers"]) == 2
    prompt = (outcome.folder / "prompt.txt").read_text()
    assert prompt.startswith("Q: where is the town hall of")
    assert prompt.endswith("town hall?\nA:\n")
    value = sum(line["is_right"] for line in lines) / len(lines)
    assert outcome.metrics["value"] == outcome.metrics["metrics"]["exact_match"] == value
    assert run(written).reused


def test_the_vote_gives_the_nearest_answer_where_it_ties_and_reports_compare(written, tmp_path):
    voted = run(having(written, decide_by="vote", lm="no/such", num_exemplars=1, name="vote"))
    assert [line["prediction"] for line in lines_of(voted.folder)] == PLACES[:3]  # same words
    assert voted.metrics["value"] == 1
    asked = run(having(written, num_exemplars=1))
    assert asked.metrics["knn_vote"]["value"] == 1
    difference = asked.metrics["knn_vote"]["difference"]
    assert difference == pytest.approx(asked.metrics["value"] - 1)
    (group,) = load_collection([tmp_path / "runs"]).groups
    check_comparable(group)
    assert sorted(row_names(group)) == ["icl-knn", "vote-knn"]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"decide_by": "score"}, "decide_by score is for tasks with labels, and answers of 'webq"),
        ({"exemplars": "balanced"}, "exemplars balanced is for tasks with labels"),
        ({"calibrate": True}, "calibrate True is for tasks with labels"),
        ({"num_exemplars": None}, "num_exemplars is 64, but the pool holds only 6"),
        ({"task": "webquestion"}, "unknown task 'webquestion'. Did you mean 'webquestions'"),
    ],
)
def test_what_only_labels_have_is_refused(written, changes, told):
    with pytest.raises(ConfigError, match=told):
        run(having(written, **changes))


# A memory of corrections.


def test_a_correction_stands_first_in_a_near_querys_prompt_and_no_other_prompt_changes(
    kate, memory
):
    kate = having(kate, encoder="bm25")
    before, after = run(kate), run(having(kate, name="memory", **memory))
    assert after.metrics["method"] == "icl-knn-memory"
    plain, corrected = lines_of(before.folder), lines_of(after.folder)
    (one,) = corrected[0].pop("memory")
    assert (one["entry"], one["score"], one["feedback"]) == (1, -1, "negative")
    assert one["is_shown"]
    shown = [exemplar["id"] for exemplar in corrected[0]["exemplars"]]
    assert shown == ["memory-1", *(exemplar["id"] for exemplar in plain[0]["exemplars"][:2])]
    assert corrected[0]["scores"] != plain[0]["scores"]
    first_exemplar = (after.folder / "prompt.txt").read_text().split("\n\n")[0]
    assert NEAR in first_exemplar
    assert first_exemplar.endswith("negative")
    for mine, theirs in zip(corrected[1:], plain[1:], strict=True):
        assert mine.pop("memory") == []
        assert mine == theirs
    assert after.metrics["memory"] == {
        "entries": 1,
        "entries_of_other_tasks": 1,
        "queries_with_memory": 1,
        "queries_that_were_corrected": 0,
    }
    assert "memory" not in before.metrics


def test_the_users_word_stands_before_the_pools_own_copy(kate, memory):
    kate = having(kate, encoder="bm25")
    nearest = lines_of(run(kate).folder)[0]["exemplars"][0]["id"]
    rows = Path(kate.data.train_file).read_text().splitlines()
    text = rows[int(nearest.rpartition("-")[2])].split('"text": "')[1].split('"')[0]
    with FeedbackLog.open(Path(memory["memory"])) as log:
        log.write(text, "negative", task="sst2")
        log.write(FIRST, "negative", task="sst2")
    wide = {**memory, "memory_threshold": -100, "memory_matches": 3}
    outcome = run(having(kate, name="wide", **wide))
    (line, *_) = lines_of(outcome.folder)
    ids = [exemplar["id"] for exemplar in line["exemplars"]]
    assert sorted(ids) == ["memory-1", "memory-3", "memory-4"]
    assert nearest not in ids
    assert outcome.metrics["memory"]["queries_that_were_corrected"] == 1
    assert any("the very text that was corrected" in note for note in outcome.metrics["notes"])


def test_free_feedback_stands_behind_the_query_on_one_line(kate, memory):
    kate = having(kate, encoder="bm25")
    with FeedbackLog.open(Path(memory["memory"])) as log:
        log.correct(1, "film | here\nmeans cinema")
    with pytest.raises(DataError, match=r"entry 3: unknown label 'film \| here means cinema'"):
        run(having(kate, **memory))
    assert not kate.folder.exists()
    outcome = run(having(kate, memory_as="clarification", **memory))
    line, other = lines_of(outcome.folder)[:2]
    asked = (outcome.folder / "prompt.txt").read_text().split("\n\n")[-1]
    assert f"{FIRST} | clarification: film / here means cinema\n" in asked
    assert len(line["exemplars"]) == 3
    assert line["memory"][0]["is_shown"]
    assert other["memory"] == []


def test_another_memory_is_another_run_and_a_vote_takes_none(kate, memory):
    kate = having(kate, encoder="bm25")
    run(having(kate, **memory))
    with FeedbackLog.open(Path(memory["memory"])) as log:
        log.write("x", "positive", task="another")  # not of this task: nothing changes
        assert run(having(kate, **memory)).reused
        log.write("A dull plot.", "positive", task="sst2")
    with pytest.raises(ArtifactError, match="was made with memory"):
        run(having(kate, **memory))
    with pytest.raises(ConfigError, match="decide_by 'vote' asks no LM, and --memory adds"):
        run(having(kate, decide_by="vote", **memory))


def test_a_finished_run_decides_new_texts_as_its_own_and_a_memory_changes_near_ones(kate, memory):
    kate = having(kate, encoder="bm25")
    outcome = run(kate)
    lines = lines_of(outcome.folder)[:2]
    texts = [line["text"] for line in lines]
    alone = Predictor.open(outcome.folder, device="cpu").answer(texts)
    for line, answer in zip(lines, alone, strict=True):
        assert answer.prediction.label == line["prediction"]
        assert dict(answer.prediction.scores) == pytest.approx(line["scores"], abs=1e-5)
        assert answer.details["exemplars"] == line["exemplars"]
        assert [example.id for example in answer.exemplars] == [e["id"] for e in line["exemplars"]]
    aided = Predictor.open(outcome.folder, device="cpu", memory=PromptMemoryArguments(**memory))
    near, far = aided.answer(texts)
    assert near.exemplars[0].id == "memory-1"
    assert dict(near.prediction.scores) != pytest.approx(lines[0]["scores"], abs=1e-5)
    assert dict(far.prediction.scores) == pytest.approx(lines[1]["scores"], abs=1e-5)


def test_a_finished_run_is_measured_on_another_file(kate, tmp_path):
    outcome = run(kate)
    lines = Path(kate.data.test_file).read_text().splitlines(keepends=True)
    other = tmp_path / "other.jsonl"
    other.write_text("".join(lines[:4]))
    changes = {"data": {"test_file": str(other)}}
    again = evaluate_run(outcome.folder, changes=changes, output_dir=tmp_path / "elsewhere")
    assert again.metrics["n"] == 4
    theirs = {line["text"]: line["prediction"] for line in lines_of(outcome.folder)}
    for line in lines_of(again.folder):
        assert line["prediction"] == theirs[line["text"]]


def test_a_run_whose_pool_has_changed_decides_nothing(kate):
    outcome = run(kate)
    shutil.copy(kate.data.test_file, kate.data.train_file)
    with pytest.raises(ArtifactError, match=r"restore them, or run it again"):
        Predictor.open(outcome.folder, device="cpu")


def test_arguments_of_runs_are_kept_whole(kate):
    outcome = run(kate)
    values = kate.as_json()
    from pgra.runs import read_arguments

    assert read_arguments(outcome.folder, {}).as_json()["data"] == values["data"]
    changed = read_arguments(outcome.folder, {"data": {"max_test_samples": 3}})
    assert changed.data == replace(kate.data, max_test_samples=3)
