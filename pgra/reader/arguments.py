"""Arguments of the reader and of its training, without torch."""

import math
from dataclasses import dataclass

from pgra.config import Arguments, arg
from pgra.errors import ConfigError

_PAPER_BATCH = 8  # of SST-2 and most others (Guo et al. 2023, appendix H, table 7)


@dataclass(kw_only=True)
class LabelBiasArguments(Arguments):
    """Whether labels that a reader leans to, whatever the text, lose that."""

    GROUP = "Reader"

    label_bias: str = arg(
        "auto",
        "Take the bias to labels out of scores: dev (fitted to it; 16 examples a label), batch (by "
        "the mean over the texts decided, 50 or more), auto (dev if it can, else batch over the "
        "training texts), or none (the paper's).",
        choices=("auto", "batch", "dev", "none"),
    )


@dataclass(kw_only=True)
class ReaderArguments(LabelBiasArguments):
    """The fused T5 that reads a query with its evidence."""

    GROUP = "Reader"

    model_name_or_path: str = arg(
        "google-t5/t5-base",
        "Reader, any T5: hub id, folder or bundled:NAME. --reader is the same.",
        decides=False,
        is_common=True,
    )
    same_train: bool = arg(
        False,
        "Leave out of training what PGRA's prompt would show, so that both train on the same.",
    )
    reader_template: str | None = arg(
        None,
        "How it sees a query: the task's fields, <extra_id_0> for the word; default: the task's.",
    )
    segment_order: str = arg(
        "query_first",
        "query_first, or evidence_first (the paper's code).",
        choices=("evidence_first", "query_first"),
    )
    max_segment_tokens: int = arg(
        128, "Tokens of one segment; evidence is cut first, the query's slot never.", least=8
    )
    decode: str = arg(
        "verbalizer",
        "verbalizer (score every label's words), or official (one generated token).",
        choices=("official", "verbalizer"),
    )


@dataclass(kw_only=True)
class FolderArguments(Arguments):
    """Where a run is, and its seed."""

    GROUP = "Output"

    output_dir: str = arg(
        "runs/{task}-{method}-seed{seed}",
        "Folder of this run: checkpoints and results.",
        decides=False,
        is_common=True,
    )
    seed: int = arg(
        0, "Seed of what is drawn, if anything is.", least=0, is_common=True, group="Training"
    )
    evidence: str = arg(
        "given",
        "given (as the arguments say), or auto: what pgra worth finds best, or none.",
        choices=("auto", "given"),
        decides=False,  # what it chose does
        is_common=True,
        group="Reranker",
    )


@dataclass(kw_only=True)
class TrainingArguments(FolderArguments):
    """How a reader is trained; defaults are the paper's for SST-2 (appendix H, table 7)."""

    GROUP = "Training"

    learning_rate: float | None = arg(
        None,
        "Peak rate; default: by the reader's width and the steps (the paper's grid: 1e-5 to 1e-4).",
        is_common=True,
        above=0,
    )
    total_train_batch_size: int | None = arg(
        None,
        "Examples a step, of all devices and accumulated batches (the paper: 4 or 8); default: 8.",
        least=1,
        is_common=True,
    )
    per_device_train_batch_size: int | None = arg(
        None,
        "Examples a device holds at once; default: its share of total_train_batch_size. Beside "
        "that, batches are accumulated; alone, a step has so many times devices.",
        least=1,
        decides=False,
    )
    max_steps: int = arg(
        5000,
        "Training steps; -1: as many as num_train_epochs has. 0: no training.",
        is_common=True,
        least=-1,
    )
    num_train_epochs: float = arg(3.0, "Epochs, with --max_steps -1.", above=0)
    seed: int = arg(
        42,
        "Of what the training draws: the order of examples, dropout.",
        is_common=True,
        least=0,
        below=1 << 32,
    )
    bf16: bool | None = arg(
        None,
        "Multiply in bfloat16, with float32 weights: the default on a GPU that has it; --no_bf16.",
        is_common=True,
    )
    torch_compile: bool = arg(
        False, "Compile the encoder's layers: a minute or two, then fewer, larger kernels."
    )
    lr_scheduler_type: str = arg(
        "linear",
        "How the learning rate falls after its rise.",
        choices=("constant", "constant_with_warmup", "cosine", "inverse_sqrt", "linear"),
    )
    warmup_steps: int = arg(0, "Steps over which the learning rate rises.", least=0)
    weight_decay: float = arg(
        0.01, "AdamW's weight decay, of all weights but norms and biases.", least=0
    )
    adam_epsilon: float = arg(1e-8, "AdamW's epsilon.", least=0)
    max_grad_norm: float = arg(1.0, "Gradients are cut to this norm; 0: not.", least=0)
    gradient_checkpointing: bool = arg(
        False, "Compute activations twice instead of keeping them: less memory.", decides=False
    )
    eval_steps: int = arg(
        500,
        "Steps between measurements on the dev set; 0: never, and the last weights are kept.",
        least=0,
    )
    load_best_model_at_end: bool = arg(
        True, "Keep the checkpoint that is best on the dev set.", off="Keep the last checkpoint."
    )
    save_steps: int | None = arg(
        None,
        "Steps between checkpoints; default: eval_steps, or 500. 0: none, unless a signal asks.",
        least=0,
        decides=False,
    )
    logging_steps: int = arg(50, "Steps between lines of the log.", least=1, decides=False)
    report_to: list[str] | None = arg(
        None,
        "Trackers of the log: tensorboard, wandb, trackio, ..., several; default: none.",
        decides=False,
    )
    max_train_minutes: float | None = arg(
        None,
        "Minutes after which it saves and leaves with exit code 124; the same command resumes.",
        above=0,
        decides=False,
    )

    def check(self) -> None:
        """Tie checkpoints to measurements."""
        if self.max_steps > 0:
            self.eval_steps = min(self.eval_steps, self.max_steps)
        if self.eval_steps == 0:
            self.load_best_model_at_end = False
        if self.save_steps is None:
            self.save_steps = self.eval_steps or 500
        elif self.load_best_model_at_end and self.save_steps != self.eval_steps:
            raise ConfigError(
                f"save_steps ({self.save_steps}) differs from eval_steps ({self.eval_steps})"
            )

    def share_batch(self, num_processes: int) -> int:
        """Fill in both batch sizes; return how many processes, the most, share a step evenly."""
        held = self.per_device_train_batch_size
        if self.total_train_batch_size is None:
            self.total_train_batch_size = held * num_processes if held else _PAPER_BATCH
        total = self.total_train_batch_size
        counts = [n for n in range(1, num_processes + 1) if total % (n * (held or 1)) == 0]
        if not counts:
            raise ConfigError(
                f"total_train_batch_size ({total}) is not divisible by "
                f"per_device_train_batch_size ({held})"
            )
        self.per_device_train_batch_size = held or total // counts[-1]
        return counts[-1]

    def num_accumulated(self, num_processes: int) -> int:
        """Return how many batches of a process are a step; both batch sizes are filled in."""
        total = self.total_train_batch_size or 1
        held = self.per_device_train_batch_size or 1
        return total // (held * num_processes)

    def count_steps(self, num_rows: int, num_processes: int) -> tuple[int, int]:
        """Return the number of steps of the training, and of one epoch of `num_rows` examples.

        Both batch sizes are filled in. An epoch's last step has what batches are left.

        Raises:
            ConfigError: If the examples do not fill a batch of each process.
        """
        held = self.per_device_train_batch_size or 1
        batches = num_rows // (held * num_processes)  # of the last, smaller one nothing is learned
        if batches == 0:
            raise ConfigError(
                f"a batch of {held} on {num_processes} processes exceeds {num_rows} rows: lower it"
            )
        epoch = math.ceil(batches / self.num_accumulated(num_processes))
        if self.max_steps >= 0:
            return self.max_steps, epoch
        return math.ceil(self.num_train_epochs * epoch), epoch


def default_learning_rate(width: int, steps: int) -> float:
    """Return the default rate: 8e-5 x 768 / width x (5000 / steps)^(1/3), to 1e-3.

    The paper's for SST-2 (table 7) with its T5-base and 5,000 steps; smaller readers (hidden size
    `width`) and shorter trainings need more (docs/classify.md).
    """
    return float(f"{min(1e-3, 8e-5 * 768 / width * (5000 / max(steps, 1)) ** (1 / 3)):.2g}")
