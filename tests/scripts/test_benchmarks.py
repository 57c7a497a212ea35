"""The benchmarks run whole at a small size, and write their figures."""

import importlib.util
import json
import logging
import math
import sys
from pathlib import Path

import pytest
from conftest import SENTENCES

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


@pytest.mark.slow
def test_a_packed_folder_is_all_that_a_gpu_needs(benchmark, tmp_path):
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
