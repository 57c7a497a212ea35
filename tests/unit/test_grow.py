"""Indexes that grow, and from which rows are removed."""

import json

import faiss
import numpy as np
import pytest
from conftest import SENTENCES, largest_file

from pgra.artifacts import lock_folder, write_json
from pgra.commands.common import quiet_libraries
from pgra.config import CorpusArguments, RetrieverArguments
from pgra.core import Context
from pgra.data.corpus import open_corpus
from pgra.errors import ArtifactError, ConfigError, DataError, PgraError
from pgra.retrieval import IndexRequest, find_retriever, open_retriever
from pgra.retrieval.dense import search_kept
from pgra.retrieval.maintain import add_passages, remove_rows, verify_index
from pgra.retrieval.shards import find_shards, read_rows

OLD, NEW = SENTENCES[:7], SENTENCES[7:]


class Home:
    """A corpus in two files, and arguments that index it."""

    def __init__(self, root, encoder):
        self.root, self.encoder = root, encoder
        self.context = Context(artifacts=root / "artifacts", device="cpu", progress=False)
        self.one, self.two = root / "one.txt", root / "two.txt"
        self.one.write_text("".join(f"{text}\n" for text in OLD))
        self.two.write_text("".join(f"{text}\n" for text in [OLD[2], *NEW]))  # one is there already

    def args(self, **changes):
        return RetrieverArguments(
            **{"encoder": str(self.encoder), "shard_rows": 3, "num_candidates": 4, **changes}
        )

    def corpus(self, *names, **rules):
        sources = [str(name) for name in names or (self.one,)]
        return open_corpus(CorpusArguments(corpus=sources, **rules), self.context.artifacts)

    def build(self, *names, folder=None, rules=None, **changes):
        args = self.args(**changes)
        corpus = self.corpus(*names, **(rules or {}))
        request = IndexRequest(args=args, corpus=corpus, context=self.context, output_dir=folder)
        (built,) = find_retriever(args.retriever).prepare(request)
        return built.folder

    def add(self, folder, *names):
        more = [str(name) for name in names or (self.two,)]
        return add_passages(folder, more, self.context)

    def open(self, folder, *names, **changes):
        args = self.args(index_dir=None if folder is None else str(folder), **changes)
        return open_retriever(args, self.corpus(*names), self.context)


@pytest.fixture
def home(tmp_path, encoder_dir):
    return Home(tmp_path, encoder_dir)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_a_grown_index_keeps_its_shards_and_finds_what_one_built_whole_finds(home):
    folder = home.build(folder=home.root / "index")
    before = {name: data for name, data in files(folder).items() if name.startswith("vectors")}
    grown = home.add(folder)
    assert (grown.folder, grown.num_reused) == (folder, 7)
    after = files(folder)
    assert {name: after[name] for name in before} == before
    new = {f"vectors-0000{n}.{end}" for n in (3, 4) for end in ("npy", "json")}
    assert set(after) - set(before) == {*new, "index-12.faiss", "manifest.json"}
    counts = grown.manifest.counts
    assert (counts["rows"], counts["is_exact"], set(counts["recall"])) == (12, True, {"10", "11"})
    names = (home.one, home.two)
    whole = home.build(*names, folder=home.root / "whole")
    assert manifest_of(whole)["fingerprint"] == manifest_of(folder)["fingerprint"]  # Flat
    rows = np.arange(12)
    vectors = [read_rows(find_shards(one), rows) for one in (folder, whole)]
    np.testing.assert_allclose(*vectors, atol=1e-3)
    queries = ["a warm film", "red apples", NEW[-1]]
    found, other = (home.open(one, *names).retrieve(queries, 4) for one in (folder, whole))
    np.testing.assert_array_equal(found.rows, other.rows)
    assert found.rows[2, 0] == 11
    with pytest.raises(ArtifactError, match=r'made with corpus_sha256 ".*this run asks for'):
        home.open(folder, home.one)  # the old corpus: its candidates are another index's


def test_a_folder_named_by_its_fingerprint_gets_the_name_that_others_look_for(home):
    folder = home.build()
    grown = home.add(folder).folder
    assert grown != folder
    assert not folder.exists()
    assert home.build(home.one, home.two) == grown  # found, not built
    assert home.build() == folder  # the old corpus has an index of its own again
    with pytest.raises(ConfigError, match="is an index of the grown corpus already: use that"):
        home.add(folder)


def test_what_is_there_is_not_added_again(home):
    grown = home.add(home.build(folder=home.root / "index")).folder
    before = files(grown)
    assert home.add(grown).num_reused == 12  # the same command
    assert files(grown) == before
    third = home.root / "three.txt"
    third.write_text(f"{OLD[0]}\nquite new\n")
    assert home.add(grown, third).manifest.counts["rows"] == 13
    assert home.corpus(home.one, home.two, third)[12] == "quite new"
    assert verify_index(grown).damage == []


def test_a_trained_index_is_not_trained_again_and_says_so(home, tmp_path):
    words = ["red", "blue", "warm", "cold", "great", "dull"]
    texts = [f"{word} {letter}" for word in words for letter in "abcdefghijklm"]
    home.one.write_text("\n".join(texts[:60]) + "\n")
    home.two.write_text("\n".join(texts[60:]) + "\n")
    folder = home.build(folder=tmp_path / "index", index_factory="IVF1,SQ8", shard_rows=50)
    was = faiss.read_index(str(folder / "index.faiss"))
    for number, names in enumerate([(home.two,), (tmp_path / "three.txt",)]):
        (tmp_path / "three.txt").write_text("and one more\n")
        grown = home.add(folder, *names)
        assert grown.manifest.counts["rows"] == 78 + number
        assert grown.manifest.counts["trained_rows"] == 60
        assert grown.manifest.fingerprint["trained_rows"] == 60
        assert grown.manifest.counts["recall"]["10"] > 0.5
    index = faiss.read_index(str(folder / "index-79.faiss"))
    np.testing.assert_array_equal(*(faiss.vector_to_array(i.sq.trained) for i in (was, index)))
    whole = home.build(home.one, home.two, tmp_path / "three.txt", index_factory="IVF1,SQ8")
    assert "trained_rows" not in manifest_of(whole)["fingerprint"]  # the control
    assert manifest_of(whole)["fingerprint"] != manifest_of(folder)["fingerprint"]
    names = (home.one, home.two, tmp_path / "three.txt")
    opened = home.open(folder, *names, index_factory="IVF1,SQ8")
    assert opened.fingerprint["trained_rows"] == 60


def test_what_cannot_grow_or_lose_rows_is_refused_by_name_and_left_alone(home, tmp_path):
    folder = home.build(folder=tmp_path / "index")
    before = files(folder)
    bm25 = home.build(folder=tmp_path / "bm25", retriever="bm25")
    cut = home.build(folder=tmp_path / "cut", rules={"max_passages": 3})
    for where, more, message in (
        (bm25, home.two, "is a BM25 index, which weighs words by the whole"),
        (cut, home.two, r"first 3 passages .*\(max_passages\), and cannot grow"),
        (tmp_path / "nowhere", home.two, "nowhere does not exist"),
        (folder, tmp_path / "no.txt", r"no\.txt does not exist"),
    ):
        with pytest.raises(PgraError, match=message):
            home.add(where, more)
    for where, rows, message in (
        (folder, [2, 7], r"row 7 is not in .*index: it has rows 0 to 6"),
        (folder, range(7), "these are all 7 rows of .*one must stay"),
        (tmp_path / "nowhere", [1], "nowhere does not exist"),
    ):
        with pytest.raises(PgraError, match=message):
            remove_rows(where, rows)
    with lock_folder(folder), pytest.raises(ArtifactError, match="in use by another pgra job"):
        home.add(folder)
    assert files(folder) == before
    assert not (tmp_path / "nowhere").exists()
    home.one.write_text(home.one.read_text().replace("warm", "cold"))
    with pytest.raises(ArtifactError, match=r"one\.txt changed since .*its first 7 passages are"):
        home.add(folder)
    manifest = manifest_of(folder)
    del manifest["counts"]["recipe"]
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(ArtifactError, match="does not say what it was made from.*build it again"):
        home.add(folder)
    (folder / "index.faiss").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"index\.faiss is damaged"):
        home.add(folder)


@pytest.mark.parametrize("retriever", ["dense", "hybrid"])
def test_removed_rows_are_never_found_and_k_still_gives_k(home, retriever):
    folder = home.build(folder=home.root / "index")
    before = {name: data for name, data in files(folder).items() if name != "manifest.json"}
    queries = [*OLD, "a warm film"]
    was = home.open(folder, retriever=retriever).retrieve(queries, 4)
    assert {0, 2, 6} <= set(was.rows[:, 0].tolist())  # the control
    fields = home.open(folder, retriever=retriever).fingerprint
    assert remove_rows(folder, [2, 6]).counts["removed"] == 2
    assert remove_rows(folder, [0, 2]).counts["removed"] == 3
    opened = home.open(folder, retriever=retriever)
    for k in (1, 2, 4):
        found = opened.retrieve(queries, k)
        assert not np.isin(found.rows, [0, 2, 6]).any()
        assert (found.rows != -1).all()
    assert opened.fingerprint != fields
    if retriever == "dense":
        assert sorted(opened.retrieve(["a warm film"], 4).rows[0]) == [1, 3, 4, 5]
        with pytest.raises(ConfigError, match=r"num_candidates \(5\) exceeds the corpus \(4 pass"):
            opened.retrieve(["x"], 5)
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert len(after) == len(before) + 2  # the manifest and one list
    assert verify_index(folder).damage == []


def test_removed_rows_stay_removed_when_it_grows(home):
    folder = home.build()
    remove_rows(folder, [3])
    assert home.build() == folder  # still found, and not built again
    grown = home.add(folder)
    assert grown.manifest.counts["removed"] == 1
    found = home.open(None, home.one, home.two).retrieve([OLD[3], NEW[0]], 4)
    assert 3 not in found.rows
    assert found.rows[1, 0] == 7


class CountingIndex:
    """Row 0 is the nearest to [1], row 63 the last."""

    def __init__(self):
        self.index, self.ntotal, self.depths = faiss.IndexFlatIP(1), 64, []
        self.index.add(np.arange(64, 0, -1, dtype=np.float32)[:, None])

    def search(self, queries, depth):
        self.depths.append(depth)
        return self.index.search(queries, depth)


def test_a_search_goes_deeper_until_enough_are_kept(monkeypatch):
    queries, removed, index = np.ones((2, 1), dtype=np.float32), np.arange(40), CountingIndex()
    found = search_kept(index, queries, 3, removed=removed)
    assert found.rows.tolist() == [[40, 41, 42]] * 2
    assert found.scores[0].tolist() == [24.0, 23.0, 22.0]
    assert len(index.depths) > 1
    assert index.depths == sorted(index.depths)
    index.depths.clear()
    assert search_kept(index, queries, 3, removed=removed[:0]).rows[0].tolist() == [0, 1, 2]
    assert index.depths == [3]  # nothing removed: nothing more is searched
    monkeypatch.setattr("pgra.retrieval.dense.most_hits", lambda index: 32)  # as on a GPU
    with pytest.raises(ConfigError, match="32 nearest .* nearly all removed.*--device cpu"):
        search_kept(index, queries, 3, removed=removed)


def test_verify_names_all_that_is_damaged(home):
    folder = home.build(folder=home.root / "index")
    assert verify_index(folder).damage == []
    assert verify_index(folder).num_files == 7
    (folder / "vectors-00001.npy").write_bytes(b"x")
    raw = bytearray((folder / "index.faiss").read_bytes())
    raw[-1] ^= 1
    (folder / "index.faiss").write_bytes(raw)
    (folder / "vectors-00002.json").unlink()
    (folder / "vectors-00007.npy").write_bytes(b"of a stopped add")
    verdict = verify_index(folder)
    assert sorted(verdict.damage) == [
        "index.faiss is damaged (other content than was written)",
        "vectors-00001.npy is damaged (1 bytes, 224 were written)",
        "vectors-00002.json is missing",
    ]
    assert verdict.notes == [
        "1 files are not the index's, as an unfinished 'add' leaves: vectors-00007.npy"
    ]


def test_verify_looks_at_the_corpus_too(home):
    folder = home.build(folder=home.root / "index")
    corpus = home.corpus().folder / "corpus.arrow"
    whole = corpus.read_bytes()
    corpus.write_bytes(whole[:-1] + b"?")
    assert "corpus.arrow is damaged (other content" in verify_index(folder).damage[0]
    corpus.write_bytes(whole)
    home.one.write_text("changed\n")
    assert verify_index(folder).damage == [
        f"corpus: {home.one} has changed since the index was made"
    ]
    home.one.unlink()
    verdict = verify_index(folder)
    assert verdict.damage == []
    assert "cannot be compared" in verdict.notes[0]


def test_strict_refuses_passages_longer_than_the_encoder_reads(home):
    rules = {"strict": True}
    with pytest.raises(DataError, match="passages are longer than the encoder reads.*--strict"):
        home.build(rules=rules, max_encoder_tokens=4)
    folder = home.build(max_encoder_tokens=4)
    assert manifest_of(folder)["counts"]["cut"] == 7
    with pytest.raises(DataError, match="7 passages are longer than the encoder reads"):
        home.build(rules=rules, max_encoder_tokens=4)  # found finished, and as little liked
    assert home.build(rules=rules)


@pytest.mark.parametrize("limit", [200, 600])  # a shard is 224 bytes, the FAISS file 0.8 kB
def test_a_disk_that_fills_up_leaves_the_old_index_whole(limit, home):
    folder = home.build(folder=home.root / "index")
    before = files(folder)
    home.corpus(home.one, home.two)  # is read by now
    quiet_libraries()  # bars are written to a file of pytest's
    with largest_file(limit), pytest.raises(OSError, match=r"\[Errno"):
        home.add(folder)
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if "partial" in name]
    assert home.open(folder).retrieve([OLD[3]], 1).rows[0, 0] == 3
    assert home.add(folder).num_reused == (7 if limit == 200 else 12)
    assert verify_index(folder).damage == []
