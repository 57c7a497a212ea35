import copy
from dataclasses import fields
from functools import partial

import pytest
import torch
from transformers import TrainingArguments

import pgra.reader.trainer_arguments as arguments_module
from pgra.artifacts import canonical_json
from pgra.lm.load import ready_device
from pgra.methods.pgra import training_identity
from pgra.reader.arguments import NOT_DECIDING
from pgra.reader.trainer_arguments import ReaderTrainingArguments, default_learning_rate


def test_arguments_have_the_papers_defaults_and_a_short_training_is_measured_at_its_end():
    paper = ReaderTrainingArguments(use_cpu=True)
    short = ReaderTrainingArguments(use_cpu=True, max_steps=20)
    assert (paper.learning_rate, paper.max_steps, paper.weight_decay) == (None, 5000, 0.01)
    assert (paper.per_device_train_batch_size, paper.seed, paper.max_grad_norm) == (8, 42, 1.0)
    assert (paper.eval_steps, paper.save_steps, paper.lr_scheduler_type) == (500, 500, "linear")
    assert paper.load_best_model_at_end
    assert (short.eval_steps, short.save_steps) == (20, 20)


@pytest.mark.parametrize(
    ("width", "steps", "rate"),
    [(768, 5000, 8e-5), (1024, 5000, 6e-5), (512, 5000, 1.2e-4), (512, 40, 6e-4), (64, 4, 1e-3)],
)
def test_the_default_rate_is_the_papers_for_its_reader_and_higher_for_less_of_both(
    width, steps, rate
):
    assert default_learning_rate(width, steps) == rate


def identity(arguments):
    return canonical_json(training_identity(arguments, "accuracy"))


def test_all_of_the_trainers_arguments_decide_a_run_but_the_declared():
    before = ReaderTrainingArguments(use_cpu=True)
    names = {one.name for one in fields(ReaderTrainingArguments)}
    assert names > NOT_DECIDING
    # Two follow from others, and one must be an object.
    for name in names - {"greater_is_better", "total_train_batch_size", "parallelism_config"}:
        after = copy.copy(before)
        setattr(after, name, "another")
        assert (identity(before) == identity(after)) == (name in NOT_DECIDING), name


def see_gpu(monkeypatch, *, has_bf16=True, has_tf32=True):
    """Let torch see a GPU, which is never used."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Old GPU")
    # Torch emulates bfloat16 on any GPU, and says so unless it is asked not to.
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: has_bf16 or including_emulation,
    )
    monkeypatch.setattr(arguments_module, "is_torch_tf32_available", lambda: has_tf32)
    monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda", 0))
    monkeypatch.setattr(TrainingArguments, "n_gpu", 1)
    monkeypatch.setattr(TrainingArguments, "world_size", 1)


ON_GPUS = [
    # bf16, tf32 as given; whether the GPU has them; what is done
    (None, None, True, True, "bfloat16"),
    (None, None, False, True, "tf32"),
    (None, None, False, False, "float32"),
    (False, None, True, True, "tf32"),
    (False, False, True, True, "float32"),
    (True, None, True, True, "bfloat16"),
]


@pytest.mark.parametrize(("bf16", "tf32", "has_bf16", "has_tf32", "done"), ON_GPUS)
def test_a_gpu_multiplies_in_the_fastest_way_it_has_unless_told_otherwise(
    monkeypatch, bf16, tf32, has_bf16, has_tf32, done
):
    asked = {"bf16": bf16, "tf32": tf32}
    assert ReaderTrainingArguments(use_cpu=True, bf16=bf16).precision == (
        "bfloat16" if bf16 else "float32"  # on a CPU
    )
    see_gpu(monkeypatch, has_bf16=has_bf16, has_tf32=has_tf32)
    made = ReaderTrainingArguments(**asked)
    assert made.precision == done
    assert (made.bf16, made.mixed_precision) == (
        (True, "bf16") if done == "bfloat16" else (False, "no")
    )
    assert torch.get_float32_matmul_precision() == "highest"  # of others in this process
    recorded = {name: made.to_dict()[name] for name in ("bf16", "tf32")}
    assert ReaderTrainingArguments(**recorded).precision == done
    ReaderTrainingArguments(use_cpu=True, **recorded)  # a run may be measured anywhere
    assert made.accelerator_config.non_blocking
    assert not ReaderTrainingArguments(use_cpu=True).accelerator_config.non_blocking


SHARES = [
    # processes, what is given; examples at once on a device, batches accumulated
    (1, {}, (8, 1)),
    (2, {}, (4, 1)),
    (2, {"total_train_batch_size": 16}, (8, 1)),
    (2, {"total_train_batch_size": 16, "gradient_accumulation_steps": 2}, (4, 2)),
    (2, {"total_train_batch_size": 16, "per_device_train_batch_size": 2}, (2, 4)),
    (2, {"per_device_train_batch_size": 8}, (8, 1)),  # as in transformers: 16 a step
    (2, {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 3}, (8, 3)),
]


@pytest.mark.parametrize(("processes", "given", "shares"), SHARES)
def test_a_step_has_the_same_examples_however_many_processes(monkeypatch, processes, given, shares):
    monkeypatch.setattr(TrainingArguments, "world_size", processes)
    made = ReaderTrainingArguments(use_cpu=True, **given)
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == shares
    assert made.examples_per_step == processes * shares[0] * shares[1]
    if "per_device_train_batch_size" not in given or "total_train_batch_size" in given:
        assert made.examples_per_step == given.get("total_train_batch_size", 8)
    both = ("per_device_train_batch_size", "gradient_accumulation_steps")
    recorded = {name: made.to_dict()[name] for name in both}
    assert "total_train_batch_size" not in made.to_dict()  # runs made before it are the same runs
    again = ReaderTrainingArguments(use_cpu=True, **recorded)
    assert identity(again) == identity(made)


def test_whoever_takes_a_gpu_goes_without_cudnns_attention(monkeypatch):
    """It gives a T5's position bias no gradient; on a CPU torch is left as it is."""
    for is_there in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(True)
        if is_there:
            see_gpu(monkeypatch)
        for take in (
            partial(ready_device, torch.device("cuda" if is_there else "cpu")),
            partial(ReaderTrainingArguments, use_cpu=True),
        ):
            take()
            assert torch.backends.cuda.cudnn_sdp_enabled() != is_there
            torch.backends.cuda.enable_cudnn_sdp(True)
