"""Splits: what is read, what is held out, what is refused."""

import csv
import gzip
import logging
from collections import Counter
from types import SimpleNamespace

import pytest
from conftest import write_jsonl

from pgra.config import DataArguments
from pgra.data.examples import load_examples, load_splits
from pgra.data.tasks import load_task
from pgra.errors import ConfigError, DataError


@pytest.fixture
def task():
    return load_task("mr")


def arguments(files, **more):
    return DataArguments(train_file=str(files["train"]), test_file=str(files["test"]), **more)


def ids(examples):
    return [e.id for e in examples]


def test_dev_is_held_out_of_train_with_the_same_share_of_each_label(task, review_files):
    splits = load_splits(task, arguments(review_files, dev_fraction=0.2))
    assert Counter(e.label for e in splits.dev) == {"positive": 4, "negative": 4}
    assert len(splits.train) == 32
    assert not set(ids(splits.dev)) & set(ids(splits.train))
    rows = [int(i.removeprefix("train-")) for i in ids(splits.train)]
    assert rows == sorted(rows)
    assert ids(splits.test) == [f"test-{i}" for i in range(12)]


def test_same_seed_same_dev_and_another_seed_another(task, review_files):
    dev = [
        ids(load_splits(task, arguments(review_files, dev_fraction=0.3, split_seed=seed)).dev)
        for seed in (1, 1, 2)
    ]
    assert dev[0] == dev[1] != dev[2]


def test_dev_is_at_most_max_dev_samples_but_never_empty(task, review_files):
    splits = load_splits(task, arguments(review_files, dev_fraction=0.5, max_dev_samples=4))
    assert Counter(e.label for e in splits.dev) == {"positive": 2, "negative": 2}
    one = load_splits(task, arguments(review_files, max_dev_samples=1))
    assert len(one.dev) == 1


def test_rare_label_stays_in_train_and_is_held_out_once(tmp_path, task):
    rows = [{"text": f"t{i}", "label": "positive"} for i in range(20)]
    rows += [{"text": "a", "label": "negative"}, {"text": "b", "label": "negative"}]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    splits = load_splits(task, DataArguments(train_file=str(train), test_file=str(train)))
    assert Counter(e.label for e in splits.dev) == {"positive": 2, "negative": 1}
    assert Counter(e.label for e in splits.train) == {"positive": 18, "negative": 1}


def test_validation_file_is_dev_and_train_stays_whole(task, review_files, tmp_path):
    dev = write_jsonl(tmp_path / "dev.jsonl", [{"text": "A great film.", "label": "positive"}])
    splits = load_splits(task, arguments(review_files, validation_file=str(dev)))
    assert ids(splits.dev) == ["validation-0"]
    assert len(splits.train) == 40
    assert "dev.jsonl" in splits.notes["rule"]


def test_sub_samples_keep_the_order_of_the_file(task, review_files):
    splits = load_splits(task, arguments(review_files, max_train_samples=10, max_test_samples=5))
    rows = [int(e.id.split("-")[1]) for e in splits.test]
    assert rows == sorted(rows)
    assert (len(splits.train), len(rows)) == (10, 5)
    assert rows != list(range(5))  # drawn, not the first


def test_leaks_are_counted_and_not_dropped(task, tmp_path):
    rows = [{"text": f"t{i}", "label": ["negative", "positive"][i % 2]} for i in range(20)]
    train = write_jsonl(tmp_path / "train.jsonl", rows)
    test = write_jsonl(tmp_path / "test.jsonl", [*rows[:3], {"text": "new", "label": "positive"}])
    splits = load_splits(task, DataArguments(train_file=str(train), test_file=str(test)))
    assert splits.notes["test_rows_in_train"] == 3
    assert len(splits.test) == 4


def test_blank_rows_are_dropped_counted_and_keep_their_place_in_ids(task, tmp_path, caplog):
    rows = [{"text": " ", "label": "positive"}, {"text": " good ", "label": "positive"}]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    with caplog.at_level(logging.WARNING):
        examples = load_examples(task, str(path), "test")
    assert ids(examples) == ["test-1"]
    assert examples[0].fields == {"text": "good"}
    assert "1 rows without text were dropped" in caplog.text


def test_csv_tsv_and_jsonl_give_the_same_examples(task, tmp_path):
    rows = [
        {"text": 'a "fine", warm film', "label": "positive"},
        {"text": "dull", "label": "negative"},
    ]
    write_jsonl(tmp_path / "x.jsonl", rows)
    with (tmp_path / "x.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ["label", "text"])
        writer.writeheader()
        writer.writerows(rows)
    lines = ["text\tlabel", *(f"{r['text']}\t{r['label']}" for r in rows)]
    (tmp_path / "x.tsv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    read = [
        load_examples(task, str(tmp_path / n), "test") for n in ("x.jsonl", "x.csv", "x.tsv.gz")
    ]
    assert read[0] == read[1] == read[2]
    assert read[0][0].text == 'a "fine", warm film'


def test_quoted_line_break_in_csv_stays_one_row(task, tmp_path):
    path = tmp_path / "x.csv"
    path.write_text('text,label\n"one\ntwo",1\nthree,0\n')
    assert [e.label for e in load_examples(task, str(path), "test")] == ["positive", "negative"]


def test_labels_are_read_by_name_and_by_number(tmp_path):
    task = load_task("trec")
    values = ["human", 3, "3", " number "]
    rows = [{"text": "x", "label": value} for value in values]
    path = write_jsonl(tmp_path / "x.jsonl", rows)
    labels = [e.label for e in load_examples(task, str(path), "test")]
    assert labels == ["human", "human", "human", "number"]


BAD_ROWS = {
    r"line 2: unknown label 'postive'\. Did you mean 'positive'": {"text": "x", "label": "postive"},
    r"line 2: unknown label '2'.*Numbers 0 to 1": {"text": "x", "label": 2},
    "line 2: 'label' is True, a bool, not a label's name or number": {"text": "x", "label": True},
    "line 2: has no label": {"text": "x", "label": None},
    r"line 2: no column 'label'\. Found: text, lable": None,
    r"line 2: no column 'text'\. Did you mean 'texts'": {"texts": "x", "label": 1},
    "line 2: 'text' is 5, not text": {"text": 5, "label": 1},
}


@pytest.mark.parametrize("message", sorted(BAD_ROWS))
@pytest.mark.parametrize("split", ["train", "test"])
def test_bad_rows_are_refused_with_their_line(message, split, task, tmp_path):
    bad = BAD_ROWS[message] or {"text": "x", "lable": 1}
    message = message.replace(r"Found", r"(Did you mean 'lable'\? )?Found")
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a", "label": 0}, bad])
    with pytest.raises(DataError, match=message):
        load_examples(task, str(path), split)


def test_rows_without_label_are_read_where_labels_are_not_needed(task, tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a"}, {"text": "b", "label": 1}])
    labels = [e.label for e in load_examples(task, str(path), "test", require_labels=False)]
    assert labels == [None, "positive"]


BAD_TABLES = {
    "headerless.csv": (
        "good film,1\nbad film,0\n",
        "no column 'text'.*Found: good film, 1. Is the fir",
    ),
    "ragged.csv": ("text,label\na,1\nb,1,2\n", "line 3: 3 cells under a header of 2"),
    "open.csv": ('text,label\n"a,1\n', "not valid csv"),
    "header.csv": ("text,label\n", "holds no example"),
    "blank.jsonl": ('{"text": "", "label": 1}\n', r"holds no example \(1 blank rows\)"),
    "words.txt": ("a\n", "suffix that is not read here: use .jsonl, .csv, .tsv"),
    "empty.jsonl": ("", "is empty"),
}


@pytest.mark.parametrize("name", sorted(BAD_TABLES))
def test_bad_tables_are_refused(name, task, tmp_path):
    text, message = BAD_TABLES[name]
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=message):
        load_examples(task, str(tmp_path / name), "test")


def test_task_with_two_inputs_reads_both_in_its_order(tmp_path):
    (tmp_path / "pair.yaml").write_text(
        "inputs: [a, b]\nlabels: [n, y]\nprompt: '{b} {a}'\nreader_template: '{a} {b}'\n"
        "verbalizer: {n: bad, y: good}\n"
    )
    task = load_task(str(tmp_path / "pair.yaml"))
    path = write_jsonl(tmp_path / "x.jsonl", [{"b": "2", "a": "1", "label": "y"}])
    assert load_examples(task, str(path), "test")[0].text == "1 2"


def test_local_folder_is_read_by_the_tasks_own_split_names(tmp_path, caplog):
    home = tmp_path / "sst2"
    home.mkdir()
    rows = [{"text": f"t{i}", "label": i % 2} for i in range(10)]
    write_jsonl(home / "train.jsonl", rows)
    write_jsonl(home / "validation.jsonl", rows[:4])
    task = load_task("sst2")
    for folder in (tmp_path, home):
        splits = load_splits(task, DataArguments(dataset_name=str(folder)))
        assert len(splits.test) == 4  # SST-2 is reported on its validation set, which is not dev
        assert all(e.id.startswith("train-") for e in splits.dev)
    assert "has 10 rows, the papers' train split of sst2 has 6920" in caplog.text


def test_own_task_uses_a_folders_validation_split_as_dev(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "labels: [n, y]\nprompt: '{text}'\nreader_template: '{text}'\nverbalizer: {n: b, y: g}\n"
    )
    task = load_task(str(tmp_path / "mine.yaml"))
    for split, rows in {"train": 6, "validation": 3, "test": 2}.items():
        write_jsonl(
            tmp_path / f"{split}.jsonl",
            [{"text": f"{split}{i}", "label": i % 2} for i in range(rows)],
        )
    args = DataArguments(dataset_name=str(tmp_path))
    splits = load_splits(task, args)
    assert [len(splits.train), len(splits.dev), len(splits.test)] == [6, 3, 2]
    (tmp_path / "validation.jsonl").unlink()
    assert len(load_splits(task, args).dev) == 2
    (tmp_path / "test.csv").write_text("text,label\na,1\n")
    with pytest.raises(DataError, match=r"2 files for the test split .*--test_file"):
        load_splits(task, args)


def test_missing_splits_name_the_argument_that_gives_them(task, review_files, tmp_path):
    train = str(review_files["train"])
    with pytest.raises(DataError, match="no test set: give --test_file"):
        load_splits(task, DataArguments(train_file=train, validation_file=train))
    with pytest.raises(DataError, match="no train set: give --train_file"):
        load_splits(task, DataArguments(test_file=train))
    with pytest.raises(DataError, match="--validation_file and --test_file are both"):
        load_splits(task, arguments(review_files, validation_file=str(review_files["test"])))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"has no train\.jsonl or train\.csv.*--train_file"):
        load_splits(task, DataArguments(dataset_name=str(empty)))


def test_one_training_row_is_too_few_to_hold_out_from(task, tmp_path):
    path = write_jsonl(tmp_path / "x.jsonl", [{"text": "a", "label": 1}])
    with pytest.raises(DataError, match="too few to hold out a dev set"):
        load_splits(task, DataArguments(train_file=str(path), test_file=str(path)))


def test_data_set_on_an_unreachable_hub_names_the_ways_out(task, monkeypatch, tmp_path):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot load data set .*--dataset_name, or --train_file"):
        load_splits(task, DataArguments())


def on_the_hub(monkeypatch, **splits):
    """Put real data sets where the hub would give them; only the download is replaced."""
    from datasets import Dataset, DatasetDict

    data = DatasetDict({name: Dataset.from_dict(columns) for name, columns in splits.items()})
    builder = SimpleNamespace(download_and_prepare=lambda: None, as_dataset=lambda: data)
    monkeypatch.setattr("datasets.load_dataset_builder", lambda *_, **__: builder)
    return data


def test_hub_integers_become_the_names_they_stand_for(monkeypatch):
    rows = {"text": ["What is NATO ?", "Who ?", "Why ?"], "coarse_label": [0, 3, 2]}
    on_the_hub(monkeypatch, train=rows, test=rows)
    task = load_task("trec")
    labels = [e.label for e in load_examples(task, "CogComp/trec", "test")]
    assert labels == ["abbreviation", "human", "description"]
    assert task.labels[0] == "description"  # read by our own order, all three would be wrong


def test_another_hub_data_set_is_read_by_the_classes_it_states(monkeypatch, task):
    from datasets import ClassLabel

    rows = {"text": ["a", "b"], "label": [0, 1]}
    data = on_the_hub(monkeypatch, train=rows, test=rows)
    data["test"] = data["test"].cast_column("label", ClassLabel(names=["positive", "negative"]))
    labels = [e.label for e in load_examples(task, "some/reviews", "test")]
    assert labels == ["positive", "negative"]
    data["test"] = data["test"].cast_column("label", ClassLabel(names=["good", "bad"]))
    with pytest.raises(DataError, match=r"has the classes good, bad, the task has .*hub\.labels"):
        load_examples(task, "some/reviews", "test")


def test_hub_rows_that_cannot_be_used_are_refused(monkeypatch, task):
    hidden = {"text": ["a"], "label": [-1]}
    on_the_hub(monkeypatch, train={"sentence": ["a"], "label": [1]}, test=hidden)
    with pytest.raises(DataError, match="split 'test', row 0: has no label"):
        load_examples(task, "some/reviews", "test")
    with pytest.raises(DataError, match=r"row 0: no column 'text'.*Found: sentence, label"):
        load_examples(task, "some/reviews", "train")
    with pytest.raises(DataError, match="has no validation split"):
        load_examples(task, "some/reviews", "validation")
    on_the_hub(monkeypatch, train=hidden)
    with pytest.raises(DataError, match=r"has no split 'test' \(it has train\).*--test_file"):
        load_examples(task, "some/reviews", "test")


def test_contradictory_arguments_are_refused():
    with pytest.raises(ConfigError, match=r"dev_fraction is 1\.5"):
        DataArguments(dev_fraction=1.5)
