"""What `pgra search` and `pgra rerank` say."""

import pytest

from pgra.cli import main


@pytest.fixture
def rerank_flags(corpus_file, encoder_dir, lm_dirs, review_files, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # nothing is folded
    return [
        *("--corpus", str(corpus_file), "--encoder", str(encoder_dir), "--device", "cpu"),
        *("--artifacts_dir", str(tmp_path / "artifacts")),
        *("--task", "sst2", "--lm", str(lm_dirs["opt"]), "--num_candidates", "6"),
        *("--num_evidence", "2", "--num_exemplars", "2"),
        *("--train_file", str(review_files["train"]), "--test_file", str(review_files["test"])),
    ]


def test_rerank_finds_a_sentence_by_itself_in_both_stages(rerank_flags, capsys):
    text = "Red apples grow in the garden behind the old house."
    shown = ("--similarity", "cosine", "--num_shown", "1")
    assert main(["rerank", text, *rerank_flags, *shown]) == 0
    heads, first = capsys.readouterr().out.splitlines()[1:3]
    left, right = first[: heads.index("second")].split(), first[heads.index("second") :].split()
    for score, *shown in (left, right):  # the best of both stages is itself
        assert float(score) == pytest.approx(1.0, abs=1e-3)
        assert shown[:3] == ["Red", "apples", "grow"]
