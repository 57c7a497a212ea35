"""Readers of few labels: draws, gains that follow the vote, and `pgra worth --num_labels`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import with_rerank
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.cli import main
from pgra.core import Candidates
from pgra.errors import ConfigError
from pgra.experiments.curve import OPINION, READER, Curve, Point, Texts, draw_examples
from pgra.experiments.curve import measure_curve as curve_of
from pgra.experiments.worth import measure_worth


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=8, max_size=60), st.data())
def test_a_draw_holds_each_label_in_proportion_and_the_smaller_draw(values, data):
    labels = np.unique(values, return_inverse=True)[1]
    least = labels.max() + 1
    count = data.draw(st.integers(least, len(labels)))
    seed = data.draw(st.integers(0, 5))
    drawn = draw_examples(labels, count, seed)
    assert len(set(drawn.tolist())) == len(drawn) == count
    assert (np.diff(drawn) > 0).all()
    own, all_ = np.bincount(labels[drawn], minlength=least), np.bincount(labels)
    assert (own >= 1).all()
    # Each label may have its first before its turn, and one is more than its share.
    assert (np.abs(own - count * all_ / len(labels)) <= least).all()
    assert set(draw_examples(labels, least, seed)) <= set(drawn)
    assert (draw_examples(labels, count, seed) == drawn).all()


def planted(seed, *, knows, num=100):
    """States of two labels: queries', and passages', say the label as far as the LM `knows`."""
    rng = np.random.default_rng(seed)
    labels = (np.arange(num) % 2, rng.integers(0, 2, num))
    row_labels = np.arange(80) % 2

    def states(own, clear):
        middle = np.outer(2 * own - 1, np.eye(6)[0])
        return (clear * middle + rng.normal(size=(len(own), 6))).astype(np.float32)

    texts = Texts(
        labels=labels,
        keys=(np.arange(num), np.arange(num, 2 * num)),
        vectors=tuple(states(own, 0.4) for own in labels),
        states=tuple(states(own, knows) for own in labels),
        drawn=states(row_labels, knows),
        rows=np.arange(80),
        passages=states(row_labels, knows),
    )
    told = rng.permuted(np.tile(np.arange(40), (num, 1)), axis=1)[:, :4]
    ways = {
        "dot": rng.integers(0, 80, (num, 4)),  # whatever the query
        "truth": 2 * told + labels[1][:, None],  # of its label
        "head": Candidates(np.arange(80)[None], np.zeros((1, 80), np.float32)),
    }
    return texts, ways


def test_gains_follow_the_vote_and_noise_adds_nothing():
    texts, ways = planted(0, knows=4)
    point = curve_of(texts, ways, [8], 5, depth=4).points[0]
    gain = {name: own.mean() - point.right[READER].mean() for name, own in point.right.items()}
    assert point.right[READER].shape == (5, 100)
    assert point.votes["truth"].mean() > 0.95  # evidence has its query's label
    assert gain["truth"] > 0.2
    assert gain["head"] > 0.2  # the head finds such evidence itself
    assert abs(gain["dot"]) < 0.05  # the control
    curve = Curve([point])
    assert curve.rho() > 0.5
    (_, dot, against_dot, above), (_, opinion, against_opinion, _) = point.comparisons()
    assert (dot, opinion) == ("dot", OPINION)
    assert (against_dot.low > 0, above) == (True, 5)
    # What the head's evidence says is what the head says of the query.
    assert abs(against_opinion.difference) < 0.03

    texts, ways = planted(1, knows=0, num=400)  # the LM knows nothing, so nothing gains
    blind = curve_of(texts, ways, [8], 3, depth=4).points[0]
    for own in blind.right.values():
        assert own.mean() - blind.right[READER].mean() < 0.03


def test_figures_by_hand():
    reader = np.array([[0, 0, 1, 1], [1, 0, 1, 1]], bool)
    dot = np.array([[0, 1, 1, 1], [1, 0, 1, 1]], bool)
    head = np.array([[1, 1, 1, 1], [1, 0, 1, 1]], bool)
    right = {READER: reader, OPINION: head, "dot": dot, "head": head}
    votes = {OPINION: np.ones(2), "dot": np.array([0.5, 1.0]), "head": np.array([1.0, 0.25])}
    point = Point(16, right, votes)
    told = [(g["way"], g["draw"], g["gain"], g["vote_ahead"]) for g in point.gains()]
    assert told == [
        ("dot", 0, 0.25, 0.0),
        ("dot", 1, 0.0, 0.25),
        ("head", 0, 0.5, 0.5),
        ("head", 1, 0.0, -0.5),
    ]
    # Ranks of gains 3, 1.5, 4, 1.5 and of leads 2, 3, 4, 1: their products add up to 3.
    assert Curve([point]).rho() == pytest.approx(3 / np.sqrt(4.5 * 5))
    values = point.as_json()
    assert values["accuracy_with_reader"]["head"] == 0.875
    against_dot, against_opinion = values["comparisons"]
    assert (against_dot["difference"], against_dot["draws_above"]) == (0.125, 1)
    assert against_dot["within_a_point"] is False
    assert (against_opinion["interval_90"], against_opinion["within_a_point"]) == ([0, 0], True)
    assert Curve([replace(point, votes={OPINION: np.ones(2)})]).rho() is None


def test_of_all_labels_it_is_what_worth_itself_measures(args):
    args = with_rerank(args, bank="full")
    found = measure_worth(args, ["dot", "head"], num_labels=[4, 32], num_draws=2)
    few, whole = found.curve.points
    assert (len(few.right[READER]), len(whole.right[READER])) == (2, 1)
    assert whole.right[READER].mean() == found.control.accuracy_alone
    assert whole.votes[OPINION].mean() == found.opinion[0]
    assert whole.right[OPINION].mean() == found.control.accuracy
    for way, added in zip(found.ways, found.added, strict=True):
        assert whole.votes[way.name].mean() == way.vote
        assert whole.right[way.name].mean() == added.accuracy
    assert [way.name for way in found.ways] == list(whole.votes)[1:]
    assert list(whole.votes)[-1] == "exhaustive head"


@pytest.fixture
def flags(args):
    return [
        *("worth", "--task", "sst2", "--device", "cpu", "--num_exemplars", "4"),
        *("--train_file", args.data.train_file, "--test_file", args.data.test_file),
        *("--corpus", args.corpus.corpus, "--encoder", args.retriever.encoder),
        *("--num_candidates", "6", "--num_evidence", "3", "--lm", args.rerank.lm),
        *("--artifacts_dir", args.runtime.artifacts_dir),
    ]


def test_the_command_tells_the_curve_beside_all_else(flags, tmp_path, capsys):
    target = tmp_path / "worth.json"
    words = [*flags, "--json", str(target), "--similarities", "dot", "head"]
    assert main(words) == 0
    plain, values = capsys.readouterr().out, json.loads(target.read_text())
    assert main([*words, "--num_labels", "4", "8", "--num_draws", "3"]) == 0
    out, told = capsys.readouterr().out, json.loads(target.read_text())
    assert out.endswith(plain)
    curve = told.pop("curve")
    assert told == values
    assert [(one["labels"], one["draws"]) for one in curve["by_labels"]] == [(4, 3), (8, 3)]
    ways = ["first stage", "dot", "head"]
    assert list(curve["by_labels"][0]["accuracy_with_reader"]) == [READER, OPINION, *ways]
    assert len(curve["gains"]) == 2 * 3 * len(ways)
    for name in (f"reader + {ways[2]}", "n = 8: head - dot", "n = 4: head - LM's opinion"):
        assert f"\n{name}  " in out


def test_numbers_that_cannot_be_drawn_are_refused_before_anything_is_read(args, flags, capsys):
    for count in (1, 33):
        with pytest.raises(ConfigError, match=f"--num_labels {count}: .* 2 labels, .* are 32 diff"):
            measure_worth(args, num_labels=[8, count])
    assert main([*flags, "--num_labels", "0"]) == 2
    assert main([*flags, "--num_labels", "4", "--num_draws", "0"]) == 2
    assert "num_draws" in capsys.readouterr().err
