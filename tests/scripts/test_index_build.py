import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import SENTENCES
from scripted import call, contents, flip_byte

from index_build.__main__ import main
from pgra.errors import ArtifactError, ConfigError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def flags(encoder_dir, corpus_file, tmp_path):
    return [
        *("--corpus", str(corpus_file), "--encoder", str(encoder_dir), "--device", "cpu"),
        *("--artifacts_dir", str(tmp_path / "artifacts"), "--shard_rows", "4"),
    ]


def fingerprint(folder):
    return json.loads((folder / "manifest.json").read_text())["fingerprint"]


def test_a_lossy_index_tells_its_recall_with_the_queries_given(flags, tmp_path, capsys):
    queries = tmp_path / "queries.txt"
    queries.write_text("red sea\n\napples of the town\n")
    assert main([*flags, "--index_factory", "SQ4", "--recall_queries", str(queries)]) == 0
    told = capsys.readouterr().out
    assert "  index SQ4, " in told
    seconds = r" queries/s in one call\n  trained on 12 passages in [\d.]+ s\n  recall @10 "
    assert re.search(seconds, told)
    assert " of 2 queries with hits x 4 scored again exactly (without: @10 " in told


def test_a_flat_index_beyond_the_memory_says_so(flags, capsys):
    assert main([*flags, "--index_memory_gb", "1e-7"]) == 0
    assert "exact search of the float16 vectors, shard by shard from the disk, " in (
        capsys.readouterr().out
    )


def test_queries_that_cannot_be_read_are_refused(flags, tmp_path):
    for content, message in (
        (None, "recall_queries .*q.txt cannot be read: .*No such file"),
        (b"\xff", "recall_queries .*q.txt cannot be read: .*utf-8"),
        (b"\n \n", "recall_queries .*q.txt holds no text: write a query a line"),
    ):
        if content is not None:
            (tmp_path / "q.txt").write_bytes(content)
        with pytest.raises(ConfigError, match=message):
            main([*flags, "--recall_queries", str(tmp_path / "q.txt")])
    assert not list(tmp_path.glob("artifacts/indexes/*"))


def test_an_index_is_built_told_and_found_again(flags, tmp_path, capsys):
    assert main(flags) == 0
    told = capsys.readouterr().out
    (folder,) = (tmp_path / "artifacts" / "indexes").iterdir()
    assert str(folder) in told
    assert "12 passages" in told
    assert "16 dimensions" in told
    assert "texts/s" in told
    assert "exact search of the float16 vectors" in told
    assert "0 blank lines dropped, 0 duplicates dropped" in told
    assert main(flags) == 0
    assert "reused: nothing was left to encode" in capsys.readouterr().out
    assert "reused" not in told


def test_blank_duplicate_and_cut_lines_are_told(flags, corpus_file, capsys):
    corpus_file.write_text("\n".join([*SENTENCES, "", SENTENCES[0], "sea"]) + "\n")
    main([*flags, "--max_encoder_tokens", "8"])
    told = capsys.readouterr().out
    assert "1 blank lines dropped, 1 duplicates dropped" in told
    assert "12 passages were cut at max_encoder_tokens" in told


def test_a_stopped_build_says_what_it_reuses(flags, tmp_path, capsys):
    main(flags)
    (folder,) = (tmp_path / "artifacts" / "indexes").iterdir()
    (folder / "manifest.json").unlink()
    (folder / "vectors-00001.json").unlink()
    capsys.readouterr()
    main(flags)
    assert "8 passages reused" in capsys.readouterr().out


@pytest.mark.parametrize("retriever", ["bm25", "dense"])
def test_output_dir_is_where_it_goes(flags, tmp_path, retriever):
    folder = tmp_path / "here"
    main([*flags, "--retriever", retriever, "--output_dir", str(folder)])
    assert fingerprint(folder)["rows"] == 12
    assert main([*flags, "--retriever", retriever, "--output_dir", str(folder)]) == 0


def test_hybrid_builds_both(flags, tmp_path, capsys):
    main([*flags, "--retriever", "hybrid"])
    names = {path.name.split("-")[0] for path in (tmp_path / "artifacts" / "indexes").glob("[!.]*")}
    assert names == {"bert", "bm25"}
    assert capsys.readouterr().out.count("index: ") == 2


def test_an_output_dir_of_another_index_is_refused(flags, tmp_path):
    main([*flags, "--output_dir", str(tmp_path / "here")])
    with pytest.raises(
        ArtifactError, match='was made with pooling "mean", this run asks for "cls"'
    ):
        main([*flags, "--output_dir", str(tmp_path / "here"), "--pooling", "cls"])


@pytest.mark.parametrize("retriever", ["bm25", "dense"])
def test_an_output_dir_with_other_files_is_left_alone(flags, tmp_path, retriever):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("years of work")
    with pytest.raises(ArtifactError, match=r"holds thesis\.tex, which is not an index's"):
        main([*flags, "--retriever", retriever, "--output_dir", str(tmp_path / "mine")])
    assert (tmp_path / "mine" / "thesis.tex").read_text() == "years of work"


def test_index_dir_is_refused(flags):
    with pytest.raises(ConfigError, match="index_dir names an index to use"):
        main([*flags, "--index_dir", "x"])


def test_a_folder_that_cannot_be_written_is_refused_before_encoding(flags, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")  # a file where a folder should be: root may write anywhere
    monkeypatch.setattr("pgra.retrieval.dense.encode_shards", None)
    with pytest.raises(OSError, match="Not a directory"):
        main([*flags, "--output_dir", str(tmp_path / "file" / "index")])


def test_one_yaml_serves_all_programs(flags, tmp_path, capsys):
    yaml = tmp_path / "all.yaml"
    yaml.write_text("pooling: cls\nmax_steps: 5\nnum_evidence: 4\nlearning_rate: 1.0e-4\n")
    assert main([*flags, "--config", str(yaml)]) == 0
    (folder,) = (tmp_path / "artifacts" / "indexes").iterdir()
    assert fingerprint(folder)["pooling"] == "cls"
    yaml.write_text("poling: cls\n")
    with pytest.raises(ConfigError, match=r"unknown key 'poling'. Did you mean 'pooling'\?"):
        main([*flags, "--config", str(yaml)])


def test_a_user_s_error_is_one_line(flags, tmp_path):
    assert "12 passages" in call(main, flags).out
    told = call(main, [*flags, "--output_dir", str(tmp_path / "corpus.txt" / "x")]).error
    assert str(tmp_path / "corpus.txt") in told
    assert "unknown argument '--corpsu'. Did you mean '--corpus'" in (
        call(main, [*flags, "--corpsu", "x"]).error
    )
    assert "max_encoder_tokens is 999" in call(main, [*flags, "--max_encoder_tokens", "999"]).error


def test_a_damaged_shard_of_a_stopped_build_is_encoded_again(flags, tmp_path, capsys):
    main(flags)
    (folder,) = (tmp_path / "artifacts" / "indexes").iterdir()
    before = contents(folder)
    (folder / "manifest.json").unlink()
    flip_byte(folder / "vectors-00001.npy")
    flip_byte(folder / "vectors-00002.json")
    (folder / ".12345678.partial.npy").write_bytes(b"half")
    capsys.readouterr()
    assert main(flags) == 0
    assert "4 passages reused" in capsys.readouterr().out
    after = contents(folder)
    assert {**after, "manifest.json": b""} == {**before, "manifest.json": b""}


def test_help_has_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    told = capsys.readouterr().out
    assert "python -m index_build --corpus sentences.txt" in told
    assert "--shard_rows" in told


@pytest.mark.slow
def test_two_processes_build_what_one_builds(flags, tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    two, one = tmp_path / "two", tmp_path / "one"
    done = subprocess.run(
        [*launch, "--standalone", "-m", "index_build", *flags, "--output_dir", str(two)],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("index: ") == 1  # only the main process speaks
    alone = [sys.executable, "-m", "index_build", *flags, "--output_dir", str(one)]
    subprocess.run(alone, env=environment, cwd=tmp_path, check=True, capture_output=True)
    for path in one.glob("[!.]*"):
        if path.name != "manifest.json":
            assert path.read_bytes() == (two / path.name).read_bytes(), path.name
    assert fingerprint(one) == fingerprint(two)
