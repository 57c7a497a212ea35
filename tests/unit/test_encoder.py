"""Encoders: poolings, invariances, and sentence-transformers folders as that library reads them."""

import json
import shutil
from functools import partial

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer import modules
from tiny_models import build_encoder
from transformers import AutoModel, AutoTokenizer

from pgra.artifacts import write_json
from pgra.data.bundled import bundled_model_dir
from pgra.encoders import POOLINGS
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError, ModelError

close = partial(np.testing.assert_allclose, atol=1e-5)


def make(folder, **kwargs):
    return Encoder.load(str(folder), device="cpu", **kwargs)


def by_hand(folder, text, pooling):
    """One text, no padding, straight from transformers."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder)
    with torch.no_grad():
        output = model.eval()(**tokenizer(text, return_tensors="pt"))
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
    own = sentence_dir(encoder_dir, tmp_path / "s", limits={"max_seq_length": 8})
    for encoder in (make(encoder_dir, max_encoder_tokens=8), make(own)):
        vectors = encoder.encode(texts)
        assert encoder.num_cut == 2
        close(vectors[0], vectors[1], atol=1e-6)
    assert make(own, max_encoder_tokens=32).fingerprint["max_tokens"] == 32
    folder = sentence_dir(encoder_dir, tmp_path / "large", limits={"max_seq_length": 4096})
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
    message = f"max_encoder_tokens is {window + 1}, .* at most {window}: lower it"
    with pytest.raises(ConfigError, match=message):
        make(encoder_dirs[kind], max_encoder_tokens=window + 1)
    full = make(encoder_dirs[kind], max_encoder_tokens=window)
    assert np.isfinite(full.encode(["red apples " * 300])).all()


def test_auto_knows_simcse_by_name(encoder_dir, tmp_path):
    known = {"unsup-simcse-bert": "cls_before_pooler", "sup-simcse-bert": "pooler", "e5": "mean"}
    for name, pooling in known.items():
        folder = shutil.copytree(encoder_dir, tmp_path / name)
        assert make(folder).fingerprint["pooling"] == pooling


TEXTS = [*SENTENCES, "sea", " ".join(SENTENCES[:4])]


def test_vectors_leave_the_device_as_the_float16_that_is_stored(encoder_dir):
    encoder = make(encoder_dir, encoder_batch_tokens=64)
    halves = encoder.begin(encoder.tokenize(TEXTS), in_half=True)()
    assert halves.dtype == np.float16
    np.testing.assert_array_equal(halves, encoder.encode(TEXTS).astype(np.float16))


def test_a_vector_that_is_not_finite_is_refused_with_its_text(tmp_path):
    encoder = make(build_encoder(tmp_path / "sick"))
    word = encoder.model.tokenizer("apples")["input_ids"][1]
    with torch.no_grad():
        encoder.model.transformers_model.embeddings.word_embeddings.weight[word] = float("nan")
    with pytest.raises(ModelError, match="vector of text 1 is not finite: 'apples'"):
        encoder.encode(["sea", "apples"])


@pytest.mark.gpu
def test_a_gpu_gives_the_same_vectors(encoder_dir):
    on_gpu = Encoder.load(str(encoder_dir), device="cuda", encoder_dtype="float32")
    close(on_gpu.encode(SENTENCES), make(encoder_dir).encode(SENTENCES), atol=1e-4)


# Folders of sentence-transformers: their own parts, limits and prompts.

PARTS = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
PROMPTS = {"query": "the town: ", "document": "a film: "}
MODELS, WIDE, WEIGHTS = "sentence_transformers.models", 6, "model.safetensors"


def sentence_dir(source, folder, *parts, modules=None, **files):
    """Make a plain encoder's folder one of sentence-transformers."""
    shutil.copytree(source, folder)
    named = [
        {"idx": n, "name": str(n), "path": PARTS[part], "type": f"{MODELS}.{part}"}
        for n, part in enumerate(("Transformer", "Pooling", *parts))
    ]
    write_json(folder / "modules.json", named if modules is None else modules(named))
    write_json(folder / "sentence_bert_config.json", files.get("limits", {"max_seq_length": 64}))
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", {**pooling, **files.get("pooling", {})})
    if "prompts" in files:
        write_json(folder / "config_sentence_transformers.json", {"prompts": files["prompts"]})
    if "Dense" in parts:
        shape = {"in_features": 16, "out_features": WIDE, "bias": True}
        tanh = {"activation_function": "torch.nn.modules.activation.Tanh"}
        write_json(folder / "2_Dense" / "config.json", {**shape, **tanh, **files.get("dense", {})})
        draw = torch.Generator().manual_seed(files.get("seed", 3))
        weights = {
            "linear.weight": torch.randn(WIDE, 16, generator=draw),
            "linear.bias": torch.randn(WIDE, generator=draw),
        }
        save_file(weights, folder / "2_Dense" / WEIGHTS)
    return folder


def test_prompts_stand_before_queries_and_passages(encoder_dir, tmp_path):
    folder = sentence_dir(encoder_dir, tmp_path / "e5", prompts=PROMPTS)
    told, plain = make(folder), make(folder, query_prompt="", passage_prompt="")
    for is_query, prompt in ((True, PROMPTS["query"]), (False, PROMPTS["document"])):
        vectors = told.encode(SENTENCES, is_query=is_query)
        close(vectors, plain.encode([prompt + text for text in SENTENCES], is_query=is_query))
        assert not np.allclose(vectors, plain.encode(SENTENCES), atol=1e-2)
    assert told.fingerprint == {**plain.fingerprint, "passage_prompt": PROMPTS["document"]}
    assert told.query_fingerprint == {**told.fingerprint, "query_prompt": PROMPTS["query"]}
    asked = make(encoder_dir, query_prompt=PROMPTS["query"], max_encoder_tokens=64)
    close(asked.encode(SENTENCES, is_query=True), told.encode(SENTENCES, is_query=True))


def moved(folder, **places):
    """Give parts other folders, as modules.json says."""
    modules = json.loads((folder / "modules.json").read_text())
    for module in modules:
        place = places.get(module["type"].rpartition(".")[2])
        if place and module["path"]:
            (folder / module["path"]).rename(folder / place)
        elif place:
            files = [path for path in folder.iterdir() if path.is_file()]
            (folder / place).mkdir()
            for file in files:
                if file.name not in ("modules.json", "config_sentence_transformers.json"):
                    file.rename(folder / place / file.name)
        module["path"] = place or module["path"]
    write_json(folder / "modules.json", modules)
    return folder


def more(kind):
    return {"modules": lambda named: [*named, {"idx": 9, "name": "9", "path": "", "type": kind}]}


BAD = {
    "references the module class 'custom_code": more("custom_code.Transformer"),
    "activation 'own.ReLU'": {"dense": {"activation_function": "own.ReLU"}},
    "without '..' components": {"modules": lambda named: [*named, {**named[0], "path": "../x"}]},
}


@pytest.mark.parametrize("message", BAD)
def test_code_and_files_of_others_are_refused(encoder_dir, tmp_path, message):
    with pytest.raises(ModelError, match=message):
        make(sentence_dir(encoder_dir, tmp_path / "bad", "Dense", **BAD[message]))


def test_weights_that_may_hold_code_are_refused(encoder_dir, tmp_path):
    folder = sentence_dir(encoder_dir, tmp_path / "s", "Dense")
    weights = folder / "2_Dense" / WEIGHTS
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    make(folder)  # the control: beside others they are not read
    weights.unlink()
    with pytest.raises(ModelError, match=r"no .safetensors weights, the only kind"):
        make(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "parts", "files"),
    [
        ("bert", ["Dense", "Normalize"], {"prompts": PROMPTS}),
        ("roberta", ["Dense"], {"limits": {"max_seq_length": 9, "do_lower_case": True}}),
        ("roberta", [], {"pooling": {"pooling_mode": "max"}}),
        ("bert", ["Normalize"], {"pooling": {"pooling_mode": "lasttoken"}, "limits": {}}),
        ("bert", ["Normalize"], {"prompts": {"passage": "a film: ", "other": "x "}}),
    ],
)
def test_vectors_are_those_of_the_library(encoder_dirs, tmp_path, kind, parts, files):
    folder = sentence_dir(encoder_dirs[kind], tmp_path / "s", *parts, **files)
    theirs, ours = SentenceTransformer(str(folder), device="cpu"), make(folder)
    raw = make(folder, normalize=False)
    texts = [*SENTENCES, "Sea", SENTENCES[3] * 2]
    expected = theirs.encode_document(texts)
    close(raw.encode(texts), expected)
    close(raw.encode(texts, is_query=True), theirs.encode_query(texts))
    close(ours.encode(texts), expected / np.linalg.norm(expected, axis=1, keepdims=True))
    if files.get("prompts") == PROMPTS:  # the control: the library's own prompts matter
        assert not np.allclose(theirs.encode(texts), expected, atol=1e-3)


def dense_parts(folder):
    return [*plain_parts(folder, "cls"), modules.Dense(16, WIDE), modules.Normalize()]


def plain_parts(folder, mode="mean"):
    return [modules.Transformer(str(folder), max_seq_length=12), modules.Pooling(16, mode)]


def static_parts(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    return [modules.StaticEmbedding(tokenizer, embedding_dim=16)]


def router_parts(folder):
    return [modules.Router.for_query_document(static_parts(folder), plain_parts(folder))]


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("parts", "cut"),
    [(dense_parts, None), (dense_parts, 3), (static_parts, None), (router_parts, None)],
)
def test_a_folder_that_the_library_saved_gives_its_vectors(encoder_dir, tmp_path, parts, cut):
    model = SentenceTransformer(
        modules=parts(encoder_dir), prompts=PROMPTS, device="cpu", truncate_dim=cut
    )
    folder, texts = tmp_path / "saved", [*SENTENCES, SENTENCES[3] * 3]
    model.save(str(folder))
    documents = model.encode_document(texts, normalize_embeddings=True)
    queries = model.encode_query(texts, normalize_embeddings=True)
    assert not np.allclose(documents, queries, atol=1e-3)
    ours = make(folder)
    close(ours.encode(texts), documents)
    close(ours.encode(texts, is_query=True), queries)
    close(Encoder.load(model, normalize=False).encode(texts), model.encode_document(texts))
    if parts is dense_parts:
        assert make(folder, pooling="pooler").width == 16  # the pooling alone
        moved(folder, Transformer="0_T", Pooling="pool", Dense="head")
        close(make(folder).encode(texts), documents)
        weights = load_file(folder / "head" / WEIGHTS)
        save_file({name: 2 * w for name, w in weights.items()}, folder / "head" / WEIGHTS)
        assert make(folder).fingerprint != ours.fingerprint


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_bundled_encoder_gives_the_librarys_vectors():
    ours = make("bundled:minilm-l6")
    assert ours.fingerprint["max_tokens"] == 256
    texts = [*SENTENCES, " ".join(SENTENCES), " ".join(SENTENCES * 3)]  # 2 longer than 128 tokens
    theirs = SentenceTransformer(str(bundled_model_dir("minilm-l6")), device="cpu")
    close(ours.encode(texts), theirs.encode(texts))
