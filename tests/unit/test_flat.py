import faiss
import numpy as np
import pytest

from pgra.retrieval.faiss import BlockSearch, flat_header, write_flat

RNG = np.random.default_rng(0)
VECTORS = RNG.standard_normal((101, 16)).astype(np.float32)
QUERIES = RNG.standard_normal((7, 16)).astype(np.float32)


@pytest.fixture
def index():
    index = faiss.IndexFlatIP(16)
    index.add(VECTORS)
    return index


def blocks(size):
    return (VECTORS[i : i + size] for i in range(0, 101, size))


@pytest.mark.parametrize("size", [3, 40, 101])
def test_the_file_is_faiss_own_whatever_the_blocks(size, index, tmp_path):
    faiss.write_index(index, str(tmp_path / "theirs"))
    write_flat(blocks(size), tmp_path / "ours", header=flat_header(101, 16))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert flat_header(102, 16) != flat_header(101, 16)  # the control


def test_a_form_of_file_that_is_not_known_has_no_header(monkeypatch):
    monkeypatch.setattr("pgra.retrieval.faiss._ROWS_AT", 16)
    assert flat_header(101, 16) is None


@pytest.mark.parametrize("size", [3, 40, 101])
def test_blocks_are_searched_as_the_whole_is(size, index):
    search = BlockSearch(lambda: blocks(size), 101)
    assert search.ntotal == 101
    for _ in range(2):  # they are read anew
        found = search.search(QUERIES, 9)
        scores, rows = index.search(QUERIES, 9)
        np.testing.assert_array_equal(found.rows, rows)
        np.testing.assert_allclose(found.scores, scores, rtol=1e-5)
    other = BlockSearch(lambda: blocks(size), 101).search(-QUERIES, 9)
    assert (other.rows != found.rows).any()
