"""`pgra.Index`: what a query finds, where indexes live, and what is refused."""

import logging
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import SENTENCES, contents
from datasets import Dataset, DatasetDict

import pgra
from pgra.api.searching import _open_encoder
from pgra.data.corpus import CorpusArguments
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError
from pgra.retrieval.base import RetrieverArguments

QUERIES = ["A warm film.", "the sea in March", "apples"]


@pytest.fixture(scope="module")
def encoder(encoder_dir):
    return pgra.Encoder(str(encoder_dir), device="cpu")


@pytest.fixture(scope="module")
def index(encoder):
    return pgra.Index.build(SENTENCES, encoder=encoder)


def brute_force(encoder, passages, queries):
    """All scores, (B, P): the vectors of passages lie on the disk in float16."""
    vectors = encoder.encode(passages).astype(np.float16).astype(np.float32)
    return encoder.encode(queries, is_query=True) @ vectors.T


def test_a_search_is_the_best_dot_products_in_order(index, encoder):
    scores = brute_force(encoder, SENTENCES, QUERIES)
    for found, truth in zip(index.search(QUERIES, k=4), scores, strict=True):
        order = np.argsort(-truth, kind="stable")[:4]
        assert [hit.index for hit in found] == order.tolist()
        np.testing.assert_allclose([hit.score for hit in found], truth[order], rtol=1e-5)
        assert [hit.text for hit in found] == [SENTENCES[row] for row in order]
    assert len({tuple(hit.index for hit in found) for found in index.search(QUERIES, k=4)}) > 1


def test_one_query_gives_what_a_list_of_it_gives(index):
    assert index.search(QUERIES[0], k=3) == index.search([QUERIES[0]], k=3)[0]
    assert index.search([], k=3) == []


def test_more_than_there_is_gives_all_and_less_gives_less(index):
    assert sorted(hit.index for hit in index.search("sea", k=1000)) == list(range(len(SENTENCES)))
    assert len(index.search("sea", k=2)) == 2
    assert len(index.search("sea")) == 10


def test_places_are_those_of_the_list_even_of_equal_passages(encoder):
    texts = ["red apples", " the sea ", "red apples", "two\nlines"]
    index = pgra.Index.build(texts, encoder=encoder)
    assert (len(index), index[1], index[-1]) == (4, "the sea", "two lines")
    assert index[1:3] == ["the sea", "red apples"]
    assert [hit.index for hit in index.search("red apples", k=2)] == [0, 2]
    assert list(index) == ["red apples", "the sea", "red apples", "two lines"]


def test_lists_files_and_data_sets_of_the_same_texts_find_the_same(encoder, index, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join([*SENTENCES, "", SENTENCES[0]]) + "\n")
    table = Dataset.from_dict({"body": SENTENCES, "other": [1] * len(SENTENCES)})
    args = CorpusArguments(corpus=str(tmp_path / "corpus.txt"))
    others = [
        pgra.Index.build(tmp_path / "corpus.txt", encoder=encoder),
        pgra.Index.build(str(tmp_path / "corpus.txt"), encoder=encoder),
        pgra.Index.build(args, encoder=encoder),
        pgra.Index.build(pgra.open_corpus(args), encoder=encoder),
        pgra.Index.build(table, encoder=encoder, field="body"),
        pgra.Index.build(tuple(SENTENCES), encoder=encoder),
    ]
    for other in others:
        assert other.search(QUERIES, k=5) == index.search(QUERIES, k=5)


def test_added_passages_stand_behind_and_are_found_as_if_they_had_been_there(encoder):
    index = pgra.Index.build(SENTENCES[:5], encoder=encoder)
    before = index.search(QUERIES, k=3)
    assert index.add(SENTENCES[5:9]).add(SENTENCES[9:]) is index
    assert list(index) == SENTENCES
    whole = pgra.Index.build(SENTENCES, encoder=encoder)
    assert index.search(QUERIES, k=5) == whole.search(QUERIES, k=5) != before
    index.add(SENTENCES[9:])  # once more: a list's duplicates stay
    assert len(index) == len(SENTENCES) + 3


def test_a_saved_index_can_be_moved_grows_and_leaves_the_first_as_it_was(encoder, tmp_path):
    index = pgra.Index.build(SENTENCES[:6], encoder=encoder).add(["The last one of all."])
    index.save(tmp_path / "saved")
    found = index.search(QUERIES, k=5)
    shutil.move(tmp_path / "saved", tmp_path / "moved")
    first = index.folder
    del index
    assert not first.exists()  # a temporary folder goes with its index
    moved = pgra.Index.load(tmp_path / "moved")
    assert moved.search(QUERIES, k=5) == found
    moved.add(["Another one."])
    again = pgra.Index.load(str(tmp_path / "moved"))
    assert (len(again), again[-1]) == (8, "Another one.")
    assert all(str(tmp_path / "moved") in name for name in again.corpus.made_by.sources)


def test_a_path_keeps_an_index_and_is_taken_up_but_not_by_another(encoder, tmp_path):
    pgra.Index.build(SENTENCES, encoder=encoder, path=tmp_path / "one")
    before = contents(tmp_path / "one")
    again = pgra.Index.build(SENTENCES, encoder=encoder, path=str(tmp_path / "one"))
    assert len(again) == len(SENTENCES)
    for texts, how in ((SENTENCES[1:], {}), (SENTENCES, {"factory": "HNSW8"})):
        with pytest.raises(ArtifactError, match="Index.load, or choose another path"):
            pgra.Index.build(texts, encoder=encoder, path=tmp_path / "one", **how)
    assert contents(tmp_path / "one") == before


def test_what_the_command_line_built_is_opened_searched_and_grown(encoder_dir, tmp_path, capsys):
    from pgra.commands.index import build

    (tmp_path / "corpus.txt").write_text("\n".join(SENTENCES) + "\n")
    words = f"--corpus {tmp_path}/corpus.txt --encoder {encoder_dir} --device cpu"
    assert build([*words.split(), "--artifacts_dir", str(tmp_path / "artifacts")]) == 0
    (folder,) = (p for p in (tmp_path / "artifacts/indexes").iterdir() if p.is_dir())
    index = pgra.Index.load(folder, device="cpu")
    own = pgra.Index.build(SENTENCES, encoder=str(encoder_dir), device="cpu")
    assert index.search(QUERIES, k=5) == own.search(QUERIES, k=5)
    index.add(["A new one."])
    assert index.folder != folder  # its name is a digest of what it is of
    assert len(pgra.Index.load(index.folder)) == len(SENTENCES) + 1
    index.save(tmp_path / "copy")
    assert pgra.Index.load(tmp_path / "copy").search(QUERIES) == index.search(QUERIES)


def test_a_run_finds_in_it_what_it_finds(index, tmp_path):
    context = pgra.Context(artifacts=tmp_path / "artifacts", device="cpu", progress=False)
    corpus = pgra.open_corpus(index.corpus.made_by, tmp_path / "artifacts")
    args = replace(index.args, num_candidates=12)
    retriever = pgra.open_retriever(args, corpus, context)
    assert index.args.encoder == index.encoder_name
    found = retriever.retrieve(QUERIES, 12).rows[:, :3].tolist()
    assert found == [[hit.index for hit in hits] for hits in index.search(QUERIES, k=3)]


@pytest.mark.parametrize("kind", ["transformers", "sentence-transformers"])
def test_a_loaded_encoder_is_the_one_of_its_folder_and_is_kept(kind, encoder_dir, index, tmp_path):
    from sentence_transformers import SentenceTransformer
    from transformers import AutoModel, AutoTokenizer

    if kind == "transformers":
        parts = [kind.from_pretrained(encoder_dir) for kind in (AutoModel, AutoTokenizer)]
        encoder = pgra.Encoder(*parts, max_encoder_tokens=128)
    else:
        model = SentenceTransformer(str(encoder_dir), device="cpu")
        model.max_seq_length = 128
        encoder = model
    made = pgra.Index.build(SENTENCES, encoder=encoder)
    for found, truth in zip(made.search(QUERIES, k=5), index.search(QUERIES, k=5), strict=True):
        assert [hit.index for hit in found] == [hit.index for hit in truth]
        scores = [[hit.score for hit in hits] for hits in (found, truth)]
        np.testing.assert_allclose(*scores, rtol=1e-4)
    made.save(tmp_path / "saved")
    loaded = pgra.Index.load(tmp_path / "saved")
    assert loaded.search(QUERIES) == made.search(QUERIES)
    assert loaded.encoder_name == str(tmp_path / "saved/encoder")


def test_an_encoder_that_is_another_is_refused(encoder_dirs, index, tmp_path):
    index.save(tmp_path / "saved")
    with pytest.raises(ArtifactError, match="was made with encoder"):
        pgra.Index.load(tmp_path / "saved", encoder=str(encoder_dirs["roberta"]))


def test_an_index_that_is_damaged_is_refused(index, tmp_path):
    index.save(tmp_path / "saved")
    file = tmp_path / "saved/index/index.faiss"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(ArtifactError, match="damaged"):
        pgra.Index.load(tmp_path / "saved")


def test_passages_that_are_cut_are_told(encoder_dir, caplog):
    encoder = pgra.Encoder(str(encoder_dir), device="cpu", max_encoder_tokens=8)
    with caplog.at_level(logging.WARNING):
        pgra.Index.build(["the sea"], encoder=encoder)
        assert not caplog.messages
        pgra.Index.build(["the sea", " ".join(SENTENCES)], encoder=encoder)
    assert "1 of 2 passages are longer than the 8 tokens" in caplog.text


BAD = [
    (["a", " "], DataError, r"passages\[1\] is blank: leave it out"),
    (["a", None], DataError, r"passages\[1\]: 'text' is None, not text"),
    (["a", "\udc80"], DataError, r"passages\[1\].* surrogate"),
    ([], DataError, "there are no passages"),
    (7, ValueError, "passages are of type int: give a list of texts, a file, or a Dataset"),
    ({"a": 1}, ValueError, "passages are of type dict"),
    ("nosuch.txt", DataError, "nosuch.txt does not exist"),
    (Dataset.from_dict({"body": ["a"]}), DataError, "no column 'text' .it has body"),
    (DatasetDict({"train": Dataset.from_dict({"text": ["a"]})}), DataError, "give one of its spl"),
]


@pytest.mark.parametrize(("passages", "kind", "words"), BAD, ids=lambda v: None)
def test_bad_passages_are_refused_and_leave_nothing(passages, kind, words, encoder, tmp_path):
    with pytest.raises(kind, match=words):
        pgra.Index.build(passages, encoder=encoder, path=tmp_path / "index")
    assert not (tmp_path / "index").exists()


def test_other_bad_input_is_refused_and_leaves_nothing(encoder, index, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a\n")
    with pytest.raises(ValueError, match="a list holds passages, and these are files .a.txt"):
        pgra.Index.build(["a.txt"], encoder=encoder)
    for factory in ("nonsense", "IVF4096,Flat"):
        with pytest.raises(ConfigError):
            pgra.Index.build(["a", "b"], encoder=encoder, path="new", factory=factory)
        assert not Path("new").exists()
    with pytest.raises(ArtifactError, match="holds a.txt, which is not an index's"):
        pgra.Index.build(["a"], encoder=encoder, path=tmp_path)
    with pytest.raises(ArtifactError, match="nowhere holds no finished index"):
        pgra.Index.load("nowhere")
    with pytest.raises(ArtifactError, match="is not empty"):
        index.save(tmp_path)
    with pytest.raises(ValueError, match="an encoder is a hub id, .* of type int"):
        pgra.Index.build(["a"], encoder=3)
    for query in (3, None, ["a", 3], {"a": "b"}):
        with pytest.raises(ValueError, match="query"):
            index.search(query)
    for k in (0, -1, 2.5, "3", True):
        with pytest.raises(ValueError, match="k is .* give a whole number from 1 on"):
            index.search("a", k=k)
    with pytest.raises(IndexError):
        index[len(SENTENCES)]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt"]


def test_first_guesses_of_a_corpus_work(corpus_file, tmp_path):
    given = [
        pgra.open_corpus(SENTENCES),
        pgra.open_corpus(str(corpus_file)),
        pgra.open_corpus(corpus_file, str(tmp_path / "artifacts")),
    ]
    for corpus in given:
        assert list(corpus) == SENTENCES
    assert (tmp_path / "artifacts/corpora").is_dir()
    folder = given[0].folder
    assert folder.is_dir()
    given.clear()
    del corpus
    assert not folder.exists()


def test_first_guesses_of_an_encoder_work_or_are_told(encoder_dir, encoder):
    truth = encoder.encode(SENTENCES)
    args = RetrieverArguments(encoder=str(encoder_dir))
    for given in (encoder_dir, str(encoder_dir)):
        np.testing.assert_array_equal(pgra.Encoder(given, device="cpu").encode(SENTENCES), truth)
    made = pgra.Encoder.from_name(encoder_dir, device="cpu", pooling="max")
    assert np.abs(made.encode(SENTENCES) - truth).max() > 0.01
    assert made.args == RetrieverArguments(**{**vars(args), "pooling": "max"})
    with pytest.raises(PgraError, match="unknown option of an encoder 'poling'. Did you mean"):
        pgra.Encoder(encoder_dir, poling="max")
    with pytest.raises(ValueError, match="a loaded model needs its tokenizer"):
        pgra.Encoder(made.model)


def test_an_open_encoder_is_not_moved_and_another_device_is_refused(encoder, tmp_path, monkeypatch):
    index = pgra.Index.build(SENTENCES, encoder=encoder, path=tmp_path / "one", device="cpu")
    assert index.search(QUERIES) == pgra.Index.load(index.folder.parent, encoder=encoder).search(
        QUERIES
    )
    for made in (
        lambda: pgra.Index.build(SENTENCES, encoder=encoder, path=tmp_path / "two", device="meta"),
        lambda: pgra.Index.load(tmp_path / "one", encoder=encoder, device="meta"),
    ):
        with pytest.raises(ConfigError, match="device is 'meta', and the encoder given is on cpu"):
            made()
    assert not (tmp_path / "two").exists()
    monkeypatch.setattr(encoder, "device", torch.device("cuda:1"))
    assert _open_encoder(encoder, "cuda") is _open_encoder(encoder, "auto") is encoder
    with pytest.raises(ConfigError, match="is 'cuda:0', and the encoder given is on cuda:1"):
        _open_encoder(encoder, "cuda:0")


def test_wrong_types_are_refused_in_words(encoder, index, tmp_path):
    build = pgra.Index.build
    for made in (
        lambda: build(["a"], encoder=encoder, factory=3),
        lambda: build(["a"], encoder=encoder, path=3),
        lambda: build(["a"], encoder=encoder, field=3),
        lambda: build(["a"], encoder="bundled:minilm-l6", device=3),
        lambda: pgra.Index.load(3),
        lambda: index.save(None),
        lambda: index.add(3),
        lambda: pgra.Encoder(None),
        lambda: pgra.CausalLM("bundled:smollm2-135m", device=3),
    ):
        with pytest.raises(ValueError, match=" (is|are|of type) .*: give | of type NoneType"):
            made()
    assert RetrieverArguments(encoder=Path("a/b")).encoder == "a/b"
    for name, value, words in (
        ("encoder", 3, "encoder is 3: it must be text"),
        ("num_candidates", "5", "num_candidates is '5': it must be a whole number"),
        ("normalize", "no", "normalize is 'no': it must be true or false"),
        ("max_encoder_tokens", "8", "max_encoder_tokens is '8': it must be a whole number"),
    ):
        with pytest.raises(ConfigError, match=words):
            RetrieverArguments(**{name: value})
