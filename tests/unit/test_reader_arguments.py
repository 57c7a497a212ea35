import pytest
import torch

from pgra.errors import ConfigError, ModelError
from pgra.lm.load import choose_device
from pgra.reader.arguments import TrainingArguments, default_learning_rate
from pgra.reader.train import uses_bf16


def test_training_has_the_papers_defaults():
    paper, short = TrainingArguments(), TrainingArguments(max_steps=20)
    paper.share_batch(1)
    assert (paper.learning_rate, paper.max_steps, paper.weight_decay) == (None, 5000, 0.01)
    assert (paper.per_device_train_batch_size, paper.seed, paper.max_grad_norm) == (8, 42, 1.0)
    assert (paper.eval_steps, paper.save_steps, paper.lr_scheduler_type) == (500, 500, "linear")
    assert paper.load_best_model_at_end
    assert (short.eval_steps, short.save_steps) == (20, 20)


@pytest.mark.parametrize(
    ("width", "steps", "rate"),
    [(768, 5000, 8e-5), (1024, 5000, 6e-5), (512, 5000, 1.2e-4), (512, 40, 6e-4), (64, 4, 1e-3)],
)
def test_the_default_rate_is_the_papers_for_its_reader(width, steps, rate):
    assert default_learning_rate(width, steps) == rate


@pytest.mark.parametrize("asked", [None, False, True])
def test_bfloat16_is_never_emulated(monkeypatch, asked):
    arguments, gpu = TrainingArguments(bf16=asked), torch.device("cuda", 0)
    assert uses_bf16(arguments, torch.device("cpu")) == bool(asked)
    for has_bf16 in (True, False):
        # Torch emulates bfloat16 on any GPU, and says so unless it is asked not to.
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, has=has_bf16: has or including_emulation,
        )
        if asked and not has_bf16:
            with pytest.raises(ModelError, match="bf16"):
                uses_bf16(arguments, gpu)
        else:
            assert uses_bf16(arguments, gpu) == (has_bf16 and asked is not False)


@pytest.mark.parametrize(
    ("processes", "given", "shares"),
    [
        # processes, what is given; examples at once on a device, batches accumulated
        (1, {}, (8, 1)),
        (2, {}, (4, 1)),
        (2, {"total_train_batch_size": 16}, (8, 1)),
        (2, {"total_train_batch_size": 16, "per_device_train_batch_size": 2}, (2, 4)),
        (2, {"per_device_train_batch_size": 8}, (8, 1)),  # 16 a step
        (8, {"total_train_batch_size": 4}, (1, 1)),  # shared by four
        (4, {"total_train_batch_size": 6}, (2, 1)),  # by three
    ],
)
def test_a_step_has_the_same_examples_however_many_processes(processes, given, shares):
    made = TrainingArguments(**given)
    sharing = made.share_batch(processes)
    accumulated = made.num_accumulated(sharing)
    assert (made.per_device_train_batch_size, accumulated) == shares
    assert made.total_train_batch_size == sharing * shares[0] * shares[1]
    before = made.deciding()
    made.share_batch(processes)
    assert made.deciding() == before
    if processes == 2:
        with pytest.raises(ConfigError, match="5"):
            TrainingArguments(total_train_batch_size=5, per_device_train_batch_size=2).share_batch(
                2
            )


@pytest.mark.gpu
def test_whoever_takes_a_gpu_goes_without_cudnns_attention():
    """It gives a T5's position bias no gradient; on a CPU torch is left as it is."""
    for device in ("cpu", "cuda"):
        torch.backends.cuda.enable_cudnn_sdp(True)
        choose_device(device)
        assert torch.backends.cuda.cudnn_sdp_enabled() == (device == "cpu")
    torch.backends.cuda.enable_cudnn_sdp(True)
