"""A labeler centred at its corpus: by hand, and over written runs."""

import json
import math
from dataclasses import asdict

import numpy as np
import pytest
from test_pseudo_labels import QUIET, TEXTS, save_labeler, told, write_two_runs

from pgra.config import CorpusArguments
from pgra.errors import DataError
from pgra.experiments.consistency import PseudoLabels, report_consistency
from pgra.reader.record import Reader


@pytest.fixture(scope="module")
def labeler(t5_dir, tmp_path_factory):
    return save_labeler(t5_dir, tmp_path_factory.mktemp("runs") / "plain")


@pytest.fixture
def runs(tmp_path):
    return write_two_runs(tmp_path)


def scored(*chances):
    """Labels of texts "0", "1", ... that a labeler gives these chances of "pos" (or of each)."""
    names = ("neg", "pos") if isinstance(chances[0], float) else ("a", "b", "c")
    both = [(1 - c, c) if isinstance(c, float) else c for c in chances]
    return {str(i): dict(zip(names, one, strict=True)) for i, one in enumerate(both)}


def test_a_centred_labeler_calls_half_of_its_corpus_each_label():
    scores = scored(0.6, 0.7, 0.8, 0.9, 0.95)  # all "pos", as nearly all of Wikipedia is
    texts, sample = ["0", "3"], list(scores)
    centred, plain = PseudoLabels(scores, 5, sample), PseudoLabels(scores, 5)
    # The median's own text ties, and goes to the first label.
    assert list(centred.labels.values()) == ["neg", "neg", "neg", "pos", "pos"]
    assert list(plain.labels.values()) == ["pos"] * 5  # the control: the paper's
    assert centred.medians == pytest.approx({"neg": math.log(0.2), "pos": math.log(0.8)})
    told = centred.describe(texts)
    assert told["corpus_labels_uncentred"] == {"neg": 0.0, "pos": 1.0}
    assert told["corpus_labels"] == {"neg": 0.6, "pos": 0.4}
    assert told["evidence_labels_uncentred"] == {"neg": 0.0, "pos": 1.0}
    assert told["evidence_labels"] == {"neg": 0.5, "pos": 0.5}
    assert "pos 100.0 % before, neg 60.0 %, pos 40.0 % after" in centred.note("t", texts)
    told = plain.describe(texts)
    assert (told["is_centred"], "corpus_labels" in told) == (False, False)


def test_of_more_labels_each_is_measured_by_its_own_median():
    scores = scored((0.5, 0.3, 0.2), (0.6, 0.1, 0.3), (0.7, 0.2, 0.1))
    centred = PseudoLabels(scores, 3, list(scores))
    # Medians 0.6, 0.2, 0.2; ratios to them: 5/6, 3/2, 1; 1, 1/2, 3/2; 7/6, 1, 1/2.
    assert list(centred.labels.values()) == ["b", "c", "a"]
    assert set(PseudoLabels(scores, 3).labels.values()) == {"a"}  # the control
    zero = scored((1.0, 0.0, 0.0), (1.0, 0.0, 0.0))  # of float32; no logarithm of it
    assert set(PseudoLabels(zero, 2, ["0", "1"]).labels.values()) == {"a"}


def with_corpus(folder, path, **changes):
    """Have a written run say which corpus its evidence is of, as train.py does."""
    asked = {**asdict(CorpusArguments(corpus=str(path))), **changes}
    runtime = {"artifacts_dir": str(path.parent / "artifacts")}
    (folder / "arguments.json").write_text(json.dumps({"corpus": asked, "runtime": runtime}))
    return folder


def test_runs_are_measured_with_a_labeler_centred_at_their_corpus(
    labeler, runs, tmp_path, corpus_file
):
    for run in runs:
        with_corpus(run, corpus_file)
    how = {**QUIET, "labelers": [labeler], "centre": True}
    centred = report_consistency(runs, tmp_path / "out", **how)
    plain = report_consistency(runs, tmp_path / "out", **{**how, "centre": False})
    passages = list(dict.fromkeys(corpus_file.read_text().splitlines()))
    reader = Reader.load(labeler, device="cpu")
    chance = {t: reader.predict([t])[0].scores["positive"] for t in (*passages, *TEXTS)}
    middle = np.median([chance[text] for text in passages])
    for run, other in zip(centred.runs, plain.runs, strict=True):
        lines = [
            json.loads(x)
            for x in (tmp_path / run.name / "predictions.jsonl").read_text().splitlines()
        ]
        for measured, threshold in ((run, middle), (other, 0.5)):
            shares = [
                np.mean(
                    [
                        (chance[seen["text"]] > threshold) == (line["label"] == "positive")
                        for seen in line["evidence"]
                    ]
                )
                for line in lines
            ]
            assert measured.shares.tolist() == pytest.approx(shares)
    assert [r.score for r in centred.runs] != [r.score for r in plain.runs]  # the control
    report_consistency(runs, tmp_path / "out", **how)
    written = json.loads((tmp_path / "out" / "consistency.json").read_text())["labelers"]["reviews"]
    assert (written["is_centred"], written["corpus_texts"]) == (True, len(passages))
    before, after = written["corpus_labels_uncentred"], written["corpus_labels"]
    assert before["positive"] == pytest.approx(np.mean([chance[t] > 0.5 for t in passages]))
    assert (
        abs(after["positive"] - 0.5) <= 0.5 / len(passages) + 1e-9 < abs(before["positive"] - 0.5)
    )
    assert "the labeler is centred at its medians" in told(centred)
    assert "the labeler is not centred (the paper's way)" in told(plain)


def test_without_its_corpus_a_labeler_is_not_centred_in_silence(labeler, runs, tmp_path):
    how = {**QUIET, "labelers": [labeler], "centre": True}
    with pytest.raises(DataError, match=r"fid does not say which corpus.*give --no_centre"):
        report_consistency(runs, tmp_path / "out", **how)
    for run in runs:
        with_corpus(run, tmp_path / "gone.txt")
    with pytest.raises(DataError, match=r"gone\.txt.*put it there, or give --no_centre"):
        report_consistency(runs, tmp_path / "out", **how)
