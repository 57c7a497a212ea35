"""What `pgra search` and `pgra rerank` say."""

import pytest

from pgra.cli import main


@pytest.fixture
def stage_flags(encoder_dir, corpus_file, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "500")  # nothing is folded
    return [
        *("--corpus", str(corpus_file), "--encoder", str(encoder_dir), "--device", "cpu"),
        *("--artifacts_dir", str(tmp_path / "artifacts")),
    ]


@pytest.fixture
def rerank_flags(stage_flags, lm_dirs, review_files):
    return [
        *("--task", "sst2", "--lm", str(lm_dirs["opt"]), "--num_candidates", "6"),
        *("--num_evidence", "2", "--num_exemplars", "2", *stage_flags),
        *("--train_file", str(review_files["train"]), "--test_file", str(review_files["test"])),
    ]


@pytest.fixture
def say(capsys):
    """Run a command that works and return what it printed."""

    def run(*words):
        assert main([*words]) == 0
        return capsys.readouterr().out

    return run


def test_rerank_finds_a_sentence_by_itself_in_both_stages(rerank_flags, say):
    text = "Red apples grow in the garden behind the old house."
    told = say("rerank", text, *rerank_flags, "--similarity", "cosine", "--num_shown", "1")
    heads, first = told.splitlines()[1:3]
    left, right = first[: heads.index("second")].split(), first[heads.index("second") :].split()
    for score, *shown in (left, right):  # the best of both stages is itself
        assert float(score) == pytest.approx(1.0, abs=1e-3)
        assert shown[:3] == ["Red", "apples", "grow"]


@pytest.mark.slow
def test_rerank_does_all_splits_with_neighbors_by_the_reader_that_a_yaml_names(
    rerank_flags, t5_dir, tmp_path, say, capsys
):
    config = tmp_path / "run.yaml"
    config.write_text(f"model_name_or_path: {t5_dir}\nneighbor_encoder: reader\n")
    flags = [*rerank_flags, "--config", str(config), "--exemplars", "knn"]
    told = say("rerank", *flags)
    for split, count in (("train", 36), ("dev", 4), ("test", 12)):
        assert f"sst2 {split}: {count} queries\n" in told
    assert told.count(str(tmp_path / "artifacts/evidence/sst2")) == 3
    other = [*flags, "--model_name_or_path", str(tmp_path / "none")]
    assert main(["rerank", "A warm film.", *other]) == 2  # the control: it is what is opened
    assert str(tmp_path / "none") in capsys.readouterr().err
