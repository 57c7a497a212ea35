"""Values that no argument can have are refused by one rule, with the argument's name."""

import pytest

from pgra.cli import main
from pgra.errors import ConfigError
from pgra.retrieval.faiss import empty_index

TRAIN = ["train", "--task", "sst2"]
INDEX = ["index", "--corpus", "c.txt"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([*TRAIN, "--weight_decay", "nan"], "weight_decay is nan: it must be a finite number"),
        ([*INDEX, "--artifacts_dir", ""], "artifacts_dir is empty: give a path"),
    ],
)
def test_one_line_names_the_argument_and_its_value(words, told, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("pgra: error: ")
    assert told in last


WRITERS = {  # by the file that it would replace, which it reads
    "corpus.txt": ["search", "--queries", "q.tsv", "--corpus", "corpus.txt", "--trec"],
    "q.tsv": ["rerank", *TRAIN[1:], "--queries", "q.tsv", "--trec"],
    "train.jsonl": ["plan", *TRAIN[1:], "--train_file", "train.jsonl", "--json"],
    "test.jsonl": ["plan", *TRAIN[1:], "--test_file", "test.jsonl", "--json"],
    "c.yaml": ["plan", *TRAIN[1:], "--config", "c.yaml", "--json"],
    "memory.sqlite": ["memory", "export"],
}


@pytest.mark.parametrize("name", WRITERS)
def test_nothing_that_is_read_is_replaced(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["memory", "add", "x", "y"]) == 0
    for other in (*WRITERS, "plain"):
        if other != "memory.sqlite":
            (tmp_path / other).write_text("q\tx\n" if other == "q.tsv" else "seed: 1\n")
    (tmp_path / "link").hardlink_to(tmp_path / name)
    before = (tmp_path / name).read_bytes()
    for target in (name, f"./{name}", str(tmp_path / name), "link"):
        assert main([*WRITERS[name], target]) == 2
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert "is the file of --" in last or "is the memory itself" in last
    main([*WRITERS[name], "plain"])  # the control: it fails for another reason, or not at all
    assert "is the" not in capsys.readouterr().err
    assert (tmp_path / name).read_bytes() == before


@pytest.mark.parametrize("factory", ["IVF0,Flat", "HNSW0", "HNSW1", "IVF4_HNSW1,Flat", "PQ2x0"])
def test_factories_that_end_the_process_are_refused(factory):
    with pytest.raises(ConfigError, match="is too small a number"):
        empty_index(factory, 16, 300)
    made = empty_index(factory.replace("1", "2").replace("0", "2"), 16, 300)  # the control
    assert made.d == 16
