"""The plan of a stage with a prefix a query, against the run that it foresees."""

from dataclasses import replace

import pytest
from conftest import with_rerank, with_retriever

from pgra.commands.plan import describe_plan
from pgra.experiments.grid import GridRun, Point, foresee
from pgra.methods.pgra import find_evidence, read_task
from pgra.plan import make_plan
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.rerank.neighbors import NeighborReranker


@pytest.fixture(autouse=True)
def no_budget_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setenv("PGRA_HOME", str(tmp_path / "home"))


@pytest.fixture
def plain(args):
    few = replace(args, data=replace(args.data, max_train_samples=12, max_test_samples=6))
    return with_rerank(with_retriever(few, retriever="random"), exemplars="knn")


def run(args, monkeypatch):
    done, prepare = [], NeighborReranker.prepare

    def listen(self, *args, **kwargs):
        done.append(prepare(self, *args, **kwargs))
        return done[-1]

    monkeypatch.setattr(NeighborReranker, "prepare", listen)
    find_evidence(read_task(args), args)
    return done[-1]


def test_the_run_reads_what_was_planned(plain, monkeypatch):
    plan = make_plan(plain, seconds=0)
    num_queries = sum(plan.queries.values())
    assert plan.cost.to_read == num_queries * (6 + 1)
    assert plan.cost.is_exact
    assert plan.speed is None
    work = run(plain, monkeypatch)
    assert work.num_new == plan.cost.to_read
    # Prefixes by chance are about as long as those of neighbors.
    assert plan.cost.reading.tokens == pytest.approx(work.num_tokens, rel=0.15)
    assert plan.cost.reading.tokens_whole > 3 * plan.cost.reading.tokens
    assert plan.cost.reading.num_prefixes == num_queries
    again = make_plan(plain, seconds=0)
    assert (again.cost.to_read, again.cost.banked) == (0, plan.cost.to_read)
    # More candidates: which of them were read is not known before they are looked for.
    more = make_plan(with_retriever(plain, num_candidates=8), seconds=0)
    assert not more.cost.is_exact
    assert more.cost.to_read == num_queries * (8 + 1)


def test_prefixes_that_do_not_fit_are_planned_as_short_as_they_are_run(plain, monkeypatch):
    whole = make_plan(plain, seconds=0).cost.reading.prefix
    short = with_rerank(plain, max_prompt_tokens=whole - 20)
    plan = make_plan(short, seconds=0)
    work = run(short, monkeypatch)
    assert work.num_new == plan.cost.to_read
    assert plan.cost.reading.prefix < whole - 20  # the control: not as they would be with room
    assert plan.cost.reading.tokens == pytest.approx(work.num_tokens, rel=0.15)


def test_words_may_find_fewer_candidates_than_planned(plain, monkeypatch):
    plain = with_retriever(plain, retriever="bm25")
    plan = make_plan(plain, seconds=0)
    assert not plan.cost.is_exact
    work = run(plain, monkeypatch)
    assert work.num_new < plan.cost.to_read
    again = make_plan(plain, seconds=0)
    assert again.cost.is_exact
    assert (again.cost.to_read, again.cost.banked) == (0, work.num_new)


def test_a_plan_tells_that_each_query_has_its_own_prefix(plain):
    plan = make_plan(plain, seconds=0.2)
    told = describe_plan(plan)
    count = plan.cost.queries
    assert count == sum(plan.queries.values())
    assert f"{count:,} queries have one each, read once each" in told
    assert "counted: each passage is read anew with each query" in told
    assert plan.speed is not None
    one = describe_plan(make_plan(with_rerank(plain, exemplars="balanced"), seconds=0))
    assert "read once" in one
    assert "have one each" not in one  # the control


def test_a_dry_run_tells_the_cost_of_a_prefix_a_query(plain, tmp_path):
    training = ReaderTrainingArguments(output_dir=str(tmp_path / "run"), use_cpu=True)
    fixed = with_rerank(plain, exemplars="balanced")
    runs = [
        GridRun(Point(name, {}), None, 0, tmp_path / name, args, training)
        for name, args in (("knn", plain), ("balanced", fixed))
    ]
    nearest, shared = foresee(runs)
    num_queries = sum(make_plan(plain, seconds=0).queries.values())
    assert nearest.texts == num_queries * 7
    assert nearest.note.startswith("every pair: each passage with each query, about ")
    assert shared.texts < nearest.texts / 3
    assert "with each query" not in shared.note
