import itertools
import json
import shutil
import signal
import subprocess
import sys
import time

import faiss
import numpy as np
import pytest
from conftest import largest_file

from pgra.artifacts import lock_folder
from pgra.config import CorpusArguments
from pgra.core import Context, Worker
from pgra.data.corpus import open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.retrieval.dense import build_dense_index
from pgra.retrieval.faiss import IndexPlan, Sample, depths_for, without_own
from pgra.retrieval.shards import read_vectors

PLAN = {"factory", "memory", "rescore_factor"}
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


def build(corpus, encoder, folder, **kwargs):
    kwargs = {"factory": "Flat", **kwargs}
    plan = IndexPlan(**{name: kwargs.pop(name) for name in PLAN & set(kwargs)})
    return build_dense_index(
        corpus, encoder, folder, **{"plan": plan, "shard_rows": 10, "progress": False, **kwargs}
    )


def contents(folder):
    """Every file's bytes, the manifest without its times."""
    files = {p.name: p.read_bytes() for p in folder.iterdir() if not p.name.startswith(".")}
    manifest = json.loads(files.pop("manifest.json"))
    for name in ("created", "seconds"):
        del manifest[name]
    for name in ("texts_per_second", "queries_per_second"):
        del manifest["counts"][name]
    return files, manifest


def flip_a_byte(path):
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def test_vectors_are_read_by_row_however_the_shards_were_cut(corpus, encoder, tmp_path):
    rows = np.array([0, 9, 10, 31, 39])
    for shard_rows in (7, 10, 64):
        folder = tmp_path / str(shard_rows)
        build(corpus, encoder, folder, shard_rows=shard_rows)
        vectors = read_vectors(folder, rows)
        assert vectors.dtype == np.float16
        expected = encoder.encode([TEXTS[row] for row in rows])
        np.testing.assert_allclose(vectors, expected, atol=1e-3)
        assert abs(vectors[0] - expected[1]).max() > 1e-2  # the control
    with pytest.raises(ArtifactError, match="lacks 1 vectors: delete it, run again"):
        read_vectors(folder, np.array([3, 40]))


def test_a_built_index_holds_all_vectors(corpus, encoder, tmp_path):
    built = build(corpus, encoder, tmp_path / "i")
    names = {f"vectors-0000{n}.{end}" for n in range(4) for end in ("npy", "json")}
    assert set(built.manifest.files) == names | {"index.faiss"}
    assert built.num_reused == 0
    vectors = np.concatenate([np.load(p) for p in sorted((tmp_path / "i").glob("*.npy"))])
    np.testing.assert_allclose(vectors, encoder.encode(TEXTS[:40]), atol=1e-3)
    index = faiss.read_index(str(tmp_path / "i" / "index.faiss"))
    np.testing.assert_array_equal(index.reconstruct_n(0, 40), vectors.astype(np.float32))
    counts = built.manifest.counts
    assert (counts["rows"], counts["dim"], counts["cut"], counts["is_exact"]) == (40, 16, 0, True)


@pytest.mark.parametrize("damage", ["record", "both", "byte", "foreign", "half-written"])
def test_a_build_gone_on_with_is_the_unbroken_one(damage, corpus, encoder, tmp_path):
    build(corpus, encoder, tmp_path / "whole")
    build(corpus, encoder, tmp_path / "broken")
    folder, shard = tmp_path / "broken", tmp_path / "broken" / "vectors-00002.npy"
    (folder / "manifest.json").unlink()
    (folder / "index.faiss").unlink()
    record = shard.with_suffix(".json")
    if damage == "byte":
        flip_a_byte(shard)
    elif damage == "foreign":
        record.write_text(record.read_text().replace('"made_of": "', '"made_of": "0'))
    else:
        record.unlink()
    if damage == "both":
        shard.unlink()
    if damage == "half-written":
        (folder / ".12345678.partial.npy").write_bytes(b"half")
    again = build(corpus, encoder, folder)
    assert again.num_reused == 30
    assert contents(folder) == contents(tmp_path / "whole")
    assert not list(folder.glob(".*.partial*"))


def test_resumed_shards_are_told(corpus, encoder, tmp_path, caplog):
    build(corpus, encoder, tmp_path / "i")
    (tmp_path / "i" / "manifest.json").unlink()
    (tmp_path / "i" / "vectors-00001.json").unlink()
    with caplog.at_level("INFO"):
        build(corpus, encoder, tmp_path / "i")
    assert "3 of 4 shards already there" in caplog.text


def test_shards_of_another_size_are_made_again(corpus, encoder, tmp_path):
    build(corpus, encoder, tmp_path / "i", shard_rows=7)
    (tmp_path / "i" / "manifest.json").unlink()
    assert build(corpus, encoder, tmp_path / "i").num_reused == 0
    build(corpus, encoder, tmp_path / "whole")
    assert contents(tmp_path / "i") == contents(tmp_path / "whole")


def test_another_factory_takes_over_the_vectors_and_another_encoder_does_not(
    corpus, encoder, encoder_dir, tmp_path, caplog
):
    build(corpus, encoder, tmp_path / "flat")
    flip_a_byte(tmp_path / "flat" / "vectors-00002.npy")
    with caplog.at_level("INFO"):
        taken = build(corpus, encoder, tmp_path / "sq", factory="SQfp16", home=tmp_path)
    assert f"3 of 4 shards are those of {tmp_path / 'flat'}" in caplog.text
    assert taken.num_reused == 30  # all but the damaged one
    alone = build(
        corpus, encoder, tmp_path / "apart" / "sq", factory="SQfp16", home=tmp_path / "no"
    )
    assert alone.num_reused == 0
    assert contents(taken.folder) == contents(alone.folder)
    other = Encoder.from_name(str(encoder_dir), device="cpu", pooling="max")
    assert build(corpus, other, tmp_path / "other", home=tmp_path).num_reused == 0


def test_a_shard_made_again_leaves_its_lender_as_it_was(corpus, encoder, tmp_path):
    build(corpus, encoder, tmp_path / "flat")
    before = contents(tmp_path / "flat")
    build(corpus, encoder, tmp_path / "sq", factory="SQfp16", home=tmp_path)
    (tmp_path / "sq" / "manifest.json").unlink()
    (tmp_path / "sq" / "vectors-00001.json").unlink()
    assert build(corpus, encoder, tmp_path / "sq", factory="SQfp16").num_reused == 30
    assert contents(tmp_path / "flat") == before


def test_a_finished_index_is_reused_whole(corpus, encoder, tmp_path):
    build(corpus, encoder, tmp_path / "i")
    before = (tmp_path / "i" / "manifest.json").read_bytes()
    assert build(corpus, encoder, tmp_path / "i").num_reused == 40
    assert (tmp_path / "i" / "manifest.json").read_bytes() == before


def test_a_damaged_index_is_refused(corpus, encoder, tmp_path):
    build(corpus, encoder, tmp_path / "i")
    flip_a_byte(tmp_path / "i" / "index.faiss")
    with pytest.raises(ArtifactError, match=r"index\.faiss is damaged"):
        build(corpus, encoder, tmp_path / "i")


def test_two_jobs_do_not_share_a_folder(corpus, encoder, tmp_path):
    with (
        lock_folder(tmp_path / "i"),
        pytest.raises(ArtifactError, match="in use by another pgra job"),
    ):
        build(corpus, encoder, tmp_path / "i")
    assert not list((tmp_path / "i").glob("vectors-*"))


def test_a_folder_with_something_else_is_left_alone(corpus, encoder, tmp_path):
    (tmp_path / "letters.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"holds letters\.txt, which is not an index's"):
        build(corpus, encoder, tmp_path)
    assert (tmp_path / "letters.txt").read_text() == "mine"


def test_each_process_encodes_its_share(corpus, encoder, tmp_path):
    """Both ranks run in threads here; test_index_build.py starts real processes."""
    from threading import Barrier, Thread

    both = Barrier(2, timeout=60)
    folder = tmp_path / "two"
    results = {}
    name = str(encoder.model.config._name_or_path)
    # Loaded one after the other: from_pretrained patches torch while it runs, so that two threads
    # in it leave the patches behind.
    own = [Encoder.from_name(name, device="cpu") for _ in range(2)]

    def work(rank):
        built = build(corpus, own[rank], folder, context=Context(Worker(rank, 2), both.wait))
        results[rank] = built.manifest

    threads = [Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results[0] == results[1]
    build(corpus, encoder, tmp_path / "one")
    assert contents(folder) == contents(tmp_path / "one")


def test_an_unknown_factory_is_refused_before_encoding(corpus, encoder, tmp_path):
    with pytest.raises(ConfigError, match=r"index_factory 'Flt' does not work .*Use Flat"):
        build(corpus, encoder, tmp_path / "i", factory="Flt")
    with pytest.raises(ConfigError, match="'IVF64,Flat' has 64 lists, the corpus 40 passages"):
        build(corpus, encoder, tmp_path / "i", factory="IVF64,Flat")
    assert not (tmp_path / "i").exists()


def test_a_factory_that_needs_more_passages_is_refused(corpus, encoder, tmp_path):
    with pytest.raises(ConfigError, match="'PQ4' cannot be trained on 40 passages"):
        build(corpus, encoder, tmp_path / "i", factory="PQ4")


@pytest.mark.parametrize(("factory", "name"), [("IVF8,Flat", "nprobe"), ("HNSW8", "efSearch")])
def test_an_approximate_index_finds_nearly_all(factory, name, encoder, tmp_path):
    corpus = make_corpus(tmp_path, TEXTS[:400])
    built = build(corpus, encoder, tmp_path / "i", factory=factory, shard_rows=150)
    counts = built.manifest.counts
    assert set(counts["recall"]) == {"10", "150"}
    assert counts["recall"]["150"] >= 0.95
    assert set(counts["search"]) == {name}
    if name == "nprobe":  # the setting is on disk, not only in the manifest
        index = faiss.read_index(str(tmp_path / "i" / "index.faiss"))
        assert index.nprobe == counts["search"]["nprobe"]


@pytest.fixture(scope="module")
def lossy(encoder, tmp_path_factory):
    """A lossy index, and others of the same vectors."""
    root = tmp_path_factory.mktemp("lossy")
    corpus = make_corpus(root, TEXTS[:400])

    def remake(name, **kwargs):
        if name != "first":  # what was encoded is there already
            shutil.copytree(root / "first", root / name)
            (root / name / "manifest.json").unlink()
        kwargs = {"factory": "PQ2x4", "shard_rows": 150, **kwargs}
        counts = build(corpus, encoder, root / name, **kwargs).manifest.counts
        return counts, (root / name / "index.faiss").read_bytes()

    return remake, remake("first")


def test_a_lossy_index_says_how_much_it_loses(lossy):
    remake, (counts, content) = lossy
    assert 0.02 < counts["recall"]["10"] < 0.9
    assert counts["is_exact"] is False
    assert counts["trained_on"] == 400
    assert counts["recall_of"] == "200 passages not tuned on"
    assert counts["queries_per_second"] > 0
    told, same = remake("rescored", rescore_factor=4)
    assert told["recall_without_rescoring"] == counts["recall"]
    assert told["recall"]["10"] > counts["recall"]["10"]
    assert told["rescore_factor"] == 4
    assert same == content  # only the search differs


def test_recall_is_measured_with_queries_that_are_given(lossy):
    remake, (counts, content) = lossy
    told, same = remake("queries", queries=TEXTS[400:450])
    assert told["recall_of"] == "50 queries"
    assert told["recall"] != counts["recall"]
    assert same == content


def test_an_exact_index_beyond_the_memory_gets_no_file(corpus, encoder, tmp_path):
    small = build(corpus, encoder, tmp_path / "s", memory=40 * 16 * 4 - 1)
    assert "index.faiss" not in small.manifest.files
    counts = small.manifest.counts
    assert (counts["is_exact"], counts["recall"]) == (True, {"10": 1.0, "39": 1.0})
    assert (
        "index.faiss" in build(corpus, encoder, tmp_path / "l", memory=40 * 16 * 4).manifest.files
    )
    with pytest.raises(ArtifactError, match="lacks 1 vectors"):
        read_vectors(tmp_path / "s", np.array([40]))


def test_recall_agrees_with_brute_force_on_the_sample():
    vectors = np.random.default_rng(0).normal(size=(50, 8)).astype(np.float32)
    rows = np.array([3, 17, 40])
    sample = Sample.search(rows, vectors[rows], [vectors[:20], vectors[20:23], vectors[23:]], 10)
    scores = vectors[rows] @ vectors.T
    scores[np.arange(3), rows] = -np.inf
    np.testing.assert_array_equal(sample.neighbours, np.argsort(-scores, axis=1)[:, :10])


def test_own_row_is_left_out_of_recall():
    found = np.array([[4, 7, 9], [1, 2, 3]])
    assert without_own(found, np.array([7, 0])).tolist() == [[4, 9], [1, 2]]
    assert depths_for(1) == []
    assert depths_for(5) == [4]
    assert depths_for(1000) == [10, 150]


def test_one_passage_makes_an_index(encoder, tmp_path):
    built = build(make_corpus(tmp_path, ["sea"]), encoder, tmp_path / "i", factory="HNSW8")
    assert built.manifest.counts["rows"] == 1


def test_vectors_too_large_for_float16_are_refused(corpus, encoder_dir, tmp_path):
    encoder = Encoder.from_name(str(encoder_dir), device="cpu", normalize=False)
    encoder.model.register_forward_hook(
        lambda module, args, output: output.__setitem__(
            "last_hidden_state", output.last_hidden_state * 1e6
        )
    )
    with pytest.raises(ModelError, match="passage 0 exceeds 65504.*use normalize"):
        build(corpus, encoder, tmp_path / "i")


@pytest.mark.parametrize("limit", [400, 1000])  # a shard is 448 bytes, index.faiss 2.6 kB
def test_a_full_disk_leaves_nothing_half_written(limit, corpus, encoder, tmp_path):
    folder = tmp_path / "i"
    with largest_file(limit), pytest.raises(OSError, match=r"\[Errno"):
        build(corpus, encoder, folder)
    left = {p.name for p in folder.iterdir() if p.name != ".lock"}
    assert not {name for name in left if "partial" in name or "index" in name or "manif" in name}
    assert build(corpus, encoder, folder).num_reused == (0 if limit == 400 else 40)


KILLED = """
import sys
from pathlib import Path
from pgra.data.corpus import load_corpus
from pgra.encoders.encoder import Encoder
from pgra.retrieval.dense import build_dense_index
encoder = Encoder.from_name(sys.argv[1], device="cpu", batch_tokens=64)
build_dense_index(
    load_corpus(Path(sys.argv[2])), encoder, Path(sys.argv[3]), shard_rows=20, progress=False
)
"""


@pytest.mark.slow
def test_a_killed_build_goes_on_where_it_stopped(encoder_dir, tmp_path):
    corpus = make_corpus(tmp_path, TEXTS)
    job = [sys.executable, "-c", KILLED, encoder_dir, corpus.folder]
    process = subprocess.Popen([*job, tmp_path / "broken"], stderr=subprocess.DEVNULL)
    while len(list((tmp_path / "broken").glob("vectors-*.json"))) < 5 and process.poll() is None:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "broken" / "manifest.json").exists()
    encoder = Encoder.from_name(str(encoder_dir), device="cpu", batch_tokens=64)
    again = build(corpus, encoder, tmp_path / "broken", shard_rows=20)
    assert 80 <= again.num_reused < len(TEXTS)
    build(corpus, encoder, tmp_path / "whole", shard_rows=20)
    assert contents(tmp_path / "broken") == contents(tmp_path / "whole")
