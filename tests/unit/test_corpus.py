"""Corpora: every rule for a line, every refusal, and access by row."""

import gzip
import hashlib
import json
import os

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.data.read import read_lines
from pgra.errors import ArtifactError, DataError


def read(path, root, **rules):
    return open_corpus(CorpusArguments(corpus=str(path), **rules), root / "artifacts")


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_blank_lines_and_duplicates_are_dropped_and_counted(tmp_path):
    path = write(tmp_path / "c.txt", "one two \n\n  three\t\r\n   \none two\nthree\nfo\rur")
    corpus = read(path, tmp_path)
    assert list(corpus) == ["one two", "three", "fo ur"]
    assert corpus.counts == {"rows": 3, "blank": 2, "duplicates": 2}
    expected = hashlib.sha256(b"one two\nthree\nfo ur\n").hexdigest()
    assert corpus.fingerprint == {"corpus_sha256": expected, "rows": 3}
    whole = read(path, tmp_path, drop_duplicates=False)
    assert list(whole) == ["one two", "three", "one two", "three", "fo ur"]
    assert whole.counts["duplicates"] == 2
    assert list(Corpus(corpus.folder)) == list(corpus)


LINES = st.text(st.characters(codec="utf-8", exclude_characters="\0\n\r"), max_size=20)


@given(
    texts=st.lists(LINES, max_size=12).map(lambda texts: [*texts, "x"]),
    rows=st.lists(st.integers(0, 99), max_size=9),
)
@settings(max_examples=5)
def test_all_formats_give_one_corpus_whose_texts_follow_the_rows(texts, rows, tmp_path_factory):
    folder = tmp_path_factory.mktemp("any")
    passages = list(dict.fromkeys(text.strip() for text in texts if text.strip()))
    plain = "".join(f"{text}\n" for text in texts).encode()
    lines = "".join(json.dumps({"text": text, "n": 1}) + "\n" for text in texts).encode()
    sheet = pd.DataFrame({"text": texts, "n": 1}).to_csv(index=False).encode()
    files = {
        "c.txt": plain,
        "c.csv": sheet,
        "c.csv.gz": gzip.compress(sheet),
        "bom.txt": b"\xef\xbb\xbf" + plain,
        "c.txt.zst": pa.compress(plain, codec="zstd", asbytes=True),
        "c.jsonl.gz": gzip.compress(lines[:9]) + gzip.compress(lines[9:]),
    }
    paths = [write(folder / name, data) for name, data in files.items()]
    pq.write_table(pa.table({"text": texts}), folder / "c.parquet", row_group_size=2)
    paths.append(folder / "c.parquet")
    corpora = [read(path, folder) for path in paths]
    assert [list(corpus) for corpus in corpora] == [passages] * len(paths)
    assert len({corpus.fingerprint["corpus_sha256"] for corpus in corpora}) == 1
    wanted = [row % len(passages) for row in rows]
    assert corpora[0].texts(wanted) == [passages[row] for row in wanted]


@pytest.mark.parametrize("when", ["while it is read", "before it is read", None])
def test_a_corpus_that_is_overwritten_while_it_is_read_is_not_kept(when, tmp_path, monkeypatch):
    path = write(tmp_path / "c.txt", "\n".join(f"first {i}" for i in range(4_000)))
    other, plain = "\n".join(f"other {i}" for i in range(4_000)), read_lines

    def overwriting(source, *args):
        if when == "before it is read":
            write(path, other)
        for number, line in enumerate(plain(source, *args)):
            if when and number == 2_000:
                write(path, other)
            yield line

    monkeypatch.setattr("pgra.data.corpus.read_lines", overwriting)
    if when:
        with pytest.raises(ArtifactError, match="c.txt"):
            read(path, tmp_path)
        assert not list(tmp_path.glob("artifacts/corpora/[!.]*"))
        monkeypatch.undo()
        write(path, "\n".join(f"first {i}" for i in range(4_000)))
    assert list(read(path, tmp_path)) == [f"first {i}" for i in range(4_000)]


def test_changed_source_is_read_again_and_same_one_is_not(corpus_file, tmp_path):
    first = read(corpus_file, tmp_path)
    made = (first.folder / "manifest.json").stat().st_mtime_ns
    assert (read(corpus_file, tmp_path).folder / "manifest.json").stat().st_mtime_ns == made
    stat = corpus_file.stat()
    corpus_file.write_text(corpus_file.read_text().replace("warm", "cold"))
    os.utime(corpus_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    changed = read(corpus_file, tmp_path)
    assert "cold" in changed[0]
    assert changed.folder != first.folder


BAD = {
    "latin.jsonl": (b'{"text": "a"}\n{"text": "caf\xe9"}\n', "line 2"),
    "binary.txt": (b"one\nt\0wo\n", "line 2"),
    "cut.txt.gz": (gzip.compress(b"one two three\n" * 99)[:-12], "cut.txt.gz"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text"\n', "line 3"),
    "lacks.jsonl": (b'{"body": "a"}\n', "'text'"),
    "twice.csv": (b"text,text\none,two\n", "twice.csv"),
    "quotes.csv": (b'text\n"one"\n"t\\"wo"\n', "line 3"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_unusable_source_is_refused_and_nothing_stays_behind(name, tmp_path):
    data, message = BAD[name]
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, data), tmp_path)
    left = (tmp_path / "artifacts" / "corpora").glob("*")
    assert [path.name for path in left if path.suffix != ".lock"] == []


def test_passages_hold_all_words_in_order_and_cross_no_document(tmp_path):
    path = write(tmp_path / "c.txt", "a b  c d e\nf\n\ng h i j")
    parts = read(path, tmp_path, passage_words=2)
    assert list(parts) == ["a b", "c d", "e", "f", "g h", "i j"]


# Tables as corpora, and sources of any kind.


def test_passages_are_drawn_by_a_seed_over_all_of_the_corpus(tmp_path):
    path = tmp_path / "many.txt"
    path.write_text("".join(f"passage {row}\n" for row in range(1000)))

    def rows(**how):
        return [int(text[8:]) for text in read(path, tmp_path, max_passages=50, **how)]

    drawn = rows(passage_seed=0)
    assert drawn == sorted({*drawn})
    assert len(drawn) == 50 < max(drawn)
    assert rows(passage_seed=1) != drawn  # the controls: another seed, and none
    assert rows() == list(range(50))
