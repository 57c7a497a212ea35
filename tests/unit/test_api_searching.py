"""`pgra.Index`: what a query finds, where indexes live, and what is refused."""

import numpy as np
import pytest
from conftest import SENTENCES
from datasets import Dataset
from transformers import AutoModel, AutoTokenizer

import pgra
from pgra.commands.index import main as build_index
from pgra.data.corpus import CorpusArguments
from pgra.errors import ArtifactError

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


def test_places_are_those_of_the_list_even_of_equal_passages(encoder):
    texts = ["red apples", " the sea ", "red apples", "two\nlines"]
    index = pgra.Index.build(texts, encoder=encoder)
    assert index.corpus.slice(0, 9) == ["red apples", "the sea", "red apples", "two lines"]
    assert [hit.index for hit in index.search("red apples", k=2)] == [0, 2]


def test_files_and_data_sets_of_the_same_texts_find_the_same(encoder, index, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join([*SENTENCES, "", SENTENCES[0]]) + "\n")
    args = CorpusArguments(corpus=str(tmp_path / "corpus.txt"))
    table = Dataset.from_dict({"body": SENTENCES, "other": [1] * len(SENTENCES)})
    for given in (tmp_path / "corpus.txt", args, table):
        other = pgra.Index.build(given, encoder=encoder, field="body")
        assert other.search(QUERIES, k=5) == index.search(QUERIES, k=5)


def test_a_moved_index_opens(encoder, index, tmp_path):
    home, moved = tmp_path / "one", tmp_path / "moved"
    pgra.Index.build(SENTENCES, encoder=encoder, path=home)
    home.rename(moved)
    assert pgra.Index.load(moved).search(QUERIES, k=5) == index.search(QUERIES, k=5)


def test_what_the_command_line_built_is_opened_and_searched(encoder_dir, index, tmp_path):
    (tmp_path / "corpus.txt").write_text("\n".join(SENTENCES) + "\n")
    words = f"--corpus {tmp_path}/corpus.txt --encoder {encoder_dir} --device cpu"
    assert build_index([*words.split(), "--output_dir", str(tmp_path / "made")]) == 0
    assert pgra.Index.load(tmp_path / "made").search(QUERIES, k=5) == index.search(QUERIES, k=5)


def test_a_loaded_encoder_is_the_one_of_its_folder_and_is_kept(encoder_dirs, index, tmp_path):
    parts = [kind.from_pretrained(encoder_dirs["bert"]) for kind in (AutoModel, AutoTokenizer)]
    kept = tmp_path / "kept"
    made = pgra.Index.build(SENTENCES, encoder=pgra.Encoder(*parts), path=kept)
    for found, truth in zip(made.search(QUERIES, k=5), index.search(QUERIES, k=5), strict=True):
        assert [hit.index for hit in found] == [hit.index for hit in truth]
        scores = [[hit.score for hit in hits] for hits in (found, truth)]
        np.testing.assert_allclose(*scores, rtol=1e-4)
    loaded = pgra.Index.load(kept)
    assert loaded.search(QUERIES) == made.search(QUERIES)
    assert loaded.args.encoder == str(kept / "encoder")
    with pytest.raises(ArtifactError, match="was made with encoder"):
        pgra.Index.load(kept, encoder=str(encoder_dirs["roberta"]))
