import pytest
import torch

from pgra.models.loading import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.collate import Collator, tokenize_inputs
from pgra.types import ReaderInput

VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, "{text}: <extra_id_0>")


@pytest.fixture(scope="module")
def tokenizer(t5_dir):
    return load_tokenizer(find_model(str(t5_dir)))


def test_tokens_are_those_of_whole_segments_with_their_end(tokenizer):
    inputs = [ReaderInput("a", ("red sea", "sea"), "positive"), ReaderInput("b", ("a film",))]
    rows = tokenize_inputs(inputs, tokenizer, VERBALIZER)
    assert [ids.tolist() for ids in rows[0].segments] == tokenizer(["red sea", "sea"]).input_ids
    assert rows[0].target is not None
    assert rows[0].target.tolist() == VERBALIZER.target_ids(tokenizer)[1]
    assert rows[1].target is None
    assert rows[0].segments[1][-1] == tokenizer.eos_token_id
    assert rows[0].size == 2 * len(rows[0].segments[0])


def test_a_batch_is_padded_to_its_own_largest(tokenizer):
    inputs = [
        ReaderInput("a", ("red sea", "sea"), "positive"),
        ReaderInput("b", ("the old house by the sea",), "negative"),
    ]
    rows = tokenize_inputs(inputs, tokenizer, VERBALIZER)
    batch = Collator(tokenizer.pad_token_id)(rows)
    longest = len(rows[1].segments[0])
    assert batch.input_ids.shape == batch.attention_mask.shape == (2, 2, longest)
    assert batch.input_ids.dtype is torch.int64
    assert batch.attention_mask.dtype is torch.bool
    assert batch.attention_mask.sum(dim=2).tolist() == [
        [len(segment) for segment in rows[0].segments],
        [longest, 0],
    ]
    real = batch.input_ids[0, 0][batch.attention_mask[0, 0]]
    assert real.tolist() == rows[0].segments[0].tolist()
    assert batch.labels is not None
    for i, row in enumerate(rows):
        assert row.target is not None
        assert batch.labels[i][: len(row.target)].tolist() == row.target.tolist()
        assert (batch.labels[i][len(row.target) :] == -100).all()


def test_without_labels_the_trainer_gets_none(tokenizer):
    rows = tokenize_inputs([ReaderInput("b", ("a film",))], tokenizer, VERBALIZER)
    collate = Collator(tokenizer.pad_token_id)
    assert collate(rows).labels is None
    assert set(collate.as_inputs(rows)) == {"input_ids", "attention_mask"}


def test_moving_a_batch_keeps_it(tokenizer):
    rows = tokenize_inputs([ReaderInput("b", ("a film",), "positive")], tokenizer, VERBALIZER)
    batch = Collator(tokenizer.pad_token_id)(rows)
    moved = batch.to(torch.device("cpu"))
    assert torch.equal(moved.input_ids, batch.input_ids)
    assert moved.labels is not None
