import pytest
import torch
from conftest import reader_inputs

from pgra.lm.batching import GroupCost
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import Collator

VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, "{text}: <extra_id_0>")
ITEMS = [
    ("a", ("red sea", "sea"), "positive"),
    ("b", ("the old house by the sea",), "negative"),
]


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture
def collate(tokenizer):
    return Collator(tokenizer.pad_token_id, GroupCost(0, 1 << 20))


def test_a_batch_holds_every_segments_tokens_and_padded_targets(tokenizer, collate):
    rows = reader_inputs(tokenizer, VERBALIZER, ITEMS)
    batch = collate(list(rows))
    assert batch.example_ids == ("a", "b")
    for row, places in zip(rows, batch.packed.places, strict=True):
        tokens = [token for segment in row.segments for token in segment.tolist()]
        assert batch.packed.input_ids[places[places >= 0]].tolist() == tokens
    assert batch.labels is not None
    for i, row in enumerate(rows):
        assert row.target is not None
        assert batch.labels[i][: len(row.target)].tolist() == row.target.tolist()
        assert (batch.labels[i][len(row.target) :] == -100).all()


def test_the_trainer_gets_names_and_without_labels_none(tokenizer, collate):
    unlabelled = reader_inputs(tokenizer, VERBALIZER, [("b", ("a film",), None)])
    assert collate(list(unlabelled)).labels is None
    names = {"input_ids", "attention_mask", "groups", "places", "example_ids"}
    assert set(collate.as_inputs(list(unlabelled))) == names
    labelled = reader_inputs(tokenizer, VERBALIZER, ITEMS)
    assert set(collate.as_inputs(list(labelled))) == {*names, "labels"}


def test_moving_a_batch_keeps_it(tokenizer, collate):
    batch = collate(list(reader_inputs(tokenizer, VERBALIZER, ITEMS)))
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.packed.input_ids, batch.packed.input_ids)
    assert moved.labels is not None
