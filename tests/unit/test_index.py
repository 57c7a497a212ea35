"""Dense indexes as they are built: shards, going on, many processes, recall."""

import itertools
import json
from threading import Barrier, Thread

import faiss
import numpy as np
import pytest
from conftest import largest_file
from small_index import flip_byte

from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import Context, Worker
from pgra.data.corpus import open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.retrieval import IndexRequest
from pgra.retrieval.dense import find_or_build
from pgra.retrieval.shards import find_shards, read_rows

WORDS = ["red", "blue", "film", "sea", "town", "album", "apples", "river", "garden", "story"]
TEXTS = [" ".join(words) for words in itertools.permutations(WORDS, 3)]  # 720


@pytest.fixture(scope="module")
def encoder(encoder_dir):
    return Encoder.from_name(str(encoder_dir), device="cpu")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), TEXTS[:40])


def make_corpus(folder, texts):
    (folder / "texts.txt").write_text("\n".join(texts) + "\n")
    return open_corpus(CorpusArguments(corpus=str(folder / "texts.txt")), folder)


def build(corpus, encoder, folder, *, rank=0, world=1, wait=lambda: None, queries=None, **args):
    args = {"index_factory": "Flat", "shard_rows": 10, **args}
    is_home = folder.parent.name == "indexes"  # where vectors may be taken over
    root = folder.parent.parent if is_home else folder.parent / f"of-{folder.name}"
    request = IndexRequest(
        args=RetrieverArguments(encoder="an encoder", **args),
        corpus=corpus,
        context=Context(Worker(rank, world), wait, root, device="cpu", progress=False),
        output_dir=folder,
        recall_queries=queries,
    )
    return find_or_build(request, encoder)


def contents(folder):
    """Every file's bytes, the manifest without its times and what was asked for."""
    files = {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
    manifest = json.loads(files.pop("manifest.json"))
    for name in ("created", "seconds"):
        del manifest[name]
    for name in ("texts_per_second", "queries_per_second", "recipe"):
        manifest["counts"].pop(name, None)
    return files, manifest


@pytest.mark.parametrize("shard_rows", [7, 64])
def test_a_built_index_holds_all_vectors_however_the_shards_are_cut(
    shard_rows, corpus, encoder, tmp_path
):
    folder = tmp_path / "index"
    built = build(corpus, encoder, folder, shard_rows=shard_rows)
    vectors = read_rows(find_shards(folder), np.arange(40))
    assert vectors.dtype == np.float16
    np.testing.assert_allclose(vectors, encoder.encode(TEXTS[:40]), atol=1e-3)
    some = np.array([0, 9, 10, 31, 39])
    np.testing.assert_array_equal(read_rows(find_shards(folder), some), vectors[some])
    with pytest.raises(ArtifactError, match="lacks 1 vectors: delete it, run again"):
        read_rows(find_shards(folder), np.array([3, 40]))
    index = faiss.read_index(str(folder / "index.faiss"))
    np.testing.assert_array_equal(index.reconstruct_n(0, 40), vectors.astype(np.float32))
    counts = built.manifest.counts
    assert (counts["rows"], counts["dim"], counts["cut"], counts["is_exact"]) == (40, 16, 0, True)
    assert {path.partition("-")[0] for path in built.manifest.files} == {"vectors", "index.faiss"}


@pytest.mark.parametrize("damage", ["record", "both", "byte", "foreign", "other sizes"])
def test_a_build_gone_on_with_is_the_unbroken_one(damage, corpus, encoder, tmp_path, caplog):
    build(corpus, encoder, tmp_path / "whole")
    rows = 7 if damage == "other sizes" else 10
    build(corpus, encoder, tmp_path / "broken", shard_rows=rows)
    folder, shard = tmp_path / "broken", tmp_path / "broken" / "vectors-00002.npy"
    (folder / "manifest.json").unlink()
    (folder / "index.faiss").unlink()
    (folder / ".12345678.partial.npy").write_bytes(b"half")
    record = shard.with_suffix(".json")
    if damage == "byte":
        flip_byte(shard)
    elif damage == "foreign":
        record.write_text(record.read_text().replace('"made_of": "', '"made_of": "0'))
    elif damage != "other sizes":
        record.unlink()
    if damage == "both":
        shard.unlink()
    with caplog.at_level("INFO"):
        again = build(corpus, encoder, folder)
    assert again.num_reused == (0 if damage == "other sizes" else 30)
    assert ("3 of 4 shards already there" in caplog.text) == (damage != "other sizes")
    assert contents(folder) == contents(tmp_path / "whole")
    assert not list(folder.glob(".*.partial*"))


def test_another_factory_takes_over_the_vectors_and_another_encoder_does_not(
    corpus, encoder, encoder_dir, tmp_path, caplog
):
    home = tmp_path / "indexes"
    build(corpus, encoder, home / "flat")
    flip_byte(home / "flat" / "vectors-00002.npy")
    lender = contents(home / "flat")
    with caplog.at_level("INFO"):
        taken = build(corpus, encoder, home / "sq", index_factory="SQfp16")
    assert f"3 of 4 shards are those of {home / 'flat'}" in caplog.text
    assert taken.num_reused == 30  # all but the damaged one
    alone = build(corpus, encoder, tmp_path / "apart" / "sq", index_factory="SQfp16")
    assert alone.num_reused == 0
    assert contents(taken.folder) == contents(alone.folder)
    other = Encoder.from_name(str(encoder_dir), device="cpu", pooling="max")
    assert build(corpus, other, home / "other").num_reused == 0
    (home / "sq" / "manifest.json").unlink()
    (home / "sq" / "vectors-00001.json").unlink()
    assert build(corpus, encoder, home / "sq", index_factory="SQfp16").num_reused == 40
    assert contents(home / "flat") == lender  # a shard made again leaves its lender as it was


def test_each_process_encodes_its_share(corpus, encoder, tmp_path):
    """Both ranks run in threads here; test_index_build.py starts real processes."""
    both, folder, results = Barrier(2, timeout=60), tmp_path / "two", {}
    name = str(encoder.model.config._name_or_path)
    # Loaded one after the other: from_pretrained patches torch while it runs, so that two threads
    # in it leave the patches behind.
    own = [Encoder.from_name(name, device="cpu") for _ in range(2)]

    def work(rank):
        built = build(corpus, own[rank], folder, rank=rank, world=2, wait=both.wait)
        results[rank] = built.manifest

    for _ in range(2):  # built, and found
        threads = [Thread(target=work, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results[0] == results[1]
    build(corpus, encoder, tmp_path / "one")
    assert contents(folder) == contents(tmp_path / "one")


@pytest.mark.parametrize(
    ("factory", "message", "is_begun"),
    [
        ("Flt", r"index_factory 'Flt' does not work .*Use Flat", False),
        ("IVF64,Flat", "'IVF64,Flat' has 64 lists, the corpus 40 passages", False),
        ("PQ4", "'PQ4' cannot be trained on 40 passages", True),
    ],
)
def test_a_factory_that_cannot_work_is_refused(
    factory, message, is_begun, corpus, encoder, tmp_path
):
    with pytest.raises(ConfigError, match=message):
        build(corpus, encoder, tmp_path / "i", index_factory=factory)
    assert (tmp_path / "i").exists() == is_begun


@pytest.mark.parametrize(("factory", "name"), [("IVF8,Flat", "nprobe"), ("HNSW8", "efSearch")])
def test_an_approximate_index_finds_nearly_all(factory, name, encoder, tmp_path):
    corpus = make_corpus(tmp_path, TEXTS[:320])
    built = build(corpus, encoder, tmp_path / "i", index_factory=factory, shard_rows=150)
    counts = built.manifest.counts
    assert set(counts["recall"]) == {"10", "150"}
    assert counts["recall"]["150"] >= 0.95
    assert set(counts["search"]) == {name}
    if name == "nprobe":  # the setting is on disk, not only in the manifest
        index = faiss.read_index(str(tmp_path / "i" / "index.faiss"))
        assert index.nprobe == counts["search"]["nprobe"]
    one = make_corpus(tmp_path, ["sea"])
    assert build(one, encoder, tmp_path / "one", index_factory="HNSW8").manifest.counts["rows"] == 1


def test_a_lossy_index_says_how_much_it_loses(encoder, tmp_path):
    corpus, home = make_corpus(tmp_path, TEXTS[:320]), tmp_path / "indexes"
    lossy = {"index_factory": "PQ2x4", "rescore_factor": 0}
    made = {}
    for name, changes in {
        "first": {},
        "rescored": {"rescore_factor": 4},
        "queries": {"queries": TEXTS[400:450]},
    }.items():  # the vectors are those of the first
        made[name] = build(corpus, encoder, home / name, **{**lossy, **changes}).manifest
    counts, rescored, asked = (one.counts for one in made.values())
    assert len({one.files["index.faiss"]["checksum"] for one in made.values()}) == 1
    assert 0.02 < counts["recall"]["10"] < 0.9
    assert (counts["is_exact"], counts["trained_on"]) == (False, 320)
    assert counts["recall_of"] == "160 passages not tuned on"
    assert counts["queries_per_second"] > 0
    assert rescored["recall_without_rescoring"] == counts["recall"]
    assert rescored["recall"]["10"] > counts["recall"]["10"]
    assert asked["recall_of"] == "50 queries"
    assert asked["recall"] != counts["recall"]


def test_vectors_too_large_for_float16_are_refused(corpus, encoder_dir, tmp_path):
    encoder = Encoder.from_name(str(encoder_dir), device="cpu", normalize=False)
    encoder.model.register_forward_hook(
        lambda module, args, output: output.__setitem__(
            "last_hidden_state", output.last_hidden_state * 1e6
        )
    )
    with pytest.raises(ModelError, match="passage 0 exceeds 65504.*use normalize"):
        build(corpus, encoder, tmp_path / "i")


@pytest.mark.parametrize(("limit", "num_reused"), [(400, 0), (1000, 40)])
def test_a_full_disk_leaves_nothing_half_written(limit, num_reused, corpus, encoder, tmp_path):
    folder = tmp_path / "index"  # a shard is 448 bytes, index.faiss 2.6 kB
    with largest_file(limit), pytest.raises(OSError, match=f"{folder}"):
        build(corpus, encoder, folder)
    assert {path.name.partition("-")[0] for path in folder.glob("*")} <= {"vectors"}
    assert build(corpus, encoder, folder).num_reused == num_reused
