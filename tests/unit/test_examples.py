"""A task's examples: what is read of each source, what is held out, drawn and refused."""

import gzip
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pandas as pd
import pytest
from conftest import write_jsonl
from datasets import ClassLabel, Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.data.examples import (
    DataArguments,
    load_splits,
    open_rows,
    open_split,
    read_split,
)
from pgra.data.tasks import Task
from pgra.errors import DataError
from pgra.exemplars.selector import ExemplarSelector
from pgra.types import Example

TASK = Task.load("mr")
LABELS = TASK.labels
few = settings(max_examples=15)


def ids(examples):
    return [example.id for example in examples]


def labels_of(examples):
    return [example.label for example in examples]


def files(train, test, **more):
    more = {"allow_test_in_train": True, **more}
    return DataArguments(train_file=str(train), test_file=str(test), **more)


def read(path, split="test", task=TASK):
    return read_split(task, open_split(task, str(path), split), split)


# Files.


CELL = st.text(st.characters(codec="utf-8", exclude_characters='\0\r\n\t"'), max_size=12)


@given(rows=st.lists(st.tuples(CELL, st.sampled_from(LABELS)), min_size=1, max_size=6))
@few
def test_all_formats_give_the_same_examples(rows, tmp_path_factory):
    """Blank rows are dropped, and the others keep their places in their ids."""
    folder = tmp_path_factory.mktemp("any")
    rows = [*rows, ('a "fine", film', "positive")]
    records = [{"label": label, "text": text, "more": "x"} for text, label in rows]
    write_jsonl(folder / "x.jsonl", records)
    pd.DataFrame(records).to_csv(folder / "x.csv", index=False)
    lines = ["text\tlabel\tmore", *(f"{text}\t{label}\tx ¦" for text, label in rows)]
    (folder / "x.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    every = [
        Example(f"test-{i}", {"text": text.strip()}, label) for i, (text, label) in enumerate(rows)
    ]
    for name in ("x.jsonl", "x.csv", "x.tsv.gz"):
        assert read(folder / name) == [one for one in every if one.text], name


def test_a_cell_that_quoting_changed_is_refused_in_a_tsv(tmp_path):
    path = tmp_path / "x.tsv"
    for cell in ('"He said ""hi"" twice"', '""'):  # as pandas and DPR's Wikipedia have them
        path.write_text(f"text\tlabel\n{cell}\t{LABELS[0]}\n")
        with pytest.raises(DataError, match="line 2"):
            read(path)
    path.write_text(f'text\tlabel\n"a" ""b"" c\t{LABELS[0]}\n')  # the control
    assert read(path)[0].text == '"a" ""b"" c'


# Folders and hubs.


def test_a_local_folder_is_read_by_the_tasks_own_split_names(tmp_path):
    home = tmp_path / "sst2"
    home.mkdir()
    for split, size in (("train", 10), ("validation", 4), ("test", 2)):
        rows = [{"text": f"{split} {i}", "label": LABELS[i % 2]} for i in range(size)]
        write_jsonl(home / f"{split}.jsonl", rows)
    for folder in (tmp_path, home):
        splits = load_splits(Task.load("sst2"), DataArguments(dataset_name=str(folder)))
        assert len(splits.test) == 4  # SST-2 is reported on its validation set, which is not dev
        assert all(e.id.startswith("train-") for e in splits.dev)
    mine = Task(name="mine", labels=LABELS, prompt="{text}")  # has its dev set there
    splits = load_splits(mine, DataArguments(dataset_name=str(home)))
    assert [len(part) for part in (splits.train, splits.dev, splits.test)] == [10, 4, 2]


# Splits.


@given(
    labels=st.lists(st.sampled_from(LABELS), min_size=4, max_size=40),
    fraction=st.floats(0.05, 0.9),
    most=st.integers(1, 9),
    seed=st.integers(0, 3),
)
@few
def test_what_is_held_out_is_a_share_of_each_label(labels, fraction, most, seed, tmp_path_factory):
    rows = [{"text": f"t{i}", "label": label} for i, label in enumerate([*labels, *labels])]
    path = write_jsonl(tmp_path_factory.mktemp("any") / "x.jsonl", rows)
    args = files(path, path, dev_fraction=fraction, max_dev_samples=None, split_seed=seed)
    splits = load_splits(TASK, args)
    train, dev = ([int(e.id[6:]) for e in part] for part in (splits.train, splits.dev))
    assert sorted(train + dev) == list(range(len(rows)))  # divided, and nothing lost
    assert (train, dev) == (sorted(train), sorted(dev))
    for label, count in Counter(row["label"] for row in rows).items():
        assert labels_of(splits.dev).count(label) == min(max(1, round(count * fraction)), count - 1)
    assert ids(splits.test) == [f"test-{i}" for i in range(len(rows))]
    assert load_splits(TASK, args) == splits
    assert 1 <= len(load_splits(TASK, replace(args, max_dev_samples=most)).dev) <= most


def test_copies_of_a_text_are_on_one_side_of_what_is_held_out(tmp_path):
    rows = [
        {"text": f"{name}{i}", "label": LABELS[i % 2]} for name in ("T", " t") for i in range(40)
    ]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    splits = load_splits(TASK, DataArguments(train_file=str(train), max_dev_samples=5))
    parts = [splits.train, splits.dev, splits.test]
    assert [len(part) for part in parts] == [60, 4, 16]
    assert [len({row.text.lower() for row in part}) for part in parts] == [30, 2, 8]


@pytest.mark.parametrize("load", [load_splits, partial(load_splits, is_trained=False)])
def test_without_a_test_file_a_fifth_is_held_out_of_train(load, tmp_path):
    rows = [{"text": f"t{i}", "label": LABELS[i % 4 == 0]} for i in range(40)]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    args = DataArguments(dataset_name=str(train))  # one file: as --train_file
    splits = load(TASK, args)
    learned = ids(splits.train) + ids(splits.dev)
    assert sorted(ids(splits.test) + learned) == sorted(f"train-{i}" for i in range(40))
    assert Counter(labels_of(splits.test)) == {LABELS[0]: 6, LABELS[1]: 2}
    other = write_jsonl(tmp_path / "test.jsonl", rows[:3])
    measured = load(TASK, replace(args, test_file=str(other)))  # a run's, on another file
    assert ids(measured.train) + ids(measured.dev) == learned
    assert (len(measured.test), measured.notes["test_rule"]) == (3, None)


def test_texts_shared_by_train_and_test_are_counted_or_refused(tmp_path):
    rows = [{"text": f"t{i}", "label": LABELS[i % 2]} for i in range(40)]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    test = write_jsonl(tmp_path / "test.jsonl", rows[5:30])
    args = files(train, test, allow_test_in_train=False)
    with pytest.raises(DataError, match="25"):
        load_splits(TASK, args)
    write_jsonl(test, [*rows[5:30], {"text": "another", "label": LABELS[0]}])  # the control
    assert load_splits(TASK, args).notes["test_rows_in_train"] == 25
    splits = load_splits(TASK, files(train, train, max_train_samples=10, max_test_samples=5))
    drawn = [int(name.split("-")[1]) for name in ids(splits.test)]
    assert drawn == sorted(drawn) != list(range(5))  # drawn, not the first
    assert (len(splits.train), len(drawn), splits.notes["test_rows_in_train"]) == (10, 5, 5)


# Rows in memory.


def test_rows_in_memory_are_what_their_file_is(tmp_path):
    rows = [{"text": f"t{i}", "label": LABELS[i % 2], "more": i} for i in range(9)]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    pairs = [(row["text"], row["label"]) for row in rows]
    for some in (rows, pairs, str(path), Dataset.from_list(rows), read(path)):
        assert read_split(TASK, open_rows(TASK, some, "rows"), "test") == read(path)
    with pytest.raises(DataError, match="DatasetDict"):
        open_rows(TASK, DatasetDict({"train": Dataset.from_list(rows)}), "rows")
    coded = Dataset.from_list([{"text": "a", "label": 0}])
    with pytest.raises(DataError, match="'0'"):  # nothing names its classes
        read_split(TASK, open_rows(TASK, coded, "rows"), "test")


STARS = Task(name="stars", labels=("-1", "1", "2", "0"), prompt="{text}")
NOT_READ = [None, math.nan, pd.NA, pd.NaT, np.float64("nan"), " ", True, np.True_, 1.0, "3"]


def by_file(rows, folder):
    return read(write_jsonl(folder / "x.jsonl", rows), task=STARS)


def by_table(rows, folder):
    pd.DataFrame(rows).to_csv(folder / "x.csv", index=False)
    return read(folder / "x.csv", task=STARS)


def by_training(rows, folder):
    return read_split(STARS, open_rows(STARS, rows, "train"), "test")


def by_data_set(rows, folder):
    return by_training(Dataset.from_list(rows), folder)


def by_selector(rows, folder):
    return ExemplarSelector(pd.DataFrame(rows), task=STARS, selection="fixed")._examples


def by_selector_alone(rows, folder):
    return ExemplarSelector(rows, selection="fixed")._examples


READ_BY = [by_file, by_table, by_training, by_data_set, by_selector, by_selector_alone]


@pytest.mark.parametrize("read_rows", READ_BY, ids=lambda each: each.__name__)
def test_a_number_is_the_label_of_its_digits_for_every_reader(read_rows, tmp_path):
    rows = [{"text": f"t{i}", "label": [1, 2, 0, -1][i % 4]} for i in range(16)]
    assert labels_of(read_rows(rows, tmp_path)) == [str(row["label"]) for row in rows]


@pytest.mark.parametrize("names", [("1", "2", "0", "-1"), ("0", "1", "2", "-1")])
def test_numbers_of_a_column_of_classes_are_places_among_its_names(names, tmp_path):
    rows = Dataset.from_list([{"text": f"t{i}", "label": i % 4} for i in range(16)])
    rows = rows.cast_column("label", ClassLabel(names=list(names)))
    selected = ExemplarSelector(rows, task=STARS, selection="fixed")._examples
    for found in (by_training(rows, tmp_path), selected):
        assert labels_of(found) == [names[i % 4] for i in range(16)]  # no digits, nor the task's
    hidden = Dataset.from_list([*rows, {"text": "a", "label": -1}], rows.features)
    with pytest.raises(DataError, match="row 16"):  # and no label '-1'
        by_training(hidden, tmp_path)


@pytest.mark.parametrize("value", NOT_READ, ids=repr)
@pytest.mark.parametrize("read_rows", [by_training, by_selector])
def test_what_is_no_label_is_refused_with_its_place(read_rows, value, tmp_path):
    rows = [{"text": "a", "label": "1"}, {"text": "b", "label": value}]
    with pytest.raises(DataError, match="row 1"):
        read_rows(rows, tmp_path)
