"""The contract of methods, over all that take PGRA's arguments; and what is each one's own."""

import signal
from dataclasses import replace

import pytest
from conftest import with_rerank, with_retriever
from method_runs import having, lines_of, run_of
from small_training import at_batch, run_files, signal_self

from pgra.core import ALONE
from pgra.errors import ArtifactError, ConfigError, Stopped
from pgra.methods.arguments import METHODS
from pgra.methods.knn import NUMBERS
from pgra.methods.rag import RagReader
from pgra.methods.stages import Stages
from pgra.retrieval.neighbors import open_neighbor_encoder
from pgra.runs import Run, evaluate_run, run

FEW = {"num_shots": 4, "exemplar_sets": 2}


def few(method, **changes):
    return {**(FEW if method == "lm-bff" else {}), **changes}


@pytest.mark.slow
@pytest.mark.parametrize("method", sorted({*METHODS} - {"icl", "kate"}))
def test_a_run_is_made_once_measured_again_alike_and_another_is_refused(args, tmp_path, method):
    folder = tmp_path / "run"
    args = with_retriever(args, retriever="hybrid") if method == "fid" else args
    mine = run_of(args, method, folder, **few(method))
    done = run(mine)
    assert not done.reused
    assert done.metrics["method"] == method
    assert done.metrics["n"] == len(lines_of(folder)) == 12
    assert run(mine).reused
    again = evaluate_run(folder, output_dir=tmp_path / "again")
    assert again.metrics["metrics"] == done.metrics["metrics"]
    assert lines_of(tmp_path / "again") == lines_of(folder)
    other = having(mine, max_test_samples=4)
    with pytest.raises(ArtifactError, match="was made with"):
        run(other)
    assert (folder / "prompt.txt").is_file() == (method in ("exhaustive", "head", "pgra", "ralm"))
    depth = 0 if method in ("head", "knn", "lm-bff", "plain") else 3
    assert {len(line["evidence"]) for line in lines_of(folder)} == {depth}
    if method in ("lm-bff", "rag"):
        with pytest.raises(ConfigError, match=f"trained by --method {method}, which makes its in"):
            Run.load(folder, device="cpu").predict("a film")
        return
    lines = lines_of(folder)[:3]  # decided as new texts they are the same
    answers = Run.load(folder, device="cpu").predict([line["text"] for line in lines])
    for line, answer in zip(lines, answers, strict=True):
        assert answer.label == line["prediction"]
        assert dict(answer.scores) == pytest.approx(line["scores"], abs=1e-4)
        assert [each.row for each in answer.evidence] == [e["row"] for e in line["evidence"]]


@pytest.mark.slow
def test_a_stopped_training_of_rag_goes_on_to_the_same_run(args, tmp_path):
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    more = {"max_steps": 4, "eval_steps": 2}
    run(run_of(args, "rag", whole, **more))
    with at_batch(3, signal_self(signal.SIGTERM), kind=RagReader), pytest.raises(Stopped):
        run(run_of(args, "rag", stopped, **more))
    assert not (stopped / "reader").exists()
    run(run_of(args, "rag", stopped, **more))
    assert run_files(stopped) == run_files(whole)
    assert lines_of(stopped) == lines_of(whole)
    for encoder in whole.glob("reader/query_encoder*"):
        assert encoder.read_bytes() == (stopped / "reader" / encoder.name).read_bytes()


# What distinguishes them.


def as_method(args, name):
    return args.having(runtime=replace(args.runtime, method=name))


@pytest.mark.parametrize(
    ("name", "retriever", "reranker", "depth"),
    [
        ("pgra", "dense", "prompted", 3),
        ("fid", "dense", "none", 3),
        ("plain", "dense", "prompted", 0),
        ("random", "random", "none", 3),
        ("exhaustive", "exhaustive", "prompted", 3),
        ("knn", "dense", "prompted", 0),
    ],
)
def test_a_method_decides_what_makes_it_and_is_told_by_it(args, name, retriever, reranker, depth):
    args = as_method(args, name)
    assert args.method == name
    assert args.retriever.retriever == retriever
    assert args.rerank.reranker == reranker
    assert args.rerank.num_evidence == depth
    assert args.retriever.num_candidates == 6  # the rest stays as it was
    assert with_rerank(args, lm="other").rerank.num_evidence == depth  # also in a changed copy
    if name != "knn":
        assert as_method(args, "pgra").method == name


# k nearest neighbors.


@pytest.mark.parametrize("encoder", ["encoder", "reader"])
def test_labels_are_the_nearest_examples(args, tmp_path, encoder):
    args = with_retriever(args, num_neighbors=1, neighbor_encoder=encoder)
    data = Stages.read(as_method(args, "knn"), ALONE).data
    model = open_neighbor_encoder(args.retriever, args.reader.model_name_or_path, "cpu")
    train, test = (
        model.encode([example.text for example in part]) for part in (data.train, data.test)
    )
    nearest = (test @ train.T).argmax(axis=1)
    folder = run(run_of(args, "knn", tmp_path / "knn")).folder
    expected = [data.train[row].label for row in nearest]
    assert [line["prediction"] for line in lines_of(folder)] == expected


@pytest.mark.slow
def test_the_dev_set_chooses_how_many_vote(args, tmp_path):
    done = run(run_of(args, "knn", tmp_path / "knn")).training
    values = {}
    for number in [number for number in NUMBERS if number <= 36]:  # the same, one by one
        own = run_of(with_retriever(args, num_neighbors=number), "knn", tmp_path / f"k{number}")
        run(own)
        again = evaluate_run(own.folder, split="dev", output_dir=tmp_path / f"dev{number}")
        values[number] = again.metrics["value"]
    best = max(values, key=values.get)
    assert (done["num_neighbors"], done["value"]) == (best, values[best])
