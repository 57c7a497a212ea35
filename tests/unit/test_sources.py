"""Tables as corpora: columns of text, what is missing, what is refused, and how far it was read."""

import gzip

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pgra.config import CorpusArguments
from pgra.data.corpus import find_source, open_corpus
from pgra.errors import DataError


def table(path, **columns):
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def texts(path, column="text"):
    return list(find_source(str(path)).texts(column))


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string(), "dictionary"])
def test_columns_of_any_kind_of_text_are_read(tmp_path, kind):
    values = pa.array(["one", "two\nthree", "one", None])
    values = values.dictionary_encode() if kind == "dictionary" else values.cast(kind)
    path = table(tmp_path / "t.parquet", text=values)
    assert texts(path) == ["one", "two three", "one", ""]


def test_missing_values_are_dropped_and_counted_as_blank(tmp_path):
    path = table(tmp_path / "t.parquet", text=["a", None, "b", " "])
    corpus = open_corpus(CorpusArguments(corpus=str(path)), tmp_path)
    assert corpus.texts([0, 1]) == ["a", "b"]
    assert corpus.counts == {"rows": 2, "blank": 2, "duplicates": 0, "not_utf8": 0}


def test_documents_of_a_table_are_cut_into_passages(tmp_path):
    words = [f"w{n}" for n in range(250)]
    path = table(tmp_path / "t.parquet", body=[" ".join(words), "w0 w1"])
    rules = CorpusArguments(corpus=str(path), corpus_field="body", passage_words=100)
    corpus = open_corpus(rules, tmp_path)
    assert [len(text.split()) for text in corpus.slice(0, 9)] == [100, 100, 50, 2]
    assert corpus[1] == " ".join(words[100:200])


def test_another_column_is_another_corpus(tmp_path):
    path = table(tmp_path / "t.parquet", text=["a"], title=["b"])
    opened = [
        open_corpus(CorpusArguments(corpus=str(path), corpus_field=name), tmp_path)
        for name in ("text", "title")
    ]
    assert [corpus[0] for corpus in opened] == ["a", "b"]


def test_a_table_without_the_column_names_those_it_has(tmp_path):
    path = table(tmp_path / "t.parquet", title=["a"], number=[1])
    with pytest.raises(DataError, match=r"no field 'text' \(it has title, number\).*corpus_field"):
        texts(path)
    with pytest.raises(DataError, match="'number' is int64, not text: name another"):
        texts(path, "number")


def test_a_bad_value_is_refused_with_its_row(tmp_path):
    path = table(tmp_path / "t.parquet", text=["a", "b", "c\0d"])
    with pytest.raises(DataError, match="row 3: 'text' holds a NUL"):
        texts(path)
    raw = pa.array([b"a", b"\xff"], pa.binary()).view(pa.string())
    with pytest.raises(DataError, match="row 2: 'text' is not UTF-8"):
        texts(table(tmp_path / "latin.parquet", text=raw))


def test_a_table_that_is_cut_short_is_refused(tmp_path):
    path = table(tmp_path / "t.parquet", text=[f"text {n}" for n in range(99)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="is damaged or is not parquet"):
        texts(path)


def test_a_source_knows_how_far_it_was_read(tmp_path):
    lines = tmp_path / "c.txt"
    lines.write_text("".join(f"line {n}\n" for n in range(5000)))
    packed = tmp_path / "c.txt.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    rows = table(tmp_path / "t.parquet", text=[f"text {n}" for n in range(5000)])
    for path in (lines, packed, rows):
        source = find_source(str(path))
        places = [source.position.done for _ in source.texts("text")]
        assert source.size == path.stat().st_size
        assert 0 <= places[0] < source.size / 2  # it begins at the beginning
        assert (np.diff(places) >= 0).all()
        assert source.size / 2 < max(source.position.done, places[-1]) <= source.size


@pytest.mark.parametrize("name", ["owner/set", "owner/set:conf", "owner/set:conf:train"])
def test_a_data_set_that_cannot_be_fetched_names_the_ways_out(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(DataError, match=rf"cannot find corpus '{name}'.*OWNER/SET:CONFIG") as told:
        find_source(name)
    assert "\n" not in str(told.value)


def test_a_path_that_is_none_is_not_looked_for_on_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("no/corpus.txt", "no/corpus.jsonl.zst", "./no/set", "set"):
        with pytest.raises(DataError, match="does not exist"):
            find_source(name)
