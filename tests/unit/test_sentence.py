"""Folders of sentence-transformers: their own parts, limits and prompts, the library's vectors."""

import json
import shutil

import numpy as np
import pytest
import torch
from conftest import SENTENCES
from safetensors.torch import save_file

from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import Context
from pgra.data.corpus import open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ModelError
from pgra.retrieval import open_retriever

PARTS = {"Transformer": "", "Pooling": "1_Pooling", "Dense": "2_Dense", "Normalize": "3_Normalize"}
PROMPTS = {"query": "the town: ", "document": "a film: "}
WIDE = 6


def write_json(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def sentence_dir(source, folder, *parts, activation="torch.nn.modules.activation.Tanh", **files):
    """Make a plain encoder's folder one of sentence-transformers."""
    shutil.copytree(source, folder)
    named = [
        {"idx": n, "name": str(n), "path": PARTS[part], "type": f"sentence_transformers.m.{part}"}
        for n, part in enumerate(("Transformer", "Pooling", *parts))
    ]
    for module in named:  # names that the library itself knows
        module["type"] = module["type"].replace(".m.", ".models.")
    write_json(folder / "modules.json", named)
    write_json(folder / "sentence_bert_config.json", files.get("limits", {"max_seq_length": 64}))
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True}
    write_json(folder / "1_Pooling" / "config.json", {**pooling, **files.get("pooling", {})})
    if "prompts" in files:
        write_json(folder / "config_sentence_transformers.json", {"prompts": files["prompts"]})
    if "Dense" in parts:
        shape = {"in_features": 16, "out_features": WIDE, "bias": True}
        config = {**shape, "activation_function": activation, **files.get("dense", {})}
        write_json(folder / "2_Dense" / "config.json", config)
        generator = torch.Generator().manual_seed(3)
        weights = {
            "linear.weight": torch.randn(WIDE, 16, generator=generator),
            "linear.bias": torch.randn(WIDE, generator=generator),
        }
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    return folder


def make(folder, **kwargs):
    return Encoder.from_name(str(folder), device="cpu", **kwargs)


def test_dense_and_normalize_come_behind_the_pooling(encoder_dir, tmp_path):
    folder = sentence_dir(encoder_dir, tmp_path / "d", "Dense", "Normalize")
    encoder = make(folder, normalize=False)
    plain = make(encoder_dir, normalize=False, max_tokens=64).encode(SENTENCES)
    layer = encoder.sentence.layers[0]
    by_hand = np.tanh(plain @ layer.weight.numpy().T + layer.bias.numpy())
    by_hand /= np.linalg.norm(by_hand, axis=1, keepdims=True)
    np.testing.assert_allclose(encoder.encode(SENTENCES), by_hand, atol=1e-5)
    assert encoder.width == WIDE
    assert encoder.fingerprint["normalize"] is True  # its own part, whatever is asked for


@pytest.mark.parametrize("pooling", ["cls", "max", "pooler"])
def test_parts_behind_a_pooling_are_left_out_under_another(encoder_dir, tmp_path, pooling):
    folder = sentence_dir(encoder_dir, tmp_path / "d", "Dense", "Normalize")
    other = make(folder, pooling=pooling, normalize=False)
    plain = make(encoder_dir, pooling=pooling, normalize=False, max_tokens=64).encode(SENTENCES)
    np.testing.assert_allclose(other.encode(SENTENCES), plain, atol=1e-6)
    assert other.width == 16
    assert not np.allclose(np.linalg.norm(plain, axis=1), 1, atol=1e-2)
    # What was made with them must not be taken for this.
    assert (other.fingerprint["normalize"], "layers" in other.fingerprint) == (False, False)
    unit = make(folder, pooling=pooling)  # unit length, where it is asked for
    np.testing.assert_allclose(np.linalg.norm(unit.encode(SENTENCES), axis=1), 1, atol=1e-5)
    assert unit.fingerprint["normalize"] is True


@pytest.mark.parametrize(
    ("own", "asked"),
    [("mean_tokens", "mean"), ("cls_token", "cls"), ("cls_token", "cls_before_pooler")],
)
def test_a_models_own_pooling_by_name_keeps_its_parts(encoder_dir, tmp_path, own, asked):
    modes = {"pooling_mode_mean_tokens": False, f"pooling_mode_{own}": True}
    folder = sentence_dir(encoder_dir, tmp_path / "d", "Dense", "Normalize", pooling=modes)
    silent, told = make(folder, normalize=False), make(folder, normalize=False, pooling=asked)
    np.testing.assert_array_equal(told.encode(SENTENCES), silent.encode(SENTENCES))
    np.testing.assert_allclose(np.linalg.norm(told.encode(SENTENCES), axis=1), 1, atol=1e-5)


def test_the_weights_behind_the_pooling_are_part_of_the_fingerprint(encoder_dir, tmp_path):
    first = make(sentence_dir(encoder_dir, tmp_path / "a", "Dense")).fingerprint
    changed = sentence_dir(encoder_dir, tmp_path / "b", "Dense")
    assert make(changed).fingerprint == first
    weights = {"linear.weight": torch.ones(WIDE, 16), "linear.bias": torch.zeros(WIDE)}
    save_file(weights, changed / "2_Dense" / "model.safetensors")
    assert make(changed).fingerprint != first


def test_its_own_longest_text_holds_unless_another_is_asked_for(encoder_dir, tmp_path):
    short = sentence_dir(encoder_dir, tmp_path / "s", limits={"max_seq_length": 8})
    encoder = make(short)
    encoder.encode([SENTENCES[0]])
    assert (encoder.fingerprint["max_tokens"], encoder.num_cut) == (8, 1)
    assert make(short, max_tokens=32).fingerprint["max_tokens"] == 32
    silent = sentence_dir(encoder_dir, tmp_path / "n", limits={})
    assert make(silent).fingerprint["max_tokens"] == 160  # as many as it has positions for
    large = sentence_dir(encoder_dir, tmp_path / "l", limits={"max_seq_length": 4096})
    assert make(large).fingerprint["max_tokens"] == 160


def test_prompts_stand_before_queries_and_passages(encoder_dir, tmp_path):
    folder = sentence_dir(encoder_dir, tmp_path / "e5", prompts=PROMPTS)
    told, plain = make(folder), make(folder, query_prompt="", passage_prompt="")
    for is_query, prompt in ((True, PROMPTS["query"]), (False, PROMPTS["document"])):
        vectors = told.encode(SENTENCES, is_query=is_query)
        by_hand = plain.encode([prompt + text for text in SENTENCES], is_query=is_query)
        np.testing.assert_allclose(vectors, by_hand, atol=1e-6)
        assert not np.allclose(vectors, plain.encode(SENTENCES), atol=1e-2)
    assert told.fingerprint == {**plain.fingerprint, "passage_prompt": PROMPTS["document"]}
    assert told.query_fingerprint == {**told.fingerprint, "query_prompt": PROMPTS["query"]}
    asked = make(encoder_dir, query_prompt=PROMPTS["query"], max_tokens=64)
    np.testing.assert_allclose(
        asked.encode(SENTENCES, is_query=True), told.encode(SENTENCES, is_query=True), atol=1e-6
    )


def test_another_query_prompt_finds_others_in_the_same_index(encoder_dir, tmp_path):
    (tmp_path / "c.txt").write_text("".join(f"{text}\n" for text in SENTENCES))
    corpus = open_corpus(CorpusArguments(corpus=str(tmp_path / "c.txt")), tmp_path)

    def search(prompt):
        args = RetrieverArguments(encoder=str(encoder_dir), num_candidates=5, query_prompt=prompt)
        return open_retriever(args, corpus, Context(artifacts=tmp_path, device="cpu"))

    plain, asked = search(None), search("the river of the town: ")
    assert len([p for p in (tmp_path / "indexes").iterdir() if p.is_dir()]) == 1
    assert asked.fingerprint == {**plain.fingerprint, "query_prompt": "the river of the town: "}
    scores = [found.retrieve(["red apples"], 5).scores for found in (plain, asked)]
    assert not np.allclose(*scores, atol=1e-3)


BAD = {
    "part": ({"module": "sentence_transformers.models.LSTM"}, "has a part 'LSTM'.*only Dense"),
    "pooling": ({"only": "Transformer"}, "has no Pooling .*no single vector"),
    "code": ({"module": "custom_code.Transformer"}, r"needs code of its own \('custom_code"),
    "activation": ({"activation": "torch.nn.Mish"}, "has activation 'Mish', and only GELU"),
    "residual": ({"dense": {"use_residual": True}}, "use_residual True, which is not done here"),
    "weights": ({"without": "2_Dense/model.safetensors"}, "Dense part without 2_Dense/config.json"),
    "damaged": ({"damaged": "2_Dense/model.safetensors"}, "model.safetensors.*cannot be read"),
    "no json": ({"damaged": "modules.json"}, "modules.json of .* cannot be read"),
    "prompts": ({"prompts": ["a"]}, "the prompts of .* are .*, not texts by name"),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_is_not_known_is_refused_by_name(encoder_dir, tmp_path, kind):
    change, message = BAD[kind]
    files = {name: change[name] for name in ("activation", "dense", "prompts") if name in change}
    folder = sentence_dir(encoder_dir, tmp_path / "bad", "Dense", **files)
    if "module" in change:
        modules = json.loads((folder / "modules.json").read_text())
        modules.append({"idx": 9, "name": "9", "path": "", "type": change["module"]})
        write_json(folder / "modules.json", modules)
    if "only" in change:
        modules = json.loads((folder / "modules.json").read_text())
        kept = [module for module in modules if module["type"].endswith(change["only"])]
        write_json(folder / "modules.json", kept)
    if "without" in change:
        (folder / change["without"]).unlink()
    if "damaged" in change:
        (folder / change["damaged"]).write_text("{")
    with pytest.raises(ModelError, match=message) as told:
        make(folder)
    assert "\n" not in str(told.value)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("kind", "parts", "files"),
    [
        ("bert", [], {}),
        ("bert", ["Normalize"], {"pooling": {"pooling_mode": "cls"}}),
        ("bert", ["Dense", "Normalize"], {"prompts": PROMPTS}),
        ("roberta", ["Dense"], {"limits": {"max_seq_length": 9, "do_lower_case": True}}),
        ("roberta", [], {"pooling": {"pooling_mode": "max"}}),
        ("bert", ["Normalize"], {"pooling": {"pooling_mode": "lasttoken"}, "limits": {}}),
    ],
)
def test_vectors_are_those_of_the_library(encoder_dirs, tmp_path, kind, parts, files):
    library = pytest.importorskip("sentence_transformers")
    folder = sentence_dir(encoder_dirs[kind], tmp_path / "s", *parts, **files)
    theirs, ours = library.SentenceTransformer(str(folder), device="cpu"), make(folder)
    raw = make(folder, normalize=False)
    texts = [*SENTENCES, "Sea", SENTENCES[3] * 2]
    expected = theirs.encode_document(texts)
    np.testing.assert_allclose(raw.encode(texts), expected, atol=1e-5)
    np.testing.assert_allclose(
        raw.encode(texts, is_query=True), theirs.encode_query(texts), atol=1e-5
    )
    lengths = np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(ours.encode(texts), expected / lengths, atol=1e-5)
    if "prompts" in files:  # the control: the library's own prompts matter
        assert not np.allclose(theirs.encode(texts), expected, atol=1e-3)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_bundled_encoder_gives_the_librarys_vectors(two_threads):
    library = pytest.importorskip("sentence_transformers")
    from pgra.data.bundled import bundled_model_dir

    ours = Encoder.from_name("bundled:minilm-l6", device="cpu")
    assert ours.fingerprint["max_tokens"] == 256
    texts = [*SENTENCES, " ".join(SENTENCES), " ".join(SENTENCES * 3)]  # 2 longer than 128 tokens
    theirs = library.SentenceTransformer(str(bundled_model_dir("minilm-l6")), device="cpu")
    np.testing.assert_allclose(ours.encode(texts), theirs.encode(texts), atol=1e-5)
    cut = Encoder.from_name("bundled:minilm-l6", device="cpu", max_tokens=128).encode(texts)
    assert not np.allclose(cut[-1], ours.encode(texts)[-1], atol=1e-3)
