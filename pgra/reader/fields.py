"""The Hugging Face Trainer's arguments that decide nothing, and a name: without `transformers`."""

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
