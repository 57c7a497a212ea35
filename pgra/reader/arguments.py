"""The Trainer's own arguments, with the paper's values as defaults."""

import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from pgra.config import at_least, choose
from pgra.errors import ConfigError, unknown_name
from pgra.lm.load import ready_device

# Where the Trainer's log goes besides the terminal: TensorBoard, W&B, Trackio and others.


_PACKAGES = {"azure_ml": "azureml", "comet_ml": "comet-ml", "tensorboard": "tensorboardX"}
"""The package to install, where it is not named like the tracker."""
_UNSEEN = ("flyte", "kubeflow")  # not among what transformers can tell the presence of


def check_trackers(report_to: str | Sequence[str] | None) -> list[str]:
    """Read the trackers to report to, and refuse what could not be reported to.

    Args:
        report_to: Names, one or several in a word; "none" and "all" (that are installed) stand
            alone.

    Returns:
        The names; empty for none.

    Raises:
        ConfigError: If one is unknown, or its package is not installed.
    """
    from transformers.integrations import get_available_reporting_integrations
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    given = [report_to] if isinstance(report_to, str) else list(report_to or ())
    names = [name for word in given for name in word.split(",") if name]
    if names in ([], ["none"]):
        return []
    available = get_available_reporting_integrations()
    if names == ["all"]:
        return list(available)
    for name in names:
        if name not in INTEGRATION_TO_CALLBACK:
            raise ConfigError(unknown_name("tracker", name, [*INTEGRATION_TO_CALLBACK, "none"]))
        if name not in (*available, *_UNSEEN):
            package = _PACKAGES.get(name, name)
            raise ConfigError(
                f"report_to {name} needs a package that is not installed: pip install {package}, "
                "or leave it out"
            )
    return names


def finish_trackers(names: Sequence[str] | None) -> None:
    """Close what a training leaves open, so that the next one in this process is one of its own."""
    if "wandb" in (names or ()) and "wandb" in sys.modules:
        sys.modules["wandb"].finish()


_A_WEEK = 7 * 24 * 3600
_UNSUPPORTED = "the reader does not support it. Leave it out"
_WHOLE = (
    "each device trains the whole reader. Leave it out (accelerate launch uses several devices)"
)
_MEASURED = "the reader decides the dev set itself, in batches of tokens. Leave it out"
_TOKENISED = "inputs are tokenised beforehand. Leave it out"
REFUSED = {
    "fp16": "it overflows in a T5 and gives NaN: use --bf16, or neither",
    "fp16_full_eval": "it overflows in a T5 and gives NaN: use --bf16, or neither",
    "bf16_full_eval": "the dev set is decided as the reader is trained: use --bf16, or neither",
    "label_smoothing_factor": _UNSUPPORTED,
    "neftune_noise_alpha": _UNSUPPORTED,
    "use_liger_kernel": _UNSUPPORTED,
    "liger_kernel_config": _UNSUPPORTED,
    "optim_target_modules": _UNSUPPORTED,
    "debug": _UNSUPPORTED,
    "fsdp": _WHOLE,
    "fsdp_config": _WHOLE,
    "deepspeed": _WHOLE,
    "parallelism_config": _WHOLE,
    "auto_find_batch_size": (
        "it would train with other batches than the run's record says. Lower "
        "--per_device_train_batch_size and raise --gradient_accumulation_steps"
    ),
    # What a run that was stopped could not go on with, bit for bit.
    "ignore_data_skip": "a run that goes on would train on examples twice. Leave it out",
    "dataloader_persistent_workers": "a run that goes on would draw other dropout. Leave it out",
    "dataloader_in_order": "a run that goes on would read other batches. Leave it out",
    "eval_on_start": "a run that goes on would measure once more. Leave it out",
    "restore_callback_states_from_checkpoint": (
        "it would bring back the stop too, and early stopping's count is kept anyway. Leave it out"
    ),
    "enable_jit_checkpoint": "SIGTERM saves a checkpoint here anyway. Leave it out",
    "save_only_model": (
        "such checkpoints cannot be gone on from. Leave it out (--save_total_limit keeps few)"
    ),
    # What would change nothing.
    "per_device_eval_batch_size": _MEASURED,
    "prediction_loss_only": _MEASURED,
    "eval_do_concat_batches": _MEASURED,
    "eval_use_gather_object": _MEASURED,
    "eval_accumulation_steps": _MEASURED,
    "include_for_metrics": _MEASURED,
    "batch_eval_metrics": _MEASURED,
    "remove_unused_columns": _TOKENISED,
    "label_names": _TOKENISED,
    "length_column_name": _TOKENISED,
    "use_cache": "training caches nothing. Leave it out",
    "logging_nan_inf_filter": "a loss that is no number ends the training. Leave it out",
}
"""Arguments that must stay as they are, and why; the other ones are tried by `check_trainer`."""
_REFUSED_OPTIMIZERS = ("galore", "apollo", "lomo", "adalomo", "schedule_free")
_CHOICES = {
    "log_level": ("passive", "detail", "debug", "info", "warning", "error", "critical"),
    "log_level_replica": ("passive", "detail", "debug", "info", "warning", "error", "critical"),
    "include_num_input_tokens_seen": ("no", "all", "non_padding"),
    "train_sampling_strategy": ("random", "sequential"),
}
_MAPPINGS = (
    *("lr_scheduler_kwargs", "accelerator_config"),
    *("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"),
)
_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "dataloader_prefetch_factor": 1,
    "dataloader_num_workers": 0,
    "weight_decay": 0,
    "max_grad_norm": 0,
    "warmup_steps": 0,
    "eval_delay": 0,
    "early_stopping_patience": 1,
    "early_stopping_threshold": 0,
    "ddp_timeout": 1,
}
_POSITIVE = ("learning_rate", "eval_steps", "save_steps", "logging_steps", "max_train_minutes")


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass
class ReaderTrainingArguments(TrainingArguments):  # type: ignore[misc]  # not followed by mypy
    """`transformers.TrainingArguments` with the paper's values for SST-2 (appendix H, table 7).

    The Trainer decays all weights but norms and biases; the released code decays those too.
    """

    output_dir: str | None = _arg(
        "runs/{task}-{method}-seed{seed}", "Folder of this run: checkpoints and results."
    )
    learning_rate: float = _arg(8e-5, "Peak learning rate (the paper's grid: 1e-5 to 1e-4).")
    per_device_train_batch_size: int = _arg(8, "Examples a device and step (the paper: 4 or 8).")
    max_steps: int = _arg(5000, "Training steps; over num_train_epochs.")
    weight_decay: float = _arg(0.01, "AdamW's weight decay.")
    eval_strategy: str = _arg("steps", "When the dev set is measured: steps, epoch or no.")
    eval_steps: float | None = _arg(
        500, "Steps between measurements on the dev set (at most max_steps)."
    )
    save_steps: float | None = _arg(None, "Steps between checkpoints; default: eval_steps.")
    save_total_limit: int | None = _arg(1, "Checkpoints kept: the best, and the last so many.")
    load_best_model_at_end: bool = _arg(True, "Keep the checkpoint that is best on the dev set.")
    logging_steps: float = _arg(50, "Steps between lines of the log.")
    dataloader_drop_last: bool = _arg(True, "Leave out an epoch's last, smaller batch.")
    remove_unused_columns: bool = _arg(False, "Not of use here: inputs are tokenised beforehand.")
    ddp_find_unused_parameters: bool | None = _arg(
        False, "Not needed: every weight of a T5 takes part in every step."
    )
    disable_tqdm: bool | None = _arg(False, "Show no bar while the reader trains.")
    report_to: list[str] | None = field(
        default=None,
        metadata={
            "help": "Trackers of the log: tensorboard, wandb, trackio, ..., several; default: none."
        },
    )
    early_stopping_patience: int | None = _arg(
        None, "Measurements on the dev set without progress after which training ends."
    )
    early_stopping_threshold: float = _arg(0.0, "What counts as progress: more than this.")
    max_train_minutes: float | None = _arg(
        None,
        "Minutes of training after which it saves and leaves with exit code 124; the same command "
        "goes on.",
    )
    num_shots: int = _arg(
        16, "Examples of each label that lm-bff trains on; as many others choose the checkpoint."
    )
    exemplar_sets: int = _arg(
        16, "Sets of demonstrations, one of each label, that lm-bff reads an example with."
    )
    exemplar_share: float = _arg(
        0.5, "Share of a label's examples, the nearest, that lm-bff takes demonstrations from."
    )
    logging_nan_inf_filter: bool = _arg(
        False, "Not of use here: a loss that is no number ends the training."
    )
    ddp_timeout: int = _arg(_A_WEEK, "Seconds that processes wait for each other.")

    def __post_init__(self) -> None:
        """Refuse what a T5 reader cannot do, and tie checkpoints to measurements."""
        self._read_mappings()
        self._check_refused()
        self._check_numbers()
        self._check_shots()
        self._check_stops()
        if self.max_steps > 0 and self.eval_steps is not None and self.eval_steps >= 1:
            self.eval_steps = min(self.eval_steps, self.max_steps)
        if self.save_steps is None:
            self.save_steps = self.eval_steps or 500
        elif self.load_best_model_at_end and self.save_steps != self.eval_steps:
            raise ConfigError(
                f"save_steps ({self.save_steps}) differs from eval_steps ({self.eval_steps}): the "
                "best measurement needs its checkpoint. Leave save_steps out"
            )
        self._suit_machine()
        self.report_to = check_trackers(self.report_to) or ["none"]
        try:
            super().__post_init__()
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise ConfigError(f"training arguments: {error}") from None
        if self.mixed_precision != ("bf16" if self.bf16 else "no"):  # set by `accelerate launch`
            raise ConfigError(
                f"ACCELERATE_MIXED_PRECISION is '{self.mixed_precision}', and bf16 is {self.bf16}: "
                "say it by --bf16 alone"
            )
        ready_device(self.device)
        if self.n_gpu > 1:  # one process sees several GPUs: the Trainer would use DataParallel,
            self._n_gpu = (
                1  # which cannot gather a FiD's outputs; `accelerate launch` uses them all
            )

    def choose_metric(self, metric: str) -> None:
        """Let a metric choose the checkpoint, unless another one is named."""
        if self.metric_for_best_model in (None, "loss"):
            self.metric_for_best_model: str | None = metric
            self.greater_is_better = True

    def _check_refused(self) -> None:
        for one in dataclasses.fields(self):
            value = getattr(self, one.name)
            default = one.default if one.default_factory is MISSING else one.default_factory()
            if one.name in REFUSED and (value or None) != (default or None):
                raise ConfigError(f"{one.name} is {value!r}: {REFUSED[one.name]}")
            if not _is_finite(value):
                raise ConfigError(f"{one.name} is {value}: it must be a finite number")
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, str):
                choose(name, value, known)
        optim = str(getattr(self.optim, "value", self.optim))
        if optim.startswith(_REFUSED_OPTIMIZERS):
            raise ConfigError(
                f"optim is '{optim}': the reader does not support it. Leave it out, or take "
                "adamw_torch, adafactor or sgd"
            )
        if self.greater_is_better is False and self.metric_for_best_model is None:
            raise ConfigError(
                "greater_is_better is False: the task's metric is better when it is greater. Leave "
                "it out, or name metric_for_best_model"
            )

    def _read_mappings(self) -> None:
        for name in _MAPPINGS:
            value = getattr(self, name)
            try:
                if name == "accelerator_config" and str(value).endswith(".json"):
                    value = Path(str(value)).read_text(encoding="utf-8")
                value = json.loads(value) if isinstance(value, str) else value
                if name == "accelerator_config":
                    _check_accelerator(value)
            except (OSError, ValueError, TypeError) as error:
                raise ConfigError(f"{name} is {value!r}: {error}") from None
            if isinstance(value, str | int | float | list):
                raise ConfigError(f"{name} is {value!r}: it must be a mapping in JSON")
            setattr(self, name, value)

    def _check_numbers(self) -> None:
        for name in _POSITIVE:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}: it must be above 0")
        for name, least in _LEAST.items():
            at_least(name, getattr(self, name), least)
        if self.max_steps != -1:  # -1 leaves it to num_train_epochs
            at_least("max_steps", self.max_steps, 1)
        elif self.num_train_epochs <= 0:
            raise ConfigError(f"num_train_epochs is {self.num_train_epochs}: it must be above 0")
        for name in ("seed", "data_seed"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1 << 32:
                raise ConfigError(f"{name} is {value}: it must lie between 0 and {(1 << 32) - 1}")

    def _check_shots(self) -> None:
        at_least("num_shots", self.num_shots, 2)  # an example's label needs another one to show
        at_least("exemplar_sets", self.exemplar_sets, 1)
        if not 0 < self.exemplar_share <= 1:
            raise ConfigError(
                f"exemplar_share is {self.exemplar_share}: it must be above 0 and at most 1"
            )

    def _check_stops(self) -> None:
        measures = str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no"
        if self.early_stopping_patience and not (measures and self.load_best_model_at_end):
            raise ConfigError(
                "early_stopping_patience needs measurements and their checkpoints: leave "
                "eval_strategy and load_best_model_at_end as they are"
            )

    def _suit_machine(self) -> None:
        for end in ("checkpointing", "checkpointing_kwargs"):  # the library's new name for it
            if getattr(self, f"activation_{end}", None) is None:
                setattr(self, f"activation_{end}", getattr(self, f"gradient_{end}"))
        if not torch.accelerator.is_available():  # nothing to pin for, and torch would say so
            self.dataloader_pin_memory = False
            self.use_cpu = True  # or accelerate takes each process for the only one


def _check_accelerator(value: AcceleratorConfig | Mapping[str, Any] | None) -> None:
    config = AcceleratorConfig(**value) if isinstance(value, Mapping) else value
    if not isinstance(config, AcceleratorConfig):
        return
    if config.dispatch_batches or not config.use_seedable_sampler:
        raise ValueError(
            "with dispatch_batches, or without use_seedable_sampler, a run that goes on would read "
            "other batches. Leave them out"
        )
    if (config.gradient_accumulation_kwargs or {}).get("num_steps", 1) != 1:
        raise ValueError("take gradient_accumulation_steps instead of num_steps")


def _is_finite(value: object) -> bool:
    """Say whether all numbers in a value are finite; JSON's NaN may stand in a mapping."""
    if isinstance(value, Mapping):
        return all(_is_finite(part) for part in value.values())
    return not isinstance(value, float) or math.isfinite(value)


TRAINING_NOT_DECIDING = frozenset(
    {
        # Where: folders, names, the Hub.
        *("output_dir", "run_name", "project", "trackio_space_id", "trackio_bucket_id"),
        *("trackio_static_space_id", "push_to_hub", "hub_token", "hub_private_repo"),
        *("hub_model_id", "hub_strategy", "hub_always_push", "hub_revision"),
        # On which machine. How many processes train together is compared by itself.
        *("use_cpu", "local_rank", "ddp_backend", "ddp_timeout"),
        # How much is logged, how often, how loud. (A missing eval_steps is resolved before.)
        *("logging_strategy", "logging_steps", "logging_first_step", "logging_nan_inf_filter"),
        *("log_on_each_node", "log_level", "log_level_replica", "disable_tqdm", "report_to"),
        *("include_num_input_tokens_seen", "skip_memory_metrics"),
        # How often a run is saved, when it pauses, where it goes on: going on is bit-exact, and the
        # best checkpoint is always kept (with it, save_steps is eval_steps, which decides).
        *("save_steps", "save_total_limit", "save_on_each_node", "resume_from_checkpoint"),
        "max_train_minutes",
        # Memory and speed of the same computation: what is computed twice, who reads batches.
        *("activation_checkpointing", "gradient_checkpointing", "torch_empty_cache_steps"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"),
        "dataloader_multiprocessing_context",
        # Asked by nobody: a run always trains, measures and predicts.
        *("do_train", "do_eval", "do_predict"),
        # Of lm-bff, in the fingerprints of its examples and demonstrations.
        *("num_shots", "exemplar_sets", "exemplar_share"),
    }
)
"""The Trainer's arguments that change no weight and no prediction. All others decide a run, so a
new one of a later `transformers` does too, until it is declared here."""
