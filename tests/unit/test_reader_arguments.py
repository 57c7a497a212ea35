import copy
import re
from dataclasses import dataclass, fields
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from transformers import TrainingArguments

from pgra.artifacts import canonical_json
from pgra.config import parse_arguments
from pgra.errors import ConfigError
from pgra.lm.load import ready_device
from pgra.methods.pgra import training_identity
from pgra.reader.arguments import REFUSED, ReaderTrainingArguments, check_trainer
from pgra.reader.fields import NOT_DECIDING


def test_arguments_have_the_papers_defaults_and_are_read_from_yaml_and_command_line(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("learning_rate: 0.001\nmax_steps: 40\n")
    paper = ReaderTrainingArguments(use_cpu=True)
    words = ["--config", str(path), "--max_steps", "20", "--use_cpu"]
    (training,) = parse_arguments([ReaderTrainingArguments], words, prog="x", description="")
    assert (paper.learning_rate, paper.max_steps, paper.weight_decay) == (8e-5, 5000, 0.01)
    assert (paper.per_device_train_batch_size, paper.seed, paper.max_grad_norm) == (8, 42, 1.0)
    assert (paper.eval_steps, paper.save_steps, paper.lr_scheduler_type) == (500, 500, "linear")
    assert paper.load_best_model_at_end
    assert (training.learning_rate, training.max_steps) == (1e-3, 20)
    assert (training.eval_steps, training.save_steps) == (20, 20)  # measured at its end


FIELDS = [one.name for one in fields(ReaderTrainingArguments)]
OTHER = {
    "dataloader_prefetch_factor": 2,
    "parallelism_config": SimpleNamespace(to_json=lambda: {"dp_shard_size": 2}),
    "accelerator_config": {"even_batches": False},
    "activation_checkpointing_kwargs": {"use_reentrant": True},
    "data_seed": 7,
    "dataloader_multiprocessing_context": "fork",
    "debug": "underflow_overflow",
    "early_stopping_patience": 3,
    "eval_strategy": "epoch",
    "gradient_checkpointing_kwargs": {"use_reentrant": True},
    "greater_is_better": False,
    "hub_strategy": "end",
    "log_level": "debug",
    "log_level_replica": "debug",
    "logging_strategy": "epoch",
    "lr_scheduler_kwargs": {"power": 2.0},
    "lr_scheduler_type": "cosine",
    "max_steps": 900,
    "max_train_minutes": 5.0,
    "metric_for_best_model": "mcc",
    "optim": "sgd",
    "include_num_input_tokens_seen": "all",
    "optim_args": "maximize=False",
    "torch_compile_mode": "reduce-overhead",
    "torch_empty_cache_steps": 2,
    "report_to": ["tensorboard"],
    "save_strategy": "best",
    "torch_compile_backend": "eager",
    "train_sampling_strategy": "sequential",
}
"""Other legal values, where they do not follow from the field's kind."""
NOT_HERE = ("tf32", "ddp_backend")  # ask for a GPU, and for several processes
BESIDES = {
    "dataloader_prefetch_factor": {"dataloader_num_workers": 1},
    "dataloader_persistent_workers": {"dataloader_num_workers": 1},
    "dataloader_multiprocessing_context": {"dataloader_num_workers": 1},
    "eval_strategy": {"load_best_model_at_end": False},
    "greater_is_better": {"metric_for_best_model": "mcc"},
    "save_steps": {"load_best_model_at_end": False},
}
"""What else a value asks for."""


def other_value(name):
    """Give another value of a field than its default."""
    if name in OTHER:
        return OTHER[name]
    value = getattr(ReaderTrainingArguments(use_cpu=True), name)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value / 2 if 0 < value < 1 else value + 1
    return "x"


def with_value(name):
    """Give arguments with a field's default and with another value, set by force if refused."""
    more = {"use_cpu": True, **BESIDES.get(name, {})}
    before = ReaderTrainingArguments(**more)
    try:
        return before, ReaderTrainingArguments(**{**more, name: other_value(name)})
    except ConfigError:
        after = copy.copy(before)
        setattr(after, name, other_value(name))
        return before, after


def identity(arguments):
    return canonical_json(training_identity(arguments, "accuracy"))


@pytest.mark.parametrize("name", FIELDS)
def test_all_of_the_trainers_arguments_decide_a_run_but_the_declared(name):
    before, after = with_value(name)
    assert (identity(before) == identity(after)) == (name in NOT_DECIDING)


@pytest.mark.parametrize("name", REFUSED)
def test_what_the_reader_cannot_do_is_refused_with_its_value(name):
    ReaderTrainingArguments(use_cpu=True)  # the control
    value = other_value(name)
    with pytest.raises(ConfigError, match=f"^{name} is ") as caught:
        ReaderTrainingArguments(use_cpu=True, **{name: value})
    assert repr(value) in str(caught.value)
    assert "eave it out" in str(caught.value) or "--" in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {"optim": "galore_adamw"},
        {"optim": "adamw_torch_xla"},
        {"optim_args": "no_pair"},
        {"adam_beta1": 1.5},
        {"learning_rate": float("nan")},
        {"lr_scheduler_type": "cosine_with_min_lr"},
        {"lr_scheduler_kwargs": "{"},
        {"lr_scheduler_kwargs": '{"unknown": 1}'},
        {"lr_scheduler_kwargs": '{"min_lr": NaN}'},
        {"accelerator_config": '{"gradient_accumulation_kwargs": {"num_steps": 2}}'},
        {"accelerator_config": '{"dispatch_batches": true}'},
        {"activation_checkpointing_kwargs": '{"unknown": 1}'},
        {"dataloader_num_workers": 1, "dataloader_multiprocessing_context": "unknown"},
        {"torch_compile_backend": "unknown"},
        {"greater_is_better": False},
        {"load_best_model_at_end": False, "early_stopping_patience": 2},
        {"eval_steps": 20, "save_steps": 500},
        {"report_to": "tensorbord"},
        {"max_steps": -2},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_value_that_cannot_be_used_is_refused_before_the_training(values):
    with pytest.raises(ConfigError) as caught:
        check_trainer(ReaderTrainingArguments(use_cpu=True, **values))
    (name, value), *_ = reversed(values.items())
    assert name in str(caught.value) or name == "report_to"
    message = str(caught.value).lower()
    if name != "early_stopping_patience":
        assert all(word.lower() in message for word in re.findall(r"\w+", str(value)))


@pytest.mark.parametrize("name", [one for one in FIELDS if one not in {*REFUSED, *NOT_HERE}])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_a_legal_value_of_any_argument_can_be_used(name):
    more = {"use_cpu": True, **BESIDES.get(name, {})}
    if name == "lr_scheduler_kwargs":
        more["lr_scheduler_type"] = "polynomial"
    check_trainer(ReaderTrainingArguments(**{**more, name: other_value(name)}))


def test_a_precision_that_accelerate_sets_is_said_by_the_argument(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    ReaderTrainingArguments(use_cpu=True, bf16=True)  # the control
    with pytest.raises(
        ConfigError, match="ACCELERATE_MIXED_PRECISION is 'bf16', and bf16 is False"
    ):
        ReaderTrainingArguments(use_cpu=True)


def test_a_declared_argument_exists_and_one_of_a_later_trainer_decides():
    assert set(FIELDS) >= NOT_DECIDING

    @dataclass
    class Later(ReaderTrainingArguments):
        brand_new: int = 0

    assert identity(Later(use_cpu=True)) != identity(Later(use_cpu=True, brand_new=1))
    mapped = [{"power": 2.0}, '{"power": 2}']
    one, other = (ReaderTrainingArguments(use_cpu=True, lr_scheduler_kwargs=m) for m in mapped)
    assert identity(one) == identity(other)  # a value is what it resolves to


def test_whoever_takes_a_gpu_goes_without_cudnns_attention(monkeypatch):
    """It gives a T5's position bias no gradient; on a CPU torch is left as it is."""
    for is_there in (False, True):
        torch.backends.cuda.enable_cudnn_sdp(True)
        if is_there:  # a GPU that is seen and never used
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
            monkeypatch.setattr(TrainingArguments, "device", torch.device("cuda", 0))
        for take in (
            partial(ready_device, torch.device("cuda" if is_there else "cpu")),
            partial(ReaderTrainingArguments, use_cpu=True),
        ):
            take()
            assert torch.backends.cuda.cudnn_sdp_enabled() != is_there
            torch.backends.cuda.enable_cudnn_sdp(True)


def test_what_is_reported_to_is_asked_for_and_installed():
    assert ReaderTrainingArguments(use_cpu=True).report_to == []
    assert TrainingArguments(use_cpu=True).report_to == []  # the Trainer's default is ours
    for words in (["tensorboard"], "tensorboard"):
        assert ReaderTrainingArguments(use_cpu=True, report_to=words).report_to == ["tensorboard"]
    with pytest.raises(ConfigError, match="requires wandb to be installed"):
        ReaderTrainingArguments(use_cpu=True, report_to="tensorboard,wandb")
