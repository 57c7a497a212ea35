import numpy as np
import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from pgra.lm.batching import GroupCost, pack_segments
from pgra.reader.arguments import ReaderArguments
from pgra.reader.fid import FusionReader

LORA = ReaderArguments(lora_rank=4)


@pytest.fixture
def plain(t5_dir):
    return FusionReader.from_name(str(t5_dir))


def adapted(reader, args=LORA, seed=1):
    reader.add_adapters(args, seed=seed)
    return reader


def trained(reader):
    """Give adapters that matter: fresh ones change nothing."""
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in reader.parameters():
            if weight.requires_grad:
                weight.normal_(std=0.2)
    return reader.eval()


def read(reader):
    return reader.score_labels(packed(), torch.tensor([[5, 9, 1], [7, 1, -100], [8, 20, 1]]))


def packed():
    rng = np.random.default_rng(1)
    lengths = ((4, 7, 2), (5, 3))
    examples = [[rng.integers(3, 60, size=n).astype(np.int32) for n in row] for row in lengths]
    return pack_segments(examples, pad_token_id=0, cost=GroupCost(1, 1 << 20))


def copies(module):
    return {name: weight.clone() for name, weight in module.state_dict().items()}


def test_fresh_adapters_change_nothing_and_trained_ones_do(plain):
    before = read(plain)
    reader = adapted(plain).eval()
    torch.testing.assert_close(read(reader), before, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(read(trained(reader)), before, atol=1e-2)


def test_merged_is_what_the_adapters_gave(plain, tmp_path):
    reader = trained(adapted(plain))
    apart = read(reader)
    reader.save_pretrained(tmp_path / "reader")
    torch.testing.assert_close(read(reader), apart, atol=1e-4, rtol=1e-5)
    again = FusionReader.from_name(str(tmp_path / "reader"))
    assert torch.equal(read(again), read(reader))
    written = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "reader")
    assert not any("lora" in name for name in written.state_dict())


def test_only_adapters_train_and_only_they_are_kept(plain, t5_dir):
    reader = adapted(plain)
    learning = [name for name, weight in reader.model.named_parameters() if weight.requires_grad]
    assert set(learning) == set(reader.state_dict())
    assert all("lora_" in name for name in learning)
    assert all(".q." in name or ".v." in name for name in learning)  # peft's own for a T5
    mine = trained(reader)
    other = adapted(FusionReader.from_name(str(t5_dir)), seed=2).eval()
    assert not torch.equal(read(other), read(mine))
    assert other.load_state_dict(mine.state_dict()).missing_keys == []
    assert torch.equal(read(other), read(mine))
    half = dict(list(reader.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="weights do not fit"):
        reader.load_state_dict(half)
    assert len(reader.load_state_dict(half, strict=False).missing_keys) == 1


def test_a_seed_gives_the_adapters_and_leaves_the_callers_randomness(t5_dir):
    weights = []
    for seed in (1, 1, 2):
        torch.manual_seed(9)
        reader = adapted(FusionReader.from_name(str(t5_dir)), seed=seed)
        weights.append((copies(reader), torch.rand(1)))
    name = next(name for name in weights[0][0] if "lora_A" in name)
    assert torch.equal(weights[0][0][name], weights[1][0][name])
    assert not torch.equal(weights[0][0][name], weights[2][0][name])
    assert weights[0][1] == weights[2][1]


def test_adapters_learn_with_activation_checkpointing(plain):
    reader = trained(adapted(plain)).train()
    name = "activation_checkpointing_enable"  # before transformers 5.23 it had another
    getattr(reader, name if hasattr(reader.model, name) else "gradient_checkpointing_enable")()
    reader(**vars(packed()), labels=torch.tensor([[4, 5], [6, 1]])).loss.backward()
    grads = [w.grad for w in reader.parameters() if w.requires_grad]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in grads)
    assert all(w.grad is None for w in reader.parameters() if not w.requires_grad)
