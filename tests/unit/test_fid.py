import pytest
import torch
from conftest import T5_KINDS
from transformers import AutoModelForSeq2SeqLM

from pgra.errors import ConfigError, ModelError
from pgra.models.fid import FusionReader

B, N, L, T = 3, 4, 7, 4


@pytest.fixture(scope="module", params=T5_KINDS)
def reader(request, t5_dirs):
    reader = FusionReader.from_name(str(t5_dirs[request.param]))
    generator = torch.Generator().manual_seed(5)
    for parameter in reader.parameters():  # livelier than T5's own start, so that errors show
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.1
    return reader.eval()


@pytest.fixture(scope="module")
def batch():
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (B, N, L), generator=generator)
    lengths = torch.randint(2, L + 1, (B, N, 1), generator=generator)
    lengths[0, 0] = L
    return ids, torch.arange(L) < lengths


@pytest.fixture(scope="module")
def labels():
    return torch.tensor([[5, 9, 1, -100], [7, 1, -100, -100], [8, 20, 30, 1]])


def _join(ids, mask):
    """One example's real tokens, segment after segment, encoded alone: a slow reference."""
    return [row[keep] for row, keep in zip(ids, mask, strict=True)]


def test_one_segment_is_plain_t5(reader, batch, labels):
    ids, mask = batch[0][:, :1], batch[1][:, :1]
    plain = reader.t5(input_ids=ids[:, 0], attention_mask=mask[:, 0], labels=labels)
    fused = reader(ids, mask, labels)
    torch.testing.assert_close(fused.loss, plain.loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(fused.logits, plain.logits, atol=1e-5, rtol=1e-5)


def test_many_segments_are_encoded_alone_and_read_together(reader, batch, labels):
    ids, mask = batch
    for i in range(B):
        parts = [
            reader.t5.get_encoder()(input_ids=segment[None]).last_hidden_state
            for segment in _join(ids[i], mask[i])
        ]
        by_hand = reader.t5(encoder_outputs=(torch.cat(parts, dim=1),), labels=labels[i : i + 1])
        fused = reader(ids, mask, labels).logits[i]
        torch.testing.assert_close(fused, by_hand.logits[0], atol=1e-5, rtol=1e-5)


def test_order_of_evidence_does_not_matter_but_evidence_does(reader, batch, labels):
    ids, mask = batch
    order = [2, 0, 3, 1]
    here = reader(ids, mask, labels).logits
    there = reader(ids[:, order], mask[:, order], labels).logits
    torch.testing.assert_close(there, here, atol=1e-5, rtol=1e-5)
    twice = [0, 1, 2, 2]  # the third again in the fourth's place
    other = reader(ids[:, twice], mask[:, twice], labels).logits
    assert (other - here).abs().max() > 1e-3


def test_a_wholly_padded_segment_is_absent(reader, batch, labels):
    ids, mask = batch[0].clone(), batch[1].clone()
    mask[:, 2:] = False
    without = reader(ids[:, :2], mask[:, :2], labels)
    torch.testing.assert_close(
        reader(ids, mask, labels).logits, without.logits, atol=1e-5, rtol=1e-5
    )


def test_padding_does_not_matter_but_a_token_does(reader, batch, labels):
    ids, mask = batch
    wide_ids = torch.cat([ids, torch.full((B, N, 5), 42)], dim=2)
    wide_mask = torch.cat([mask, torch.zeros(B, N, 5, dtype=torch.bool)], dim=2)
    here = reader(ids, mask, labels)
    torch.testing.assert_close(
        reader(wide_ids, wide_mask, labels).logits, here.logits, atol=1e-5, rtol=1e-5
    )
    changed = ids.clone()
    changed[0, 0, 0] += 1
    assert (reader(changed, mask, labels).loss - here.loss).abs().item() > 1e-5


def test_shapes_that_differ_are_refused(reader, batch):
    with pytest.raises(ValueError, match="the mask is"):
        reader(batch[0], batch[1][:, :1])


def test_label_scores_are_the_plain_log_probabilities_of_whole_targets(reader, batch):
    ids, mask = batch
    targets = torch.tensor([[5, 1, -100], [9, 12, 1], [9, 1, -100]])
    scores = reader.score_labels(ids, mask, targets)
    assert scores.shape == (B, 3)
    for i in range(B):
        for j in range(3):
            labels = targets[j : j + 1, : 3 if j == 1 else 2]
            loss = reader(ids[i : i + 1], mask[i : i + 1], labels).loss
            expected = -loss.detach() * labels.shape[1]
            torch.testing.assert_close(scores[i, j], expected, atol=1e-4, rtol=1e-5)


def test_generated_tokens_are_the_likeliest(reader, batch):
    ids, mask = batch
    written = reader.generate_tokens(ids, mask, 2)
    first = reader(ids, mask, torch.full((B, 1), 1)).logits[:, 0].argmax(1)
    second = reader(ids, mask, torch.stack([first, first], 1)).logits[:, 1].argmax(1)
    assert written.tolist() == torch.stack([first, second], 1).tolist()


def test_the_gradient_reaches_the_encoder_of_every_segment(reader, batch, labels):
    reader.zero_grad()
    reader(*batch, labels).loss.backward()
    inner = reader.t5.encoder.block[0].layer[0].SelfAttention.q.weight.grad
    assert inner is not None
    assert inner.abs().sum() > 0
    reader.zero_grad(set_to_none=True)


def test_activation_checkpointing_changes_no_gradient(t5_dir, batch, labels):
    grads = []
    for checkpointed in (False, True):
        reader = FusionReader.from_name(str(t5_dir))
        if checkpointed:
            reader.activation_checkpointing_enable()
        reader.train()
        torch.manual_seed(0)
        reader(*batch, labels).loss.backward()
        grads.append(reader.t5.shared.weight.grad)
    torch.testing.assert_close(grads[0], grads[1])


def test_the_loss_is_divided_by_the_items_of_all_accumulated_batches(reader, batch, labels):
    ids, mask = batch
    whole = reader(ids, mask, labels).loss
    count = (labels != -100).sum()
    parts = [
        reader(ids[i : i + 1], mask[i : i + 1], labels[i : i + 1], num_items_in_batch=count).loss
        for i in range(B)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(), whole)


def test_weights_come_back_under_plain_t5_names(reader, tmp_path):
    weights = reader.state_dict()
    assert "shared.weight" in weights
    assert len({t.data_ptr() for t in weights.values()}) == len(weights)
    other = FusionReader(type(reader.t5)(reader.t5.config))
    result = other.load_state_dict(weights)
    assert not result.missing_keys
    assert all(
        torch.equal(a, b) for a, b in zip(reader.parameters(), other.parameters(), strict=True)
    )
    with pytest.raises(RuntimeError, match="weights do not fit"):
        other.load_state_dict({"nonsense": torch.zeros(1)})


def test_a_saved_reader_is_a_plain_t5_folder(reader, batch, labels, tmp_path):
    reader.save_pretrained(tmp_path / "reader")
    assert (tmp_path / "reader" / "model.safetensors").is_file()
    plain = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "reader").eval()
    ids, mask = batch[0][:, 0], batch[1][:, 0]
    mine = reader(ids[:, None], mask[:, None], labels).logits
    theirs = plain(input_ids=ids, attention_mask=mask, labels=labels).logits
    torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)


def test_an_untied_head_survives_saving(t5_dir, tmp_path):
    reader = FusionReader.from_name(str(t5_dir))
    head = torch.nn.Parameter(torch.randn_like(reader.t5.lm_head.weight))
    reader.t5.lm_head.weight = head
    reader.t5.config.tie_word_embeddings = False
    reader.save_pretrained(tmp_path / "untied")
    again = FusionReader.from_name(str(tmp_path / "untied"))
    torch.testing.assert_close(again.t5.lm_head.weight, head)
    assert not torch.equal(again.t5.lm_head.weight, again.t5.shared.weight)
    assert "lm_head.weight" in again.state_dict()


def test_float16_is_refused_and_bfloat16_is_not(t5_dir):
    with pytest.raises(ConfigError, match="float16: use bfloat16 or float32"):
        FusionReader.from_name(str(t5_dir), dtype=torch.float16)
    reader = FusionReader.from_name(str(t5_dir), dtype=torch.bfloat16)
    assert reader.t5.lm_head.weight.dtype is torch.bfloat16


def test_a_model_that_is_no_t5_is_refused(lm_dirs):
    with pytest.raises(ModelError, match="gpt2"):
        FusionReader.from_name(str(lm_dirs["gpt2"]))
