"""Examples of generation tasks: tables, answers in every shape, and bad rows with their place."""

from dataclasses import replace

import pytest
from conftest import write_jsonl

from pgra.data.examples import DataArguments, load_splits, open_file, read_split
from pgra.data.tasks import GenerationTask, load_any_task
from pgra.errors import ConfigError, DataError


def cell(value, is_header=False, columns=1):  # noqa: FBT002
    return {"value": value, "is_header": is_header, "column_span": columns, "row_span": 1}


TOTTO = {
    "table": [
        [cell("Year", True), cell("Points", True, 2)],
        [cell("", True), cell("home", True), cell("away", True)],
        [cell("2001", True), cell("9.9"), cell("3.3")],
    ],
    "table_page_title": "Dedric Lawson",
    "table_section_title": "College",
    "table_section_text": "",
    "highlighted_cells": [[2, 1], [2, 2]],
    "overlap_subset": True,
    "sentence_annotations": [{"final_sentence": s} for s in ("He scored 9.9 and 3.3.", "B.")],
}
FETAQA = {
    "table_array": [["Year", "Title"], ["2019", "Laal Ishq"]],
    "highlighted_cell_ids": [[1, 1]],
    "table_page_title": "Shagun Sharma",
    "table_section_title": "",
    "question": "Where was she seen?",
    "answer": "She was seen in Laal Ishq.",
}


def read(tmp_path, name, *rows, **changes):
    path = write_jsonl(tmp_path / "rows.jsonl", list(rows))
    task = replace(GenerationTask.load(name), **changes)
    return read_split(task, open_file(task, path), "test")


def test_answers_are_read_in_every_known_shape(tmp_path):
    rows = [
        {"question": " who? ", "answers": ["Ann", "Ann", " Lee ", ""]},
        {"question": "what?", "answers": "a sea"},
        {"question": "where?", "answers": {"value": "Rome", "aliases": ["Roma", "Rome"]}},
        {"question": "squad?", "answers": {"text": ["Ann", "Lee"], "answer_start": [0, 9]}},
        {"question": "popqa?", "answers": '["Ann", "Lee"]'},
        {"question": "which?", "answers": "[Ann]"},
        {"question": "kilt?", "answers": [{"answer": "Ann"}, {"meta": {}}, {"answer": "Lee"}]},
    ]
    found = read(tmp_path, "webquestions", *rows)
    both = ("Ann", "Lee")
    answers = [both, ("a sea",), ("Rome", "Roma"), both, both, ("[Ann]",), both]
    assert [one.answers for one in found] == answers
    assert (found[0].id, found[0].text, found[0].label) == ("test-0", "who?", "Ann")
    shown = {"inputs": ("question", "table"), "frame": "{question} {table}:"}
    (both,) = read(tmp_path, "fetaqa", FETAQA, **shown)
    line = "<page_title>Shagun Sharma <cell>Laal Ishq <col_header>Title"
    assert both.fields == {"question": "Where was she seen?", "table": line}


def test_what_a_row_lacks_is_named(tmp_path):
    written = {"question": "who?", "answers": "['Ann', 'Lee']"}
    with pytest.raises(DataError, match="line 1, 'answers'"):
        read(tmp_path, "webquestions", written)
    for name, row in {"webquestions": written, "totto": TOTTO, "fetaqa": FETAQA}.items():
        column = [*row][-1]
        for lacking in ({**row, column: {}}, {**row, column: 1}, {f"{column}s": row[column]}):
            with pytest.raises(DataError, match=r"line 1(?!.*KeyError)"):
                read(tmp_path, name, lacking)


def test_a_table_is_a_line_of_highlighted_cells_without_closing_tags(tmp_path):
    found = read(tmp_path, "totto", TOTTO)[0]
    assert found.text == (
        "<page_title>Dedric Lawson <section_title>College "
        "<cell>9.9 <col_header>Points <col_header>home <row_header>2001 "
        "<cell>3.3 <col_header>Points <col_header>away <row_header>2001"
    )
    assert found.answers == ("He scored 9.9 and 3.3.", "B.")
    titles = ["Dedric Lawson", "College"]
    assert found.table.chosen_values == ["9.9", "3.3", *titles]
    cells = ["Year", "Points", "home", "away", "2001", "9.9", "3.3"]
    assert found.table.values == [*cells, *titles]
    assert found.table.is_overlap is True
    hub = {**TOTTO, "sentence_annotations": {"final_sentence": ["One.", "Two."]}}
    assert read(tmp_path, "totto", hub)[0].answers == ("One.", "Two.")


def test_a_local_folder_gives_pool_and_another_the_queries(tmp_path):
    rows = [{"question": f"who is {i}?", "answers": [str(i)]} for i in range(9)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    (tmp_path / "other").mkdir()
    write_jsonl(tmp_path / "other" / "test.jsonl", rows[:3])
    task, other = GenerationTask.load("webquestions"), str(tmp_path / "other")
    args = DataArguments(dataset_name=str(tmp_path), max_train_samples=5)
    found = load_splits(task, args, is_trained=False, query_dataset_name=other)
    assert (len(found.train), found.dev, len(found.test)) == (5, [], 3)


def is_short(text, example):
    """A metric from outside: no longer than the first answer."""
    return len(text) <= len(example.answers[0])


def test_a_metric_from_outside_is_named_in_a_yaml(tmp_path):
    own = f"{__name__}:is_short"
    task = GenerationTask.load("webquestions")
    path = tmp_path / "short.yaml"
    path.write_text(replace(task, metrics=("exact_match", own)).to_yaml())
    task = load_any_task(str(path))
    rows = [{"question": "who?", "answers": ["Ann"]}] * 2
    write_jsonl(tmp_path / "rows.jsonl", rows)
    examples = read_split(task, open_file(task, tmp_path / "rows.jsonl"), "test")
    measures = task.measure(["Bob ", "Anna"], examples)
    assert measures.values == {"exact_match": 0, own: 0.5}
    assert measures.by_text[own] == [1, 0]
    with pytest.raises(ConfigError, match="unknown metric 'blue'"):
        replace(task, metrics=("blue",))


def test_written_answers_are_measured_over_all_and_each_subset(tmp_path):
    found = read(tmp_path, "totto", TOTTO, {**TOTTO, "overlap_subset": False})
    task = GenerationTask.load("totto")
    told = task.measure([" He scored 9.9 and 3.3.", "xyz"], found)
    assert (told.values["overlap/bleu"], told.values["nonoverlap/parent"]) == (pytest.approx(1), 0)
    assert told.by_text["parent"] == pytest.approx([told.values["overlap/parent"], 0])
    assert told.values["parent"] == pytest.approx(told.values["overlap/parent"] / 2)
