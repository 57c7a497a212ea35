from conftest import reader_inputs

from pgra.lm.batching import GroupCost
from pgra.lm.load import find_model, load_tokenizer
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import collate

VERBALIZER = Verbalizer({"negative": "terrible", "positive": "great"}, "{text}: <extra_id_0>")
ITEMS = [
    ("a", ("red sea", "sea"), "positive"),
    ("b", ("the old house by the sea",), "negative"),
]


def test_a_batch_holds_every_segments_tokens_and_padded_targets(t5_dir):
    tokenizer = load_tokenizer(find_model(str(t5_dir)))
    rows = reader_inputs(tokenizer, VERBALIZER, ITEMS)
    batch = collate(list(rows), pad_token_id=0, cost=GroupCost(0, 1 << 20))
    assert batch["example_ids"] == ("a", "b")
    for row, places in zip(rows, batch["places"], strict=True):
        tokens = [token for segment in row.segments for token in segment.tolist()]
        assert batch["input_ids"][places[places >= 0]].tolist() == tokens
    for labels, row in zip(batch["labels"], rows, strict=True):
        assert labels[: len(row.target)].tolist() == row.target.tolist()
        assert (labels[len(row.target) :] == -100).all()
