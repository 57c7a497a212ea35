"""The index built by Ray: the same bytes as without, also when a worker is killed in the middle."""

import importlib.util
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from scripted import call, environment, half_written, products, write_passages, written_at

from index_build.__main__ import main

NUM_PASSAGES, RECORDS = 1200, "vectors-*.json"
needs_ray = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs pip install 'pgra[ray]'"
)


def words_of(folder, encoder_dir, name):
    flags = {"corpus": folder / "corpus.txt", "encoder": encoder_dir, "shard_rows": 4}
    flags |= {"artifacts_dir": folder / "artifacts", "output_dir": folder / name, "device": "cpu"}
    return [str(word) for key, value in flags.items() for word in (f"--{key}", value)]


def workers_of(job):
    """Ray's workers that are encoding now: it titles processes by what they do."""
    found = []
    for process in psutil.Process(job.pid).children(recursive=True):
        try:
            if "encode_one" in " ".join(process.cmdline()):
                found.append(process.pid)
        except psutil.NoSuchProcess:
            continue
    return found


def kill_a_worker(job, folder):
    """Kill one worker when there are two and a part of the shards is done."""
    deadline = time.monotonic() + 1200
    while time.monotonic() < deadline and job.poll() is None:
        workers = workers_of(job)
        if len(workers) == 2 and len(written_at(folder, RECORDS)) >= 20:
            before = written_at(folder, RECORDS)
            os.kill(workers[0], signal.SIGKILL)
            return before
        time.sleep(0.01)
    pytest.fail(f"no two workers to kill one of: {job.communicate()[0]}")


@pytest.mark.slow
@needs_ray
def test_a_worker_is_killed_and_the_index_is_the_one_of_one_process(tmp_path, encoder_dir):
    write_passages(tmp_path / "corpus.txt", NUM_PASSAGES)
    assert call(main, words_of(tmp_path, encoder_dir, "local")).code == 0
    words = ["-m", "index_build", *words_of(tmp_path, encoder_dir, "ray"), "--engine", "ray"]
    job = subprocess.Popen(
        [sys.executable, *words],
        cwd=tmp_path,
        env={**environment(), "RAY_USAGE_STATS_ENABLED": "0", "RAY_ADDRESS": "local"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    before = kill_a_worker(job, tmp_path / "ray")
    told, _ = job.communicate(timeout=1500)
    assert job.returncode == 0, told
    after = written_at(tmp_path / "ray", RECORDS)
    assert 20 <= len(before) < len(after) == NUM_PASSAGES / 4
    assert {path: after[path] for path in before} == before  # what was finished was not repeated
    assert products(tmp_path / "ray") == products(tmp_path / "local")
    assert half_written(tmp_path / "ray") == []
    assert f"{NUM_PASSAGES:,} passages" in told
