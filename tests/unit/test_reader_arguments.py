import pytest
import torch
from transformers import TrainingArguments

from pgra.arguments import parse_arguments
from pgra.config import ReaderArguments
from pgra.errors import ConfigError
from pgra.memory import finetuning
from pgra.models.loading import choose_device
from pgra.reader.arguments import ReaderTrainingArguments


def test_arguments_have_the_papers_defaults():
    arguments = ReaderTrainingArguments(use_cpu=True)
    assert (arguments.learning_rate, arguments.max_steps, arguments.weight_decay) == (
        8e-5,
        5000,
        0.01,
    )
    assert (arguments.per_device_train_batch_size, arguments.seed) == (8, 42)
    assert (arguments.eval_steps, arguments.save_steps, arguments.max_grad_norm) == (500, 500, 1.0)
    assert arguments.load_best_model_at_end
    assert arguments.report_to == []
    assert arguments.lr_scheduler_type == "linear"


def test_a_short_run_is_measured_at_its_end():
    arguments = ReaderTrainingArguments(use_cpu=True, max_steps=40)
    assert (arguments.eval_steps, arguments.save_steps) == (40, 40)
    arguments = ReaderTrainingArguments(use_cpu=True, max_steps=40, eval_steps=20)
    assert (arguments.eval_steps, arguments.save_steps) == (20, 20)


def test_arguments_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match="fp16 overflows in a T5"):
        ReaderTrainingArguments(fp16=True)
    with pytest.raises(ConfigError, match=r"save_steps \(500\) differs from eval_steps \(20\)"):
        ReaderTrainingArguments(save_steps=500, eval_steps=20)
    with pytest.raises(ConfigError, match="label_smoothing_factor is not supported"):
        ReaderTrainingArguments(label_smoothing_factor=0.1)
    with pytest.raises(ConfigError, match="training arguments: --load_best_model_at_end requires"):
        ReaderTrainingArguments(eval_strategy="no")


def test_arguments_come_from_yaml_and_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 0.001\nmax_steps: 40\nmax_segment_tokens: 64\n")
    reader, training = parse_arguments(
        [ReaderArguments, ReaderTrainingArguments],
        ["--config", str(path), "--max_steps", "20", "--use_cpu"],
        prog="train.py",
        description="Train.",
    )
    assert reader.max_segment_tokens == 64
    assert (training.learning_rate, training.max_steps, training.eval_steps) == (0.001, 20, 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"enable_jit_checkpoint": True}, "enable_jit_checkpoint: SIGTERM saves a checkpoint here"),
        ({"save_only_model": True}, "save_only_model leaves checkpoints that cannot be gone on"),
        ({"max_train_minutes": 0.0}, "max_train_minutes is 0.0: must be above 0"),
        ({"early_stopping_patience": 0}, "early_stopping_patience is 0: it must be at least 1"),
        (
            {"early_stopping_patience": 2, "load_best_model_at_end": False},
            "early_stopping_patience needs measurements and their checkpoints",
        ),
    ],
    ids=str,
)
def test_what_would_spoil_a_stop_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        ReaderTrainingArguments(use_cpu=True, **change)


def test_a_dropout_rate_is_a_share():
    assert ReaderArguments(dropout_rate=0.0).dropout_rate == 0
    with pytest.raises(ConfigError, match=r"dropout_rate is 1.0: it must lie in \[0, 1\)"):
        ReaderArguments(dropout_rate=1.0)


@pytest.fixture
def cudnn_on():
    """cuDNN's attention as torch has it at the start; it gives a T5's position bias no gradient."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.fixture
def seen_gpu(monkeypatch, cudnn_on):
    """A GPU that is seen and never used."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda", 0))


def finetune_arguments(folder):
    settings = finetuning.FinetuneSettings(
        max_steps=1,
        packs_per_step=1,
        learning_rate=1e-3,
        frozen_layers=0,
        save_steps=1,
        seed=0,
        bf16=False,
        device="cpu",
    )
    return finetuning._arguments(folder, settings)


WAYS_TO_A_DEVICE = {
    "choose_device": lambda folder: choose_device("auto"),
    "the reader's Trainer": lambda folder: ReaderTrainingArguments(use_cpu=True),
    "the LM's Trainer": finetune_arguments,
}


@pytest.mark.parametrize("way", WAYS_TO_A_DEVICE)
def test_whoever_takes_a_gpu_goes_without_cudnns_attention(way, seen_gpu, tmp_path):
    WAYS_TO_A_DEVICE[way](tmp_path)
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


@pytest.mark.parametrize("way", WAYS_TO_A_DEVICE)
def test_on_a_cpu_torchs_attention_is_left_as_it_is(way, cudnn_on, tmp_path):
    WAYS_TO_A_DEVICE[way](tmp_path)
    choose_device("cpu")
    assert torch.backends.cuda.cudnn_sdp_enabled()
