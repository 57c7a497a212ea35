import numpy as np
import pytest

from pgra.core import Candidates, Context, Example, Worker
from pgra.errors import ArtifactError
from pgra.retrieval.base import examples_digest, store_candidates

FOUND = Candidates(np.array([[4, 2], [1, -1]]), np.array([[2.0, 1.0], [0.5, -np.inf]], np.float32))
FIELDS = {"retriever": "bm25", "k": 2}


def never():
    raise AssertionError("made again")


def store(root, make=lambda: FOUND, fields=FIELDS, **more):
    return store_candidates(root, "test", fields, make, stage="candidates", **more)


def test_candidates_are_made_once_and_read_back(tmp_path):
    first, again = store(tmp_path), store(tmp_path, never)
    assert (first.reused, again.reused) == (False, True)
    assert first.folder == again.folder
    for stored in (first, again):
        np.testing.assert_array_equal(stored.candidates.rows, FOUND.rows)
        np.testing.assert_array_equal(stored.candidates.scores, FOUND.scores)


def test_another_fingerprint_is_another_folder(tmp_path):
    other = store(tmp_path, fields={**FIELDS, "k": 3})
    assert other.folder != store(tmp_path).folder
    assert not store(tmp_path, fields={**FIELDS, "k": 4}).reused


def test_an_unfinished_folder_is_made_again(tmp_path):
    folder = store(tmp_path).folder
    (folder / "manifest.json").unlink()
    assert not store(tmp_path).reused
    assert store(tmp_path, never).reused


@pytest.mark.parametrize("name", ["rows.npy", "scores.npy"])
def test_a_damaged_file_is_named(tmp_path, name):
    path = store(tmp_path).folder / name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match=f"{name} is damaged .*: delete .* run the stage again"):
        store(tmp_path)
    path.unlink()
    with pytest.raises(ArtifactError, match=f"{name} is missing"):
        store(tmp_path)


def test_only_the_main_process_makes_them(tmp_path):
    met = []

    def barrier():
        met.append(None)
        if len(met) == 2:  # by then the main process, here another call, is done
            store(tmp_path)

    other = Context(Worker(1, 2), barrier)
    stored = store(tmp_path, never, context=other)
    np.testing.assert_array_equal(stored.candidates.rows, FOUND.rows)
    assert len(met) == 2


def test_the_digest_of_examples_follows_their_texts_and_order():
    one, two = Example("a", {"text": "x"}, "positive"), Example("b", {"text": "y"})
    assert examples_digest([one, two]) == examples_digest([Example("z", {"text": "x"}), two])
    assert examples_digest([one, two]) != examples_digest([two, one])
