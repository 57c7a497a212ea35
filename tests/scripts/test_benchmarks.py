"""The benchmarks run whole, and write their figures."""

import importlib.util
import itertools
import json
import logging
import math
import os
import subprocess
import sys
import time
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from conftest import SENTENCES, write_jsonl
from planted_runs import plant
from scripted import call
from tiny_models import build_lm
from transformers import AutoConfig, AutoModelForCausalLM

from pgra.artifacts import canonical_json, write_manifest
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError

NAMES = ("bank", "icl", "index", "memory", "quantized", "questions", "reader", "rerank")
AS_A_SCRIPT = '\n\nif __name__ == "__main__":\n    sys.exit(run(main))\n'
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"


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
def measure(benchmark, tmp_path, capfd):
    """Run a benchmark, here or in a process of its own; return its figures and what it printed."""

    def run(name, *words, is_apart=False):
        path = tmp_path / "figures.json"
        words = ["--json", str(path), *map(str, words)]
        if is_apart:
            subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *words], check=True)
        else:
            assert benchmark(name).main(words) == 0
        told = json.loads(path.read_text())["figures"]
        assert all(math.isfinite(value) for value in told.values())
        return told, capfd.readouterr().out

    return run


def test_a_random_lm_is_another_than_the_one_that_lends_its_tokens(
    benchmark, lm_dirs, monkeypatch, tmp_path
):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path))
    subjects, lender = benchmark("subjects"), str(lm_dirs["gpt2"])
    monkeypatch.setattr(subjects, "TOKENIZER", lender)
    names = (lender, "random:opt-tiny", "random:opt-125m")
    lms = [subjects.open_lm(name, device="cpu") for name in names]
    assert len({canonical_json(dict(lm.fingerprint)) for lm in lms}) == 3


@pytest.mark.slow
def test_rerank_measures_all_ways(measure, tmp_path):
    # A long window: to a tokeniser of 500 words the prompt is long.
    lms = [build_lm(tmp_path / kind, kind, window=2048) for kind in ("opt", "llama")]
    words = ("--quick", "--seconds", "0.1", "--num_texts", "24", "--device", "cpu", "--lm", *lms)
    told, printed = measure("rerank", *words, "--lm_layer", 1)
    ways = ("literal", "released", "expanded", "packed", "cascade", "own", "floor")
    assert {f"{way}_texts_per_second" for way in ways} < set(told)
    assert told["max_relative_error"] < 1e-4
    assert 0 < told["layer_time_share"] < 1
    assert "cascade" in printed


@pytest.mark.slow
def test_index_measures_all_parts_beside_others(measure, encoder_dir, tmp_path):
    pytest.importorskip("sentence_transformers")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"{text} {i}" for i, text in enumerate(SENTENCES * 20)))
    words = ("--quick", "--device", "cpu", "--corpus", corpus, "--encoder", encoder_dir)
    words += ("--num_texts", 40, "--sizes", 3000, "--widths", 32, "--num_queries", 3)
    told, printed = measure("index", *words, is_apart=True)
    names = {"encode_vs_sentence_transformers", "bm25_vs_rank_bm25", "flat_search_vs_tuned"}
    assert {*names, "3000x32/b1024_flat_search_vs_default"} < set(told)
    assert told["pgra_overhead"] > 1  # our search holds the call that it is measured by
    assert told["encode_least_cosine"] >= 0.9999
    assert "pgra, shards" in printed


@pytest.mark.slow
def test_bank_measures_cost_size_and_what_fewer_bytes_change(measure, tmp_path):
    lm = build_lm(tmp_path / "lm", "opt", window=2048)
    told, _ = measure("bank", "--quick", "--device", "cpu", "--lm", lm)
    assert told["second_run_texts_read"] == 0
    assert 0.5 < told["int8_top16_same_dot"] <= told["float16_top16_same_dot"] + 0.1
    assert told["rss_growth_mb_10k_to_100k"] < 200


@pytest.mark.slow
def test_memory_measures_opening_look_ups_and_writes(measure):
    told, printed = measure("memory", "--quick", "--sizes", "300", "--num_queries", "10")
    assert told["300/recall"] == 1.0  # so few are compared one by one
    assert "a durable write" in printed


@pytest.mark.slow
def test_quantized_measures_every_width(measure, tmp_path, two_threads):
    lm = build_lm(tmp_path / "lm", "llama", window=2048)
    # 4 bits share a scale by 64
    wide = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(lm, **wide)).save_pretrained(lm)
    few = ("--num_queries", "2", "--num_candidates", "6", "--num_evidence", "2")
    told, _ = measure("quantized", *few, "--device", "cpu", "--lm", lm)
    assert told["8bit_bytes_vs_float32"] < 1
    assert told["4bit_bytes_vs_float32"] < told["8bit_bytes_vs_float32"]


@pytest.mark.slow
def test_reader_measures_both_ways_and_decisions(
    measure, corpus_file, encoder_dir, t5_dir, review_files
):
    words = ("--quick", "--device", "cpu", "--num_evidence", 3, "--batch_size", 4)
    words += ("--model", t5_dir, "--encoder", encoder_dir, "--corpus", corpus_file)
    words += ("--dataset_name", review_files["train"].parent, "--reader_template", "{text}")
    # Started as a user does: its ways run in processes that look for it as the main module.
    told, printed = measure("reader", *words, is_apart=True)
    assert {"train_speedup", "infer_speedup", "d3/pgra_train_share_of_matrix_rate"} < set(told)
    # A T5 with random weights writes no label's word; what it does write, pgra decides too.
    assert told["same_predictions"] + told["no_label_written"] / 16 >= 1
    assert "usual" in printed


@pytest.mark.slow
def test_icl_writes_what_a_loop_writes(measure, tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"question": f"{text[:-1]}?", "answers": [text.split()[1]]} for text in SENTENCES]
    write_jsonl(data / "train.jsonl", rows)
    write_jsonl(data / "test.jsonl", rows[:6])
    lm = build_lm(tmp_path / "lm", "llama", window=2048)
    words = ("--quick", "--device", "cpu", "--task", "webquestions", "--dataset_name", data)
    told, printed = measure("icl", *words, "--lm", lm, "--num_exemplars", "6")
    for kind in ("nearest", "shared"):
        for way in ("loop", "to_end", "pgra"):
            assert told[f"{kind}_{way}_same_answers"] == 1
    read = told["shared_read_tokens_per_prompt"]
    assert read < told["shared_prompt_tokens"] / 2
    assert told["nearest_read_tokens_per_prompt"] > read
    assert "shared: 6 prompts" in printed


@pytest.mark.slow
def test_questions_tells_evidence_that_holds_the_answer_apart(measure, t5_dir, tmp_path):
    data, corpus = tmp_path / "data", tmp_path / "corpus.txt"
    data.mkdir()
    # In letters that the tiny T5 does not know: without evidence all questions are alike to it.
    kinds = ["".join(pair) for pair in itertools.product("αβγδε", repeat=2)][:24]
    told = ["red" if i % 2 else "blue" for i in range(24)]
    corpus.write_text("".join(f"The {k} sea was {c}.\n" for k, c in zip(kinds, told, strict=True)))
    right = [[colour] for colour in told]
    right[8:12] = [["red"], ["blue"], ["rosy", "Red!"], ["red", "blue"]]
    rows = [{"question": f"{k} sea?", "answers": own} for k, own in zip(kinds, right, strict=True)]
    write_jsonl(data / "train.jsonl", rows[12:])
    write_jsonl(data / "test.jsonl", rows[:12])
    words = ("--device", "cpu", "--dataset_name", data, "--corpus", corpus, "--model", t5_dir)
    words += ("--num_evidence", 1, "--learning_rate", 0.01, "--max_steps")
    found, printed = measure("questions", *words, 60)
    # Three passages say another colour than is right: those of the 9th, 10th and 11th question.
    assert found["bm25_recall"] == 9 / 12
    assert (found["held/questions"], found["not_held/questions"]) == (9, 3)
    # A reader that was taught to write what it reads is right where that is right, and only there.
    assert found["held/bm25/exact_match"] == 1
    assert found["not_held/bm25/exact_match"] == 0
    assert found["held/none/exact_match"] < 1
    assert found["held/random/exact_match"] < 1
    gap = found["all/bm25/exact_match"] - found["all/none/exact_match"]
    assert found["all/bm25/difference"] == pytest.approx(gap)
    assert "bm25's 75.0%" in printed
    as_it_is, _ = measure("questions", *words, 0)
    assert as_it_is["held/bm25/exact_match"] == 0


@pytest.mark.slow
def test_worth_measures_what_is_not_measured_yet(
    measure, corpus_file, encoder_dir, t5_dir, tmp_path
):
    lm, root = build_lm(tmp_path / "lm", "llama", window=2048), tmp_path / "worth"
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(f"{text} {i}" for i, text in enumerate(SENTENCES * 5)))
    words = ("--quick", "--device", "cpu", "--corpus", corpus, "--output_dir", root)
    words += ("--figures", tmp_path, "--", "--encoder", encoder_dir, "--lm", lm)
    words += ("--model_name_or_path", t5_dir, "--artifacts_dir", tmp_path)
    told, printed = measure("worth", *words)
    assert "H3 16 labels, head - opinion" in printed
    assert told["H1 head - dot/rotten-tomatoes/points"] == pytest.approx(
        told["exhaustive head/rotten-tomatoes"] - told["exhaustive dot/rotten-tomatoes"], abs=0.051
    )
    assert all((tmp_path / f"{name}.svg").read_bytes() for name in ("gain", "layer"))
    (root / "rotten-tomatoes" / "layer.json").unlink()
    again, _ = measure("worth", *words)
    assert again == told
    with pytest.raises(PgraError, match="was measured with .* give another --output_dir"):
        measure("worth", *words, "--exemplar_seed", 1)


def test_doses_tells_the_sources_rank_and_cuts_at_the_median(measure, tmp_path):
    names, claims, doses = ("false", "true"), tmp_path / "claims", tmp_path / "dose"
    sources = [f"source {i}" for i in range(8)]
    data = tmp_path / "data"
    data.mkdir()
    rows = [{"id": f"test-{i}", "sentence": text} for i, text in enumerate(sources)]
    write_jsonl(data / "test.jsonl", rows)
    right, wrong = [[text] for text in sources], [[text] for text in sources[::-1]]
    half = right[:4] + wrong[4:]
    about = {"names": names, "n": 8, "task": "claims"}
    for name, found in (("FiD", right), ("FiD, untrained", right), ("PGRA, dot", half)):
        plant(claims / name, evidence=found, method="fid", **about)
    plant(claims / "T5", wrong=[0, 2], method="plain", evidence=[[]] * 8, **about)
    plant(claims / "FiD, r = 0", evidence=wrong, wrong=range(8), method="fid", **about)
    for name in ("T5", "T5, untrained", "dose 0", "dose 0, untrained"):
        plant(doses / name, names=names, n=8)
    words = ("--claims", claims, "--dose", doses, "--data", data, "--figure", tmp_path / "f.svg")
    told, printed = measure("doses", *words)
    shown = {line.split("  ")[0]: line.split() for line in printed.splitlines() if "  " in line}
    first, _, second = printed.partition("Claims: accuracy")
    assert "PGRA, dot               50.0   -50.0" in first
    assert "T5 " not in first  # it has no evidence
    assert shown["FiD, r = 0"][-2:] == ["0.0", "0.0"]
    assert "Doses: accuracy" in second
    assert (told["claims/T5"], told["dose/T5"], told["claims/FiD, r = 0"]) == (0.75, 1.0, 0.0)
    assert (tmp_path / "f.svg").is_file()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--nonsense",), "--nonsense.* See --help."),
        (("--sizes", "100", "--k", "150"), "k is 150, more than the 100 passages: lower"),
        (("--json", f"{__file__}/a.json"), "a.json cannot be written .Not a directory"),
    ],
)
def test_a_wrong_flag_is_refused_in_a_line(benchmark, words, message):
    with pytest.raises(ConfigError, match=message):
        benchmark("index").parse([*words])


DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def test_near_questions_are_told_from_others_and_too_few_are_refused(benchmark, tmp_path, capsys):
    path, near = tmp_path / "q.jsonl", benchmark("near_questions")
    words = (" ".join(DIGITS[int(digit)] for digit in str(i)) for i in range(10_000, 13_000))
    write_jsonl(path, [{"question": f"what is {told} ?"} for told in words])
    assert near.main([str(path)]) == 0
    told = capsys.readouterr().out
    assert "other case and end               1.000 1.000 1.000 | 1.000" in told
    write_jsonl(path, [{"text": "why?"}])
    with pytest.raises(DataError, match="there are 1 questions: give 3,000 or more"):
        near.main([str(path)])


@pytest.mark.parametrize("name", NAMES)
def test_a_users_error_is_a_line_and_exit_code_2(name, benchmark, tmp_path):
    called = call(benchmark(name).main, ["--quick", "--json", str(tmp_path)])
    assert (called.code, called.out) == (2, "")
    assert called.error == f"--json {tmp_path} is a folder: name a file in it"
    assert (FOLDER / f"{name}.py").read_text().endswith(AS_A_SCRIPT)


GPU = "pytest.mark." + "gpu"
WITHOUT = ("bm25s", "datasets", "faiss", "rapidfuzz", "shtab")
HEADLINES = {
    "env": {"product_tflops_bfloat16", "copy_gb_per_second"},
    "tests": {"tests", "failures"},
    "agreement": {"float16_cascade_from_whole", "bfloat16_packed_kept_of_float32"},
    "rerank": {"pgra_share_of_product", "usual_texts_per_second", "speedup"},
    "encode": {"pgra_texts_per_second", "usual_32_share_of_product", "least_cosine"},
    "search": {"pgra_seconds", "torch_seconds", "share_of_copies", "same_hits"},
    "reader": {"bfloat16_pgra_minutes_for_5000_steps", "float32_speedup"},
    "compiled": {"bfloat16_steps_per_second", "bfloat16_graphs_steps_per_second"},
    "profile": {"reader_busy_share", "encode_busy_share", "rerank_busy_share"},
}


@pytest.fixture
def lacking(tmp_path):
    """Give a folder for PYTHONPATH, with which little is installed."""
    folder = tmp_path / "lacking"
    folder.mkdir()
    told = f"import os, sys\nsys.modules.update(dict.fromkeys({WITHOUT}))\n"
    told += "sys.path[:] = [p for p in sys.path if not os.path.isfile(p + '/pgra/cli.py')]\n"
    (folder / "sitecustomize.py").write_text(told)
    return str(folder)


@pytest.fixture
def run_gpu(lacking, tmp_path, capfd):
    """Run benchmarks/gpu.py as a user does, where little is installed; return code and output."""

    def run(*words):
        command = [sys.executable, str(FOLDER / "gpu.py"), "run", *map(str, words), "--tiny"]
        env = {**os.environ, "PYTHONPATH": lacking}
        code = subprocess.run(command, env=env, cwd=tmp_path, check=False)
        return code.returncode, capfd.readouterr().out

    return run


@pytest.mark.slow
def test_the_tests_of_a_gpu_are_found_where_little_is_installed(lacking):
    marked = [path for path in ROOT.glob("tests/*/test_*.py") if GPU in path.read_text()]
    words = ["-m", "pytest", "-q", "--collect-only", "-m", "gpu", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([lacking, str(ROOT)])}
    called = subprocess.run(
        [sys.executable, *words, *map(str, marked)],
        **{"env": env, "cwd": ROOT, "capture_output": True, "text": True, "check": False},
    )
    assert called.returncode == 0, called.stdout[-2000:]
    assert all(f"{path.name}::" in called.stdout for path in marked)
    assert len(marked) > 4


@pytest.mark.slow
def test_a_packed_folder_is_all_that_every_piece_needs(benchmark, run_gpu, tmp_path):
    corpus, packed, path = tmp_path / "corpus.txt", tmp_path / "packed", tmp_path / "gpu.json"
    corpus.write_text("\n".join(f"{text} {i}" for i, text in enumerate(SENTENCES * 5)))
    assert benchmark("gpu").main(["pack", str(packed), "--corpus", str(corpus)]) == 0
    files = [file for file in packed.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 20e6
    assert not [file for file in files if file.suffix == ".safetensors"]
    code, _ = run_gpu(packed, "--json", path)
    told = json.loads(path.read_text())
    assert code == 0
    assert {piece: told["pieces"][piece]["state"] for piece in HEADLINES} == dict.fromkeys(
        HEADLINES, "done"
    )
    names = {f"{piece}/{name}" for piece, found in HEADLINES.items() for name in found}
    assert names < set(told["figures"])
    assert all(math.isfinite(value) for value in told["figures"].values())
    assert told["figures"]["tests/failures"] == 0
    assert told["figures"]["encode/least_cosine"] > 0.999
    assert told["figures"]["search/same_hits"] == 1
    for way in ("cascade", "packed", "expanded"):
        assert told["figures"][f"agreement/float32_{way}_from_whole"] < 1e-4
        assert told["figures"][f"agreement/float16_{way}_from_whole"] > 1e-4  # the control


@pytest.mark.slow
def test_a_piece_that_fails_is_named_and_the_others_stay(run_gpu, tmp_path):
    packed, path = tmp_path / "packed", tmp_path / "gpu.json"
    packed.mkdir()
    (packed / "candidates.json").write_text('{"texts": []}')
    write_manifest(packed, stage="pack", fingerprint={}, counts={}, seconds=0.0)
    words = (packed, "--json", path, "--only")
    code, out = run_gpu(*words, "rerank", "search")
    told = json.loads(path.read_text())
    assert code == 1
    assert told["pieces"]["rerank"]["state"].startswith("failed: ")
    assert told["pieces"]["search"]["state"] == "done"
    assert out.endswith("failed: rerank\n")
    code, out = run_gpu(*words, "search")
    assert code == 0
    assert "search: done before; remove" in out
    assert json.loads(path.read_text())["figures"] == told["figures"]


@pytest.mark.slow
def test_what_was_measured_before_a_kill_stays_and_nothing_runs_on(tmp_path):
    packed, path = tmp_path / "packed", tmp_path / "gpu.json"
    packed.mkdir()
    write_manifest(packed, stage="pack", fingerprint={}, counts={}, seconds=0.0)
    words = ["run", packed, "--json", path, "--tiny", "--only", "env", "tests"]
    command = [sys.executable, "-u", str(FOLDER / "gpu.py"), *map(str, words)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert any(line.startswith("env: done") for line in running.stdout)
        while not (pieces := psutil.Process(running.pid).children()):
            time.sleep(0.01)
        running.kill()
        pieces[0].wait(60)
    told = json.loads(path.read_text())
    assert told["figures"]["env/copy_gb_per_second"] > 0
    assert told["pieces"].pop("env")["state"] == "done"
    assert not [piece for piece in told["pieces"].values() if piece["state"] == "done"]


def test_a_piece_that_takes_too_long_is_ended(benchmark, monkeypatch, tmp_path):
    gpu = benchmark("gpu")
    monkeypatch.setattr(gpu, "sizes_of", lambda args: replace(gpu.TINY, limit=1))
    args = Namespace(folder=tmp_path, json=tmp_path / "gpu.json", device="cpu", tiny=True)
    assert gpu.run_apart(args, "env") == "it took more than 1 s; its figures until then are kept"


def test_what_cannot_be_measured_is_refused_in_a_line(benchmark, monkeypatch, tmp_path):
    gpu, path = benchmark("gpu"), tmp_path / "gpu.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    words = ["run", str(tmp_path), "--json", str(path)]
    with pytest.raises(ConfigError, match="finds no GPU here: run it where there is one"):
        gpu.main(words)
    with pytest.raises(ArtifactError, match="has no manifest.json: run the 'pack' stage"):
        gpu.main([*words, "--tiny"])
    with pytest.raises(ConfigError, match="is there already: name another folder"):
        gpu.main(["pack", str(FOLDER)])
    write_manifest(tmp_path, stage="pack", fingerprint={}, counts={}, seconds=0.0)
    path.write_text('{"figures": {}}')
    with pytest.raises(ConfigError, match="holds no figures of this benchmark: name another"):
        gpu.main([*words, "--tiny"])
    told = {"figures": {}, "pieces": {}, "machine": {"device": "another"}}
    path.write_text(json.dumps(told))
    with pytest.raises(ConfigError, match="measured with .*another.*, this is .*CPU"):
        gpu.main([*words, "--tiny"])


def test_a_gpu_is_busy_while_any_kernel_runs(benchmark):
    benchmark("gpu")
    from gpu_pieces import Watch

    spans = [("b", 2e6, 5e6), ("a", 1e6, 3e6), ("c", 4e6, 4.5e6), ("d", 7e6, 8e6)]
    watch = Watch(torch.device("cpu"), seconds=10.0, spans=spans)
    assert watch.busy == pytest.approx(0.5)  # from 1 to 5, and from 7 to 8
