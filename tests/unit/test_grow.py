"""Indexes that grow, and that are compared with what was written."""

import json

import numpy as np
import pytest
from conftest import SENTENCES, largest_file
from small_index import World, flip_byte

from pgra.artifacts import lock_folder
from pgra.commands.common import quiet_libraries
from pgra.commands.verify import main as verify
from pgra.errors import ArtifactError, PgraError
from pgra.retrieval.dense import add_passages

pytestmark = pytest.mark.slow

OLD, NEW = SENTENCES[:7], SENTENCES[7:]


class Home(World):
    """A corpus in two files, one of which is indexed."""

    def __init__(self, root, encoder):
        super().__init__(root, encoder, OLD)
        self.two = self.write("two.txt", [OLD[2], *NEW])  # one is there already
        self.index = root / "index"

    def build(self, *files, **changes):
        changes = {"folder": self.index, "shard_rows": 3, **changes}
        (built,) = self.prepare(changes.pop("name", "dense"), *files, **changes)
        return built.folder

    def add(self, folder, *files):
        return add_passages(folder, [str(path) for path in files or (self.two,)], self.context)

    def open_at(self, folder, *files, name="dense", **changes):
        return self.open(name, *files, index_dir=str(folder), **changes)


@pytest.fixture
def home(tmp_path, encoder_dir):
    return Home(tmp_path, encoder_dir)


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def manifest_of(folder):
    return json.loads((folder / "manifest.json").read_text())


def test_a_grown_index_keeps_its_shards_and_finds_what_one_built_whole_finds(home):
    folder = home.build()
    before = {name: data for name, data in files(folder).items() if name.startswith("vectors")}
    grown = home.add(folder)
    assert (grown.folder, grown.num_reused) == (folder, 7)
    after = files(folder)
    assert {name: after[name] for name in before} == before
    both = (home.one, home.two)
    whole = home.build(*both, folder=home.root / "whole")
    assert manifest_of(whole)["fingerprint"] == manifest_of(folder)["fingerprint"]  # Flat
    queries = ["a warm film", "red apples", NEW[-1]]
    found, other = (home.open_at(one, *both).retrieve(queries, 4) for one in (folder, whole))
    np.testing.assert_array_equal(found.rows, other.rows)
    assert found.rows[2, 0] == 11
    with pytest.raises(ArtifactError, match=r'made with corpus_sha256 ".*this run asks for'):
        home.open_at(folder)  # the old corpus: its candidates are another index's
    assert home.add(folder).num_reused == 12  # the same command adds nothing
    assert files(folder) == after
    assert verify([str(folder)]) == 0


def test_what_cannot_grow_is_refused_by_name_and_left_alone(home, tmp_path):
    folder = home.build()
    before = files(folder)
    bm25 = home.build(folder=tmp_path / "bm25", name="bm25")
    cut = home.build(folder=tmp_path / "cut", rules={"max_passages": 3})
    for where, message in (
        (bm25, "by stage 'bm25_index', not by"),
        (cut, r"first 3 passages .*\(max_passages\), and cannot grow"),
    ):
        with pytest.raises(PgraError, match=message):
            home.add(where)
    with lock_folder(folder), pytest.raises(ArtifactError, match="in use by another pgra job"):
        home.add(folder)
    assert files(folder) == before
    home.one.write_text(home.one.read_text().replace("warm", "cold"))
    with pytest.raises(ArtifactError, match=r"one\.txt changed since .*its first 7 passages are"):
        home.add(folder)
    (folder / "index.faiss").write_bytes(b"short")
    with pytest.raises(ArtifactError, match=r"index\.faiss is damaged"):
        home.add(folder)


def test_verify_names_all_that_is_damaged_of_whatever_lies_in_a_folder(home, capsys):
    folder = home.build()
    corpus = home.corpus().folder / "corpus.arrow"
    assert verify([str(home.root)]) == 0
    assert "all as written" in capsys.readouterr().out
    flip_byte(corpus)
    (folder / "vectors-00001.npy").write_bytes(b"x")
    flip_byte(folder / "index.faiss")
    (folder / "vectors-00002.json").unlink()
    assert verify([str(home.root)]) == 1
    out = capsys.readouterr().out
    for line in (
        f"{corpus} is damaged (other content than was written)",
        f"{folder}/index.faiss is damaged (other content than was written)",
        f"{folder}/vectors-00001.npy is damaged (1 bytes, 224 were written)",
        f"{folder}/vectors-00002.json is missing",
    ):
        assert line in out
    with pytest.raises(ArtifactError, match="has no checksums: give an artifact, a run"):
        verify([str(home.encoder)])


@pytest.mark.parametrize(("limit", "num_done"), [(200, 7), (600, 12)])
def test_a_disk_that_fills_up_leaves_the_old_index_whole(limit, num_done, home):
    folder = home.build()  # a shard is 224 bytes, the FAISS file 0.8 kB
    before = files(folder)
    home.corpus(home.one, home.two)  # is read by now
    quiet_libraries()  # bars are written to a file of pytest's
    with largest_file(limit), pytest.raises(OSError, match=r"\[Errno"):
        home.add(folder)
    after = files(folder)
    assert {name: after[name] for name in before} == before
    assert not [name for name in after if "partial" in name]
    assert home.open_at(folder).retrieve([OLD[3]], 1).rows[0, 0] == 3
    assert home.add(folder).num_reused == num_done
    assert verify([str(folder)]) == 0
