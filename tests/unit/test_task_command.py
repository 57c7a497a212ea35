"""`pgra task`: a task's YAML is checked and shown as models see it."""

import pytest

from pgra.cli import main

TASK = """
inputs: [question]
labels: [where, who]
prompt: "What is asked for?\\n{question}"
reader_template: "{question} It asks for a <extra_id_0> ."
verbalizer: {where: place, who: person}
"""
ROWS = [("Who wrote this?", "who"), ("Where is it?", "where"), ("Who ran?", "who")]


@pytest.fixture
def task_file(tmp_path):
    (tmp_path / "mine.yaml").write_text(TASK)
    lines = ["question,label", *(f"{text},{label}" for text, label in ROWS)]
    (tmp_path / "train.csv").write_text("\n".join(lines))
    return tmp_path / "mine.yaml"


def test_two_rows_are_shown_as_the_lm_and_the_reader_see_them(task_file, capsys):
    rows = ["--train_file", str(task_file.parent / "train.csv")]
    assert main(["task", str(task_file), *rows, "--num_exemplars", "1"]) == 0
    told = capsys.readouterr().out
    assert "Who ran?\n  The answer is who" in told
    assert "Who wrote this? It asks for a <extra_id_0> . (a passage of the corpus)" in told
    assert "and learns to write: <extra_id_0> person <extra_id_1>" in told


def test_a_tasks_own_data_set_is_read_where_it_is_asked_for(task_file, capsys):
    (task_file.parent / "test.csv").write_bytes((task_file.parent / "train.csv").read_bytes())
    hub = f"hub: {{id: {task_file.parent}, splits: {{train: train, test: test}}}}\n"
    task_file.write_text(TASK + hub)
    assert main(["task", str(task_file), "--dataset_name", "own"]) == 0
    assert "test: 3 rows of 2.7 words" in capsys.readouterr().out
    assert main(["task", str(task_file)]) == 0
