"""The benchmarks run whole at a small size, and write their figures."""

import importlib.util
import json
import logging
import math
import sys
from pathlib import Path

import pytest
from conftest import SENTENCES, write_jsonl
from scripted import call
from tiny_models import build_lm

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))

    def load(name):
        spec = importlib.util.spec_from_file_location(f"benchmark_{name}", FOLDER / f"{name}.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # its dataclasses look themselves up
        spec.loader.exec_module(module)
        return module

    before = logging.getLogger("pgra").level
    yield load
    logging.getLogger("pgra").setLevel(before)  # benchmarks are silent


@pytest.fixture
def measure(benchmark, tmp_path):
    """Run a benchmark, and return its figures."""

    def run(name, *words):
        path = tmp_path / "figures.json"
        assert benchmark(name).main([*map(str, words), "--json", str(path)]) == 0
        figures = json.loads(path.read_text())["figures"]
        assert all(math.isfinite(value) for value in figures.values())
        return figures

    return run


QUICK = ("--quick", "--device", "cpu")


@pytest.mark.slow
def test_rerank_measures_all_ways(measure, tmp_path):
    # A long window: to a tokeniser of 500 words the prompt is long.
    lms = [build_lm(tmp_path / kind, kind, window=2048) for kind in ("opt", "llama")]
    figures = measure("rerank", *QUICK, "--seconds", "0.1", "--num_texts", "24", "--lm", *lms)
    ways = ("released", "expanded", "packed", "cascade", "own", "floor")
    assert {f"{way}_texts_per_second" for way in ways} < set(figures)
    assert figures["max_relative_error"] < 1e-4


@pytest.mark.slow
def test_index_measures_all_parts_beside_others(measure, encoder_dir, tmp_path):
    pytest.importorskip("sentence_transformers")
    pytest.importorskip("rank_bm25")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"{text} {i}" for i, text in enumerate(SENTENCES * 20)))
    words = ("--corpus", corpus, "--encoder", encoder_dir, "--num_texts", 40, "--num_queries", 3)
    figures = measure("index", *QUICK, *words, "--sizes", 3000, "--widths", 32)
    names = {"encode_vs_sentence_transformers", "bm25_vs_rank_bm25", "flat_search_vs_tuned"}
    assert names < set(figures)
    assert figures["encode_least_cosine"] >= 0.9999


@pytest.mark.slow
def test_memory_measures_opening_look_ups_and_writes(measure):
    figures = measure("memory", "--quick", "--sizes", "300", "--num_queries", "10")
    assert figures["300/recall"] == 1.0  # so few are compared one by one


@pytest.mark.slow
def test_reader_measures_both_ways_and_decisions(
    measure, corpus_file, encoder_dir, t5_dir, review_files
):
    words = ("--num_evidence", 3, "--batch_size", 4, "--model", t5_dir, "--encoder", encoder_dir)
    words += ("--corpus", corpus_file, "--dataset_name", review_files["train"].parent)
    figures = measure("reader", *QUICK, *words, "--reader_template", "{text}")
    assert {"train_speedup", "infer_speedup", "d3/pgra_train_share_of_matrix_rate"} < set(figures)
    # A T5 with random weights writes no label's word; what it does write, pgra decides too.
    assert figures["same_predictions"] + figures["no_label_written"] / 16 >= 1


@pytest.mark.slow
def test_icl_writes_what_a_loop_writes(measure, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"question": f"{text[:-1]}?", "answers": [text.split()[1]]} for text in SENTENCES]
    write_jsonl(data / "train.jsonl", rows)
    write_jsonl(data / "test.jsonl", rows[:6])
    lm = build_lm(tmp_path / "lm", "llama", window=2048)
    words = ("--task", "webquestions", "--dataset_name", data, "--lm", lm, "--num_exemplars", "6")
    figures = measure("icl", *QUICK, *words)
    for kind in ("nearest", "shared"):
        for way in ("loop", "to_end", "pgra"):
            assert figures[f"{kind}_{way}_same_answers"] == 1
    read = figures["shared_read_tokens_per_prompt"]
    assert read < figures["shared_prompt_tokens"] / 2
    assert figures["nearest_read_tokens_per_prompt"] > read


@pytest.mark.slow
def test_a_packed_folder_is_all_that_a_gpu_needs(benchmark, tmp_path, capfd):
    corpus, packed, path = tmp_path / "corpus.txt", tmp_path / "packed", tmp_path / "gpu.json"
    corpus.write_text("\n".join(f"{text} {i}" for i, text in enumerate(SENTENCES * 5)))
    gpu = benchmark("gpu")
    assert gpu.main(["pack", str(packed), "--corpus", str(corpus)]) == 0
    files = [file for file in packed.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20e6
    assert not [file for file in files if file.suffix == ".safetensors"]
    assert gpu.main(["run", str(packed), "--tiny", "--json", str(path)]) == 0
    figures = json.loads(path.read_text())["figures"]
    assert {name.partition("/")[0] for name in figures} == {*gpu.PIECES}
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["encode/least_cosine"] > 0.999
    assert figures["search/same_hits"] == 1
    (packed / "candidates.json").write_text('{"texts": []}')
    words = ["run", str(packed), "--tiny", "--json", str(path), "--only", "rerank", "search"]
    assert gpu.main(words) == 1
    assert capfd.readouterr().out.endswith("failed: rerank\n")


@pytest.mark.parametrize("name", ["icl", "index", "memory", "reader", "rerank"])
def test_a_users_error_is_a_line_and_exit_code_2(name, benchmark, tmp_path):
    called = call(benchmark(name).main, ["--quick", "--json", str(tmp_path)])
    assert (called.code, called.out) == (2, "")
    assert called.error == f"--json {tmp_path} is a folder: name a file in it"
