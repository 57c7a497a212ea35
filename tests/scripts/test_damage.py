"""A damaged product is refused by name, and its way out is said."""

import contextlib
import json

import pytest
from small_index import flip_byte

from pgra.artifacts import sealed

DAMAGED = [
    "indexes/bert-*/index.faiss",
    "banks/gpt2-*/*.keys.npy",
    "banks/gpt2-*/[0-9a-f]*.json",
    "candidates/sst2/train-*/scores.npy",
    "evidence/sst2/test-*/manifest.json",
    "corpora/corpus-*/manifest.json",
    "corpora/corpus-*/corpus.arrow",
    "corpora/corpus-*/blocks.json",
]


@contextlib.contextmanager
def restored(path):
    """Put a file back as it was."""
    good = path.read_bytes()
    try:
        yield good
    finally:
        path.write_bytes(good)


def resealed(data):
    """As another program would have written it."""
    return json.dumps(sealed(json.loads(data))).encode()


@pytest.fixture(scope="module")
def whole(bench):
    bench.make("whole")
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
    ("name", "damage", "told", "more"),
    [
        ("run.json", lambda good: b"{", "is damaged", "delete {}"),
        ("arguments.json", lambda good: b"[]", "is damaged", "delete {}"),
        ("metrics.json", lambda good: b"\xff", "is damaged", "delete {}"),
        ("metrics.json", lambda good: good.replace(b'"n": 12', b'"n": 13'), "is damaged", ""),
        ("reader/pgra.json", lambda good: good.replace(b"It was", b"It waS"), "is damaged", "copy"),
        ("arguments.json", lambda good: good.replace(b'"seed": 1', b'"seed": 7'), "is damaged", ""),
        (
            "arguments.json",
            lambda good: resealed(good.replace(b'"seed": 1', b'"seed": 7')),
            "is damaged (metrics.json beside it tells of other content)",
            "",
        ),
        (
            "arguments.json",
            lambda good: resealed(good.replace(b'"num_candidates"', b'"num_kandidates"')),
            "holds arguments that this version of pgra does not know",
            "num_kandidates",
        ),
    ],
)
def test_a_damaged_run_or_one_of_another_version_is_named(whole, name, damage, told, more):
    path = whole.run("whole") / name
    with restored(path) as good:
        assert damage(good) != good
        path.write_bytes(damage(good))
        error = whole.evaluate("whole").error
    assert f"{path} {told}" in error
    assert more.format(whole.run("whole")) in error
    assert whole.evaluate("whole").code == 0


def test_damaged_weights_of_a_run_are_named(whole):
    path = whole.run("whole") / "reader" / "model.safetensors"
    with restored(path):
        flip_byte(path)
        for called in (whole.evaluate("whole"), whole.train("whole")):
            assert f"{path} is damaged (it is not what metrics.json says)" in called.error
        path.unlink()
        assert f"{path} is missing: delete {path.parent}" in whole.evaluate("whole").error
