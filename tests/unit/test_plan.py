"""A plan against the run that it foresees, for each first stage and each reranker."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import with_rerank, with_retriever

from pgra.core import ALONE
from pgra.errors import ConfigError
from pgra.lm.cost import Speed
from pgra.methods.stages import Stages
from pgra.rerank.cross_encoder import CrossEncoderArguments


def make_plan(args, **how):
    return Stages.read(args, ALONE).plan(**how)


@pytest.fixture
def args(args):
    return replace(args, data=replace(args.data, max_train_samples=12, max_test_samples=6))


@pytest.fixture
def plain(args):
    """With the first stage that is quickest to try."""
    return with_retriever(args, retriever="bm25")


@pytest.fixture
def nearest(args):
    return with_rerank(with_retriever(args, retriever="random"), exemplars="knn")


def run(args):
    """Run both stages; give what the reranker did."""
    found, done = Stages.read(args, ALONE), []
    prepare = found.reranker.prepare
    found.reranker.prepare = lambda *inputs: done.append(prepare(*inputs)) or done[-1]
    found.find()
    return done[-1]


def bank_bytes(args):
    """Count the bytes of all arrays in all banks, without the files' heads."""
    paths = (args.artifacts / "banks").rglob("*.npy")
    return sum(np.load(path, mmap_mode="r").nbytes for path in paths)


def check(args, *, rel=None):
    """Compare a plan with its run, and with a plan after it."""
    cost = make_plan(args, seconds=0.1).cost
    assert {path.name for path in args.artifacts.iterdir()} <= {"corpora", "neighbors"}
    work = run(args)
    assert cost.is_exact
    assert (cost.to_read, cost.banked) == (work.num_new, 0)
    # Finding out whether the prefix can be shared may read some texts more.
    assert cost.reading.tokens == pytest.approx(work.num_tokens, abs=cost.reading.prefix, rel=rel)
    assert cost.bank_bytes == bank_bytes(args)
    again = make_plan(args, seconds=0.1)
    assert (again.cost.to_read, again.cost.reading.tokens, again.cost.bank_bytes) == (0, 0, 0)
    assert again.cost.banked == work.num_new
    assert (again.speed, again.seconds()) == (None, 0.0)
    return cost, work


@pytest.mark.parametrize("retriever", ["dense", "exhaustive", "random"])
def test_the_run_reads_what_was_planned(args, retriever):
    cost, work = check(with_retriever(args, retriever=retriever))
    assert cost.passages == work.num_passages


def test_so_it_does_with_another_dtype_of_a_full_bank(plain):
    full = with_rerank(plain, bank="full", bank_dtype="int8", bank_shard_rows=7)
    cost, _ = check(with_retriever(full, num_candidates=3))
    assert (cost.basis, cost.passages) == ("whole corpus", 12)
    assert cost.shards == -(-cost.to_read // 7) > 1


@pytest.mark.parametrize("way", [{"num_candidates": 1}, {"retriever": "exhaustive"}])
def test_so_it_does_with_what_a_similarity_is_fitted_to(plain, way, monkeypatch):
    monkeypatch.setattr("pgra.rerank.similarity.SAMPLE", 5)
    plain = with_retriever(with_rerank(plain, num_evidence=1), **way)
    fitted = with_rerank(plain, similarity="whitened")
    run(plain)
    cost, work = make_plan(fitted, seconds=0).cost, run(fitted)
    assert cost.is_exact
    assert (cost.to_read, cost.passages) == (work.num_new, work.num_passages)
    assert (cost.to_read > 0) == ("num_candidates" in way)  # of all passages none was left
    assert make_plan(fitted, seconds=0).cost.to_read == 0


def test_so_it_does_with_a_cross_encoder(args, cross_encoder_dir):
    own = CrossEncoderArguments(cross_encoder=str(cross_encoder_dir))
    args = with_rerank(replace(args, rerank_options=own), reranker="cross-encoder")
    cost, _ = check(with_retriever(args, retriever="random"), rel=0.1)
    assert (cost.to_read, cost.basis) == (cost.queries * 6, "every pair")
    assert cost.reading.model == str(cross_encoder_dir)
    assert cost.reading.cut == 0


def test_so_it_does_with_a_prefix_a_query_that_does_not_fit(nearest):
    """Prefixes by chance are about as long as those of neighbors; the run leaves exemplars out."""
    whole = make_plan(nearest, seconds=0).cost.reading.prefix
    nearest = with_rerank(nearest, max_prompt_tokens=whole - 20)
    cost, _ = check(nearest, rel=0.15)
    assert cost.reading.prefix < whole - 20
    assert cost.to_read == cost.queries * (6 + 1)
    assert cost.reading.num_prefixes == cost.queries
    # More candidates: which of them were read is not known before they are looked for.
    more = make_plan(with_retriever(nearest, num_candidates=8), seconds=0).cost
    assert (more.is_exact, more.to_read) == (False, cost.queries * (8 + 1))


def test_words_may_find_fewer_candidates_than_planned(nearest):
    args = with_retriever(nearest, retriever="bm25")
    cost = make_plan(args, seconds=0).cost
    work = run(args)
    assert not cost.is_exact
    assert work.num_new < cost.to_read
    again = make_plan(args, seconds=0).cost
    assert again.is_exact
    assert (again.to_read, again.banked) == (0, work.num_new)


def test_sharing_the_prefix_is_what_saves(args):
    shared = make_plan(args, seconds=0).cost
    read, texts = shared.reading, shared.to_read
    assert read.tokens_whole == pytest.approx(read.tokens + read.prefix * (texts - 1), abs=2)
    assert read.flops_whole > 3 * read.flops
    alone = make_plan(with_rerank(args, prefix_sharing="none"), seconds=0).cost.reading
    assert alone.tokens == alone.tokens_whole == read.tokens_whole
    assert alone.cache == 0 < read.cache


def test_time_is_load_and_tokens_shared_among_processes(args):
    plan = make_plan(args, seconds=0)
    assert plan.seconds() is None
    cost = replace(plan.cost, shards=5, reading=replace(plan.cost.reading, tokens=1000))
    speed = Speed(texts=1, tokens=50, seconds=1.0, load_seconds=3.0)
    plan = replace(plan, cost=cost, speed=speed)
    assert plan.seconds() == 3 + 1000 / 50
    assert plan.seconds(2) == 3 + 0.6 * 20  # one has three of the five shards
    assert plan.seconds(8) == 3 + 0.2 * 20


@pytest.mark.parametrize("retriever", ["dense", "exhaustive"])
def test_a_wrong_index_factory_is_refused_as_by_the_run(args, retriever):
    wrong = with_retriever(args, retriever=retriever, index_factory="IVF13,Flat")
    with pytest.raises(ConfigError, match="index_factory 'IVF13,Flat' has 13 lists") as planned:
        make_plan(wrong, seconds=0)
    with pytest.raises(ConfigError) as ran:
        Stages.read(wrong, ALONE).find()
    assert str(planned.value) == str(ran.value)
    assert {path.name for path in args.artifacts.iterdir()} == {"corpora"}  # nothing was read
    make_plan(with_retriever(wrong, index_factory="IVF2,Flat"), seconds=0)
