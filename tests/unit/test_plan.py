"""A plan against the run that it foresees."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import with_rerank, with_retriever

from pgra.errors import ConfigError
from pgra.lm.cost import Speed
from pgra.methods.pgra import find_evidence, read_task
from pgra.plan import make_plan


@pytest.fixture(autouse=True)
def no_budget_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))


@pytest.fixture
def plain(args):
    """With the first stage that is quickest to try."""
    return with_retriever(args, retriever="bm25")


def run(args, monkeypatch):
    """Run both stages; give what the LM read."""
    from pgra.rerank.prompted import PromptedReranker

    done, prepare = [], PromptedReranker.prepare

    def listen(self, *args, **kwargs):
        done.append(prepare(self, *args, **kwargs))
        return done[-1]

    monkeypatch.setattr(PromptedReranker, "prepare", listen)
    found = read_task(args)
    find_evidence(found, args)
    return done[-1]


def bank_bytes(args):
    """Count the bytes of all arrays in all banks, without the files' heads."""
    paths = (args.artifacts / "banks").rglob("*.npy")
    return sum(np.load(path, mmap_mode="r").nbytes for path in paths)


WAYS = {
    "dense": {},
    "bm25": {"retriever": "bm25"},
    "exhaustive": {"retriever": "exhaustive"},
    "random": {"retriever": "random"},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_run_reads_what_was_planned(args, way, monkeypatch):
    args = with_retriever(args, **WAYS[way])
    plan = make_plan(args, seconds=1)
    assert [path.name for path in args.artifacts.iterdir()] == ["corpora"]
    assert plan.cost.is_exact
    work = run(args, monkeypatch)
    assert plan.cost.to_read == work.num_new
    assert plan.cost.passages == work.num_passages
    assert plan.cost.banked == 0
    # Finding out whether the prefix can be shared may read some texts more.
    assert plan.cost.reading.tokens == pytest.approx(work.num_tokens, abs=plan.cost.reading.prefix)
    assert plan.cost.bank_bytes == bank_bytes(args)
    again = make_plan(args, seconds=1)
    assert (again.cost.to_read, again.cost.reading.tokens, again.cost.bank_bytes) == (0, 0, 0)
    assert again.cost.banked == work.num_new
    assert (again.speed, again.seconds()) == (None, 0.0)


def test_numbers_by_hand(args):
    plan = make_plan(args, seconds=0)
    # 40 reviews: 4 to choose on, 4 of the other 36 in the prompt.
    assert plan.queries == {"train": 32, "dev": 4, "test": 12}
    assert plan.first.num_candidates == 6
    assert plan.cost.most_passages == 12
    assert plan.cost.basis == "guessed"
    assert plan.cost.shards == 1
    small = make_plan(with_rerank(args, bank_shard_rows=7), seconds=0)
    assert small.cost.shards == -(-small.cost.to_read // 7) > 1


def test_a_full_bank_reads_the_whole_corpus(plain, monkeypatch):
    plain = with_retriever(plain, num_candidates=3)
    lazy, full = make_plan(plain, seconds=1), with_rerank(plain, bank="full")
    plan = make_plan(full, seconds=1)
    assert (plan.cost.basis, plan.cost.passages) == ("whole corpus", 12)
    assert lazy.cost.passages < 12
    assert plan.cost.to_read == run(full, monkeypatch).num_new


def test_a_bank_that_is_there_in_part_counts(plain, monkeypatch):
    run(with_retriever(plain, num_candidates=3), monkeypatch)
    plan = make_plan(plain, seconds=1)
    assert plan.cost.banked > 0
    assert plan.cost.to_read == run(plain, monkeypatch).num_new


def test_sharing_the_prefix_is_what_saves(args):
    shared = make_plan(args, seconds=0)
    read, prefix, texts = shared.cost.reading, shared.cost.reading.prefix, shared.cost.to_read
    assert read.tokens_whole == pytest.approx(read.tokens + prefix * (texts - 1), abs=2)
    assert read.flops_whole > 3 * read.flops
    alone = make_plan(with_rerank(args, prefix_sharing="none"), seconds=0)
    assert alone.cost.reading.tokens == alone.cost.reading.tokens_whole == read.tokens_whole
    assert alone.cost.reading.cache == 0 < shared.cost.reading.cache


def test_a_sample_stands_for_all(plain, monkeypatch):
    exact = make_plan(plain, seconds=0).cost.reading
    monkeypatch.setattr("pgra.rerank.prompted._SAMPLE", 8)
    part = make_plan(plain, seconds=0).cost.reading
    assert part.sampled == 16 < exact.sampled
    assert part.tokens == pytest.approx(exact.tokens, rel=0.25)
    assert part.tokens != exact.tokens


@pytest.mark.parametrize("dtype", ["auto", "float16", "int8"])
def test_the_banks_bytes_follow_its_dtype(plain, dtype, monkeypatch):
    plan = make_plan(with_rerank(plain, bank_dtype=dtype, bank_shard_rows=7), seconds=1)
    run(with_rerank(plain, bank_dtype=dtype, bank_shard_rows=7), monkeypatch)
    assert plan.cost.bank_bytes == bank_bytes(plain)
    width, passages = 32, plan.cost.passages
    queries = plan.cost.queries * (width * 4 + 12)
    saved = {"auto": 4, "float16": 2, "int8": 1}[dtype]
    scales = -(-passages // 7) * width * 8 if dtype == "int8" else 0
    assert plan.cost.bank_bytes == queries + passages * (width * saved + 12) + scales


def test_time_is_load_and_tokens_shared_among_processes(args):
    plan = make_plan(with_rerank(args, bank_shard_rows=7), seconds=0)
    assert plan.seconds() is None
    reading = replace(plan.cost.reading, tokens=1000)
    speed = Speed(texts=1, tokens=50, seconds=1.0, load_seconds=3.0)
    plan = replace(plan, cost=replace(plan.cost, shards=5, reading=reading), speed=speed)
    assert plan.seconds() == 3 + 1000 / 50
    assert plan.seconds(2) == 3 + 0.6 * 20  # one has three of the five shards
    assert plan.seconds(8) == 3 + 0.2 * 20


def test_the_lm_is_measured_only_when_asked(args):
    plan = make_plan(args, seconds=1)
    assert plan.speed.texts >= 1
    assert plan.seconds() > plan.speed.load_seconds
    assert make_plan(args, seconds=0).speed is None


@pytest.mark.parametrize("change", [{"num_evidence": 0}, {"reranker": "none"}])
def test_a_run_without_the_lm_is_refused(args, change):
    with pytest.raises(ConfigError, match="the LM has nothing to read with --num_evidence 0 or"):
        make_plan(with_rerank(args, **change))
    assert not args.artifacts.exists()


def test_more_candidates_than_passages_are_refused(args):
    with pytest.raises(ConfigError, match=r"num_candidates \(13\) exceeds the corpus \(12"):
        make_plan(with_retriever(args, num_candidates=13))
    make_plan(with_retriever(args, num_candidates=13, retriever="exhaustive"), seconds=0)


@pytest.mark.parametrize("retriever", ["dense", "hybrid", "exhaustive"])
@pytest.mark.parametrize(
    ("factory", "message"), [("Flaat", "does not work"), ("IVF13,Flat", "has 13 lists")]
)
def test_a_wrong_index_factory_is_refused_as_by_the_run(args, retriever, factory, message):
    wrong = with_retriever(args, retriever=retriever, index_factory=factory)
    with pytest.raises(ConfigError, match=f"index_factory '{factory}' {message}") as planned:
        make_plan(wrong, seconds=0)
    with pytest.raises(ConfigError) as run:
        find_evidence(read_task(wrong), wrong)
    assert str(planned.value) == str(run.value)
    make_plan(with_retriever(wrong, index_factory="IVF2,Flat"), seconds=0)


def test_the_trials_corpus_is_not_told(args, caplog):
    with caplog.at_level("INFO", "pgra"):
        assert make_plan(args, seconds=1).cost.is_exact
    told = [line for line in caplog.messages if line.startswith("corpus ")]
    assert len(told) == 1
    assert "corpus.txt: 12 passages" in told[0]
    assert "a trial with 12 of 12 passages" in caplog.text
