"""The demo, in small, on the real models and sentences."""

import json

import pytest
from method_runs import lines_of

from pgra.commands.demo import CLAIMS, READERS, main
from pgra.config import config_root
from pgra.data.bundled import bundled_corpus_file
from pgra.report.metrics import has_answer

pytestmark = pytest.mark.slow
SMALL = [
    *("--max_passages", "40", "--num_candidates", "4", "--max_train_samples", "72"),
    *("--max_dev_samples", "2", "--max_test_samples", "6", "--num_exemplars", "4"),
    *("--max_steps", "1", "--artifacts_dir", "artifacts", "--output_dir", "runs/demo"),
]


def test_the_demo_says_what_it_found(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0
    shown = capsys.readouterr().out
    assert all(f"\n{name}\n" in shown for name in [*READERS, *CLAIMS])
    assert shown.count("`pgra worth` says: train with") == 2
    assert "Prompt-guided" in (tmp_path / "runs/demo/report.html").read_text()
    ranks = [
        [[seen["stage1_rank"] for seen in line["evidence"]] for line in lines_of(folder)]
        for folder in (tmp_path / "runs/demo" / name for name in ("t5", "pgra"))
    ]
    assert ranks[0] == [[]] * 6
    assert ranks[1] != [[1, 2]] * 6


def test_each_question_of_the_demo_is_answered_by_a_sentence():
    sentences = bundled_corpus_file("wikipedia-19k").read_text().splitlines()
    asked = [*map(json.loads, (config_root() / "demo-questions.jsonl").read_text().splitlines())]
    assert len({question["question"] for question in asked}) == len(asked) == 168
    found = [sum(has_answer(s, question["answers"]) for s in sentences) for question in asked]
    assert set(found) == {1, 2, 3}
    assert found.count(1) > 140  # a few facts are told again
    assert not any(has_answer(question["question"], question["answers"]) for question in asked)
