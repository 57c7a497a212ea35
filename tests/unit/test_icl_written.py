"""`pgra icl` where answers are written: exact match, the vote, reports, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import write_jsonl
from pgra.methods.kate_arguments import IclArguments
from pgra.methods.kate_inputs import IclRun
from test_icl import having, lines_of

from pgra.config import DataArguments
from pgra.errors import ConfigError
from pgra.exemplars import SelectionArguments
from pgra.lm.base import CompleterArguments
from pgra.methods.kate import run_icl, run_icl_seeds
from pgra.report.compare import compare_runs
from pgra.report.results import check_comparable, load_collection, row_names
from pgra.report.text_metrics import is_exact_match

PLACES = ["Rome", "Paris", "Oslo", "Bern", "Riga", "Kyiv"]


@pytest.fixture
def run(tmp_path, encoder_dir, lm_dirs):
    pool = [
        {"question": f"where is the town hall of {place}?", "answers": [place, f"The {place}"]}
        for place in PLACES
    ]
    asked = [
        {"question": f"where stands the {place} town hall?", "answers": [f"in {place}", place]}
        for place in PLACES[:3]
    ]
    return IclRun(
        data=DataArguments(
            task="webquestions",
            train_file=str(write_jsonl(tmp_path / "pool.jsonl", pool)),
            test_file=str(write_jsonl(tmp_path / "asked.jsonl", asked)),
        ),
        completer=CompleterArguments(lm=str(lm_dirs["gpt2"])),
        selection=SelectionArguments(encoder="bm25", num_exemplars=2),
        icl=IclArguments(
            artifacts_dir=str(tmp_path / "artifacts"),
            output_dir=str(tmp_path / "runs" / "{task}-{system}"),
            device="cpu",
        ),
    )


def test_answers_are_written_and_compared_with_all_that_are_right(run):
    outcome = run_icl(run)
    assert outcome.folder.name == "webquestions-icl-knn"
    lines = lines_of(outcome.folder)
    for line in lines:
        assert line["is_right"] == is_exact_match(line["prediction"], line["answers"])
        assert "\n" not in line["prediction"]
        assert len(line["answers"]) == 2
    assert (outcome.folder / "prompt.txt").read_text().startswith("Q: where is the town hall of")
    assert (outcome.folder / "prompt.txt").read_text().endswith("town hall?\nA:\n")
    value = sum(line["is_right"] for line in lines) / len(lines)
    assert outcome.metrics["value"] == outcome.metrics["metrics"]["exact_match"] == value
    assert run_icl(run).reused


def test_the_vote_gives_the_nearest_answer_where_it_ties(run):
    voted = run_icl(having(run, decide_by="vote", lm="no/such-lm", num_exemplars=1))
    assert [line["prediction"] for line in lines_of(voted.folder)] == PLACES[:3]  # same words
    assert voted.metrics["value"] == 1
    asked = run_icl(having(run, output_dir=run.icl.output_dir + "-lm", num_exemplars=1))
    assert asked.metrics["knn_vote"]["value"] == 1
    told = asked.metrics["knn_vote"]["difference"]
    assert told == pytest.approx(asked.metrics["value"] - 1)


def test_reports_compare_exact_matches(run, tmp_path):
    run_icl(having(run, decide_by="vote", num_exemplars=1, output_dir=str(tmp_path / "runs/v")))
    run_icl(run)
    (group,) = load_collection([tmp_path / "runs"]).groups
    check_comparable(group)
    assert sorted(row_names(group)) == ["icl-knn", "vote-knn"]
    values = {one.system: one.value for one in group.runs}
    assert values["vote-knn"] == 1 > values["icl-knn"]
    study = compare_runs(group, baseline="icl-knn")
    assert [row for row in study.rows] == ["icl-knn", "vote-knn"]


def test_the_task_says_how_many_exemplars_and_the_pool_may_be_too_small(run):
    usual = IclRun(
        data=run.data,
        completer=run.completer,
        selection=replace(run.selection, num_exemplars=None),
        icl=run.icl,
    )
    with pytest.raises(ConfigError, match="num_exemplars is 64, but the pool holds only 6"):
        run_icl(usual)
    assert not Path(run.folder).exists()


def test_draws_have_seeds(run):
    summary = run_icl_seeds(having(run, exemplars="random", redraw=True), [0, 1])
    assert summary.values["metric"] == "exact_match"
    assert summary.values["n"] == 2


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"decide_by": "score"}, "decide_by score is for tasks with labels, and answers of 'webq"),
        ({"exemplars": "balanced"}, "exemplars balanced is for tasks with labels"),
        ({"calibrate": True}, "calibrate True is for tasks with labels"),
        ({"task": "webquestion"}, "unknown task 'webquestion'. Did you mean 'webquestions'"),
    ],
)
def test_what_only_labels_have_is_refused(run, changes, told):
    with pytest.raises(ConfigError, match=told):
        run_icl(having(run, **changes))
