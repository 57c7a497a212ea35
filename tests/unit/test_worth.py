"""What evidence is worth: bits by hand, controls, hidden labels, and runs that take the best."""

import math
from dataclasses import replace

import numpy as np
import pytest
from conftest import BAD, GOOD, THINGS, review_rows, with_retriever, write_jsonl
from method_runs import run_of

from pgra.context import ALONE, Context
from pgra.errors import ArtifactError
from pgra.experiments.worth import (
    WorthStudy,
    calibrate,
    choose,
    compare,
    measure_worth,
    take_evidence,
)
from pgra.methods.arguments import WorthArguments
from pgra.methods.pgra import Pgra
from pgra.rerank.bank import query_key
from pgra.runs import run

TARGETS, FOLDS = np.arange(40) % 2, np.arange(40) // 2 % 5


def test_bits_are_of_the_right_answers_probabilities():
    gains = compare(np.log2([0.5, 0.5, 0.25]), np.log2([0.25, 0.5, 0.5]))
    assert (gains["bits"], gains["helped"], gains["hurt"]) == (0, 1 / 3, 1 / 3)
    assert gains["low"] == -gains["high"] < 0
    gains = compare(np.log2([0.5] * 20), np.log2([0.25] * 20))
    assert (gains["bits"], gains["low"], gains["high"]) == (1, 1, 1)
    assert gains["p"] < 0.01


def test_calibration_never_sees_a_querys_own_label():
    scores = np.random.default_rng(3).normal(size=(40, 2)).astype(np.float32)
    scores[np.arange(40), TARGETS] += 2
    ours = calibrate(scores, TARGETS, FOLDS)
    assert ours[np.arange(40), TARGETS].mean() > np.log(0.6)
    np.testing.assert_allclose(calibrate(3 * scores + [5, -2], TARGETS, FOLDS), ours, atol=1e-4)
    np.testing.assert_allclose(calibrate(0 * scores, TARGETS, FOLDS), np.log(0.5), atol=1e-6)
    flipped = np.where(FOLDS == 2, 1 - TARGETS, TARGETS)
    moved = (calibrate(scores, flipped, FOLDS) != ours).any(axis=1)
    assert moved.tolist() == (FOLDS != 2).tolist()


def test_of_21_sources_worth_nothing_one_is_chosen_as_rarely_as_p_says():
    def best(gains):
        rows = [
            {
                "source": "dot",
                "d": 1,
                "bits": gain,
                "low": gain - 1.96,
                "high": gain,
                "p": math.erfc(abs(gain) / math.sqrt(2)),
            }
            for gain in gains
        ]
        return choose(rows, {"dot": {}})["best"]

    draws = np.random.default_rng(0).normal(size=(200, 21))
    assert sum(best(gains) is not None for gains in draws) <= 10
    assert (draws.max(axis=1) > 1.96).sum() > 60  # what a row's own interval would choose
    assert best([0.0, 5.0])["bits"] == 5


@pytest.fixture
def args(args, tmp_path):
    """88 reviews, and passages that have their words, one of them a review itself."""
    passages = [f"A {word} {thing} number" for word in GOOD + BAD for thing in THINGS[:4]]
    rows = review_rows(88)
    (tmp_path / "corpus.txt").write_text("\n".join([*passages, rows[0]["text"]]) + "\n")
    write_jsonl(tmp_path / "train.jsonl", rows)
    write_jsonl(tmp_path / "test.jsonl", review_rows(12, start=88))
    return run_of(with_retriever(args, retriever="bm25"), "pgra", tmp_path / "run")


@pytest.fixture
def words_read(monkeypatch):
    """Have a reader that counts the good and bad words of the evidence."""

    def score(self, lines):
        texts = [" ".join(line.text for line in own).lower() for own in lines]
        counts = [[sum(text.count(w) for w in words) for words in (GOOD, BAD)] for text in texts]
        order = [["positive", "negative"].index(label) for label in self.data.labels]
        return np.array(counts, np.float32)[:, order]

    monkeypatch.setattr(Pgra, "new_inputs", lambda self, examples, lines: lines)
    monkeypatch.setattr(Pgra, "score", score)


@pytest.mark.slow
def test_evidence_with_the_answer_is_worth_a_bit(args, words_read, tmp_path):
    found = measure_worth(args, WorthArguments(depths=[1, 8]), Context(artifacts=tmp_path / "a"))
    rows = {(row["source"], row["d"]): row for row in found["rows"]}
    assert {d for _, d in rows} == {1, 6}  # no more than candidates
    assert rows["first_stage", 1]["low"] > 0.5
    assert rows["first_stage", 1]["accuracy"] > 0.9 > 0.7 > found["without"]["accuracy"]
    assert rows["random", 1]["low"] < 0.05
    assert rows["random", 1]["bits"] < 0.2
    assert found["without"]["bits"] == pytest.approx(1, abs=0.02)  # two labels, half each
    assert found["why"].startswith("best is first_stage with d = ")
    assert found["changes"]["reranker"] == "none"
    labels = np.random.default_rng(0).permutation([row["label"] for row in review_rows(88)])
    rows = [{**row, "label": label} for row, label in zip(review_rows(88), labels, strict=True)]
    write_jsonl(tmp_path / "train.jsonl", rows)
    how = WorthArguments(depths=[1], sources=["first_stage", "head"])
    found = measure_worth(args, how, Context(artifacts=tmp_path / "a"))
    assert (found["best"], found["changes"]) == (None, {"num_evidence": 0})
    assert all(row["low"] < 0 for row in found["rows"])


@pytest.mark.slow
def test_a_head_is_fitted_to_none_of_its_queries(args, tmp_path, monkeypatch):
    study = WorthStudy(args, WorthArguments(depths=[6]), Context(artifacts=tmp_path / "a"))
    fitted, open_stages = [], WorthStudy._stages
    monkeypatch.setattr(
        WorthStudy,
        "_stages",
        lambda self, a, train: fitted.append(train) or open_stages(self, a, train),
    )
    for name, count in (("head", 5), ("whitened_cosine", 1)):
        fitted.clear()
        lines, forwards = study.find_evidence(name)
        assert len(fitted) == count
        again = study.find_evidence(name)[1]  # though nothing is read again
        assert again == forwards > 88
        assert all(
            line.text != q.text for q, o in zip(study.queries, lines, strict=True) for line in o
        )
    stages = study.method.stages
    query = next(query for query in study.queries if query.text == review_rows(2)[0]["text"])
    for stages.finds_itself in (False, True):
        (lines,) = stages.new_lines([query])
        assert stages.finds_itself == (query.text in {line.text for line in lines})
    fitted.clear()
    study.find_evidence("head")
    keys = {query_key(query) for query in study.queries}
    hidden = [keys - {query_key(one) for one in train} for train in fitted]
    assert [len(h) for h in hidden] == np.bincount(study.folds).tolist()
    assert set.union(*hidden) == keys


@pytest.mark.slow
def test_a_run_takes_what_is_best_once_and_says_why(args, words_read, tmp_path, monkeypatch):
    args = args.change("training", evidence="auto")
    assert with_retriever(args, num_candidates=2)  # fewer than num_evidence, which is chosen
    worth = measure_worth(args, WorthArguments(), replace(ALONE, artifacts=tmp_path / "artifacts"))
    monkeypatch.undo()
    monkeypatch.setattr(WorthStudy, "measure", None)  # it is measured already
    made = run(args)
    assert (made.args.method, made.args.rerank.num_evidence) == ("fid", worth["best"]["d"])
    assert worth["why"] in made.metrics["notes"]
    before = made.predictions
    (tmp_path / "run/metrics.json").unlink()
    assert run(args).predictions == before
    assert run(args).reused
    given = args.change("training", evidence="given")
    assert run(take_evidence(given, worth["changes"])).reused  # the same by its flags
    with pytest.raises(ArtifactError, match="run"):
        run(given)
