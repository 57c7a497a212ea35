"""Arguments of the reader and of its training, without `transformers`."""

from dataclasses import dataclass

from pgra.config import Arguments, arg


@dataclass(kw_only=True)
class LoraArguments(Arguments):
    """Low-rank adapters of a reader (Hu et al. 2022)."""

    GROUP = "Training"

    lora_rank: int | None = arg(
        None,
        "Train low-rank adapters of this rank, not the weights: for readers too large to train. "
        "Needs pip install 'pgra[lora]'. The finished reader is a plain model all the same.",
        least=1,
    )
    lora_alpha: int | None = arg(
        None,
        "Scale of the adapters, over the rank; default: peft's.",
        least=1,
        needs={"lora_rank": True},
    )
    lora_dropout: float | None = arg(
        None,
        "Dropout before the adapters; default: peft's.",
        least=0,
        below=1,
        needs={"lora_rank": True},
    )
    lora_target_modules: list[str] | None = arg(
        None,
        "Layers that get one, by the end of their names; default: peft's, q and v.",
        needs={"lora_rank": True},
    )


@dataclass(kw_only=True)
class ReaderArguments(LoraArguments):
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
    length_normalize: bool = arg(
        False, "Divide a label's log-probability by its tokens (for a reader not trained on them)."
    )
    dropout_rate: float | None = arg(
        None,
        "Share of activations dropped in training, 0 for none; default: the model's own.",
        least=0,
        below=1,
    )
    evidence_attention: bool = arg(
        False,
        "Write to predictions.jsonl what share of the reader's cross-attention each evidence gets "
        "(predicting then takes about 15 % longer).",
        decides=False,
    )


LOSSES_FILE = "losses.jsonl"
"""Of a run: every step's loss."""
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
    }
)
"""Where, how fast and how loud: they change no weight and no prediction. All others decide a run,
so a new one of a later `transformers` does too, until it is declared here."""
