from dataclasses import replace

import pytest
from conftest import with_rerank, with_retriever

from pgra.commands.common import parse_run
from pgra.config import READER_SYSTEMS, SYSTEMS, RuntimeArguments
from pgra.errors import ConfigError
from pgra.methods.pgra import find_evidence, read_task
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.runs import OWN_SYSTEMS, refuse_own, run_system, seeds_meaning, train_seeds


def as_system(args, name):
    return replace(args, runtime=replace(args.runtime, system=name))


def training(folder, **changes):
    return ReaderTrainingArguments(
        output_dir=str(folder), use_cpu=True, max_steps=1, disable_tqdm=True, **changes
    )


def parse(*flags):
    words = ["--task", "sst2", "--output_dir", "x", "--device", "cpu", *flags]
    return parse_run(words, prog="test", description="", epilog="")[0]


@pytest.mark.parametrize(
    ("name", "method", "retriever", "reranker", "depth"),
    [
        ("pgra", "pgra", "dense", "prompted", 3),
        ("fid", "fid", "dense", "none", 3),
        ("plain", "t5", "dense", "prompted", 0),
        ("random", "random", "random", "none", 3),
        ("exhaustive", "pgra-exhaustive", "exhaustive", "prompted", 3),
        ("icl", "icl", "dense", "prompted", 0),
        ("knn", "knn", "dense", "prompted", 0),
    ],
)
def test_a_system_decides_what_makes_it(args, name, method, retriever, reranker, depth):
    args = as_system(args, name)
    assert args.method == method
    assert args.system == name
    assert args.retriever.retriever == retriever
    assert args.rerank.reranker == reranker
    assert args.rerank.num_evidence == depth
    assert args.retriever.num_candidates == 6  # the rest stays as it was
    assert with_rerank(args, lm="other").rerank.num_evidence == depth  # also in a changed copy


def test_the_arguments_alone_tell_a_system_too(args):
    assert with_rerank(args, reranker="none").system == "fid"
    assert with_rerank(args, num_evidence=0).system == "plain"
    assert with_retriever(args, retriever="exhaustive").system == "exhaustive"
    by_chance = with_retriever(with_rerank(args, reranker="none"), retriever="random")
    assert by_chance.system == "random"
    assert with_retriever(args, retriever="random").system == "pgra"  # the LM picks among them
    assert set(READER_SYSTEMS) | set(OWN_SYSTEMS) == set(SYSTEMS)


def test_flags_that_contradict_the_system_are_refused(tmp_path):
    assert parse("--system", "plain").rerank.num_evidence == 0
    assert parse("--system", "plain", "--num_evidence", "0").rerank.num_evidence == 0
    message = "num_evidence is 8, and system 'plain' is the one with num_evidence 0: leave it out"
    with pytest.raises(ConfigError, match=message):
        parse("--system", "plain", "--num_evidence", "8")
    with pytest.raises(ConfigError, match="retriever is bm25, and system 'random' is the one"):
        parse("--system=random", "--retriever=bm25")
    with pytest.raises(ConfigError, match="reranker is prompted, and system 'fid'"):
        parse("--system", "fid", "--reranker", "prompted")
    config = tmp_path / "base.yaml"  # a YAML gives defaults: one base serves all systems
    config.write_text("num_evidence: 8\nreranker: prompted\n")
    assert parse("--system", "plain", "--config", str(config)).rerank.num_evidence == 0
    assert parse("--system", "fid", "--config", str(config)).rerank.num_evidence == 8


def test_what_no_system_can_be_is_refused(args):
    with pytest.raises(ConfigError, match="unknown system 'fib'. Did you mean 'fid'"):
        RuntimeArguments(system="fib")
    for name in ("fid", "random", "exhaustive"):
        with pytest.raises(ConfigError, match=f"system '{name}' reads evidence, and num_ev"):
            as_system(with_rerank(args, num_evidence=0), name)
    with pytest.raises(ConfigError, match="is a system of its own: use --system random"):
        as_system(with_retriever(args, retriever="random"), "fid")
    with pytest.raises(ConfigError, match=r"index_dir \(there\) names .*'random' has none"):
        as_system(with_retriever(args, index_dir="there"), "random")
    as_system(with_retriever(args, index_dir="there"), "fid")  # the control


def test_a_plain_system_asks_for_no_more_candidates_than_there_are_evidence(args):
    few = with_retriever(with_rerank(args, num_evidence=1), num_candidates=1)
    with pytest.raises(ConfigError, match="exceeds num_candidates"):
        with_rerank(few, num_evidence=2)
    assert with_rerank(as_system(few, "icl"), num_evidence=2).rerank.num_evidence == 0


def test_what_is_the_readers_alone_is_refused_to_others(args):
    refuse_own(args, "search 'grid'")
    with pytest.raises(ConfigError, match="search 'grid' is for readers .*not for system 'knn'"):
        refuse_own(as_system(args, "knn"), "search 'grid'")


def test_random_evidence_is_the_same_for_a_text_in_any_run(args):
    found = read_task(args)
    args = as_system(args, "random")
    find_evidence(found, args)
    again = read_task(args)
    other = replace(args, rerank=replace(args.rerank, num_evidence=2))
    find_evidence(again, other)
    for three, two in zip(found.evidence_texts("test"), again.evidence_texts("test"), strict=True):
        assert three[:2] == two[:2]
    assert len({tuple(texts) for texts in found.evidence_texts("test")}) > 1


def test_a_reader_system_is_a_run_that_names_itself(args, tmp_path):
    outcome = run_system(as_system(args, "random"), training(tmp_path / "run"))
    assert outcome.metrics["system"] == "random"
    assert outcome.metrics["n"] == 12
    assert (outcome.folder / "reader").is_dir()


def test_seeds_work_for_a_system_that_trains_nothing(args, tmp_path):
    args = as_system(args, "knn")
    summary = train_seeds(args, training(tmp_path / "knn"), [0, 1])
    assert summary.values["seeds_are"] == seeds_meaning(args) == OWN_SYSTEMS["knn"].seeds
    assert summary.values["sd"] == 0
    assert [run["seed"] for run in summary.values["runs"]] == [0, 1]
    assert (tmp_path / "knn" / "seed-1" / "metrics.json").is_file()
