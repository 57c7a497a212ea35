"""`pgra index` and its words, as a user meets them."""

import numpy as np
import pytest
from conftest import SENTENCES
from scripted import Bench, call, contents, flip_byte

from pgra.cli import main as pgra
from pgra.commands.train import main as train_main

WORDS = ["add", "build", "info", "remove", "search", "verify"]


@pytest.fixture
def bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    bench = Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)
    bench.corpus.write_text("\n".join(SENTENCES[:9]) + "\n")
    (tmp_path / "more.txt").write_text("\n".join(SENTENCES[8:]) + "\n")
    return bench


@pytest.fixture
def flags(bench):
    return [
        *("--corpus", str(bench.corpus), "--encoder", str(bench.encoder), "--device", "cpu"),
        *("--artifacts_dir", str(bench.artifacts), "--shard_rows", "4"),
    ]


def index(*words):
    return call(lambda argv: pgra(["index", *argv]), [str(word) for word in words])


def built(flags, bench, *words):
    assert index(*flags, *words).code == 0
    return bench.product("indexes/*-*")


def test_info_tells_what_an_index_is_by_folder_or_by_its_arguments(flags, bench):
    missing = index("info", *flags).error
    assert "there is no finished index of" in missing
    assert "make it with pgra index build" in missing
    folder = built(flags, bench)
    told = index("info", folder).out
    assert index("info", *flags).out == told
    for line in (
        f"index: {folder}",
        f"  corpus         {bench.corpus}",
        "  rows           9",
        f"  encoder        {bench.encoder}",
        "  width          16",
        "  type           Flat",
        "  recall         exact search of the float16 vectors",
    ):
        assert line in told.splitlines()
    assert ", torch " in told
    hybrid = index("info", *flags, "--retriever", "hybrid").error
    assert "bm25-" in hybrid
    built_bm25 = index("build", *flags, "--retriever", "bm25")
    assert built_bm25.code == 0
    told = index("info", *flags, "--retriever", "hybrid").out
    assert told.count("index: ") == 2
    assert "  kind           bm25" in told


def test_verify_names_what_is_damaged_and_ends_with_1(flags, bench):
    folder = built(flags, bench)
    whole = index("verify", folder)
    assert (whole.code, whole.out) == (0, f"{folder}: whole: 7 files as written\n")
    flip_byte(folder / "vectors-00001.npy")
    damaged = index("verify", *flags)
    assert damaged.code == 1
    assert damaged.out.splitlines() == [
        f"{folder}: damaged",
        "  damaged: vectors-00001.npy is damaged (other content than was written)",
    ]
    assert "does not exist" in index("verify", bench.root / "no").error


def test_search_shows_rank_score_row_and_text(flags, bench):
    folder = built(flags, bench)
    told = index("search", folder, SENTENCES[4], "--num_candidates", 2).out.splitlines()
    assert len(told) == 3
    rank, score, *row = told[1].split()[:4]
    assert (rank, row) == ("1", ["row", "4"])
    assert float(score) == pytest.approx(1, abs=1e-3)
    assert told[1].endswith(SENTENCES[4])
    by_flags = index("search", SENTENCES[4], *flags, "--num_candidates", 2).out.splitlines()
    assert by_flags == told
    assert "nothing to search with" in index("search", folder).error
    exceeds = index("search", folder, "x", "--num_candidates", 10).error
    assert "num_candidates (10) exceeds the corpus (9 passages)" in exceeds


def test_an_index_grows_and_rows_are_removed(flags, bench, tmp_path):
    folder, more = tmp_path / "index", tmp_path / "more.txt"
    index(*flags, "--output_dir", folder)
    where = ["--artifacts_dir", bench.artifacts, "--device", "cpu"]
    told = index("add", folder, "--corpus", more, *where).out
    assert "12 passages" in told
    assert "added 3 passages" in told
    again = index("add", folder, "--corpus", more, *where).out
    assert "nothing to add: it has these passages" in again
    (tmp_path / "rows.txt").write_text("3\n\n4\n")
    removed = index("remove", folder, "--rows", 9, "--rows_file", tmp_path / "rows.txt").out
    assert removed.endswith("3 of 12 rows are removed, 9 left\n")
    found = index("search", folder, SENTENCES[9], "--num_candidates", 9).out
    rows = [int(line.split()[3]) for line in found.splitlines()[1:]]
    assert sorted(rows) == [0, 1, 2, 5, 6, 7, 8, 10, 11]
    info = index("info", folder).out.splitlines()
    assert "  removed        3" in info
    assert f"  corpus         {bench.corpus}, {more}" in info
    assert index("verify", folder).code == 0


@pytest.mark.slow
def test_a_grown_index_serves_train_and_old_candidates_are_not_used(flags, bench, tmp_path):
    folder = tmp_path / "index"
    index(*flags, "--output_dir", folder)
    assert bench.train("before", index_dir=folder).code == 0
    where = ["--artifacts_dir", bench.artifacts, "--device", "cpu"]
    index("add", folder, "--corpus", tmp_path / "more.txt", *where)
    stale = bench.train("stale", index_dir=folder).error
    assert "was made with corpus_sha256" in stale
    made = set(bench.artifacts.glob("candidates/sst2/[!.]*-*"))
    both = [*bench.argv("after", index_dir=folder, corpus=None), "--corpus", bench.corpus]
    both.append(tmp_path / "more.txt")
    assert call(train_main, [str(word) for word in both]).code == 0
    grown = set(bench.artifacts.glob("candidates/sst2/[!.]*-*"))
    assert len(grown) == 2 * len(made)
    assert made < grown
    index("remove", folder, "--rows", 1, 5)
    both[both.index(str(bench.run("after")))] = bench.run("removed")
    assert call(train_main, [str(word) for word in both]).code == 0
    every = set(bench.artifacts.glob("candidates/sst2/[!.]*-*"))
    assert len(every) == 3 * len(made)
    for folders, has_removed in ((grown, True), (every - grown, False)):
        rows = np.concatenate([np.load(folder / "rows.npy").ravel() for folder in folders])
        assert np.isin([1, 5], rows).all() == has_removed
        assert np.isin([1, 5], rows).any() == has_removed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("inof", "unknown word after pgra index 'inof'. Did you mean 'info'"),
        ("add DIR", "there is nothing to add: pgra index add DIR --corpus MORE"),
        ("add --corpus x", "no index is named: pgra index add DIR"),
        ("remove DIR", "no rows are named: pgra index remove DIR --rows 5 9"),
        ("remove --rows 3", "no index is named: pgra index remove DIR"),
        ("remove DIR --rows x", "invalid int value: 'x'"),
        ("remove DIR --rows 3", "DIR does not exist"),
        ("add DIR --corpus x", "DIR does not exist"),
        ("remove DIR --rows_file rows.txt", "rows.txt, line 2: '-4' is no row: one number a line"),
    ],
)
def test_mistakes_are_told_in_a_line(words, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.txt").write_text("3\n-4\n")
    assert message in index(*words.split()).error
    assert [*contents(tmp_path)] == ["rows.txt"]


def test_help_names_every_word():
    told = index("--help").out
    assert all(f"\n  {word} " in told for word in WORDS)
    assert "pgra index add DIR --corpus more.txt" in told
