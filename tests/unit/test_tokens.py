"""Tokenised inputs: a sequence over a few arrays, kept on disk."""

import shutil

import pytest
from conftest import reader_inputs

from pgra.core import Example
from pgra.errors import ArtifactError
from pgra.lm.load import find_model, load_tokenizer, tokenizer_identity
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import store_inputs

VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, "{text}: <extra_id_0>")
ITEMS = [
    ("a", ("red sea", "sea"), "positive"),
    ("b", ("the old house by the sea",), None),
    ("c", ("film", "plot", "cast"), "negative"),
]
EXAMPLES = [Example(name, {"text": name}, label) for name, _, label in ITEMS]


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture
def store(tokenizer, tmp_path):
    def run(make, **fields):
        return store_inputs(
            tmp_path,
            "train",
            {"x": 1, **fields},
            make,
            examples=EXAMPLES,
            tokenizer=tokenizer,
            verbalizer=VERBALIZER,
        )

    return run


def _content(inputs):
    return [
        (row.example_id, [s.tolist() for s in row.segments], None if row.target is None else 1)
        for row in inputs
    ]


def test_rows_come_back_as_they_were_given(tokenizer):
    inputs = reader_inputs(tokenizer, VERBALIZER, ITEMS)
    assert len(inputs) == 3
    for row, (name, segments, label) in zip(inputs, ITEMS, strict=True):
        assert row.example_id == name
        assert [s.tolist() for s in row.segments] == tokenizer(list(segments)).input_ids
        assert (row.target is None) == (label is None)
    assert inputs[2].target.tolist() == VERBALIZER.target_ids(tokenizer)[0]
    with pytest.raises(IndexError):
        inputs[3]
    assert reader_inputs(tokenizer, VERBALIZER, []).sizes() == []


def test_what_is_stored_is_what_was_made_and_is_made_once(tokenizer, store):
    made = []

    def make():
        made.append(1)
        return reader_inputs(tokenizer, VERBALIZER, ITEMS)

    first, second = store(make), store(make)
    assert _content(first) == _content(second) == _content(make())
    assert len(made) == 2  # once by the store, once by the line above
    store(make, x=2)
    assert len(made) == 3


def test_damaged_tokens_are_refused_by_name(tokenizer, store, tmp_path):
    store(lambda: reader_inputs(tokenizer, VERBALIZER, ITEMS))
    (path,) = tmp_path.glob("train-*/tokens.npy")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError, match="tokens.npy is damaged"):
        store(lambda: pytest.fail("made again"))


def test_a_tokenizers_identity_is_its_content(reader_dir, lm_dirs, tmp_path):
    one = load_tokenizer(find_model(str(reader_dir)))
    shutil.copytree(reader_dir, tmp_path / "copy")
    one.save_pretrained(tmp_path / "copy")
    same = load_tokenizer(find_model(str(tmp_path / "copy")))
    assert tokenizer_identity(one) == tokenizer_identity(same)
    same.add_tokens(["a whole sentence"])
    assert tokenizer_identity(one) != tokenizer_identity(same)
    other = load_tokenizer(find_model(str(lm_dirs["gpt2"])))
    assert tokenizer_identity(one) != tokenizer_identity(other)
