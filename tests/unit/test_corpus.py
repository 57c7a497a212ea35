"""Corpora: every rule for a line, every refusal, and access by row."""

import fcntl
import gzip
import hashlib
import os
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import SENTENCES, write_jsonl

from pgra.artifacts import build_once
from pgra.config import CorpusArguments
from pgra.data import corpus as corpus_module
from pgra.data.corpus import load_corpus, open_corpus
from pgra.errors import ArtifactError, ConfigError, DataError


def read(path, root, **rules):
    return open_corpus(CorpusArguments(corpus=str(path), **rules), root / "artifacts")


def everything(corpus):
    return corpus.slice(0, len(corpus))


def zstd(data):
    return pa.compress(data, codec="zstd", asbytes=True)


def write(path, data):
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return path


def test_blank_lines_and_duplicates_are_dropped_and_counted(tmp_path):
    path = write(tmp_path / "c.txt", "one two \n\n  three\t\r\n   \none two\nthree\nfour")
    corpus = read(path, tmp_path)
    assert everything(corpus) == ["one two", "three", "four"]
    assert corpus.counts == {"rows": 3, "blank": 2, "duplicates": 2, "not_utf8": 0}


def test_duplicates_stay_when_asked_and_are_still_counted(tmp_path):
    path = write(tmp_path / "c.txt", "a\nb\na\n")
    corpus = read(path, tmp_path, drop_duplicates=False)
    assert everything(corpus) == ["a", "b", "a"]
    assert corpus.counts["duplicates"] == 1


def test_fingerprint_is_the_checksum_of_the_kept_lines(tmp_path):
    corpus = read(write(tmp_path / "c.txt", "b \n\na\nb\n"), tmp_path)
    expected = hashlib.sha256(b"b\na\n").hexdigest()
    assert corpus.fingerprint == {"corpus_sha256": expected, "rows": 2}
    other = read(write(tmp_path / "d.txt", "a\nb\n"), tmp_path)
    assert other.fingerprint != corpus.fingerprint


def test_all_formats_give_the_same_corpus(tmp_path):
    text = "".join(f"{s}\n" for s in SENTENCES)
    lines = write_jsonl(tmp_path / "c.jsonl", [{"text": s, "n": 1} for s in SENTENCES])
    pq.write_table(pa.table({"text": SENTENCES}), tmp_path / "c.parquet", row_group_size=5)
    paths = [
        write(tmp_path / "c.txt", text),
        write(tmp_path / "c.txt.gz", gzip.compress(text.encode())),
        write(tmp_path / "c.txt.zst", zstd(text.encode())),
        write(tmp_path / "two.txt.zst", zstd(text[:100].encode()) + zstd(text[100:].encode())),
        lines,
        write(tmp_path / "c.jsonl.gz", gzip.compress(lines.read_bytes())),
        write(tmp_path / "c.jsonl.zst", zstd(lines.read_bytes())),
        tmp_path / "c.parquet",
    ]
    corpora = [read(path, tmp_path) for path in paths]
    assert [everything(c) for c in corpora] == [SENTENCES] * len(paths)
    assert len({c.fingerprint["corpus_sha256"] for c in corpora}) == 1


def test_folders_of_the_old_formats_keep_their_names(tmp_path):
    """A corpus that was read by an earlier version is found again, and with it all made of it."""
    text = read(write(tmp_path / "c.txt", "one\ntwo\n"), tmp_path)
    lines = read(write(tmp_path / "c.jsonl", '{"text": "one"}\n{"text": "two"}\n'), tmp_path)
    assert (text.folder.name, lines.folder.name) == ("c-9d5d82f9310f", "c-34dc1fd3ece0")


def test_byte_order_mark_and_inner_line_breaks_do_not_enter_passages(tmp_path):
    assert read(write(tmp_path / "b.txt", b"\xef\xbb\xbfone\ntwo\n"), tmp_path)[0] == "one"
    path = write_jsonl(tmp_path / "c.jsonl", [{"body": "one\ntwo"}])
    assert read(path, tmp_path, corpus_field="body")[0] == "one two"


def test_unicode_line_separators_do_not_cut_a_passage(tmp_path):
    assert len(read(write(tmp_path / "c.txt", "one\u2028two\x0bthree\n"), tmp_path)) == 1


def test_texts_follow_the_rows_asked_across_batches(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus_module, "_BATCH_ROWS", 4)
    corpus = read(write(tmp_path / "c.txt", "".join(f"p{i}\n" for i in range(11))), tmp_path)
    assert len(corpus.batches) == 3
    rows = [10, 0, 3, 4, 0, 7]
    assert corpus.texts(rows) == [f"p{i}" for i in rows] == [corpus[i] for i in rows]
    assert corpus.texts(np.array([], dtype=np.int64)) == []
    assert corpus.slice(9, 99) == ["p9", "p10"]
    assert [len(b) for b in corpus.batched(5)] == [5, 5, 1]


@pytest.mark.parametrize("row", [-1, 12])
def test_rows_outside_the_corpus_are_refused(corpus_file, tmp_path, row):
    corpus = read(corpus_file, tmp_path)
    with pytest.raises(IndexError, match=f"row {row} of a corpus of 12"):
        corpus.texts([0, row])
    with pytest.raises(IndexError, match=f"row {row}"):
        corpus[row]


def test_several_files_are_one_corpus_in_the_order_given(tmp_path):
    one = write(tmp_path / "one.txt", "a\nb\n")
    two = write_jsonl(tmp_path / "two.jsonl", [{"text": "b"}, {"text": "c"}])
    both = open_corpus(CorpusArguments(corpus=[str(one), str(two)]), tmp_path / "artifacts")
    assert everything(both) == ["a", "b", "c"]
    assert both.counts["duplicates"] == 1
    whole = read(write(tmp_path / "whole.txt", "a\nb\nc\n"), tmp_path)
    assert both.fingerprint == whole.fingerprint
    turned = open_corpus(CorpusArguments(corpus=[str(two), str(one)]), tmp_path / "artifacts")
    assert everything(turned) == ["b", "c", "a"]
    assert turned.fingerprint != both.fingerprint


def test_one_name_in_a_list_is_that_name():
    assert CorpusArguments(corpus=["a.txt"]) == CorpusArguments(corpus="a.txt")
    assert CorpusArguments(corpus=["a.txt", "b.txt"]).sources == ["a.txt", "b.txt"]
    with pytest.raises(ConfigError, match="corpus names no file"):
        CorpusArguments(corpus=[])


def test_a_few_lines_that_are_not_utf8_are_dropped_counted_and_told(tmp_path, caplog):
    lines = [f"passage {i}".encode() for i in range(200)]
    lines[7] = lines[30] = b"caf\xe9"
    corpus = read(write(tmp_path / "c.txt", b"\n".join(lines)), tmp_path)
    assert len(corpus) == 198
    assert corpus.counts["not_utf8"] == 2
    assert corpus[7] == "passage 8"
    assert "2 lines dropped, as" in caplog.text
    assert "line 8, byte 4: 0xe9 is not UTF-8" in caplog.text
    lines[31] = b"caf\xe9"  # the third of 200: another encoding
    with pytest.raises(DataError, match="line 8, byte 4: 0xe9 is not UTF-8"):
        read(write(tmp_path / "d.txt", b"\n".join(lines)), tmp_path)


def test_lines_of_jsonl_that_are_not_utf8_are_dropped_too(tmp_path):
    lines = [b'{"text": "p%d"}' % i for i in range(150)]
    lines[3] = b'{"text": "caf\xe9"}'
    corpus = read(write(tmp_path / "c.jsonl", b"\n".join(lines)), tmp_path)
    assert (len(corpus), corpus.counts["not_utf8"]) == (149, 1)


STRICT = {
    "blank": b"a\n\nb\n",
    "duplicates": b"a\na\n",
    "UTF-8": b"".join(b"%d\n" % i for i in range(150)) + b"\xe9\n",
}


@pytest.mark.parametrize("what", sorted(STRICT))
def test_strict_refuses_what_is_dropped_else(what, tmp_path):
    path = write(tmp_path / "c.txt", STRICT[what])
    for _ in range(2):  # when it is read, and when it is found read
        with pytest.raises(
            DataError, match=rf"c\.txt holds 1 .*{what}.*--strict refuses them: mend"
        ):
            read(path, tmp_path, strict=True)
    assert len(read(path, tmp_path)) == len(STRICT[what].split()) - (what != "blank")
    assert len(read(write(tmp_path / "d.txt", "a\nb\n"), tmp_path, strict=True)) == 2


def test_strict_lets_duplicates_be_that_are_kept(tmp_path):
    path = write(tmp_path / "c.txt", "a\na\n")
    assert len(read(path, tmp_path, strict=True, drop_duplicates=False)) == 2


def test_max_passages_keeps_the_first(corpus_file, tmp_path):
    assert everything(read(corpus_file, tmp_path, max_passages=3)) == SENTENCES[:3]
    assert len(read(corpus_file, tmp_path)) == 12


def test_changed_source_is_read_again_and_same_one_is_not(corpus_file, tmp_path):
    first = read(corpus_file, tmp_path)
    made = (first.folder / "manifest.json").stat().st_mtime_ns
    again = read(corpus_file, tmp_path)
    assert (again.folder / "manifest.json").stat().st_mtime_ns == made
    stat = corpus_file.stat()
    text = corpus_file.read_text()
    corpus_file.write_text(text.replace("warm", "cold"))
    os.utime(corpus_file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # same size, same time
    changed = read(corpus_file, tmp_path)
    assert "cold" in changed[0]
    assert changed.folder != first.folder


def test_opened_again_from_its_folder_it_is_the_same(corpus_file, tmp_path):
    corpus = read(corpus_file, tmp_path)
    again = load_corpus(corpus.folder)
    assert again.fingerprint == corpus.fingerprint
    assert everything(again) == SENTENCES


def test_cut_artefact_is_refused(corpus_file, tmp_path):
    corpus = read(corpus_file, tmp_path)
    path = corpus.folder / "corpus.arrow"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ArtifactError, match="damaged"):
        read(corpus_file, tmp_path)


BAD = {
    "empty.txt": (b"", "is empty"),
    "blank.txt": (b"\n \n", "holds no passage"),
    "binary.txt": (b"one\nt\0wo\n", "line 2: a NUL byte"),
    "latin.txt": ("one\ncaf\xe9\n".encode("latin-1"), "line 2, byte 4: 0xe9 is not UTF-8"),
    "cut.txt.gz": (gzip.compress(b"one two three\n" * 99)[:-12], "cut short or is not gzip"),
    "fake.txt.gz": (b"plain text\n", "cut short or is not gzip"),
    "list.jsonl": (b'{"text": "a"}\n[1]\n', "line 2: a list, not a JSON object"),
    "broken.jsonl": (b'{"text": "a"}\n\n{"text"\n', "line 3: not JSON"),
    "lacks.jsonl": (b'{"body": "a"}\n', r"line 1: no field 'text' \(it has body\).*--corpus_field"),
    "number.jsonl": (b'{"text": 3}\n', "line 1: 'text' is a int, not text"),
    "nul.jsonl": (b'{"text": "a\\u0000b"}\n', "line 1: 'text' holds a NUL"),
    "half.jsonl": (b'{"text": "a\\ud800b"}\n', "half a surrogate pair"),
    "mac.txt": (b"one\rtwo\rthree\r", "one line with carriage returns.*convert them to LF"),
    "table.parquet": (b"PAR1", "is damaged or is not parquet"),
    "table.parquet.gz": (gzip.compress(b"PAR1"), "parquet is packed inside.*unpack it"),
    "cut.txt.zst": (zstd(b"one two three\n" * 99)[:-12], "cut short or is not zstd"),
    "fake.txt.zst": (b"plain text\n", "cut short or is not zstd"),
    "table.csv": (b"text\none\n", "suffix that is not read here: use .txt, .jsonl, .parquet"),
    "bare": (b"one\n", "suffix that is not read here"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_unusable_source_is_refused_and_nothing_stays_behind(name, tmp_path):
    data, message = BAD[name]
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, data), tmp_path)
    corpora = tmp_path / "artifacts" / "corpora"
    left = list(corpora.iterdir()) if corpora.exists() else []
    assert [p.name for p in left if not p.name.endswith(".lock")] == []


def test_missing_file_names_its_neighbours(corpus_file, tmp_path):
    with pytest.raises(DataError, match=r"corpsu\.txt does not exist\. Near it: corpus\.txt"):
        read(tmp_path / "corpsu.txt", tmp_path)
    with pytest.raises(DataError, match=r"Neither does the folder"):
        read(tmp_path / "no" / "corpus.txt", tmp_path)
    with pytest.raises(DataError, match="is a folder"):
        read(tmp_path, tmp_path)


def test_hub_name_that_cannot_be_fetched_names_the_ways_out(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(DataError, match=r"cannot find corpus.*local .txt.*bundled: name"):
        read("owner/no-such-data-set-here/file.txt", tmp_path)


def test_unknown_bundled_corpus_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"unknown bundled corpus 'wiki'.*wikipedia-19k"):
        read("bundled:wiki", tmp_path)


def test_second_process_waits_for_the_first_and_does_not_build(tmp_path):
    folder, built = tmp_path / "thing-1", []

    def build(aside):
        built.append(aside)
        (aside / "a.txt").write_text("a")
        return {}

    lock = (tmp_path / ".thing-1.lock").open("w")
    fcntl.flock(lock, fcntl.LOCK_EX)
    waiting = threading.Thread(
        target=build_once, args=(folder,), kwargs={"stage": "s", "fingerprint": {}, "build": build}
    )
    waiting.start()
    time.sleep(0.2)
    assert not built
    folder.mkdir()  # half-built: no manifest, so it must be made anew
    lock.close()
    waiting.join(timeout=10)
    assert len(built) == 1
    build_once(folder, stage="s", fingerprint={}, build=build)
    assert len(built) == 1


def test_leftover_of_a_killed_build_is_not_used(tmp_path):
    aside = tmp_path / ".thing-1.partial"
    aside.mkdir()
    (aside / "old.txt").write_text("half")

    def build(folder):
        (folder / "new.txt").write_text("whole")
        return {"rows": 1}

    built = build_once(tmp_path / "thing-1", stage="s", fingerprint={}, build=build)
    assert list(built.manifest.files) == ["new.txt"]
    assert not aside.exists()


def test_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ArtifactError, match=r"cannot write .*PGRA_HOME"):
        build_once(tmp_path / "file" / "x", stage="s", fingerprint={}, build=lambda _: {})

    def full(_):
        raise OSError(28, "No space left on device")

    with pytest.raises(ArtifactError, match="No space left"):
        build_once(tmp_path / "y", stage="s", fingerprint={}, build=full)
    assert not (tmp_path / "y").exists()


def test_a_stray_carriage_return_is_white_space(tmp_path):
    path = tmp_path / "stray.txt"
    path.write_bytes(b"one\r\ntwo\rthree\r\n")
    assert read(str(path), tmp_path).texts([0, 1]) == ["one", "two three"]
