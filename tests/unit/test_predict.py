import numpy as np
import pytest
import torch
from conftest import reader_inputs

from pgra.errors import ConfigError, ModelError
from pgra.models.fid import FusionReader
from pgra.models.loading import find_model, load_tokenizer
from pgra.models.segments import GroupCost
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.collate import Collator
from pgra.reader.predict import Decision, decide, label_chances, predict, score_inputs
from pgra.types import Worker

WORDS = {"negative": "terrible", "positive": "great", "mixed": "a b"}
VERBALIZER = Verbalizer(WORDS, "{text} It was <extra_id_0> .")
OFFICIAL = Decision("official")


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture(scope="module")
def reader(t5_dir):
    reader = FusionReader.from_name(str(t5_dir))
    generator = torch.Generator().manual_seed(5)
    for parameter in reader.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return reader


TEXTS = ["the red sea", "a film", "the old house by the sea and the garden", "plot", "a cast"]
ITEMS = [
    (f"test-{i}", tuple(f"{text} {'and so on ' * n}" for n in range(i % 3 + 1)), None)
    for i, text in enumerate(TEXTS)
]


@pytest.fixture(scope="module")
def inputs(tokenizer):
    return reader_inputs(tokenizer, VERBALIZER, ITEMS)


def _same(found, expected):
    assert [p.example_id for p in found] == [p.example_id for p in expected]
    assert [p.label for p in found] == [p.label for p in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(list(a.scores.values()), list(b.scores.values()), atol=1e-5)


def test_predictions_do_not_depend_on_batches_or_order(reader, tokenizer, inputs):
    together = predict(reader, tokenizer, inputs, VERBALIZER)
    _same(predict(reader, tokenizer, inputs, VERBALIZER, batch_tokens=1), together)
    back = reader_inputs(tokenizer, VERBALIZER, ITEMS[::-1])
    _same(predict(reader, tokenizer, back, VERBALIZER, batch_tokens=60)[::-1], together)
    changed = reader_inputs(
        tokenizer, VERBALIZER, [(name, ("the boats",), None) for name, _, _ in ITEMS]
    )
    other = predict(reader, tokenizer, changed, VERBALIZER)
    assert other[0].scores != together[0].scores


def test_scores_are_the_softmax_of_plain_t5_log_probabilities(reader, tokenizer, inputs):
    only = reader_inputs(tokenizer, VERBALIZER, ITEMS[:1])
    (found,) = predict(reader, tokenizer, only, VERBALIZER)
    encoded = tokenizer(ITEMS[0][1][0], return_tensors="pt")
    totals = []
    for label in VERBALIZER.labels:
        target = tokenizer(VERBALIZER.target_text(label), return_tensors="pt").input_ids
        with torch.no_grad():
            loss = reader.t5(**encoded, labels=target).loss
        totals.append(-loss.item() * target.shape[1])
    expected = torch.tensor(totals, dtype=torch.float64).softmax(0).numpy()
    np.testing.assert_allclose(list(found.scores.values()), expected, atol=1e-5)
    assert found.label == VERBALIZER.labels[int(expected.argmax())]
    assert sum(found.scores.values()) == pytest.approx(1)


def test_dropout_is_off_and_training_mode_comes_back(reader, tokenizer, inputs):
    expected = predict(reader, tokenizer, inputs, VERBALIZER)
    reader.train()
    _same(predict(reader, tokenizer, inputs, VERBALIZER), expected)
    assert reader.t5.training
    reader.eval()


def test_ties_go_to_the_first_label():
    scores = np.zeros((1, 3), dtype=np.float32)
    (found,) = decide(["test-0"], scores, VERBALIZER)
    assert found.label == "negative"


def test_scores_that_are_no_numbers_stop():
    scores = np.full((1, 3), np.nan, dtype=np.float32)
    with pytest.raises(ModelError, match="scores of example 'test-0' are NaN"):
        decide(["test-0"], scores, VERBALIZER)


def test_a_length_normalised_score_is_the_mean_of_a_targets_tokens(reader, tokenizer, inputs):
    sizes = np.array([len(ids) for ids in VERBALIZER.target_ids(tokenizer)])
    assert len(set(sizes)) > 1
    sums, means = (
        score_inputs(
            reader,
            tokenizer,
            inputs,
            VERBALIZER,
            decision=Decision(length_normalize=is_mean),
            batch_tokens=100,
            progress=False,
            worker=Worker(),
        )
        for is_mean in (False, True)
    )
    np.testing.assert_allclose(means * sizes, sums, rtol=1e-5)


def test_a_temperature_flattens_chances_and_changes_no_decision():
    scores = np.log(np.array([[0.8, 0.15, 0.05]], dtype=np.float32))
    (cold,), (warm,) = label_chances(scores), label_chances(scores, 2.0)
    np.testing.assert_allclose(cold, [0.8, 0.15, 0.05], rtol=1e-5)
    roots = np.sqrt([0.8, 0.15, 0.05])
    np.testing.assert_allclose(warm, roots / roots.sum(), rtol=1e-5)
    for temperature in (0.1, 1.0, 9.0):
        (found,) = decide(["test-0"], scores, VERBALIZER, temperature=temperature)
        assert found.label == "negative"


def test_no_input_gives_no_prediction(reader, tokenizer):
    assert predict(reader, tokenizer, reader_inputs(tokenizer, VERBALIZER, []), VERBALIZER) == []


def _memorise(t5_dir, inputs):
    """An oracle: a reader that has learnt the targets of these inputs by heart."""
    torch.manual_seed(0)
    reader = FusionReader.from_name(str(t5_dir))
    batch = Collator(0, GroupCost(1, 1 << 20))(list(inputs))
    optimizer = torch.optim.Adam(reader.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        loss = reader(**batch.packed.as_inputs(), labels=batch.labels).loss
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    assert loss.item() < 0.1
    return reader


def test_official_decode_is_never_right_on_a_word_of_two_tokens(t5_dir, tokenizer):
    items = [
        ("t-0", ("the red sea",), "mixed"),
        ("t-1", ("a film in the town",), "positive"),
        ("t-2", ("plot",), "negative"),
    ]
    words = {"positive": "great", "negative": "terrible", "mixed": "a b"}
    verbalizer = Verbalizer(words, "{text} It was <extra_id_0> .")
    inputs = reader_inputs(tokenizer, verbalizer, items)
    single = verbalizer.audit(tokenizer).single
    assert "mixed" not in single
    oracle = _memorise(t5_dir, inputs)
    right = [p.label for p in predict(oracle, tokenizer, inputs, verbalizer)]
    assert right == ["mixed", "positive", "negative"]
    official = predict(oracle, tokenizer, inputs, verbalizer, decision=OFFICIAL)
    assert official[0].label == "positive"  # unknown words go to the first label
    for (_, _, label), found in zip(items, official, strict=True):
        assert (found.label == label) == (label in single or label == "positive")
    assert official[1].scores == {"positive": 1.0, "negative": 0.0, "mixed": 0.0}


def test_official_decode_writes_one_word_without_a_slot(t5_dir, tokenizer):
    verbalizer = Verbalizer({"negative": "sea", "positive": "terrible"}, "{text} Answer:")
    assert "positive" in verbalizer.audit(tokenizer).single
    items = [
        ("t-0", ("the red sea",), "positive"),
        ("t-1", ("a film in the town",), "positive"),
    ]
    inputs = reader_inputs(tokenizer, verbalizer, items)
    oracle = _memorise(t5_dir, inputs)
    found = predict(oracle, tokenizer, inputs, verbalizer, decision=OFFICIAL)
    assert [p.label for p in found] == ["positive", "positive"]


def test_words_that_the_reader_cannot_tell_apart_are_refused(reader, tokenizer, inputs):
    with pytest.raises(ConfigError, match="are the same tokens"):
        predict(reader, tokenizer, inputs, Verbalizer({"x": "a b", "y": "a▁b"}, "{text}"))


def test_bar_of_several_processes_stops_at_its_total(reader, tokenizer, inputs, monkeypatch):
    from pgra.reader import predict as module

    bars = []

    class Bar(module.tqdm):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            bars.append(self)

    monkeypatch.setattr(module, "tqdm", Bar)
    monkeypatch.setattr(module, "gather_object", lambda found: found)  # the others' share is lost
    module.score_inputs(
        reader,
        tokenizer,
        inputs,
        VERBALIZER,
        decision=Decision(),
        batch_tokens=10_000,
        progress=True,
        worker=module.Worker(rank=0, world=4),
    )
    assert bars[0].n == bars[0].total == 5
