import numpy as np
import pytest
import torch

from pgra.errors import ConfigError, ModelError
from pgra.models.fid import FusionReader
from pgra.models.loading import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.collate import Collator, tokenize_inputs
from pgra.reader.predict import decide, predict
from pgra.types import ReaderInput

WORDS = {"negative": "terrible", "positive": "great", "mixed": "a b"}
VERBALIZER = Verbalizer(WORDS, "{text} It was <extra_id_0> .")


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


@pytest.fixture(scope="module")
def inputs():
    texts = ["the red sea", "a film", "the old house by the sea and the garden", "plot", "a cast"]
    return [
        ReaderInput(f"test-{i}", tuple(f"{text} {'and so on ' * n}" for n in range(i % 3 + 1)))
        for i, text in enumerate(texts)
    ]


def _same(found, expected):
    assert [p.example_id for p in found] == [p.example_id for p in expected]
    assert [p.label for p in found] == [p.label for p in expected]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(list(a.scores.values()), list(b.scores.values()), atol=1e-5)


def test_predictions_do_not_depend_on_batches_or_order(reader, tokenizer, inputs):
    together = predict(reader, tokenizer, inputs, VERBALIZER)
    _same(predict(reader, tokenizer, inputs, VERBALIZER, batch_tokens=1), together)
    back = predict(reader, tokenizer, inputs[::-1], VERBALIZER, batch_tokens=60)
    _same(back[::-1], together)
    changed = [ReaderInput(item.example_id, ("the boats",)) for item in inputs]
    other = predict(reader, tokenizer, changed, VERBALIZER)
    assert other[0].scores != together[0].scores


def test_scores_are_the_softmax_of_plain_t5_log_probabilities(reader, tokenizer, inputs):
    only = inputs[0]
    (found,) = predict(reader, tokenizer, [only], VERBALIZER)
    encoded = tokenizer(only.segments[0], return_tensors="pt")
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
    (found,) = decide([ReaderInput("test-0", ("x",))], scores, VERBALIZER)
    assert found.label == "negative"


def test_scores_that_are_no_numbers_stop():
    scores = np.full((1, 3), np.nan, dtype=np.float32)
    with pytest.raises(ModelError, match="scores of example 'test-0' are NaN"):
        decide([ReaderInput("test-0", ("x",))], scores, VERBALIZER)


def test_no_input_gives_no_prediction(reader, tokenizer):
    assert predict(reader, tokenizer, [], VERBALIZER) == []


def _memorise(t5_dir, tokenizer, verbalizer, inputs):
    """An oracle: a reader that has learnt the targets of these inputs by heart."""
    torch.manual_seed(0)
    reader = FusionReader.from_name(str(t5_dir))
    batch = Collator(0)(tokenize_inputs(inputs, tokenizer, verbalizer))
    optimizer = torch.optim.Adam(reader.parameters(), lr=1e-2)
    for _ in range(120):
        optimizer.zero_grad()
        loss = reader(batch.input_ids, batch.attention_mask, batch.labels).loss
        loss.backward()
        optimizer.step()
        if loss.item() < 0.01:
            break
    assert loss.item() < 0.1
    return reader


def test_official_decode_is_never_right_on_a_word_of_two_tokens(t5_dir, tokenizer):
    inputs = [
        ReaderInput("t-0", ("the red sea",), "mixed"),
        ReaderInput("t-1", ("a film in the town",), "positive"),
        ReaderInput("t-2", ("plot",), "negative"),
    ]
    words = {"positive": "great", "negative": "terrible", "mixed": "a b"}
    verbalizer = Verbalizer(words, "{text} It was <extra_id_0> .")
    single = verbalizer.audit(tokenizer).single
    assert "mixed" not in single
    oracle = _memorise(t5_dir, tokenizer, verbalizer, inputs)
    right = [p.label for p in predict(oracle, tokenizer, inputs, verbalizer)]
    assert right == ["mixed", "positive", "negative"]
    official = predict(oracle, tokenizer, inputs, verbalizer, decode="official")
    assert official[0].label == "positive"  # unknown words go to the first label
    for item, found in zip(inputs, official, strict=True):
        assert (found.label == item.label) == (item.label in single or item.label == "positive")
    assert official[1].scores == {"positive": 1.0, "negative": 0.0, "mixed": 0.0}


def test_official_decode_writes_one_word_without_a_slot(t5_dir, tokenizer):
    verbalizer = Verbalizer({"negative": "sea", "positive": "terrible"}, "{text} Answer:")
    assert "positive" in verbalizer.audit(tokenizer).single
    inputs = [
        ReaderInput("t-0", ("the red sea",), "positive"),
        ReaderInput("t-1", ("a film in the town",), "positive"),
    ]
    oracle = _memorise(t5_dir, tokenizer, verbalizer, inputs)
    found = predict(oracle, tokenizer, inputs, verbalizer, decode="official")
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
    rows = module.tokenize_inputs(inputs, tokenizer, VERBALIZER)
    module.score_rows(
        reader,
        tokenizer,
        rows,
        VERBALIZER,
        decode="verbalizer",
        batch_tokens=10_000,
        progress=True,
        worker=module.Worker(rank=0, world=4),
    )
    assert bars[0].n == bars[0].total == 5
