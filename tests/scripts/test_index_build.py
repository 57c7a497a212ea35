"""`pgra index` and its words, as a user meets them; `tests/unit/test_index.py` says what is built.

What the words print of a small index stands in the golden records.
"""

import json

import pytest
from conftest import SENTENCES, contents
from processes import launch
from scripted import call

from index_build.__main__ import main


@pytest.fixture
def bench(new_bench):
    new_bench.corpus.write_text("\n".join(SENTENCES[:9]) + "\n")
    return new_bench


@pytest.fixture
def flags(bench):
    return [
        *("--corpus", str(bench.corpus), "--encoder", str(bench.encoder), "--device", "cpu"),
        *("--artifacts_dir", str(bench.artifacts), "--shard_rows", "4"),
    ]


def build(flags, *words):
    called = call(main, [*flags, *map(str, words)])
    assert called.code == 0, called.err
    return called.out


def fingerprint(folder):
    return json.loads((folder / "manifest.json").read_text())["fingerprint"]


@pytest.mark.parametrize("retriever", ["bm25", "bm25+dense"])
def test_output_dir_is_where_it_goes_and_what_is_there_is_left_alone(flags, tmp_path, retriever):
    mine, words = tmp_path / "mine", [*flags, "--retriever", retriever, "--output_dir"]
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    assert "holds thesis.tex, no index's" in call(main, [*words, str(mine)]).error
    assert (mine / "thesis.tex").read_text() == "years of work"
    build(words, tmp_path / "here")
    assert fingerprint(tmp_path / "here")["rows"] == 9


@pytest.mark.slow
def test_two_processes_build_what_one_builds(flags, tmp_path):
    words = [*flags, "--output_dir", str(tmp_path / "two")]
    told = launch(call, main, words)
    assert [called.code for called in told] == [0, 0], told
    assert "".join(called.out for called in told).count("index: ") == 1  # only the first speaks
    build([*flags, "--output_dir"], tmp_path / "one")
    one, two = (contents(tmp_path / name) for name in ("one", "two"))
    assert {**one, "manifest.json": b""} == {**two, "manifest.json": b""}
    assert fingerprint(tmp_path / "one") == fingerprint(tmp_path / "two")


@pytest.mark.slow
def test_parts_of_an_array_build_what_one_builds(flags, tmp_path):
    words = [*flags, "--output_dir", str(tmp_path / "parts")]
    assert "0 of 3 shards are still" in build([*words, "--shard", "1/2"])  # it does the other's too
    assert not (tmp_path / "parts" / "manifest.json").exists()
    (tmp_path / "parts" / "vectors-00002.json").unlink()
    (tmp_path / "parts" / ".vectors-00002.taken.partial").write_text("0")  # by one that was killed
    assert "1 of 3 shards are still" in build([*words, "--shard", "1/2"])
    assert "0 of 3 shards are still" in build([*words, "--shard", "0/2"])
    assert "reused 9" in build(words)
    build([*flags, "--output_dir"], tmp_path / "one")
    one, parts = (contents(tmp_path / name) for name in ("one", "parts"))
    assert {**one, "manifest.json": b""} == {**parts, "manifest.json": b""}
    assert "'2/2' is not I/N" in call(main, [*words, "--shard", "2/2"]).error
