"""KATE with a memory of corrections: prompts of near queries, and only of these, change."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pgra.methods.kate_arguments import IclArguments
from pgra.methods.kate_inputs import IclRun

from pgra.config import DataArguments
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.exemplars import SelectionArguments
from pgra.lm.base import CompleterArguments
from pgra.memory.labels import PromptMemoryArguments
from pgra.memory.log import FeedbackLog
from pgra.methods.kate import answer_queries, is_icl_run, load_icl_run, run_icl

FIRST, NEAR = "A great film number 20.", "a GREAT film, number 2"  # FIRST: the first test text
NONE = PromptMemoryArguments()


@pytest.fixture
def run(tmp_path, review_files, lm_dirs):
    tests = review_files["test"]
    tests.write_text("".join(tests.read_text().splitlines(keepends=True)[:4]))
    return IclRun(
        data=DataArguments(
            task="sst2",
            train_file=str(review_files["train"]),
            test_file=str(tests),
        ),
        completer=CompleterArguments(lm=str(lm_dirs["gpt2"])),
        selection=SelectionArguments(encoder="bm25", num_exemplars=3),
        icl=IclArguments(
            artifacts_dir=str(tmp_path / "artifacts"),
            output_dir=str(tmp_path / "runs" / "{task}-{system}"),
            device="cpu",
        ),
    )


@pytest.fixture
def memory(tmp_path):
    with FeedbackLog.open(tmp_path / "memory.sqlite") as log:
        log.write(NEAR, "negative", task="sst2")
        log.write(FIRST, "yes", task="another")
    path = str(tmp_path / "memory.sqlite")
    return PromptMemoryArguments(memory=path, memory_lookup="edit", memory_threshold=-1)


def with_memory(run, memory, name="{task}-{system}", **changes):
    icl = replace(run.icl, output_dir=str(Path(run.icl.output_dir).parent / name))
    return replace(
        run, memory=replace(memory, **changes), icl=icl, selection=replace(run.selection)
    )


def lines_of(outcome):
    text = (outcome.folder / "predictions.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_a_correction_stands_first_in_a_near_querys_prompt_and_no_other_prompt_changes(run, memory):
    before = run_icl(run)
    after = run_icl(with_memory(run, memory))
    assert after.folder.name == "sst2-icl-knn-memory"
    plain, corrected = lines_of(before), lines_of(after)
    (one,) = corrected[0].pop("memory")
    assert (one["entry"], one["score"], one["feedback"]) == (1, -1, "negative")
    assert one["is_shown"]
    shown = [exemplar["id"] for exemplar in corrected[0]["exemplars"]]
    assert shown == ["memory-1", *(exemplar["id"] for exemplar in plain[0]["exemplars"][:2])]
    assert corrected[0]["scores"] != plain[0]["scores"]
    prompt = (after.folder / "prompt.txt").read_text()
    first_exemplar = prompt.split("\n\n")[0]
    assert NEAR in first_exemplar
    assert first_exemplar.endswith("negative")
    for mine, theirs in zip(corrected[1:], plain[1:], strict=True):
        assert mine.pop("memory") == []
        assert mine == theirs
    told = after.metrics["memory"]
    assert told == {
        "entries": 1,
        "entries_of_other_tasks": 1,
        "queries_with_memory": 1,
        "queries_that_were_corrected": 0,
    }
    assert "memory" not in before.metrics


def test_the_corrected_text_itself_gets_its_correction_and_is_counted_as_such(run, memory):
    with FeedbackLog.open(Path(memory.memory)) as log:
        log.write(FIRST, "negative", task="sst2")
    outcome = run_icl(with_memory(run, memory))
    assert lines_of(outcome)[0]["exemplars"][0]["id"] == "memory-3"
    assert outcome.metrics["memory"]["queries_that_were_corrected"] == 1
    assert any("the very text that was corrected" in note for note in outcome.metrics["notes"])


def test_the_pools_own_copy_of_a_corrected_text_gives_way_to_the_users_word(run, memory, tmp_path):
    nearest = lines_of(run_icl(run))[0]["exemplars"][0]["id"]
    rows = [json.loads(line) for line in Path(run.data.train_file).read_text().splitlines()]
    text = rows[int(nearest.rpartition("-")[2])]["text"]
    with FeedbackLog.open(Path(memory.memory)) as log:
        log.write(text, "negative", task="sst2")
    wide = with_memory(run, memory, memory_threshold=-100, memory_matches=2)
    (line, *_) = lines_of(run_icl(wide))
    ids = [exemplar["id"] for exemplar in line["exemplars"]]
    assert ids[:2] == ["memory-1", "memory-3"]
    assert nearest not in ids
    assert len(ids) == 3


def test_kept_answers_and_another_order_of_queries_give_the_same(run, memory, caplog, tmp_path):
    caplog.set_level("INFO")
    asked = lines_of(run_icl(with_memory(run, memory)))
    assert "the LM was asked 4 prompts" in caplog.text
    kept = lines_of(run_icl(with_memory(run, memory, "again")))
    assert "the LM was asked 0 prompts" in caplog.text
    assert kept == asked
    path = Path(run.data.test_file)
    back = tmp_path / "back.jsonl"
    back.write_text("\n".join(path.read_text().splitlines()[::-1]) + "\n")
    other = replace(run, data=replace(run.data, test_file=str(back)))
    turned = lines_of(run_icl(with_memory(other, memory, "back")))[::-1]
    for mine, theirs in zip(turned, asked, strict=True):
        assert mine["memory"] == theirs["memory"]
        assert mine["exemplars"] == theirs["exemplars"]
        assert mine["scores"] == pytest.approx(theirs["scores"], abs=1e-5)


def test_a_correction_goes_last_where_the_window_is_short(run, memory):
    wide = run_icl(with_memory(run, memory))
    most = lines_of(wide)[0]["prompt_tokens"]
    narrow = replace(run, completer=replace(run.completer, lm_window=most - 10))
    (line, *_) = lines_of(run_icl(with_memory(narrow, memory, "narrow")))
    assert line["over_budget"] > 0
    assert line["exemplars"][0]["id"] == "memory-1"


def test_free_feedback_stands_behind_the_query_on_one_line(run, memory):
    said = "film | here\nmeans cinema"
    with FeedbackLog.open(Path(memory.memory)) as log:
        log.correct(1, said)
    with pytest.raises(DataError, match=r"entry 3: unknown label 'film \| here means cinema'"):
        run_icl(with_memory(run, memory))
    assert not Path(run.icl.output_dir).parent.exists()
    outcome = run_icl(with_memory(run, memory, memory_as="clarification"))
    line, other = lines_of(outcome)[:2]
    asked = (outcome.folder / "prompt.txt").read_text().split("\n\n")[-1]
    assert f"{FIRST} | clarification: film / here means cinema\n" in asked
    assert len(line["exemplars"]) == 3
    assert "memory-3" not in [exemplar["id"] for exemplar in line["exemplars"]]
    assert line["memory"][0]["is_shown"]
    assert other["memory"] == []


def test_another_memory_is_another_run_and_a_vote_takes_none(run, memory):
    run_icl(with_memory(run, memory))
    with FeedbackLog.open(Path(memory.memory)) as log:
        log.write("x", "positive", task="another")  # not of this task: nothing changes
        assert run_icl(with_memory(run, memory)).reused
        log.write("A dull plot.", "positive", task="sst2")
    with pytest.raises(ArtifactError, match="was made with memory"):
        run_icl(with_memory(run, memory))
    vote = replace(run, icl=replace(run.icl, decide_by="vote"))
    with pytest.raises(ConfigError, match="decide_by 'vote' asks no LM, and --memory adds"):
        run_icl(replace(vote, memory=memory))


def test_a_finished_run_decides_new_texts_as_its_own_and_a_memory_changes_near_ones(run, memory):
    outcome = run_icl(run)
    assert is_icl_run(outcome.folder)
    lines = lines_of(outcome)[:2]
    again = load_icl_run(outcome.folder, device="cpu")
    texts = [line["text"] for line in lines]
    for line, told in zip(lines, answer_queries(outcome.folder, again, texts, NONE), strict=True):
        assert told.prediction.label == line["prediction"]
        assert dict(told.prediction.scores) == pytest.approx(line["scores"], abs=1e-5)
        assert told.more["exemplars"] == line["exemplars"]
        assert [example.id for example in told.examples] == [e["id"] for e in line["exemplars"]]
    near, far = answer_queries(outcome.folder, again, texts, memory)
    assert near.examples[0].id == "memory-1"
    assert dict(near.prediction.scores) != pytest.approx(lines[0]["scores"], abs=1e-5)
    assert dict(far.prediction.scores) == pytest.approx(lines[1]["scores"], abs=1e-5)


def test_a_run_whose_pool_has_changed_decides_nothing(run):
    outcome = run_icl(run)
    shutil.copy(run.data.test_file, run.data.train_file)
    with pytest.raises(ArtifactError, match=r"was made with train .*restore it, or run pgra icl"):
        answer_queries(outcome.folder, load_icl_run(outcome.folder), ["a film"], NONE)
