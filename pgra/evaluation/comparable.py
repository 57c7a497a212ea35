"""Which runs may stand in one table, and in which row."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pgra.errors import ArtifactError
from pgra.evaluation.runs import TASK_AXIS, Group, Run
from pgra.io import canonical_json
from pgra.types import UNDECIDED, Json

SYSTEMS = ("icl", "knn", "lm-bff", "plain", "rag", "fid", "random", "pgra", "exhaustive")
"""In the order of the paper's Table 2, then our own; others come after, by name."""
TASKS = ("sst2", "sst5", "cola", "trec", "cr", "mr", "mpqa", "subj")
"""In the paper's order; others come after, by name."""
UNSEEDED = (
    *("icl", "knn", "icl-farthest", "icl-fixed", "icl-knn", "icl-knn-mmr"),
    *("vote-farthest", "vote-knn", "vote-knn-mmr"),
)
"""Nothing is trained, and a seed decides nothing, but for a random order of exemplars."""
_TRAINED = {"knn", "plain", "rag", "fid", "random", "pgra", "exhaustive"}
_RULES = ("split_seed", "dev_fraction", "max_train_samples", "max_dev_samples")
_EXEMPLARS = ("num_exemplars", "exemplars", "exemplar_seed", "num_prefixes")
# Where, how fast and how loud: none of it decides a prediction.
_NOT_DECIDING = {
    *("data.task", "data.dataset_name", "data.train_file", "data.validation_file"),
    *("data.test_file", "retriever.encoder_batch_tokens", "retriever.index_dir"),
    *("retriever.shard_rows", "rerank.lm_batch_tokens", "rerank.bank_shard_rows", "rerank.bank"),
    *("rerank.prefix_sharing", "rerank.lm_device_map", "reader.evidence_attention"),
}
# Sections that a system does not look at, but for the names after them.
_UNUSED = {
    "plain": ("corpus", "retriever", "rerank"),
    "icl": ("corpus", "retriever", "training"),
    "knn": ("corpus", "rerank", "training"),
    "fid": ("rerank",),
    "random": ("rerank",),
}
_STILL_USED = (*_EXEMPLARS, "num_evidence")
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
# Where content is, which may have been moved meanwhile; runs go on by content, not by name.
_PLACES = {
    *("corpus.corpus", "retriever.encoder", "retriever.neighbor_encoder", "rerank.lm"),
    "reader.model_name_or_path",
}
# Of the few shots that one system alone is tuned on.
_SHOTS = {"num_shots", "exemplar_sets", "exemplar_share"}
_SEEDS = {"seed", "data_seed"}  # of one row's runs


def is_unseeded(run: Run) -> bool:
    """Say whether any other seed would give the same run again."""
    return run.system in UNSEEDED and run.setting("selection.order") != "random"


def check_comparable(group: Group) -> None:
    """Refuse runs that cannot stand in one table.

    Raises:
        ArtifactError: If two runs of a task have another metric, test set, or split rule, are the
            same system, setting and seed, or are seeds of one row with another setting or corpus;
            both are named.
    """
    first: dict[str, Run] = {}
    trained: dict[str, Run] = {}
    for run in group.runs:
        _refuse(first.setdefault(run.task, run), run, _other_test(first[run.task], run))
        if run.system in _TRAINED:
            before = trained.setdefault(run.task, run)
            _refuse(before, run, _other_rule(before, run, group.axes))
    _refuse_twins(group)
    _refuse_mixed_seeds(group)


def _refuse_mixed_seeds(group: Group) -> None:
    """Refuse a row whose seeds are no seeds of one thing: a grid was gone on with otherwise."""
    first: dict[tuple[str, str], Run] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        before = first.setdefault((name, run.task), run)
        told = _other_setting(before, run)
        _refuse(before, run, told and f"two seeds of '{name}' with another {told}")


def _other_setting(a: Run, b: Run) -> str | None:
    ours, theirs = _settings(a), _settings(b)
    for name in sorted((ours.keys() & theirs.keys()) - _PLACES):
        if ours[name] != theirs[name]:
            return f"setting ({name.rpartition('.')[2]} {ours[name]}, {theirs[name]})"
    left, right = _fingerprint(a, "corpus"), _fingerprint(b, "corpus")
    if left and right and left != right:
        return f"corpus ({left[:8]}, {right[:8]})"
    return None


def _refuse(a: Run, b: Run, why: str | None) -> None:
    if why is not None:
        raise ArtifactError(
            f"{a.folder} and {b.folder} cannot stand in one table, task {a.task}: {why}; report "
            "them apart, or run one again"
        )


def _other_test(a: Run, b: Run) -> str | None:
    """Say why two runs of a task were not measured alike; None if they were."""
    for name in ("metric", "split"):
        if a.metrics.get(name) != b.metrics.get(name):
            return f"another {name} ({a.metrics.get(name)}, {b.metrics.get(name)})"
    if set(a.decisions.names) - {UNDECIDED} != set(b.decisions.names) - {UNDECIDED}:
        return f"other labels ({_listed(a.decisions.names)}; {_listed(b.decisions.names)})"
    if a.decisions.examples != b.decisions.examples:
        return f"another test set (fingerprint {_test_mark(a)}; {_test_mark(b)})"
    return None


def _test_mark(run: Run) -> str:
    return f"{run.decisions.examples[:8]}, n = {len(run.decisions.labels)}"


def _other_rule(a: Run, b: Run, axes: Sequence[str]) -> str | None:
    """Say why two systems do not stand on one division of the data; None if they were.

    What a grid varies may differ. The examples that stand in the prompt are left out of train, so
    training examples are compared only where the prompt's examples are chosen alike.
    """
    if any(axis.startswith("data.") and axis != TASK_AXIS for axis in axes):
        return None
    both_known = bool(a.arguments) and bool(b.arguments)
    for name in _RULES if both_known else ():
        left, right = a.setting(f"data.{name}"), b.setting(f"data.{name}")
        if left != right:
            return f"another split rule ({name} {left}, {right})"
    same_prompt = all(a.setting(f"rerank.{n}") == b.setting(f"rerank.{n}") for n in _EXEMPLARS)
    for split in ("dev", "train") if same_prompt else ("dev",):
        left, right = _fingerprint(a, split), _fingerprint(b, split)
        if left and right and left != right:
            return f"another split rule (other {split} examples: {left[:8]}, {right[:8]})"
    return None


def _fingerprint(run: Run, split: str) -> str:
    return str(run.metrics.get("fingerprints", {}).get(split) or "")


def _refuse_twins(group: Group) -> None:
    seen: dict[tuple[str, str, int], Run] = {}
    for name, run in zip(row_names(group), group.runs, strict=True):
        other = seen.setdefault((name, run.task, run.seed), run)
        if other is not run:
            raise ArtifactError(
                f"{other.folder} and {run.folder} are the same system, setting, task and seed "
                f"({name}, {run.task}, {run.seed}): leave one out"
            )


def row_names(group: Group) -> list[str]:
    """Give the name of each run's row, in the order of the runs.

    Of a grid it is the point's name; else the system's, with the settings in which runs of this
    system differ on one task.
    """
    if group.points:
        return [run.name for run in group.runs]
    settings = [_settings(run) for run in group.runs]
    kinds: dict[tuple[str, str], list[dict[str, Json]]] = {}
    for run, values in zip(group.runs, settings, strict=True):
        kinds.setdefault((run.system, run.task), []).append(values)
    varied: dict[str, set[str]] = {}
    for (system, _), values_of in kinds.items():
        varied.setdefault(system, set()).update(_varied([v for v in values_of if v]))
    words = _words(settings)
    return [
        " ".join([run.system, *_told(values, sorted(varied[run.system]), words)])
        for run, values in zip(group.runs, settings, strict=True)
    ]


def _words(settings: Sequence[Mapping[str, Json]]) -> dict[tuple[str, str], str]:
    """Word each argument's values: a path by its last part, whole where two would be alike."""
    values = {(name, canonical_json(v)): v for of_run in settings for name, v in of_run.items()}
    alike = Counter((name, _short(value)) for (name, _), value in values.items())
    return {
        place: _short(value) if alike[place[0], _short(value)] == 1 else str(value)
        for place, value in values.items()
    }


def _varied(settings: Sequence[Mapping[str, Json]]) -> set[str]:
    names = {name for values in settings for name in values}
    return {
        name for name in names if len({canonical_json(values.get(name)) for values in settings}) > 1
    }


def _told(
    values: Mapping[str, Json], names: Sequence[str], words: Mapping[tuple[str, str], str]
) -> list[str]:
    own = [name for name in names if name in values]
    return [f"{n.rpartition('.')[2]}={words[n, canonical_json(values[n])]}" for n in own]


def _short(value: Json) -> str:
    return value.rstrip("/").rpartition("/")[2] if isinstance(value, str) else str(value)


def _settings(run: Run) -> dict[str, Json]:
    """Give what decides a run's predictions, but for data, task and seed, by "section.name"."""
    flat: dict[str, Any] = {}
    for section, values in run.arguments.items():
        if isinstance(values, Mapping):
            for name, value in values.items():
                if _decides(run.system, section, name):
                    flat[f"{section}.{name}"] = value
    return flat


def _decides(system: str, section: str, name: str) -> bool:
    """Say whether an argument can change what a system predicts."""
    if section == "runtime" or f"{section}.{name}" in _NOT_DECIDING:
        return False
    if section in _UNUSED.get(system, ()) and name not in _STILL_USED:
        return False
    if section == "training" and name in _SHOTS:
        return system == "lm-bff"
    return section != "training" or name not in {*TRAINING_NOT_DECIDING, *_SEEDS}


def _listed(names: Sequence[str]) -> str:
    return ", ".join(sorted(names))


def in_order(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Sort distinct names: those in a list by their place there, then the others by name."""
    place = {name: number for number, name in enumerate(known)}
    return sorted(set(names), key=lambda name: (place.get(name, len(known)), name))
