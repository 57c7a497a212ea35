"""What evidence is worth: bits by hand, the verdict, and `pgra worth` on tiny models."""

import json
from dataclasses import replace

import numpy as np
import pytest
from conftest import with_rerank, with_retriever, write_jsonl
from scipy.optimize import brentq

from pgra.cli import main
from pgra.core import ALONE
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.experiments.added import measure_added
from pgra.experiments.worth import Worth, measure_worth
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.stages import Stages
from pgra.rerank.bank import query_key
from pgra.rerank.head import fit_head

SIXTY = np.arange(60) % 2
"""Labels of sixty queries: ten folds of three of each."""


def odds(values):
    """Log-odds of two labels, (n, 2)."""
    half = np.asarray(values, np.float64) / 2
    return np.column_stack([-half, half])


def side(targets):
    return 2.0 * targets - 1


def test_a_vote_that_knows_the_label_adds_what_the_reader_lacks():
    nothing, all_ = odds(np.zeros(60)), odds(7 * side(SIXTY))
    found = measure_added(nothing, all_, SIXTY)
    # A fold's 54 others: standardised the vote is -1 and 1, and the log-odds are 2 b. Of
    # log(1 + exp(-2 b)) + b * b / (2 * 54) the slope is 0.
    b = brentq(lambda b: b / 54 - 2 / (1 + np.exp(2 * b)), 0, 20)
    assert found.alone == pytest.approx(1)  # a coin
    assert found.bits.difference == pytest.approx(1 - np.log2(1 + np.exp(-2 * b)), abs=1e-4)
    assert (found.accuracy, found.is_sure) == (1.0, True)
    knows = measure_added(all_, nothing, SIXTY)  # the control: the other way round
    assert (knows.bits.difference, knows.is_sure) == (0, False)
    assert knows.alone < 0.01


def test_what_the_reader_knows_already_adds_nothing_and_neither_scale_nor_place_counts():
    rng = np.random.default_rng(0)
    reader = odds(side(SIXTY) + 2 * rng.normal(size=60))
    vote = odds(side(SIXTY) + rng.normal(size=60))
    found = measure_added(reader, vote, SIXTY)
    assert found.is_sure
    assert abs(measure_added(reader, reader, SIXTY).bits.difference) < 0.02
    moved = measure_added(reader, 30 * vote + [5.0, -3.0], SIXTY)
    assert moved.bits.difference == pytest.approx(found.bits.difference, abs=1e-4)


def test_other_shares_of_labels_on_test_are_no_gain():
    rng = np.random.default_rng(0)
    reader, noise = odds(2 * side(SIXTY) + rng.normal(size=60)), odds(rng.normal(size=60))
    leans = reader + odds(np.full(60, -5.0))  # its training examples had more of the first label
    found = measure_added(leans, noise, SIXTY)
    assert found.accuracy_alone > (leans.argmax(axis=1) == SIXTY).mean() + 0.2
    assert abs(found.bits.difference) < 0.02


@pytest.mark.parametrize("num_labels", [2, 4])
def test_noise_adds_nothing_and_signal_does_in_nearly_every_draw(num_labels):
    gains = {"noise": [], "signal": []}
    for seed in range(20):
        rng = np.random.default_rng(seed)
        targets = rng.integers(0, num_labels, 100)

        def draw(knows, targets=targets, rng=rng):
            return knows * np.eye(num_labels)[targets] + rng.normal(size=(100, num_labels))

        reader = 6 * draw(0.5)  # it boasts: to be less sure is no gain
        gains["noise"].append(measure_added(reader, draw(0), targets))
        gains["signal"].append(measure_added(reader, draw(2), targets))
    sure = {name: sum(one.is_sure for one in found) for name, found in gains.items()}
    assert sure["noise"] <= 1
    assert sure["signal"] >= 19
    assert -0.02 < np.mean([one.bits.difference for one in gains["noise"]]) < 0.005


def worth_of(*added, control):
    return Worth(
        task="sst2",
        queries=60,
        train={"negative": 50, "positive": 54},
        corpus_labels={"negative": 0.2, "positive": 0.8},
        drawn=2000,
        lm="lm",
        encoder="encoder",
        reader=(0.65, 0.6),
        opinion=(0.75, 0.7),
        ways=[],
        added=added,
        control=control,
    )


def test_the_verdict_is_of_the_way_that_adds_most():
    rng = np.random.default_rng(1)
    reader, signal, noise = (odds(k * side(SIXTY) + rng.normal(size=60)) for k in (0.5, 2, 0))
    good, none = (measure_added(reader, vote, SIXTY) for vote in (signal, noise))
    low, high = good.bits.low, good.bits.high
    assert low > 0
    assert worth_of(none, good, control=good).conclude() == (
        f"evidence can add at most {good.bits.difference:.2f} bits ({low:.2f} to {high:.2f}) to a "
        f"reader of 104 labels, the LM's opinion alone {good.bits.difference:.2f}: train with it"
    )
    assert none.bits.low < 0 < none.bits.high
    alone = worth_of(none, control=good).conclude()
    assert alone.endswith("the interval holds 0, train without")


@pytest.fixture
def flags(args):
    return [
        *("worth", "--task", "sst2", "--device", "cpu", "--num_exemplars", "4"),
        *("--train_file", args.data.train_file, "--test_file", args.data.test_file),
        *("--corpus", args.corpus.corpus, "--encoder", args.retriever.encoder),
        *("--num_candidates", "6", "--num_evidence", "3", "--lm", args.rerank.lm),
        *("--artifacts_dir", args.runtime.artifacts_dir),
    ]


def test_the_command_tells_all_and_reads_nothing_twice(flags, args, tmp_path, capsys, monkeypatch):
    target = tmp_path / "worth.json"
    words = [*flags, "--json", str(target), "--similarities", "dot", "cosine", "whitened"]
    assert main(words) == 0
    out, values = capsys.readouterr().out, target.read_text()
    told = json.loads(values)
    assert out.splitlines()[-1] == told["conclusion"]
    assert [way["name"] for way in told["ways"]] == ["first stage", "dot", "cosine", "whitened"]
    for way in told["ways"]:
        assert f"\n{way['name']}  " in out
    assert told["train_labels"] == {"negative": 16, "positive": 16}
    assert told["corpus"]["passages"] == 12

    def refuse(*args, **kwargs):
        raise AssertionError("a text is read again")

    monkeypatch.setattr(PromptedEncoder, "encode_prompts", refuse)
    monkeypatch.setattr(Encoder, "encode", refuse)
    assert main(words) == 0
    assert (capsys.readouterr().out, target.read_text()) == (out, values)
    Stages.read(args, ALONE).find(("test",))  # nor when it is trained on


def test_pseudo_labels_are_the_lms_opinion_of_passages_centred_at_the_corpus(args):
    """By hand: the LM's states of texts, not from the bank."""
    found = measure_worth(args, ["cosine"])
    stages = Stages.read(with_rerank(args, similarity="cosine"), ALONE)
    stages.find(("test",))
    encoder, test = stages.reranker.encoder, stages.data.test
    train = sorted(stages.data.train, key=query_key)  # as folds are dealt
    labels = list(stages.data.labels)

    def states(texts):
        return encoder.encode(list(texts)).float().numpy()

    truth = np.array([labels.index(example.label) for example in train])
    head = fit_head(states([example.text for example in train]), truth, 2)

    def positive(texts):
        logits = ((states(texts) - head.stats[0]) / head.stats[1]) @ head.weights[:, :-1].T
        return (logits + head.weights[:, -1]) @ [-1, 1]

    right = [(positive([e.text])[0] > 0) == (e.label == labels[1]) for e in test]
    assert found.opinion == (np.mean(right), head.accuracy)
    middle = positive(stages.corpus.texts(np.arange(len(stages.corpus)))).mean()
    votes, shares = [], []
    for example, lines in zip(test, stages.evidence_lines("test"), strict=True):
        said = [value > middle for value in positive([line.text for line in lines])]
        is_label = [one == (example.label == labels[1]) for one in said]
        votes.append(sum(is_label) >= 2)  # of three
        shares.append(np.mean(is_label))
    way = found.ways[1]
    assert (way.vote, way.score) == (np.mean(votes), pytest.approx(np.mean(shares)))


def test_what_cannot_be_measured_is_refused_before_anything_is_read(args, tmp_path, capsys, flags):
    rows = [{"text": f"A dull film {i}.", "label": i < 30} for i in range(30)]
    one = write_jsonl(tmp_path / "one.jsonl", [{**row, "label": "negative"} for row in rows])
    few = {"max_test_samples": 9}
    for change, message in (
        (
            replace(args, data=replace(args.data, train_file=str(one))),
            "has label 'positive'",
        ),
        (
            replace(args, data=replace(args.data, **few)),
            "two folds of 5 test queries.*are 9 in all",
        ),
        (with_retriever(args, retriever="exhaustive"), "leave out --retriever exhaustive"),
        (with_rerank(args, reranker="none"), "leave out.*--reranker none"),
        (
            with_rerank(args, num_prefixes=2),
            "keeps none: use --reranker prompted, --num_prefixes 1",
        ),
        (with_rerank(args, similarity="dott"), "unknown similarity 'dott'"),
    ):
        with pytest.raises(ConfigError, match=message):
            measure_worth(change)
    assert main([*flags, "--similarities", "dott"]) == 2
    assert main([*flags, "--json", str(tmp_path)]) == 2
    assert "is a folder: name a file in it" in capsys.readouterr().err
    assert not list((tmp_path / "artifacts").glob("banks/*/*.npy"))
