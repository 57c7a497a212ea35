"""The Trainer's own arguments, with the paper's values as defaults."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from pgra.config import at_least
from pgra.errors import ConfigError
from pgra.models.loading import ready_device
from pgra.reader.trackers import check_trackers

_A_WEEK = 7 * 24 * 3600


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
        if self.fp16:
            raise ConfigError("fp16 overflows in a T5 and gives NaN: use --bf16, or neither")
        if self.label_smoothing_factor:
            raise ConfigError("label_smoothing_factor is not supported by the reader: leave it out")
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
        except ValueError as error:
            raise ConfigError(f"training arguments: {error}") from None
        ready_device(self.device)
        if self.n_gpu > 1:  # one process sees several GPUs: the Trainer would use DataParallel,
            self._n_gpu = (
                1  # which cannot gather a FiD's outputs; `accelerate launch` uses them all
            )

    def _check_numbers(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"learning_rate is {self.learning_rate}: it must be above 0")
        for name in (
            "per_device_train_batch_size",
            "per_device_eval_batch_size",
            "gradient_accumulation_steps",
        ):
            at_least(name, getattr(self, name), 1)
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
        if self.enable_jit_checkpoint:
            raise ConfigError(
                "enable_jit_checkpoint: SIGTERM saves a checkpoint here anyway. Leave it out"
            )
        if self.save_only_model:
            raise ConfigError(
                "save_only_model leaves checkpoints that cannot be gone on from: leave it out "
                "(--save_total_limit keeps few of them)"
            )
        if self.max_train_minutes is not None and not self.max_train_minutes > 0:
            raise ConfigError(f"max_train_minutes is {self.max_train_minutes}: must be above 0")
        at_least("early_stopping_patience", self.early_stopping_patience, 1)
        measures = str(getattr(self.eval_strategy, "value", self.eval_strategy)) != "no"
        if self.early_stopping_patience and not (measures and self.load_best_model_at_end):
            raise ConfigError(
                "early_stopping_patience needs measurements and their checkpoints: leave "
                "eval_strategy and load_best_model_at_end as they are"
            )

    def _suit_machine(self) -> None:
        if getattr(self, "activation_checkpointing", None) is None:  # the library's new name for it
            self.activation_checkpointing = self.gradient_checkpointing
        if not torch.accelerator.is_available():  # nothing to pin for, and torch would say so
            self.dataloader_pin_memory = False
            self.use_cpu = True  # or accelerate takes each process for the only one
