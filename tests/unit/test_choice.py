import re

import pytest

from pgra.core import machine_memory
from pgra.errors import ConfigError
from pgra.retrieval.base import choose_factory, import_faiss, memory_limit

GB = 10**9


@pytest.mark.parametrize(
    ("num_rows", "width", "gigabytes", "factory", "reason"),
    [
        (1_000_000, 768, 4, "Flat", "and their 3.07 GB fit in 4 GB"),
        (1_000_000, 768, 2, "Flat", "from the disk, as 3.07 GB exceed 2 GB"),
        # 10 M x 384: 15.4 GB in float32, 7.68 in float16, 3.84 in 8 bits; and 8 bytes a row.
        (10_000_000, 384, 16, "IVF4096,Flat", "too many .*; in Flat their 15.4 GB fit in 16 GB"),
        (10_000_000, 384, 8, "IVF4096,SQfp16", "in SQfp16 their 7.76 GB fit in 8 GB"),
        (10_000_000, 384, 4, "IVF4096,SQ8", "in SQ8 their 3.92 GB fit in 4 GB"),
        (10_000_000, 384, 1, "IVF4096,PQ64", "in PQ64 their 0.72 GB fit in 1 GB"),
        (1_000_000_000, 768, 80, "IVF16384,PQ64", "in PQ64 their 72 GB fit in 80 GB"),
        (1_000_000_000, 768, 8, "IVF16384,PQ64", "their 72 GB exceed 8 GB, the least"),
        (3_000_000, 100, 0.2, "IVF4096,PQ50", "100 are too many"),  # 50 divides the width
    ],
)
def test_auto_goes_by_size_and_memory_and_says_why(num_rows, width, gigabytes, factory, reason):
    choice = choose_factory("auto", num_rows, width, memory=int(gigabytes * GB))
    assert choice.factory == factory
    assert re.search(reason, choice.reason)
    assert f"{num_rows:,} passages x {width}" in choice.reason
    assert "\n" not in choice.reason


def test_a_named_factory_is_taken_as_it_is():
    choice = choose_factory("HNSW32", 10**9, 768, memory=1)
    assert (choice.factory, choice.reason) == ("HNSW32", "")


def test_half_of_the_memory_is_the_limit_unless_one_is_given():
    assert memory_limit(1.5) == 1_500_000_000
    assert memory_limit(None) == machine_memory() // 2
    assert machine_memory() > GB // 10


@pytest.fixture
def installed(monkeypatch, tmp_path):
    """Packages that are looked for in another folder, and not found before."""

    def install(*names):
        for name in names:
            folder = tmp_path / f"{name.replace('-', '_')}-1.15.1.dist-info"
            folder.mkdir()
            (folder / "METADATA").write_text(
                f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.15.1\n"
            )
        monkeypatch.setattr("sys.path", [str(tmp_path)])

    import_faiss.cache_clear()
    yield install
    import_faiss.cache_clear()


@pytest.mark.parametrize("names", [("faiss-cpu",), ("faiss-gpu",)])
def test_one_kind_of_faiss_is_imported(names, installed):
    module = import_faiss()
    installed(*names)
    import_faiss.cache_clear()
    assert import_faiss() is module


def test_two_kinds_of_faiss_are_refused(installed):
    installed("faiss-cpu", "faiss-gpu")
    with pytest.raises(
        ConfigError, match="both installed .*: pip uninstall -y faiss-cpu faiss-gpu"
    ):
        import_faiss()
