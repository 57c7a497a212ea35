"""The demo, in small, on the real models and sentences."""

import pytest
from method_runs import lines_of

from pgra.commands.demo import READERS, main

pytestmark = pytest.mark.slow
SMALL = [
    *("--max_passages", "100", "--num_candidates", "8", "--max_train_samples", "16"),
    *("--max_dev_samples", "2", "--max_test_samples", "12", "--max_steps", "1"),
    *("--artifacts_dir", "artifacts", "--output_dir", "runs/demo"),
]


def test_the_demo_compares_three_readers_and_is_reused(tmp_path, monkeypatch, capsys, two_threads):
    monkeypatch.chdir(tmp_path)
    assert main(SMALL) == 0
    shown = capsys.readouterr().out
    for name in READERS:
        assert f"| {name}" in shown
    assert "95 % interval" in shown
    assert "query: " in shown
    report = (tmp_path / "runs/demo/report.md").read_text()
    assert "whose training split is not unseen data" in report
    assert (tmp_path / "runs/demo/results.png").read_bytes().startswith(b"\x89PNG")
    none, first, best = (
        [[seen["stage1_rank"] for seen in line["evidence"]] for line in lines_of(folder)]
        for folder in (tmp_path / "runs/demo" / name for name in ("t5", "fid", "pgra"))
    )
    assert none == [[]] * 12
    assert first == [[1, 2]] * 12 != best

    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npy")}
    assert main(SMALL) == 0
    assert "was there already and was reused" in capsys.readouterr().out
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.npy")} == before
