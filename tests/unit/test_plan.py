"""A plan counts what the run then reads, for each first stage and each reranker."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
from conftest import contents, with_rerank, with_retriever

from pgra.commands.search import read_part
from pgra.context import ALONE, Context
from pgra.experiments.dry_run import show_plan
from pgra.methods.stages import Stages
from pgra.parallel import Worker
from pgra.rerank.cross_encoder import CrossEncoderArguments

pytestmark = pytest.mark.slow

WAYS = {
    "bm25": {},
    "random": {"retriever": "random"},
    "fitted": {"similarity": "whitened", "num_candidates": 2},
    "cross-encoder": {"reranker": "cross-encoder"},
}


@pytest.fixture
def args(args):
    args = args.having(data=replace(args.data, max_train_samples=12, max_test_samples=6))
    return with_retriever(args, retriever="bm25")  # the quickest to try


def count(args):
    """Count the texts that the reranker has yet to read, as --dry_run does."""
    stages = Stages.read(args, ALONE)
    stages.open()
    return stages.reranker.count_missing(*stages.wanted())


def run(args):
    """Run both stages, and return how many texts the reranker read, also for the first."""
    found, done = Stages.read(args, ALONE), []
    prepare = found.reranker.prepare
    found.reranker.prepare = lambda *inputs: done.append(prepare(*inputs)) or done[-1]
    found.find()
    return sum(work.num_new for work in done)


@pytest.mark.parametrize("way", WAYS)
def test_the_run_reads_what_was_counted(args, way, cross_encoder_dir, monkeypatch):
    monkeypatch.setattr("pgra.rerank.similarity.SAMPLE", 5)
    first = {name: WAYS[way][name] for name in ("retriever", "num_candidates") if name in WAYS[way]}
    args = with_retriever(with_rerank(args, num_evidence=2), **first)
    if way == "cross-encoder":
        options = CrossEncoderArguments(cross_encoder=str(cross_encoder_dir))
        args = args.having(rerank_options=options)
    args = with_rerank(args, **{k: v for k, v in WAYS[way].items() if k not in first})
    assert count(args) == count(args) == run(args) > 0
    assert count(args) == 0
    # Two parts leave the same bytes, and a run has nothing left to read.
    home = Path(args.runtime.artifacts_dir)
    parts = args.having(runtime=replace(args.runtime, artifacts_dir=str(home / "parts")))
    said = [read_part(parts, [], Context(Worker(rank, 2, is_part=True))) for rank in (1, 0)]
    assert said[-1].endswith("; none are still with other parts")
    one, two = contents(home / "banks"), contents(home / "parts" / "banks")
    assert two == {name: ANY if "manifest" in name else kept for name, kept in one.items()}
    assert run(parts) == 0


def test_what_is_timed_is_kept_and_read_once(args):
    counted = count(args)
    plan = show_plan(args)
    assert f"to read: {counted} texts" in plan
    assert "minutes" in plan
    left = count(args)
    assert 0 < left < counted
    assert run(args) == left
