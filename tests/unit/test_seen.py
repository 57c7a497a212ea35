"""Duplicates are found however many texts there are, and in whatever batches they come."""

import numpy as np
import pytest

from pgra.data import corpus as seen_module
from pgra.data.corpus import SeenTexts


def new_ones(folder, texts, size):
    seen = SeenTexts(folder)
    parts = [seen.add(texts[start : start + size]) for start in range(0, len(texts), size)]
    return np.concatenate(parts).tolist(), seen


@pytest.mark.parametrize("run_rows", [8, 64, 1 << 23])
@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_first_of_equal_texts_is_new_and_no_other(tmp_path, monkeypatch, run_rows, size):
    monkeypatch.setattr(seen_module, "_RUN_ROWS", run_rows)
    rng = np.random.default_rng(0)
    texts = [f"text {n}" for n in rng.integers(0, 300, 700)]
    found, _ = new_ones(tmp_path, texts, size)
    known, expected = set(), []
    for text in texts:
        expected.append(text not in known)
        known.add(text)
    assert found == expected
    assert 0 < sum(found) < len(found)


def test_full_runs_go_to_disk_and_leave_no_file_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(seen_module, "_RUN_ROWS", 64)
    _, seen = new_ones(tmp_path, [f"text {n}" for n in range(1000)], 10)
    on_disk = [run for run in seen._runs if isinstance(run, np.memmap)]
    assert sum(run.shape[1] for run in on_disk) >= 900
    assert sum(run.shape[1] for run in seen._runs) == 1000
    assert len(seen._runs) < 40
    assert list(tmp_path.iterdir()) == []
