"""Kills at random moments: no shard is lost, none is made twice, and the product is equal.

The jobs are forks of one process that has imported everything, so that each kill costs a tenth of a
second. Moments are seeded: behind so many shards, and a random part of the time that one takes.
"""

import json
import subprocess
import sys
from itertools import pairwise

import pytest
from scripted import ROOT, environment, half_written, products, write_passages

pytestmark = pytest.mark.slow

NUM_SHARDS = 80  # of two rows; an index that grows has as many before

JOBS = """
import json, os, random, signal, statistics, sys, time
from itertools import pairwise
from pathlib import Path
import torch
from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import Context
from pgra.data.corpus import open_corpus
from pgra.retrieval import IndexRequest, find_retriever
from pgra.retrieval.dense import add_passages
from pgra.artifacts import check_files, load_manifest

torch.set_num_threads(1)
encoder, one, two, root, first, last, kills = sys.argv[1:]
root, first, last, draw = Path(root), int(first), int(last), random.Random(0)
context = Context(artifacts=root / "artifacts", device="cpu", progress=False)

def build(folder):
    args = RetrieverArguments(encoder=encoder, shard_rows=2)
    corpus = open_corpus(CorpusArguments(corpus=one), context.artifacts)
    request = IndexRequest(args=args, corpus=corpus, context=context, output_dir=folder)
    find_retriever("dense").prepare(request)

def add(folder):
    add_passages(folder, [two], context)

def fork(job, folder):
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        job(folder)
        code = 0
    finally:
        os._exit(code)

def finish(job, folder):
    assert os.waitpid(fork(job, folder), 0)[1] == 0, job

def shards(folder):
    return {p.name: [p.stat().st_mtime_ns, p.stat().st_ino] for p in folder.glob("vectors-*.json")}

def pace(folder):  # seconds that a shard takes
    times = sorted(p.stat().st_mtime_ns for p in folder.glob("vectors-*.json"))[first:]
    return statistics.median(b - a for a, b in pairwise(times)) / 1e9

def kill(job, folder, number):
    process = fork(job, folder)
    record = folder / f"vectors-{number:05d}.json"
    while not record.exists() and os.waitpid(process, os.WNOHANG) == (0, 0):
        time.sleep(0.0005)
    time.sleep(draw.random() * pace(root / "whole"))
    os.kill(process, signal.SIGKILL)
    status = os.waitpid(process, 0)[1]
    assert status == signal.SIGKILL, f"it ended with {status} before the kill behind {number}"
    assert not list(folder.glob("index.faiss")) or job is add

def torture(job, folder):
    seen = []
    was = load_manifest(folder, stage="dense_index").files if job is add else {}
    for number in sorted(draw.sample(range(first, last), int(kills))):
        kill(job, folder, number)
        if job is add:
            check_files(folder, load_manifest(folder, stage="dense_index").files)
            assert load_manifest(folder, stage="dense_index").files == was
        seen.append(shards(folder))
    finish(job, folder)
    return [*seen, shards(folder)]

for folder in (root / "whole", root / "killed"):
    if first:  # the index that grows
        finish(build, folder)
job = add if first else build
finish(job, root / "whole")
print(json.dumps(torture(job, root / "killed")))
"""


@pytest.mark.parametrize(("job", "first", "kills"), [("build", 0, 20), ("add", NUM_SHARDS, 5)])
def test_kills_lose_no_shard_and_repeat_none(job, first, kills, encoder_dir, tmp_path):
    lines = write_passages(tmp_path / "one.txt", 4 * NUM_SHARDS).read_text().splitlines(True)
    (tmp_path / "one.txt").write_text("".join(lines[: 2 * NUM_SHARDS]))
    (tmp_path / "two.txt").write_text("".join(lines[2 * NUM_SHARDS :]))
    last = first + NUM_SHARDS - 5  # so that each kill finds the job at work
    names = [encoder_dir, tmp_path / "one.txt", tmp_path / "two.txt", tmp_path]
    words = [*names, first, last, kills]
    done = subprocess.run(
        [sys.executable, "-c", JOBS, *map(str, words)],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert len(seen) == kills + 1
    assert len(seen[-1]) == first + NUM_SHARDS
    for before, after in pairwise(seen):
        assert {name: after.get(name) for name in before} == before  # neither lost nor made again
    assert len({len(shards) for shards in seen}) > kills / 2  # each run went on
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert half_written(killed) == []
    assert products(killed) == products(whole)
    one, two = (json.loads((f / "manifest.json").read_text()) for f in (whole, killed))
    assert (one["fingerprint"], one["files"]) == (two["fingerprint"], two["files"])
