"""The Trainer's own arguments, with the paper's values as defaults."""

import dataclasses
import os
from dataclasses import MISSING, dataclass
from typing import Any

import torch
import transformers
from transformers.integrations.integration_utils import get_reporting_integration_callbacks
from transformers.utils import is_torch_tf32_available

from pgra.config import at_least, rules
from pgra.errors import ConfigError, show
from pgra.lm.load import ready_device
from pgra.reader.arguments import TrainingArguments

_PAPER_BATCH = 8  # of SST-2 and most others (appendix H, table 7)
_REASONS: dict[str, tuple[str, ...]] = {
    "the Trainer would upload each checkpoint with what it signs with: give the finished run to "
    "pgra push": ("push_to_hub", "hub_token"),
    "the reader does not support it. Leave it out": (
        *("auto_find_batch_size", "debug", "label_smoothing_factor", "liger_kernel_config"),
        *("neftune_noise_alpha", "optim_target_modules", "use_liger_kernel"),
        *("torch_compile", "torch_compile_backend", "torch_compile_mode"),
    ),
    "each device trains the whole reader. Leave it out (accelerate launch uses several devices)": (
        *("fsdp", "fsdp_config", "deepspeed", "parallelism_config"),
    ),
    "it overflows in a T5 and gives NaN: use --bf16, or neither": ("fp16", "fp16_full_eval"),
    "the dev set is decided as the reader is trained: use --bf16, or neither": ("bf16_full_eval",),
    "the same command goes on from its last checkpoint anyway. Leave it out": (
        *("enable_jit_checkpoint", "resume_from_checkpoint"),
    ),
    "a run that was stopped could not go on as if it had not been. Leave it out": (
        *("dataloader_in_order", "dataloader_persistent_workers", "eval_on_start"),
        *("ignore_data_skip", "restore_callback_states_from_checkpoint", "save_only_model"),
    ),
}
# Arguments that must stay as they are, and why.
REFUSED = {name: reason for reason, names in _REASONS.items() for name in names}


@dataclass
class ReaderTrainingArguments(TrainingArguments, transformers.TrainingArguments):  # type: ignore[misc]
    """`transformers.TrainingArguments` with the paper's values for SST-2 (appendix H, table 7).

    The Trainer decays all weights but norms and biases; the released code decays those too.

    Resolved when made: `bf16` to what the device has, `total_train_batch_size` to None, with
    `per_device_train_batch_size` and `gradient_accumulation_steps` in its place. `tf32` stays as
    given, for a run made with it may be measured on a CPU.
    """

    remove_unused_columns: bool = False
    ddp_find_unused_parameters: bool | None = False  # every weight of a T5 takes part in each step
    logging_nan_inf_filter: bool = False

    def __post_init__(self) -> None:
        """Refuse what a reader cannot do, and tie checkpoints to measurements."""
        self._check()
        if self.max_steps > 0 and self.eval_steps is not None and self.eval_steps >= 1:
            self.eval_steps = min(self.eval_steps, self.max_steps)
        if self.save_steps is None:
            self.save_steps = self.eval_steps or 500
        elif self.load_best_model_at_end and self.save_steps != self.eval_steps:
            raise ConfigError(
                f"save_steps ({self.save_steps}) differs from eval_steps ({self.eval_steps}): the "
                "best measurement needs its checkpoint. Leave save_steps out"
            )
        for end in ("checkpointing", "checkpointing_kwargs"):  # the library's new name for it
            if getattr(self, f"activation_{end}", None) is None:
                setattr(self, f"activation_{end}", getattr(self, f"gradient_{end}"))
        if not torch.accelerator.is_available():  # nothing to pin for, and torch would say so
            self.dataloader_pin_memory = False
            self.use_cpu = True  # or accelerate takes each process for the only one
        named = [self.report_to] if isinstance(self.report_to, str) else self.report_to or ["none"]
        self.report_to = [name for word in named for name in word.split(",") if name]
        asked = self.tf32
        self._choose_precision()
        may_send_early = self.accelerator_config is None
        try:
            transformers.TrainingArguments.__post_init__(self)
            for tracker in get_reporting_integration_callbacks(self.report_to):
                tracker()  # which refuses where its package is not installed
        except (ValueError, TypeError, OSError, ImportError, RuntimeError) as error:
            raise ConfigError(f"training arguments: {error}") from None
        if self.mixed_precision != ("bf16" if self.bf16 else "no"):  # set by `accelerate launch`
            raise ConfigError(
                f"ACCELERATE_MIXED_PRECISION is '{self.mixed_precision}', and bf16 is {self.bf16}: "
                "say it by --bf16 alone"
            )
        self.tf32 = asked
        ready_device(self.device)
        self._check_accelerator()
        if may_send_early and self.dataloader_pin_memory and self.device.type == "cuda":
            self.accelerator_config.non_blocking = True  # no step waits for its batch
        if self.full_determinism:  # cuBLAS reads it once, at a GPU's first product
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        self._share_batch()
        # Where one process sees several GPUs, the Trainer would use DataParallel, which cannot
        # gather a FiD's outputs; `accelerate launch` uses them all.
        self._n_gpu = min(self.n_gpu, 1)

    def choose_metric(self, metric: str) -> None:
        """Let a metric choose the checkpoint, unless another one is named."""
        if self.metric_for_best_model in (None, "loss"):
            self.metric_for_best_model: str | None = metric
            self.greater_is_better = True

    def to_dict(self) -> dict[str, Any]:
        """Return the arguments for a run's record."""
        values = transformers.TrainingArguments.to_dict(self)
        # Two other arguments give the total; of a token the library writes its name in <>.
        left_out = ("total_train_batch_size", "hub_token")
        return {name: value for name, value in values.items() if name not in left_out}

    @property
    def examples_per_step(self) -> int:
        """Examples a step, of all processes and accumulated batches."""
        return self._parts * int(self.per_device_train_batch_size or 0)

    @property
    def precision(self) -> str:
        """How the reader multiplies: one of `PRECISIONS`."""
        return "bfloat16" if self.bf16 else "tf32" if self._rounds else "float32"

    def share_of(self, total: int) -> int:
        """Return each process's share of a step's examples; an uneven one is a ConfigError."""
        if total % self._parts:
            raise ConfigError(
                f"total_train_batch_size ({total}) is not divisible by {self._parts} (processes "
                "times gradient_accumulation_steps): start another number of processes, or change "
                "--total_train_batch_size"
            )
        return total // self._parts

    @property
    def _parts(self) -> int:
        """How many batches a step has."""
        readers = 1 if self.accelerator_config.split_batches else int(self.world_size)
        return readers * int(self.gradient_accumulation_steps)

    def _share_batch(self) -> None:
        """Choose how many examples each process holds at once, and how often."""
        total, held = self.total_train_batch_size, self.per_device_train_batch_size
        self.total_train_batch_size = None
        if total is None and held is not None:
            return
        total = total or _PAPER_BATCH
        if held is None:
            self.per_device_train_batch_size = self.share_of(total)
        elif self.gradient_accumulation_steps == 1 and total % self.examples_per_step == 0:
            self.gradient_accumulation_steps: int = total // self.examples_per_step
        elif self.examples_per_step != total:
            raise ConfigError(
                f"total_train_batch_size is {total}, and per_device_train_batch_size ({held}) "
                f"times {self._parts} (processes times gradient_accumulation_steps) is "
                f"{self.examples_per_step}: give total_train_batch_size alone"
            )

    def _choose_precision(self) -> None:
        """Choose how the device multiplies; transformers would set TF32 for the LM's states too."""
        is_on_gpu = not self.use_cpu and torch.cuda.is_available()
        if self.bf16 is None:  # emulated it is slower than float32
            self.bf16 = is_on_gpu and torch.cuda.is_bf16_supported(including_emulation=False)
        self._rounds = is_on_gpu and is_torch_tf32_available() and self.tf32 is not False
        self.tf32 = False

    def _check(self) -> None:
        """Refuse values that the rules do not allow, and what must stay as it is."""
        for declared in dataclasses.fields(self):
            name, value = declared.name, getattr(self, declared.name)
            make = declared.default_factory
            default = declared.default if make is MISSING else make()
            if name in REFUSED and (value or None) != (default or None):
                raise ConfigError(f"{name} is {show(value)}: {REFUSED[name]}")
        for name, rule in rules(type(self)).items():
            rule.check(name, getattr(self, name))
        if self.max_steps != -1:  # -1 leaves it to num_train_epochs
            at_least("max_steps", self.max_steps, 0)

    def _check_accelerator(self) -> None:
        """Refuse what would train, or resume, with other batches than the run's record says."""
        made = self.accelerator_config
        accumulated = (made.gradient_accumulation_kwargs or {}).get("num_steps", 1)
        if made.dispatch_batches or not made.use_seedable_sampler or accumulated != 1:
            raise ConfigError(
                "accelerator_config: leave dispatch_batches and use_seedable_sampler as they are, "
                "and give gradient_accumulation_steps instead of num_steps"
            )


def default_learning_rate(width: int, steps: int) -> float:
    """Return the default rate: 8e-5 x 768 / width x (5000 / steps)^(1/3), to 1e-3.

    The paper's for SST-2 (table 7) with its T5-base and 5,000 steps; smaller readers (hidden size
    `width`) and shorter trainings need more (docs/training.md).
    """
    return float(f"{min(1e-3, 8e-5 * 768 / width * (5000 / max(steps, 1)) ** (1 / 3)):.2g}")
