"""A damaged product is refused by name, and its way out is said."""

import contextlib

import pytest
from scripted import Bench, flip_byte

DAMAGED = [
    "indexes/bert-*/index.faiss",
    "banks/gpt2-*/*.keys.npy",
    "banks/gpt2-*/[0-9a-f]*.json",
    "candidates/sst2/train-*/scores.npy",
    "evidence/sst2/test-*/manifest.json",
    "corpora/corpus-*/manifest.json",
]


@contextlib.contextmanager
def restored(path):
    """Put a file back as it was."""
    good = path.read_bytes()
    try:
        yield good
    finally:
        path.write_bytes(good)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    bench = Bench(tmp_path_factory.mktemp("whole"), lm_dirs["gpt2"], encoder_dir, t5_dir)
    assert bench.train("whole").code == 0
    return bench


@pytest.mark.parametrize("pattern", DAMAGED)
def test_a_damaged_artifact_is_named(whole, pattern):
    path = sorted(whole.artifacts.glob(pattern))[0]
    with restored(path):
        flip_byte(path)
        for name in ("whole", "another"):
            told = whole.train(name).error
            assert f"{path} is damaged" in told
            assert "delete" in told
    assert not whole.run("another").exists()
    assert "(reused)" in whole.train("whole").out


def test_damaged_states_are_named_when_they_are_used(whole):
    path = sorted(whole.artifacts.glob("banks/gpt2-*/*.states.npy"))[0]
    with restored(path) as good:
        flip_byte(path)
        assert "(reused)" in whole.train("whole").out  # of stored evidence no state is looked at
        assert f"{path} is damaged" in whole.train("another", similarity="cosine").error
        path.write_bytes(good[:-1])  # that it is short is seen at once
        assert f"{path} is damaged" in whole.train("whole").error
    assert not whole.run("another").exists()


@pytest.mark.parametrize(
    ("name", "text"),
    [("run.json", b"{"), ("arguments.json", b"[]"), ("metrics.json", b"\xff")],
)
def test_a_damaged_run_is_named(whole, name, text):
    path = whole.run("whole") / name
    with restored(path):
        path.write_bytes(text)
        told = whole.evaluate("whole").error
        assert f"{path} is damaged" in told
        assert f"delete {whole.run('whole')}" in told
    assert whole.evaluate("whole").code == 0


def test_arguments_of_another_version_are_named(whole):
    path = whole.run("whole") / "arguments.json"
    with restored(path) as good:
        path.write_bytes(good.replace(b'"num_candidates"', b'"num_kandidates"'))
        error = whole.evaluate("whole").error
    assert f"{path} holds arguments that this version of pgra does not know" in error
    assert "num_kandidates" in error


def test_damaged_weights_of_a_run_are_named(whole):
    path = whole.run("whole") / "reader" / "model.safetensors"
    with restored(path):
        flip_byte(path)
        for called in (whole.evaluate("whole"), whole.train("whole")):
            assert f"{path} is damaged (it is not what metrics.json says)" in called.error
        path.unlink()
        assert f"{path} is missing: delete {path.parent}" in whole.evaluate("whole").error
