"""Example files: what a cell or a label may hold, and how a tsv is read."""

import json
import logging

import pytest
from conftest import write_jsonl

from pgra.config import DataArguments
from pgra.data.examples import load_examples, load_splits
from pgra.data.tasks import load_task
from pgra.errors import DataError


@pytest.fixture
def task():
    return load_task("mr")


@pytest.mark.parametrize("bad", ["\ud800", "a\0b"])
@pytest.mark.parametrize("column", ["text", "label"])
def test_half_a_character_or_nul_is_refused_with_its_line(bad, column, task, tmp_path):
    rows = [{"text": "a \U0001f600", "label": 1}, {"text": "b", "label": 1, column: bad}]
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))  # as \u escapes
    message = rf"x\.jsonl, line 2: '{column}' holds a NUL or half a surrogate pair"
    with pytest.raises(DataError, match=message):
        load_examples(task, str(path), "test")
    write_jsonl(path, rows[:1])
    assert load_examples(task, str(path), "test")[0].fields["text"] == "a \U0001f600"


NO_QUOTING = "tsv is read without quoting: use csv for quoted cells"
QUOTED = {
    "doubled": ('text\tlabel\n"a ""fine"" film"\t1\n', f"line 2: 'text' is quoted .*{NO_QUOTING}"),
    "tab": ('text\tlabel\n"a\tb"\t1\n', f"line 2: 3 cells under a header of 2.*{NO_QUOTING}"),
    "break": ('text\tlabel\n"a\nb"\t1\n', f"line 2: 1 cells under a header of 2.*{NO_QUOTING}"),
    "header": ('"text"\t"label"\na\t1\n', f"no column 'text'.*first line a header.*{NO_QUOTING}"),
}


@pytest.mark.parametrize("name", sorted(QUOTED))
def test_tsv_that_was_written_with_quoting_is_refused(name, task, tmp_path):
    text, message = QUOTED[name]
    (tmp_path / "x.tsv").write_text(text)
    with pytest.raises(DataError, match=message):
        load_examples(task, str(tmp_path / "x.tsv"), "test")


def test_quote_marks_of_a_tsv_stay_and_unused_columns_may_hold_any(task, tmp_path):
    text = '"fine" and "warm"\t1\t"x ""y"" z"\n"all of it"\t0\t-\n'
    (tmp_path / "x.tsv").write_text("text\tlabel\tnote\n" + text)
    texts = [e.text for e in load_examples(task, str(tmp_path / "x.tsv"), "test")]
    assert texts == ['"fine" and "warm"', '"all of it"']


def test_ragged_row_without_quotes_says_nothing_of_quoting(task, tmp_path):
    (tmp_path / "x.tsv").write_text("text\tlabel\na\tb\t1\n")
    with pytest.raises(DataError, match=r"3 cells under a header of 2 \(text, label\)\.$"):
        load_examples(task, str(tmp_path / "x.tsv"), "test")


@pytest.mark.parametrize(("label", "kind"), [(["sad"], "list"), ({"a": 1}, "dict"), (1.5, "float")])
def test_label_that_is_no_name_is_told_as_what_it_is(label, kind, task, tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a", "label": label}])
    with pytest.raises(DataError, match=f"'label' is .*, a {kind}, not a label's name or number"):
        load_examples(task, str(path), "test")


def test_labels_without_a_training_example_are_told_once(tmp_path, caplog):
    rows = [{"text": f"t{i}", "label": i % 4} for i in range(20)]  # TREC has six labels
    path = str(write_jsonl(tmp_path / "x.jsonl", rows))
    args = DataArguments(train_file=path, test_file=path)
    with caplog.at_level(logging.WARNING):
        load_splits(load_task("trec"), args)
    told = [r.getMessage() for r in caplog.records if "no training example" in r.getMessage()]
    assert told == ["trec: no training example has the label location, number"]
    caplog.clear()
    write_jsonl(tmp_path / "x.jsonl", [*rows, *({"text": "u", "label": i % 6} for i in range(12))])
    load_splits(load_task("trec"), args)
    assert "no training example" not in caplog.text
