"""Dense indexes as they are built: shards, going on, other factories, recall."""

import itertools
import shutil

import faiss
import numpy as np
import pytest
from conftest import contents
from small_index import World, flip_byte

from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ModelError
from pgra.retrieval.dense import Index, find_shards, read_rows

WORDS = ["red", "blue", "film", "sea", "town", "album", "apples", "river", "garden", "story"]
TEXTS = [" ".join(words) for words in itertools.permutations(WORDS, 3)]  # 720


class Builder(World):
    """Builds indexes of some texts under one folder, where they may lend vectors to each other."""

    def make(self, name="index", **changes):
        folder = self.context.artifacts / "indexes" / name
        (built,) = self.build("dense", **{"folder": folder, "shard_rows": 10, **changes})
        return built


@pytest.fixture
def small(tmp_path, encoder_dir):
    return Builder(tmp_path, encoder_dir, TEXTS[:40])


def product(folder):
    """Every file's bytes but the manifest's, which tells times."""
    return {name: data for name, data in contents(folder).items() if name != "manifest.json"}


@pytest.mark.parametrize("shard_rows", [7, 64])
def test_a_built_index_holds_all_vectors_however_the_shards_are_cut(shard_rows, small):
    built = small.make(shard_rows=shard_rows)
    shards = find_shards(built.folder)
    vectors = read_rows(shards, np.arange(40))
    assert vectors.dtype == np.float16
    encoder = Encoder(str(small.encoder), device="cpu")
    np.testing.assert_allclose(vectors, encoder.encode(TEXTS[:40]), atol=1e-3)
    some = np.array([0, 9, 10, 31, 39])
    np.testing.assert_array_equal(read_rows(shards, some), vectors[some])
    with pytest.raises(ArtifactError, match="1 vectors"):
        read_rows(shards, np.array([3, 40]))
    index = faiss.read_index(str(built.folder / "index.faiss"))
    np.testing.assert_array_equal(index.reconstruct_n(0, 40), vectors.astype(np.float32))
    counts = built.manifest.counts
    assert (counts["rows"], counts["dim"], counts["cut"], counts["is_exact"]) == (40, 16, 0, True)


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["byte", "foreign", "other sizes"])
def test_a_build_gone_on_with_is_the_unbroken_one(damage, small):
    folder = small.make().folder
    whole = product(folder)
    if damage == "other sizes":
        shutil.rmtree(folder)
        small.make(shard_rows=7)
    (folder / "manifest.json").unlink()
    (folder / ".12345678.partial.npy").write_bytes(b"half")
    shard = folder / "vectors-00002.npy"
    record = shard.with_suffix(".json")
    if damage == "byte":
        flip_byte(shard)
    elif damage == "foreign":
        record.write_text(record.read_text().replace('"made_of": "', '"made_of": "0'))
    again = small.make()
    assert again.reused == (0 if damage == "other sizes" else 30)
    assert product(folder) == whole
    assert not list(folder.glob(".*.partial*"))


@pytest.mark.slow
def test_another_factory_takes_over_the_vectors(small):
    flat = small.make("flat").folder
    flip_byte(flat / "vectors-00002.npy")
    lender = product(flat)
    taken = small.make("sq", index_factory="SQfp16")
    assert taken.reused == 30  # all but the damaged one
    assert small.make("other", pooling="max").reused == 0
    (taken.folder / "manifest.json").unlink()
    (taken.folder / "vectors-00001.json").unlink()
    assert small.make("sq", index_factory="SQfp16").reused == 40
    assert product(flat) == lender  # a shard made again leaves its lender as it was


def test_vectors_too_large_for_float16_are_refused(small):
    encoder = Encoder(str(small.encoder), device="cpu", normalize=False)
    encoder.model[0].register_forward_hook(
        lambda part, given, features: {
            **features,
            "token_embeddings": features["token_embeddings"] * 1e6,
        }
    )
    with pytest.raises(ModelError, match="text 0"):
        Index(small.request(), encoder)
