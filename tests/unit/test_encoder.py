"""Encoders: poolings, invariances, and sentence-transformers folders as that library reads them."""

import json
import shutil
from functools import cache, partial

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tiny_models import build_encoder
from transformers import AutoModel, AutoTokenizer

from pgra.artifacts import write_json
from pgra.encoders import POOLINGS
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError, ModelError

close = partial(np.testing.assert_allclose, atol=1e-5)


def make(folder, **kwargs):
    return Encoder(str(folder), device="cpu", **kwargs)


@cache
def output_of(folder, text):
    """One text, no padding, straight from transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        return model.eval()(**tokenizer(text, return_tensors="pt"))


def by_hand(folder, text, pooling):
    output = output_of(folder, text)
    hidden = output.last_hidden_state[0]
    poolings = {"last": hidden[-1], "max": hidden.max(0).values, "mean": hidden.mean(0)}
    poolings["pooler"] = output.pooler_output[0]
    return poolings.get(pooling, hidden[0]).numpy()  # "cls" by its two names


@pytest.mark.parametrize("pooling", POOLINGS[1:])
def test_each_pooling_is_what_its_name_says(encoder_dir, pooling):
    encoder = make(encoder_dir, pooling=pooling, normalize=False)
    expected = np.stack([by_hand(encoder_dir, text, pooling) for text in SENTENCES[:3]])
    close(encoder.encode(SENTENCES[:3]), expected)


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_neither_order_nor_batch_size_nor_padding_nor_number_matters(encoder_dirs, kind):
    texts = [*SENTENCES, "sea", SENTENCES[0] * 3]
    encoder = make(encoder_dirs[kind])
    whole = encoder.encode(texts)
    close(whole, make(encoder_dirs[kind], encoder_batch_tokens=1).encode(texts))
    close(whole, encoder.encode(texts[::-1])[::-1])
    many = encoder.encode(texts * 28)  # of many the weights are laid out anew
    close(many, np.tile(whole, (28, 1)))
    assert not np.array_equal(many[: len(whole)], whole)  # the last digits tell


def test_cut_texts_are_counted_and_only_their_beginning_is_read(encoder_dir, tmp_path):
    texts = [SENTENCES[0], SENTENCES[0] + " And more words.", "sea"]
    own = saved(tmp_path / "s", plain(encoder_dir, length=8))
    for encoder in (make(encoder_dir, max_encoder_tokens=8), make(own)):
        vectors = encoder.encode(texts)
        assert encoder.tokenize(texts).num_cut == 2
        close(vectors[0], vectors[1], atol=1e-6)
    assert make(own, max_encoder_tokens=32).fingerprint["max_tokens"] == 32
    folder = saved(tmp_path / "large", plain(encoder_dir, length=4096))
    assert make(folder).fingerprint["max_tokens"] == 160  # as many as it has positions for


def test_the_fingerprint_tells_encoders_apart(encoder_dirs):
    base = make(encoder_dirs["bert"]).fingerprint
    assert base == make(encoder_dirs["bert"], encoder_batch_tokens=7).fingerprint
    changes = {"pooling": "cls", "normalize": False, "max_encoder_tokens": 64}
    for name, value in {**changes, "encoder_dtype": "bfloat16"}.items():
        assert make(encoder_dirs["bert"], **{name: value}).fingerprint != base
    assert make(encoder_dirs["roberta"]).fingerprint != base


@pytest.mark.parametrize(("kind", "window"), [("bert", 160), ("roberta", 159)])
def test_positions_are_limited_to_what_the_model_has(encoder_dirs, kind, window):
    with pytest.raises(ConfigError, match=f"{window + 1}"):
        make(encoder_dirs[kind], max_encoder_tokens=window + 1)
    full = make(encoder_dirs[kind], max_encoder_tokens=window)
    assert np.isfinite(full.encode(["red apples " * 300])).all()


def test_auto_knows_simcse_by_name(encoder_dir, tmp_path):
    known = {"unsup-simcse-bert": "cls_before_pooler", "sup-simcse-bert": "pooler", "e5": "mean"}
    for name, pooling in known.items():
        folder = shutil.copytree(encoder_dir, tmp_path / name)
        assert make(folder).fingerprint["pooling"] == pooling


TEXTS = [*SENTENCES, "sea", " ".join(SENTENCES[:4])]


def test_a_vector_that_is_not_finite_is_refused_with_its_text(tmp_path):
    encoder = make(build_encoder(tmp_path / "sick"))
    word = encoder.model.tokenizer("apples")["input_ids"][1]
    with torch.no_grad():
        encoder.model.transformers_model.embeddings.word_embeddings.weight[word] = float("nan")
    with pytest.raises(ModelError, match="text 1 .*'apples'"):
        encoder.encode(["sea", "apples"])


@pytest.mark.gpu
def test_a_gpu_gives_the_same_vectors(encoder_dir):
    on_gpu = Encoder(str(encoder_dir), device="cuda", encoder_dtype="float32")
    close(on_gpu.encode(SENTENCES), make(encoder_dir).encode(SENTENCES), atol=1e-4)


# Folders of sentence-transformers, as that library reads them.

PROMPTS = {"query": "the town: ", "document": "a film: "}
WIDE, WEIGHTS = 6, "model.safetensors"


def plain(folder, mode="mean", length=64):
    return [modules.Transformer(str(folder), max_seq_length=length), modules.Pooling(16, mode)]


def dense(folder):
    return [*plain(folder, "cls"), modules.Dense(16, WIDE), modules.Normalize()]


def static(folder):
    return [modules.StaticEmbedding(AutoTokenizer.from_pretrained(folder), embedding_dim=16)]


def router(folder):
    return [modules.Router.for_query_document(static(folder), plain(folder))]


def saved(folder, parts, **how):
    SentenceTransformer(modules=parts, device="cpu", **how).save(str(folder))
    return folder


def edit(path, change):
    write_json(path, change(json.loads(path.read_text())))


def test_prompts_stand_before_queries_and_passages(encoder_dir, tmp_path):
    folder = saved(tmp_path / "e5", plain(encoder_dir), prompts=PROMPTS)
    told, bare = make(folder), make(folder, query_prompt="", passage_prompt="")
    for is_query, prompt in ((True, PROMPTS["query"]), (False, PROMPTS["document"])):
        vectors = told.encode(SENTENCES, is_query=is_query)
        close(vectors, bare.encode([prompt + text for text in SENTENCES], is_query=is_query))
        assert not np.allclose(vectors, bare.encode(SENTENCES), atol=1e-2)
    assert told.fingerprint == {**bare.fingerprint, "passage_prompt": PROMPTS["document"]}
    assert told.query_fingerprint == {**told.fingerprint, "query_prompt": PROMPTS["query"]}
    asked = make(encoder_dir, query_prompt=PROMPTS["query"], max_encoder_tokens=64)
    close(asked.encode(SENTENCES, is_query=True), told.encode(SENTENCES, is_query=True))


def test_an_activation_of_others_code_is_refused(encoder_dir, tmp_path):
    folder = saved(tmp_path / "bad", dense(encoder_dir))
    edit(folder / "2_Dense/config.json", lambda c: c | {"activation_function": "own.ReLU"})
    with pytest.raises(ModelError, match="own.ReLU"):
        make(folder)


def test_weights_that_may_hold_code_are_refused(encoder_dir, tmp_path):
    folder = saved(tmp_path / "s", dense(encoder_dir))
    weights = folder / "2_Dense" / WEIGHTS
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    make(folder)  # the control: beside others they are not read
    weights.unlink()
    with pytest.raises(ModelError, match="2_Dense"):
        make(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "parts", "cut"),
    [
        *(("bert", parts, None) for parts in (plain, dense, static, router)),
        *(("roberta", plain, None), ("bert", dense, 3)),
    ],
)
def test_vectors_are_those_of_the_library(encoder_dirs, tmp_path, kind, parts, cut):
    folder = tmp_path / "saved"
    saved(folder, parts(encoder_dirs[kind]), prompts=PROMPTS, truncate_dim=cut)
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), make(folder)
    raw = make(folder, normalize=False)
    texts = [*SENTENCES, "Sea", SENTENCES[3] * 2]
    for is_query, ask in ((True, theirs.encode_query), (False, theirs.encode_document)):
        close(raw.encode(texts, is_query=is_query), ask(texts))
        close(ours.encode(texts, is_query=is_query), ask(texts, normalize_embeddings=True))
    assert not np.allclose(ours.encode(texts), ours.encode(texts, is_query=True), atol=1e-3)
    close(Encoder(theirs).encode(texts), ours.encode(texts))


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_parts_elsewhere_and_older_names_are_read(encoder_dir, tmp_path):
    folder = saved(tmp_path / "old", dense(encoder_dir))
    new = make(folder)
    (folder / "1_Pooling").rename(folder / "pool")
    edit(folder / "modules.json", lambda m: [m[0], {**m[1], "path": "pool"}, *m[2:]])
    limits = folder / "sentence_bert_config.json"
    limits.rename(folder / "sentence_roberta_config.json")
    old = {"word_embedding_dimension": 16, "pooling_mode_cls_token": True}
    write_json(folder / "pool/config.json", {**old, "pooling_mode_mean_tokens": False})
    assert make(folder).fingerprint["max_tokens"] == 64
    close(make(folder).encode(TEXTS), new.encode(TEXTS))
    assert make(folder, pooling="mean").width == 16  # the pooling alone
