"""`pgra index` and its words, as a user meets them; `tests/unit/test_index.py` says what is built.

What the words print of a small index stands in the golden records.
"""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import SENTENCES
from scripted import Bench, call, contents, environment, flip_byte

from index_build.__main__ import main
from pgra.cli import main as pgra
from pgra.commands.train import main as train_main


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


def build(flags, *words):
    called = call(main, [*flags, *map(str, words)])
    assert called.code == 0, called.err
    return called.out


def fingerprint(folder):
    return json.loads((folder / "manifest.json").read_text())["fingerprint"]


def test_what_was_found_done_and_how_it_is_searched_is_said(flags, bench, tmp_path):
    bench.corpus.write_text("\n".join([*SENTENCES, "", SENTENCES[0], "sea"]) + "\n")
    said = build(flags)
    folder = bench.product("indexes/*-*")
    assert "1 blank lines dropped, 1 duplicates dropped" in said
    assert "reused: nothing was left to encode" in build(flags)
    (folder / "manifest.json").unlink()
    flip_byte(folder / "vectors-00001.npy")
    assert "; 9 passages reused" in build(flags, "--index_memory_gb", "1e-7")
    assert "shard by shard from the disk" in build(flags, "--index_memory_gb", "1e-7")
    queries = tmp_path / "queries.txt"
    queries.write_text("red sea\n\napples of the town\n")
    said = build(flags, "--index_factory", "SQ4", "--recall_queries", queries)
    seconds = r"  index SQ4, .* queries/s in one call\n  trained on 13 passages in [\d.]+ s\n"
    assert re.search(rf"{seconds}  recall @10 .* of 2 queries with hits x 4 scored again ", said)
    queries.write_text("\n")
    assert "holds no text" in call(main, [*flags, "--recall_queries", str(queries)]).error


def test_verify_names_what_is_damaged_and_ends_with_1(flags, bench):
    missing = index("verify", *flags).error
    assert "there is no finished index of" in missing
    assert "make it with pgra index build" in missing
    build(flags)
    folder = bench.product("indexes/*-*")
    flip_byte(folder / "vectors-00001.npy")
    damaged = index("verify", *flags)
    assert damaged.code == 1
    assert damaged.out.splitlines() == [
        f"{folder}: damaged",
        "  damaged: vectors-00001.npy is damaged (other content than was written)",
    ]


def test_an_index_is_found_by_folder_or_arguments_and_loses_the_rows_of_a_file(
    flags, bench, tmp_path
):
    folder, rows = tmp_path / "index", tmp_path / "rows.txt"
    build(flags, "--output_dir", folder)
    build(flags)
    where = ["--artifacts_dir", bench.artifacts, "--device", "cpu", "--num_candidates", 2]
    by_folder = index("search", folder, SENTENCES[4], *where).out
    assert by_folder == index("search", SENTENCES[4], *flags, "--num_candidates", 2).out
    assert "nothing to search with" in index("search", folder).error
    rows.write_text("3\n\n4\n")
    removed = index("remove", folder, "--rows", 8, "--rows_file", rows).out
    assert removed.endswith("3 of 9 rows are removed, 6 left\n")
    assert SENTENCES[4] not in index("search", folder, SENTENCES[4], *where).out.splitlines()[1]


@pytest.mark.parametrize("retriever", ["bm25", "dense", "hybrid"])
def test_output_dir_is_where_it_goes_and_what_is_there_is_left_alone(flags, tmp_path, retriever):
    mine, words = tmp_path / "mine", [*flags, "--retriever", retriever, "--output_dir"]
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    assert "holds thesis.tex, which is not an index's" in call(main, [*words, str(mine)]).error
    assert (mine / "thesis.tex").read_text() == "years of work"
    said = build(words, tmp_path / "here")
    assert said.count("index: ") == (2 if retriever == "hybrid" else 1)
    assert fingerprint(tmp_path / "here")["rows"] == 9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("build FLAGS --index_dir x", "index_dir names an index to use"),
        ("build FLAGS --output_dir FILE/x", "corpus.txt"),
        ("build FLAGS --retriever random", "retriever 'random' has no index: there is nothing"),
        ("inof", "unknown word after pgra index 'inof'. Did you mean 'info'"),
        ("add DIR", "there is nothing to add: pgra index add DIR --corpus MORE"),
        ("remove --rows 3", "--index_dir is missing: give it (The index"),
        ("remove DIR --rows_file rows.txt", "rows.txt, line 2: '-4' is no row: one number a line"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_encoded(
    words, message, flags, bench, monkeypatch
):
    monkeypatch.chdir(bench.root)
    (bench.root / "rows.txt").write_text("3\n-4\n")
    words = words.replace("FILE", str(bench.corpus)).replace("FLAGS", " ".join(flags))
    assert message in index(*words.split()).error
    assert not list(bench.artifacts.glob("indexes/*/vectors*"))
    assert not (bench.root / "DIR").exists()


@pytest.mark.slow
def test_a_grown_index_serves_train_and_old_candidates_are_not_used(flags, bench, tmp_path):
    folder, more, made = tmp_path / "index", tmp_path / "more.txt", set()
    index(*flags, "--output_dir", folder)

    def new_rows(name, *corpora):
        words = [*bench.argv(name, index_dir=folder, corpus=None), "--corpus", *corpora]
        assert call(train_main, [str(word) for word in words]).code == 0
        new = set(bench.artifacts.glob("candidates/sst2/[!.]*-*")) - made
        made.update(new)
        return np.concatenate([np.load(folder / "rows.npy").ravel() for folder in new])

    assert new_rows("before", bench.corpus).max() < 9
    index("add", folder, "--corpus", more, "--artifacts_dir", bench.artifacts, "--device", "cpu")
    assert "was made with corpus_sha256" in bench.train("stale", index_dir=folder).error
    grown = new_rows("after", bench.corpus, more)
    assert np.isin([1, 5, 10], grown).all()
    index("remove", folder, "--rows", 1, 5)
    assert not np.isin([1, 5], new_rows("removed", bench.corpus, more)).any()


@pytest.mark.slow
def test_two_processes_build_what_one_builds(flags, tmp_path):
    launch = ["-m", "torch.distributed.run", "--nproc_per_node", "2", "--standalone"]
    said = {}
    for name, words in (("two", launch), ("one", [])):
        job = [sys.executable, *words, "-m", "index_build", *flags, "--output_dir", name]
        done = subprocess.run(
            job, env=environment(), cwd=tmp_path, capture_output=True, text=True, check=True
        )
        said[name] = done.stdout
    assert said["two"].count("index: ") == 1  # only the main process speaks
    one, two = (contents(tmp_path / name) for name in ("one", "two"))
    assert {**one, "manifest.json": b""} == {**two, "manifest.json": b""}
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")
