import numpy as np
import pytest
import torch
from conftest import SENTENCES
from small_training import VERBALIZER, lively, tokens

from ablations.rag import RagClassifier, RagReader, build_pooled, choose_evidence, collate_pooled
from pgra.encoders.encoder import Encoder
from pgra.lm.batching import GroupCost
from pgra.lm.load import find_model
from pgra.prompts import Verbalizer
from pgra.reader.fid import FusionReader, pack_segments
from pgra.reader.inputs import SegmentLayout
from pgra.reader.predict import T5Classifier
from pgra.types import Example

pytestmark = pytest.mark.slow

QUERIES = [
    Example("a", {"text": "A warm film"}, "positive"),
    Example("b", {"text": "A dull story"}, "negative"),
]
CANDIDATES = np.array([[4, 0, 2, 7], [9, 4, -1, -1]])
COST = GroupCost(overhead=24, max_tokens=2048)


@pytest.fixture
def encoder(encoder_dir):
    return Encoder(str(encoder_dir), encoder_dtype="float32", device="cpu")


@pytest.fixture
def inputs(encoder, tokenizer):
    def read_passages(rows):
        texts = [SENTENCES[row] for row in rows]
        return texts, 3 * encoder.encode(texts).astype(np.float16)

    return build_pooled(
        QUERIES,
        CANDIDATES,
        read_passages,
        encoder,
        tokenizer,
        verbalizer=VERBALIZER,
        layout=SegmentLayout(VERBALIZER.template),
    )


def open_reader(t5_dir, encoder, num_evidence):
    return RagReader(
        FusionReader.from_source(find_model(str(t5_dir))).model, encoder, num_evidence
    ).eval()


def batch_of(inputs, rows=(0, 1)):
    return collate_pooled([inputs[row] for row in rows], pad_token_id=0, cost=COST)


def score(reader, tokenizer, inputs):
    kind = RagClassifier if isinstance(reader, RagReader) else T5Classifier
    return kind(reader, tokenizer, VERBALIZER).score(inputs)


def expected_scores(t5_dir, encoder, tokenizer, inputs, num_evidence):
    """Sum p(z|x) p(y|x,z) by hand: vectors by the encoder, each evidence read by a plain reader."""
    plain = FusionReader.from_source(find_model(str(t5_dir)))
    vectors = dict(zip(inputs.rows.tolist(), inputs.vectors, strict=True))
    found = []
    for query, line in zip(QUERIES, CANDIDATES.tolist(), strict=True):
        known = [row for row in line if row != -1]
        (asked,) = encoder.encode([query.text])
        products = np.array([vectors[row].astype(np.float64) @ asked for row in known])
        best = np.argsort(-products)[:num_evidence]
        weights = np.exp(products[best])
        texts = [f"{query.text} <extra_id_0> {SENTENCES[known[i]]}" for i in best]
        alone = tokens(t5_dir, [(text, (text,), None) for text in texts])
        chances = np.exp(score(plain, tokenizer, alone).astype(np.float64))  # (N, C)
        found.append((weights[:, None] * chances).sum(axis=0) / weights.sum())
    return np.log(found)


@pytest.mark.parametrize("num_evidence", [1, 2, 4])
def test_scores_sum_over_evidence(t5_dir, encoder, tokenizer, inputs, num_evidence):
    expected = expected_scores(t5_dir, encoder, tokenizer, inputs, num_evidence)
    reader = open_reader(t5_dir, encoder, num_evidence)
    np.testing.assert_allclose(score(reader, tokenizer, inputs), expected, rtol=1e-4)
    fewer = open_reader(t5_dir, encoder, 3 - num_evidence % 2)  # the control
    assert abs(score(fewer, tokenizer, inputs) - expected).max() > 1e-3


def test_the_text_that_is_written_is_the_likeliest_over_all_evidence(
    t5_dir, encoder, tokenizer, inputs
):
    plain = T5Classifier(lively(t5_dir), tokenizer, Verbalizer({}, VERBALIZER.template))
    reader = RagReader(plain.module.model, encoder, 3).eval()
    reader.model.generation_config.max_new_tokens = 3
    chosen, best = choose_evidence(reader, inputs)
    drafts, found = plain.write(chosen.alone()), []
    for first, segments, weights in zip((0, 3), chosen.segments, best.scores, strict=True):
        packed = pack_segments([(one,) for one in segments], pad_token_id=0, cost=COST)
        totals = {}
        for text in drafts[first : first + 3]:
            logs = reader.score_labels(packed, torch.tensor([tokenizer(text).input_ids]))[:, 0]
            totals[text] = float((logs + torch.from_numpy(weights)).exp().sum())
        found.append(max(totals, key=totals.get))
    assert RagClassifier(reader, tokenizer, plain.verbalizer).write(inputs) == found
    assert len(set(drafts[:3])) > 1  # there was a choice


def test_the_loss_is_that_of_the_true_labels_scores(t5_dir, encoder, tokenizer, inputs):
    reader = open_reader(t5_dir, encoder, 3)
    batch = batch_of(inputs)
    scores = score(reader, tokenizer, inputs)
    total = scores[0, 1] + scores[1, 0]
    count = int((batch["labels"] != -100).sum())
    assert reader(**batch).loss.item() == pytest.approx(-total / count, rel=1e-4)
    assert reader(**batch, num_items_in_batch=1).loss.item() == pytest.approx(-total, rel=1e-4)


def test_the_query_encoder_learns_and_the_index_does_not(t5_dir, encoder, inputs):
    reader = open_reader(t5_dir, encoder, 2)
    batch = batch_of(inputs)
    before = batch["pools"]["vectors"].clone()
    loss = reader(**batch).loss
    loss.backward()
    moving = [p for p in reader.query_encoder.parameters() if p.grad is not None]
    length = torch.stack([p.grad.norm() for p in moving]).norm()
    with torch.no_grad():  # a step too short to choose other evidence
        for parameter in moving:
            parameter -= 0.02 * parameter.grad / length
    assert reader(**batch).loss < loss
    assert batch["pools"]["vectors"].grad is None
    assert torch.equal(batch["pools"]["vectors"], before)
    unused = [name for name, p in reader.named_parameters() if p.requires_grad and p.grad is None]
    assert unused == []  # as several processes need it
