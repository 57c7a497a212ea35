from contextlib import contextmanager

import numpy as np
import pytest
import torch
from conftest import T5_KINDS, one_quick
from small_training import lively
from transformers import AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

from pgra.lm.batching import GroupCost
from pgra.reader.fid import pack_segments

B, N = 3, 4
COSTS = [GroupCost(1, 1 << 20), GroupCost(10_000, 1 << 20), GroupCost(1, 8), GroupCost(1, 8, 4)]


@pytest.fixture(scope="module", params=one_quick(T5_KINDS, "t5"))
def reader(request, t5_dirs):
    reader = lively(t5_dirs[request.param])
    has_own_head = reader.model.lm_head.weight is not reader.model.shared.weight
    assert has_own_head == (request.param != "t5")
    return reader.eval()


@pytest.fixture(scope="module")
def examples():
    """Three examples of 4, 2 and 3 segments of 2 to 7 tokens."""
    rng = np.random.default_rng(1)
    return [
        [rng.integers(3, 60, size=rng.integers(2, 8)).astype(np.int32) for _ in range(count)]
        for count in (4, 2, 3)
    ]


@pytest.fixture(scope="module")
def labels():
    return torch.tensor([[5, 9, 1, -100], [7, 1, -100, -100], [8, 20, 30, 1]])


def pack(examples, cost=COSTS[0]):
    return pack_segments(examples, pad_token_id=0, cost=cost)


def read(reader, examples, labels, cost=COSTS[0], **kwargs):
    return reader(pack(examples, cost), labels=labels, **kwargs)


@contextmanager
def stock_parts(reader):
    """Give the T5 transformers' own cross-attention and norms meanwhile."""
    ours = {part: vars(part).pop("forward") for part in reader.modules() if "forward" in vars(part)}
    try:
        yield
    finally:
        for part, forward in ours.items():
            part.forward = forward


def padded(reader, examples, labels, width=9):
    """The usual Fusion-in-Decoder: all segments padded to one length, and their padding kept."""
    most = max(len(segments) for segments in examples)
    ids = torch.zeros(len(examples), most, width, dtype=torch.int64)
    mask = torch.zeros(len(examples), most, width, dtype=torch.bool)
    for i, segments in enumerate(examples):
        for n, segment in enumerate(segments):
            ids[i, n, : len(segment)] = torch.from_numpy(segment)
            mask[i, n, : len(segment)] = True
    with stock_parts(reader):
        hidden = reader.model.get_encoder()(
            input_ids=ids.view(-1, width), attention_mask=mask.view(-1, width)
        ).last_hidden_state
        return reader.model(
            encoder_outputs=BaseModelOutput(last_hidden_state=hidden.view(len(examples), -1, 32)),
            attention_mask=mask.view(len(examples), -1),
            labels=labels,
        )


@pytest.mark.parametrize("cost", COSTS)
def test_loss_and_gradients_are_those_of_the_padded_reader(reader, examples, labels, cost):
    outputs, grads = [], []
    for run in (padded, lambda *args: read(*args, cost=cost)):
        reader.zero_grad()
        output = run(reader, examples, labels)
        output.loss.backward()
        outputs.append(output)
        grads.append({name: p.grad.clone() for name, p in reader.named_parameters()})
    reader.zero_grad(set_to_none=True)
    torch.testing.assert_close(outputs[1].loss, outputs[0].loss, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(outputs[1].logits, outputs[0].logits, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(grads[1], grads[0], atol=1e-5, rtol=1e-5)
    assert grads[0]["model.encoder.block.0.layer.0.SelfAttention.q.weight"].abs().sum() > 0
    other = read(reader, [examples[0][:3], *examples[1:]], labels, cost=cost)
    assert (other.loss - outputs[0].loss).abs() > 1e-5


def test_a_saved_reader_is_a_plain_t5_and_reads_one_segment_alike(
    reader, examples, labels, tmp_path
):
    reader.save_pretrained(tmp_path / "reader")
    assert (tmp_path / "reader" / "model.safetensors").is_file()
    saved = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "reader").eval()
    for i, segments in enumerate(examples):
        plain = saved(input_ids=torch.from_numpy(segments[0])[None].long(), labels=labels[[i]])
        fused = read(reader, [segments[:1]], labels[[i]])
        torch.testing.assert_close(fused.loss, plain.loss, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fused.logits, plain.logits, atol=1e-5, rtol=1e-5)


def test_label_scores_are_the_plain_log_probabilities_of_whole_targets(reader, examples):
    """However many labels a pass of the decoder takes: 300 need several."""
    targets = torch.tensor([[5, 1, -100], [9, 12, 1], [9, 1, -100]])
    scores = reader.score_labels(pack(examples), targets.repeat(100, 1))
    torch.testing.assert_close(scores, scores[:, :3].repeat(1, 100), atol=1e-5, rtol=1e-5)
    for i in range(B):
        for j in range(3):
            labels = targets[j : j + 1, : 3 if j == 1 else 2]
            loss = read(reader, [examples[i]], labels).loss
            expected = -loss.detach() * labels.shape[1]
            torch.testing.assert_close(scores[i, j], expected, atol=1e-4, rtol=1e-5)


def generate(reader, packed, count):
    """Write as transformers does, without the start token."""
    encoded, mask = reader.fuse(packed)
    how = {"max_new_tokens": count, "do_sample": False, "num_beams": 1}
    return reader.model.generate(encoder_outputs=encoded, attention_mask=mask, **how)[:, 1:]


def test_the_tokens_written_are_those_that_transformers_writes(reader, examples):
    packed, count = pack(examples), 9
    with stock_parts(reader):
        whole = generate(reader, packed, count)
    written = reader.write(packed, count)
    assert torch.equal(written[:, : whole.shape[1]], whole)
    assert (written[:, whole.shape[1] :] == reader.model.config.pad_token_id).all()
    assert not torch.equal(written[0], written[1])
