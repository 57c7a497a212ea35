import json
import shutil
import weakref

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from tiny_models import build_encoder
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel

from pgra.encoders.encoder import POOLINGS, Encoder, resolve_pooling
from pgra.errors import ConfigError, ModelError
from pgra.lm.load import find_model


def make(folder, **kwargs):
    return Encoder.from_name(str(folder), device="cpu", **kwargs)


def by_hand(folder, text, pooling):
    """One text, no padding, straight from transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        output = model.eval()(**tokenizer(text, return_tensors="pt"))
    hidden = output.last_hidden_state[0]
    vector = {
        "cls": hidden[0],
        "cls_before_pooler": hidden[0],
        "last": hidden[-1],
        "max": hidden.max(0).values,
        "mean": hidden.mean(0),
        "pooler": output.pooler_output[0],
    }[pooling]
    return vector.numpy()


@pytest.mark.parametrize("pooling", POOLINGS)
def test_each_pooling_is_what_its_name_says(encoder_dir, pooling):
    encoder = make(encoder_dir, pooling=pooling, normalize=False)
    expected = np.stack([by_hand(encoder_dir, text, pooling) for text in SENTENCES[:3]])
    np.testing.assert_allclose(encoder.encode(SENTENCES[:3]), expected, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_neither_order_nor_batch_size_nor_padding_matters(encoder_dirs, kind):
    texts = [*SENTENCES, "sea", SENTENCES[0] * 3]
    whole = make(encoder_dirs[kind]).encode(texts)
    singly = make(encoder_dirs[kind], batch_tokens=1).encode(texts)
    np.testing.assert_allclose(whole, singly, atol=1e-5)
    backwards = make(encoder_dirs[kind]).encode(texts[::-1])[::-1]
    np.testing.assert_allclose(whole, backwards, atol=1e-5)
    assert np.abs(whole[0] - whole[1]).max() > 1e-2  # other words, another vector


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_many_texts_get_the_vectors_of_few(encoder_dirs, kind):
    """Of many the weights are laid out anew."""
    encoder, texts = make(encoder_dirs[kind]), [*SENTENCES, "sea"] * 30
    many = encoder.encode(texts)
    few = np.concatenate([encoder.encode(texts[i : i + 50]) for i in range(0, len(texts), 50)])
    np.testing.assert_allclose(many, few, atol=1e-5)
    assert not np.array_equal(many, few)  # the last digits tell that it was another way


def test_cut_texts_are_counted_and_only_their_beginning_is_read(encoder_dir):
    encoder = make(encoder_dir, max_tokens=8)
    vectors = encoder.encode([SENTENCES[0], SENTENCES[0] + " And more words.", "sea"])
    assert encoder.num_cut == 2
    np.testing.assert_allclose(vectors[0], vectors[1], atol=1e-6)
    assert make(encoder_dir, max_tokens=16).encode(["sea"]).shape == (1, 16)


def test_the_fingerprint_tells_encoders_apart(encoder_dirs):
    base = make(encoder_dirs["bert"]).fingerprint
    assert base == make(encoder_dirs["bert"], batch_tokens=7).fingerprint
    for other in (
        make(encoder_dirs["roberta"]),
        make(encoder_dirs["bert"], pooling="cls"),
        make(encoder_dirs["bert"], normalize=False),
        make(encoder_dirs["bert"], max_tokens=64),
        make(encoder_dirs["bert"], dtype="bfloat16"),
    ):
        assert other.fingerprint != base


def test_positions_are_limited_to_what_the_model_has(encoder_dirs):
    with pytest.raises(ConfigError, match=r"max_encoder_tokens is 161, .* at most 160: lower it"):
        make(encoder_dirs["bert"], max_tokens=161)
    with pytest.raises(ConfigError, match=r"max_encoder_tokens is 160, .* at most 159"):
        make(encoder_dirs["roberta"], max_tokens=160)
    full = make(encoder_dirs["roberta"], max_tokens=159)
    assert np.isfinite(full.encode(["red apples " * 300])).all()


def test_a_pooler_without_weights_is_refused(encoder_dir, tmp_path):
    folder = tmp_path / "no-pooler"
    bare = BertModel(BertConfig.from_pretrained(encoder_dir), add_pooling_layer=False)
    bare.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_dir).save_pretrained(folder)
    with pytest.raises(ModelError, match="has no pooler weights.*use cls or mean"):
        make(folder, pooling="pooler")
    assert make(folder, pooling="mean").encode(["sea"]).shape == (1, 16)


def test_an_encoder_decoder_is_refused(t5_dir):
    with pytest.raises(ModelError, match=r"encoder-decoder \(t5\)"):
        make(t5_dir)


def write_pooling(folder, values):
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pooling_mode": ["cls", "mean"]}, r"asks for pooling 'cls \+ mean', which there is not"),
        ({"pooling_mode": "mean", "include_prompt": False}, "leaves its prompt out of the pooling"),
    ],
)
def test_auto_refuses_what_it_would_do_wrong(encoder_dir, tmp_path, values, message):
    folder = shutil.copytree(encoder_dir, tmp_path / "odd")
    write_pooling(folder, values)
    with pytest.raises(ModelError, match=message):
        make(folder)
    assert make(folder, pooling="mean").encode(["sea"]).shape == (1, 16)  # what the user names


@pytest.mark.parametrize(
    ("name", "pooling"),
    [("unsup-simcse-bert", "cls_before_pooler"), ("sup-simcse-bert", "pooler"), ("e5", "mean")],
)
def test_auto_knows_simcse_by_name(encoder_dir, tmp_path, name, pooling):
    folder = shutil.copytree(encoder_dir, tmp_path / name)
    assert resolve_pooling(find_model(str(folder))) == pooling


def test_out_of_memory_halves_the_batch_and_loses_nothing(encoder_dir, caplog, monkeypatch):
    expected = make(encoder_dir).encode(SENTENCES)
    encoder = make(encoder_dir)

    attempts, alive = [], []

    def refuse_large(module, args, kwargs):
        if len(kwargs["input_ids"]) > 2:
            held = torch.empty(1)  # what a layer had made when the next found no room
            attempts.append(weakref.ref(held))
            raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: alive.append(attempts[-1]() is not None))

    encoder.model.register_forward_pre_hook(refuse_large, with_kwargs=True)
    done = []
    np.testing.assert_allclose(encoder.encode(SENTENCES, advance=done.append), expected, atol=1e-5)
    assert sum(done) == len(SENTENCES)
    assert "out of memory" in caplog.text
    assert len(alive) == len(attempts) > 0
    assert not any(alive)  # a cache is emptied of what nobody holds


def test_a_vector_that_is_not_finite_is_refused_with_its_text(tmp_path):
    encoder = make(build_encoder(tmp_path / "sick"))
    word = encoder.tokenizer("apples")["input_ids"][1]
    with torch.no_grad():
        encoder.model.embeddings.word_embeddings.weight[word] = float("nan")
    with pytest.raises(ModelError, match="vector of text 1 is not finite: 'apples'"):
        encoder.encode(["sea", "apples"])


@pytest.mark.gpu
def test_a_gpu_gives_the_same_vectors(encoder_dir):
    on_gpu = Encoder.from_name(str(encoder_dir), device="cuda", dtype="float32").encode(SENTENCES)
    np.testing.assert_allclose(on_gpu, make(encoder_dir).encode(SENTENCES), atol=1e-4)
