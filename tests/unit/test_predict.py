import numpy as np
import pytest
import torch
from conftest import reader_inputs
from oracle import ScriptedT5, oracle

from pgra.core import Worker
from pgra.data.tasks import load_task
from pgra.errors import ConfigError, ModelError
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.fid import FusionReader
from pgra.reader.predict import Decision, decide, label_chances, predict, score_inputs

WORDS = {"negative": "terrible", "positive": "great", "mixed": "a b"}
VERBALIZER = Verbalizer(WORDS, "{text} It was <extra_id_0> .")
OFFICIAL = Decision("official")


def _load(folder):
    reader = FusionReader.from_name(str(folder))
    generator = torch.Generator().manual_seed(5)
    for parameter in reader.parameters():
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return reader, load_tokenizer(find_model(str(folder)))


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture(scope="module")
def reader(t5_dir):
    return _load(t5_dir)[0]


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


def test_predictions_do_not_depend_on_batches_or_order(reader_dir):
    reader, tokenizer = _load(reader_dir)
    inputs = reader_inputs(tokenizer, VERBALIZER, ITEMS)
    together = predict(reader, tokenizer, inputs, VERBALIZER)
    _same(predict(reader, tokenizer, inputs, VERBALIZER, batch_tokens=1), together)
    back = reader_inputs(tokenizer, VERBALIZER, ITEMS[::-1])
    _same(predict(reader, tokenizer, back, VERBALIZER, batch_tokens=60)[::-1], together)
    changed = reader_inputs(
        tokenizer, VERBALIZER, [(name, ("the boats",), None) for name, _, _ in ITEMS]
    )
    other = predict(reader, tokenizer, changed, VERBALIZER)
    assert other[0].scores != together[0].scores


def test_scores_are_the_softmax_of_plain_t5_log_probabilities(reader_dir):
    reader, tokenizer = _load(reader_dir)
    only = reader_inputs(tokenizer, VERBALIZER, ITEMS[:1])
    (found,) = predict(reader, tokenizer, only, VERBALIZER)
    encoded = tokenizer(ITEMS[0][1][0], return_tensors="pt")
    totals = []
    for label in VERBALIZER.labels:
        target = tokenizer(VERBALIZER.target_text(label), return_tensors="pt").input_ids
        with torch.no_grad():
            loss = reader.model(**encoded, labels=target).loss
        totals.append(-loss.item() * target.shape[1])
    expected = torch.tensor(totals, dtype=torch.float64).softmax(0).numpy()
    np.testing.assert_allclose(list(found.scores.values()), expected, atol=1e-5)
    assert found.label == VERBALIZER.labels[int(expected.argmax())]
    assert sum(found.scores.values()) == pytest.approx(1)


def test_dropout_is_off_and_training_mode_comes_back(reader, tokenizer, inputs):
    expected = predict(reader, tokenizer, inputs, VERBALIZER)
    reader.train()
    _same(predict(reader, tokenizer, inputs, VERBALIZER), expected)
    assert reader.model.training
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


def test_all_tokens_of_a_word_count_not_only_its_first(tokenizer):
    """By hand: "a b" has 0.6 * 0.5 = 0.30, "sea" 0.4 * 0.9 = 0.36, though "a" is likelier first."""
    a, b, sea = tokenizer("a b sea", add_special_tokens=False).input_ids
    end, other = tokenizer.eos_token_id, tokenizer.unk_token_id
    chances = {
        (): {a: 0.6, sea: 0.4},
        (a,): {b: 0.5, other: 0.5},
        (a, b): {end: 1.0},
        (sea,): {end: 0.9, other: 0.1},
    }

    def script(query, written):
        return chances.get(written, {})  # behind a shorter word stands padding

    reader = FusionReader(ScriptedT5(tokenizer, script).eval())
    verbalizer = Verbalizer({"two": "a b", "one": "sea"}, "{text} It was")
    inputs = reader_inputs(tokenizer, verbalizer, ITEMS[:1])
    (found,) = predict(reader, tokenizer, inputs, verbalizer)
    assert found.label == "one"
    assert list(found.scores.values()) == pytest.approx([0.30 / 0.66, 0.36 / 0.66], abs=1e-5)
    # The mean prefers the longer word: 0.30 over 3 tokens, the end too, against 0.36 over 2.
    mean = Decision(length_normalize=True)
    (found,) = predict(reader, tokenizer, inputs, verbalizer, decision=mean)
    assert found.label == "two"
    weights = [0.30 ** (1 / 3), 0.36 ** (1 / 2)]
    assert list(found.scores.values()) == pytest.approx(
        [w / sum(weights) for w in weights], abs=1e-5
    )
    # One token is "a", which is no label's word, and so the first label.
    (found,) = predict(reader, tokenizer, inputs, verbalizer, decision=OFFICIAL)
    assert found.label == "two"


def _accuracies(tokenizer, verbalizer, items):
    """Give the share of an oracle's labels that are right, by decode."""
    inputs = reader_inputs(tokenizer, verbalizer, items)
    reader = oracle(tokenizer, inputs)
    found = {}
    for decode in ("verbalizer", "official"):
        labels = predict(reader, tokenizer, inputs, verbalizer, decision=Decision(decode))
        right = [p.label == label for p, (_, _, label) in zip(labels, items, strict=True)]
        found[decode] = sum(right) / len(right)
    return found


def _questions(verbalizer, counts):
    """Make as many different questions of each label as it has."""
    return [
        (
            f"{label}-{i}",
            (verbalizer.template.format(text=f"question {len(label)}, {i * 7} of {label}"),),
            label,
        )
        for label, count in counts.items()
        for i in range(count)
    ]


@pytest.mark.parametrize("template", ["{text} It was <extra_id_0> .", "Say: {text} It was"])
@pytest.mark.parametrize("kind", ["t5", "t5-v1.1", "mt5"])
def test_official_decode_is_never_right_on_a_word_of_two_tokens(t5_dirs, kind, template):
    tokenizer = load_tokenizer(find_model(str(t5_dirs[kind])))
    words = {"positive": "great", "negative": "terrible", "mixed": "a b"}
    verbalizer = Verbalizer({**words, "calm": "sea"}, template)
    audit = verbalizer.audit(tokenizer)
    assert "mixed" in audit.multi
    assert "negative" in audit.single
    counts = {"positive": 3, "negative": 4, "mixed": 2, "calm": 1}
    missed = sum(counts[label] for label in audit.multi if label != "positive")
    found = _accuracies(tokenizer, verbalizer, _questions(verbalizer, counts))
    assert found == {"verbalizer": 1.0, "official": (10 - missed) / 10}


def test_an_official_label_is_certain_and_unknown_words_are_the_first_label(tokenizer):
    verbalizer = Verbalizer({"good": "great", "bad": "terrible", "mixed": "a b"}, "{text} It was")
    items = _questions(verbalizer, {"mixed": 1, "bad": 1})
    inputs = reader_inputs(tokenizer, verbalizer, items)
    reader = oracle(tokenizer, inputs)
    mixed, bad = predict(reader, tokenizer, inputs, verbalizer, decision=OFFICIAL)
    assert mixed.scores == {"good": 1.0, "bad": 0.0, "mixed": 0.0}
    assert bad.scores == {"good": 0.0, "bad": 1.0, "mixed": 0.0}


TREC_TEST = {
    **{"description": 138, "entity": 94, "abbreviation": 9},
    **{"human": 65, "location": 81, "number": 113},
}
"""Questions of each class in its test set; the questions themselves do not matter to an oracle."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "template", "counts", "official"),
    [
        ("trec", None, TREC_TEST, 406 / 500),
        ("trec", "? <extra_id_0> , {text}", TREC_TEST, 406 / 500),
        ("sst2", "{text} ? <extra_id_0> ,", {"negative": 428, "positive": 444}, 1.0),
    ],
)
def test_the_official_decode_of_a_perfect_reader_ends_at_its_words(
    task, template, counts, official
):
    """TREC's "Entity" is two tokens: 406 of 500 are right at most, 81.2 %."""
    tokenizer = load_tokenizer(find_model("bundled:t5-small-titles"))
    found = load_task(task)
    verbalizer = Verbalizer(found.verbalizer, template or found.reader_template)
    accuracies = _accuracies(tokenizer, verbalizer, _questions(verbalizer, counts))
    assert accuracies == {"verbalizer": 1.0, "official": official}


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
