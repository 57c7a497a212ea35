"""Kills at random moments: no shard is lost, none is made twice, and the product is equal.

The jobs are forks of one process that has imported this file, so that each kill costs a tenth of a
second. Moments are seeded: behind so many shards, and a random part of the time that one takes.
"""

import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import time
from functools import partial
from itertools import pairwise

import pytest
from scripted import half_written, products, write_passages

from pgra.artifacts import check_files, load_manifest
from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import Context
from pgra.data.corpus import open_corpus
from pgra.retrieval import IndexRequest, find_retriever
from pgra.retrieval.dense import add_passages

pytestmark = pytest.mark.slow

NUM_SHARDS = 80  # of two rows; an index that grows has as many before
FORKS = multiprocessing.get_context("forkserver")


def build(root, encoder, folder):
    context = Context(artifacts=root / "artifacts", device="cpu", progress=False)
    args = RetrieverArguments(encoder=str(encoder), shard_rows=2)
    corpus = open_corpus(CorpusArguments(corpus=str(root / "one.txt")), context.artifacts)
    request = IndexRequest(args=args, corpus=corpus, context=context, output_dir=folder)
    find_retriever("dense").prepare(request)


def add(root, encoder, folder):
    context = Context(artifacts=root / "artifacts", device="cpu", progress=False)
    add_passages(folder, [str(root / "two.txt")], context)


def start(job, *args):
    process = FORKS.Process(target=job, args=args)
    process.start()
    return process


def finish(job, *args):
    process = start(job, *args)
    process.join()
    assert process.exitcode == 0


def shards(folder):
    return {p.name: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.glob("vectors-*.json")}


def kill(process, record, wait):
    while not record.exists() and process.is_alive():
        time.sleep(0.0005)
    time.sleep(wait)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL, f"it ended before the kill behind {record.name}"


@pytest.mark.parametrize(("job", "first", "kills"), [(build, 0, 20), (add, NUM_SHARDS, 5)])
def test_kills_lose_no_shard_and_repeat_none(job, first, kills, encoder_dir, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    FORKS.set_forkserver_preload([__name__])
    lines = write_passages(tmp_path / "one.txt", 4 * NUM_SHARDS).read_text().splitlines(True)
    (tmp_path / "one.txt").write_text("".join(lines[: 2 * NUM_SHARDS]))
    (tmp_path / "two.txt").write_text("".join(lines[2 * NUM_SHARDS :]))
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    for folder in (whole, killed):
        if first:  # the index that grows
            finish(build, tmp_path, encoder_dir, folder)
    finish(job, tmp_path, encoder_dir, whole)
    made = sorted(time for time, _ in shards(whole).values())[first:]
    pace = statistics.median(after - before for before, after in pairwise(made)) / 1e9
    read = partial(load_manifest, killed, stage="dense_index")
    was, draw, seen = read().files if first else {}, random.Random(0), []
    last = first + NUM_SHARDS - 5  # so that each kill finds the job at work
    for number in sorted(draw.sample(range(first, last), kills)):
        process = start(job, tmp_path, encoder_dir, killed)
        kill(process, killed / f"vectors-{number:05d}.json", draw.random() * pace)
        seen.append(shards(killed))
        if first:  # the old index is whole
            assert read().files == was
            check_files(killed, was)
        else:
            assert not (killed / "index.faiss").exists()
    finish(job, tmp_path, encoder_dir, killed)
    seen.append(shards(killed))
    assert len(seen[-1]) == first + NUM_SHARDS
    for before, after in pairwise(seen):
        assert {name: after.get(name) for name in before} == before  # neither lost nor made again
    assert len({len(shards) for shards in seen}) > kills / 2  # each run went on
    assert half_written(killed) == []
    assert products(killed) == products(whole)
    one, two = (json.loads((f / "manifest.json").read_text()) for f in (whole, killed))
    assert (one["fingerprint"], one["files"]) == (two["fingerprint"], two["files"])
