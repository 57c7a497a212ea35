"""Arguments of the reader and of its training, without `transformers`."""

from dataclasses import dataclass
from typing import ClassVar

from pgra.config import Arguments, arg


@dataclass(kw_only=True)
class ReaderArguments(Arguments):
    """The fused T5 that reads a query with its evidence."""

    GROUP = "Reader"

    model_name_or_path: str = arg(
        "google-t5/t5-base",
        "Reader, any T5: hub id, folder or bundled:NAME.",
        decides=False,
        is_common=True,
    )
    same_train: bool = arg(
        False,
        "Of a method without an LM's prompt (plain, fid, random, rag, knn): leave out of training "
        "what that prompt would show, so that it trains on what --method pgra trains on.",
    )
    reader_template: str | None = arg(
        None,
        "How the reader sees a query; default: the task's. Holds the task's fields, and "
        "<extra_id_0> where the word goes.",
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


_A_WEEK = 7 * 24 * 3600


@dataclass(kw_only=True)
class TrainingArguments(Arguments):
    """How a reader is trained: of `transformers.TrainingArguments` what a T5 needs, and our own.

    They are read into a `WHOLE`, which has all others of transformers too; `MORE` is their help.
    """

    GROUP = "Training"
    WHOLE: ClassVar[str] = "pgra.reader.trainer_arguments:ReaderTrainingArguments"
    MORE: ClassVar[str] = (
        "All other arguments of transformers.TrainingArguments are taken too, here and in a YAML."
    )

    output_dir: str | None = arg(
        "runs/{task}-{method}-seed{seed}",
        "Folder of this run: checkpoints and results.",
        is_common=True,
        group="Output",
    )
    learning_rate: float | None = arg(
        None,
        "Peak learning rate; default: by the reader's width and the number of steps, at most 1e-3 "
        "(the paper's grid: 1e-5 to 1e-4).",
        is_common=True,
        above=0,
    )
    total_train_batch_size: int | None = arg(
        None,
        "Examples a step, of all devices and accumulated batches together (the paper: 4 or 8); "
        "default: 8, however many processes there are.",
        least=1,
        is_common=True,
    )
    per_device_train_batch_size: int | None = arg(
        None,
        "Examples a device holds at once; default: its share of total_train_batch_size. Beside "
        "that, batches are accumulated; alone, a step has so many times devices times "
        "gradient_accumulation_steps, as in transformers.",
        least=1,
    )
    max_steps: int = arg(
        5000, "Training steps; over num_train_epochs. 0: the reader as it is.", is_common=True
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
        "Train and decide in bfloat16 with float32 weights (autocast): the default on a GPU that "
        "has it, possible on a CPU. --no_bf16: in float32.",
        is_common=True,
    )
    tf32: bool | None = arg(
        None,
        "Where a GPU multiplies float32: round factors to TF32. The default without bf16; "
        "--no_tf32: exact products.",
    )
    weight_decay: float = arg(0.01, "AdamW's weight decay.", least=0)
    eval_strategy: str = arg("steps", "When the dev set is measured: steps, epoch or no.")
    eval_steps: float | None = arg(
        500, "Steps between measurements on the dev set (at most max_steps).", above=0
    )
    save_steps: float | None = arg(None, "Steps between checkpoints; default: eval_steps.", above=0)
    save_total_limit: int | None = arg(
        1,
        "Checkpoints kept: the best, and the last so many. With 1 a finished run keeps its reader "
        "alone, which is the best one.",
    )
    load_best_model_at_end: bool = arg(
        True, "Keep the checkpoint that is best on the dev set.", off="Keep the last checkpoint."
    )
    logging_steps: float = arg(50, "Steps between lines of the log.", above=0)
    dataloader_drop_last: bool = arg(
        True,
        "Leave out an epoch's last, smaller batch.",
        off="Keep an epoch's last, smaller batch.",
    )
    disable_tqdm: bool | None = arg(False, "Show no bar while the reader trains.")
    report_to: list[str] | None = arg(
        None, "Trackers of the log: tensorboard, wandb, trackio, ..., several; default: none."
    )
    max_train_minutes: float | None = arg(
        None,
        "Minutes of training after which it saves and leaves with exit code 124; the same command "
        "goes on.",
        above=0,
    )
    ddp_timeout: int = arg(_A_WEEK, "Seconds that processes wait for each other.", least=1)
    warmup_steps: float = arg(
        0, "Steps over which the learning rate rises; below 1: their share of all.", least=0
    )
    lr_scheduler_type: str = arg("linear", "How the learning rate falls: linear, cosine, ...")
    gradient_accumulation_steps: int = arg(1, "Batches a step.", least=1)
    max_grad_norm: float = arg(1.0, "Gradients are cut to this norm; 0: not.", least=0)
    metric_for_best_model: str | None = arg(
        None, "What the best checkpoint has the most of; default: the task's metric."
    )
    full_determinism: bool = arg(False, "Only deterministic kernels, where there are any.")
    dataloader_num_workers: int = arg(0, "Processes that prepare batches.", least=0)


LOSSES_FILE = "losses.jsonl"  # a run's, with every step's loss
# Where, how fast and how loud: they change no weight and no prediction. All others decide a run, a
# new one of a later `transformers` too, until it is added here.
NOT_DECIDING = frozenset(
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
        # How often a run is saved, when it pauses, where it resumes: that is bit-exact, and the
        # best checkpoint is always kept (with it, save_steps is eval_steps, which decides).
        *("save_steps", "save_total_limit", "save_on_each_node", "resume_from_checkpoint"),
        "max_train_minutes",
        # Memory and speed of the same computation: what is computed twice, who reads batches.
        *("activation_checkpointing", "gradient_checkpointing", "torch_empty_cache_steps"),
        *("dataloader_num_workers", "dataloader_prefetch_factor", "dataloader_pin_memory"),
        "dataloader_multiprocessing_context",
        # Asked by nobody: a run always trains, measures and predicts.
        *("do_train", "do_eval", "do_predict"),
    }
)
