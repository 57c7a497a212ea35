"""`python -m index_build`, as a user meets it; `tests/unit/test_index.py` says what it builds."""

import json
import re
import subprocess
import sys

import pytest
from conftest import SENTENCES
from scripted import call, contents, environment, flip_byte

from index_build.__main__ import main


@pytest.fixture
def flags(encoder_dir, corpus_file, tmp_path):
    return [
        *("--corpus", str(corpus_file), "--encoder", str(encoder_dir), "--device", "cpu"),
        *("--artifacts_dir", str(tmp_path / "artifacts"), "--shard_rows", "4"),
    ]


def build(flags, *words):
    called = call(main, [*flags, *map(str, words)])
    assert called.code == 0, called.err
    return called.out


def fingerprint(folder):
    return json.loads((folder / "manifest.json").read_text())["fingerprint"]


def test_an_index_is_built_described_and_found_again(flags, tmp_path, corpus_file):
    corpus_file.write_text("\n".join([*SENTENCES, "", SENTENCES[0], "sea"]) + "\n")
    said = build(flags, "--max_encoder_tokens", 8)
    (folder,) = (tmp_path / "artifacts" / "indexes").iterdir()
    for line in (
        f"index: {folder}\n  13 passages, ",
        " bytes, 16 dimensions\n",
        " texts/s\n  exact search of the float16 vectors, ",
        "12 passages were cut at max_encoder_tokens\n",
        "1 blank lines dropped, 1 duplicates dropped",
    ):
        assert line in said
    assert "reused: nothing was left to encode" in build(flags, "--max_encoder_tokens", 8)
    (folder / "manifest.json").unlink()
    flip_byte(folder / "vectors-00001.npy")
    assert "; 9 passages reused" in build(flags, "--max_encoder_tokens", 8)
    assert "shard by shard from the disk" in build(flags, "--index_memory_gb", "1e-7")


def test_a_lossy_index_says_its_recall_with_the_queries_given(flags, tmp_path):
    queries = tmp_path / "queries.txt"
    queries.write_text("red sea\n\napples of the town\n")
    said = build(flags, "--index_factory", "SQ4", "--recall_queries", queries)
    seconds = r"  index SQ4, .* queries/s in one call\n  trained on 12 passages in [\d.]+ s\n"
    assert re.search(rf"{seconds}  recall @10 .* of 2 queries with hits x 4 scored again ", said)
    for content, message in ((None, "cannot be read: "), (b"\xff", "utf-8"), (b"\n", "no text: ")):
        queries.unlink(missing_ok=True)
        if content is not None:
            queries.write_bytes(content)
        assert message in call(main, [*flags, "--recall_queries", str(queries)]).error


@pytest.mark.parametrize("retriever", ["bm25", "dense", "hybrid"])
def test_output_dir_is_where_it_goes_and_what_is_there_is_left_alone(flags, tmp_path, retriever):
    mine, words = tmp_path / "mine", ["--retriever", retriever, "--output_dir"]
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    assert (
        "holds thesis.tex, which is not an index's" in call(main, [*flags, *words, str(mine)]).error
    )
    assert (mine / "thesis.tex").read_text() == "years of work"
    said = build(flags, *words, tmp_path / "here")
    assert said.count("index: ") == (2 if retriever == "hybrid" else 1)
    assert fingerprint(tmp_path / "here")["rows"] == 12
    if retriever == "dense":
        other = [*flags, *words, str(tmp_path / "here"), "--pooling", "cls"]
        assert 'was made with pooling "mean", this run asks for "cls"' in call(main, other).error


def test_one_yaml_serves_all_programs(flags, tmp_path):
    yaml = tmp_path / "all.yaml"
    yaml.write_text("pooling: cls\nmax_steps: 5\nnum_evidence: 4\nlearning_rate: 1.0e-4\n")
    build(flags, "--config", yaml)
    (folder,) = (tmp_path / "artifacts" / "indexes").iterdir()
    assert fingerprint(folder)["pooling"] == "cls"
    yaml.write_text("poling: cls\n")
    told = call(main, [*flags, "--config", str(yaml)]).error
    assert "unknown key 'poling'. Did you mean 'pooling'?" in told


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--index_dir", "x"], "index_dir names an index to use"),
        (["--output_dir", "FILE/x"], "corpus.txt"),
        (["--corpsu", "x"], "unknown argument '--corpsu'. Did you mean '--corpus'"),
        (["--max_encoder_tokens", "999"], "max_encoder_tokens is 999"),
        (["--retriever", "exhaustive"], "retriever 'exhaustive' is no first stage"),
        (["--retriever", "random"], "retriever 'random' has no index: there is nothing to build"),
        (["--retriever", "nothing:Here"], "retriever 'nothing:Here' cannot be imported"),
    ],
)
def test_a_mistake_is_one_line_before_anything_is_encoded(words, message, flags, corpus_file):
    words = [word.replace("FILE", str(corpus_file)) for word in words]
    assert message in call(main, [*flags, *words]).error
    assert not list(corpus_file.parent.glob("artifacts/indexes/*/vectors*"))


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
