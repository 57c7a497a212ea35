"""A finished reader for others: its model card, and its way to the hub.

The card (`README.md`, by the template in `configs/cards/`) is written from the run's files alone,
and names no folder of this machine.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pgra import __version__
from pgra.artifacts import TemporaryFolder, write_json, write_text
from pgra.config import config_root
from pgra.core import Json
from pgra.data.read import hub_errors, hub_reason
from pgra.errors import ArtifactError, ConfigError
from pgra.exemplars import DRAWN_EXEMPLARS
from pgra.reader import READER_FOLDER, RECORD_FILE
from pgra.reader.record import OWN_INPUTS
from pgra.report.results import METRICS_FILE, read_object
from pgra.run_folder import (
    ARGUMENTS_FILE,
    CARD_FILE,
    IDENTITY_FILE,
    TRAINING_FILE,
    check_reader,
)

logger = logging.getLogger(__name__)

_WITH_PATHS = ("arguments", "fingerprints")
_SHOWN = (  # of the training's arguments
    *("learning_rate", "total_train_batch_size", "per_device_train_batch_size", "max_steps"),
    *("num_train_epochs", "lr_scheduler_type", "warmup_steps", "weight_decay", "max_grad_norm"),
    *("bf16", "seed"),
)


def write_card(run: Path) -> Path:
    """Write a finished run's model card into its reader's folder, and return its path.

    Raises:
        ArtifactError: If the run is not finished, or damaged.
    """
    if not (run / METRICS_FILE).is_file() or not (run / READER_FOLDER).is_dir():
        raise ArtifactError(
            f"{run} holds no finished run (no {METRICS_FILE} with its {READER_FOLDER}): give the "
            "folder of a finished run of pgra train"
        )
    check_reader(run)
    identity, metrics = read_object(run / IDENTITY_FILE), read_object(run / METRICS_FILE)
    arguments = read_object(run / ARGUMENTS_FILE)
    method, sources = str(identity["method"]), arguments["corpus"]["corpus"]
    repo, at, _ = str(identity["reader_weights"]).partition("@")
    base = repo if at else None  # the hub's id; None if it came from elsewhere
    reader, training = arguments["reader"], run / TRAINING_FILE
    fields = Formatter().parse(str(identity["reader_template"]))
    cards = Environment(
        loader=FileSystemLoader(config_root() / "cards"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    cards.filters["public"] = _without_folders
    text = cards.get_template("reader.md").render(
        metadata=_metadata(metrics, arguments, method, base),
        method=method,
        base=base or _without_folders(reader["model_name_or_path"]),
        is_lm="reader_lm" in reader,
        has_own_inputs=method in OWN_INPUTS,
        identity=identity,
        metrics=metrics,
        reader=reader,
        rerank=arguments["rerank"],
        retriever=arguments["retriever"],
        drawn=DRAWN_EXEMPLARS,
        corpora=[sources] if isinstance(sources, str) else sources,
        dev=read_object(training) if training.is_file() else {},
        trained_with={
            **{n: given for n in _SHOWN if (given := arguments["training"].get(n)) is not None},
            "processes": identity["num_processes"],
        },
        fields=", ".join(f"{name}=..." for _, name, _, _ in fields if name),
        versions={"pgra": __version__, **metrics["versions"]},
    )
    write_text(run / READER_FOLDER / CARD_FILE, f"{text.rstrip()}\n")
    return run / READER_FOLDER / CARD_FILE


def _public_copy(reader: Path) -> TemporaryFolder:
    """Return links to a reader's files, beside a record that names no folder of this machine."""
    copy = TemporaryFolder()
    for path in reader.iterdir():
        if path.name != RECORD_FILE and not path.name.startswith("."):
            (copy.path / path.name).symlink_to(path.resolve())
    record = read_object(reader / RECORD_FILE)
    private = {name: _without_folders(record[name]) for name in _WITH_PATHS}
    write_json(copy.path / RECORD_FILE, {**record, **private})
    return copy


def _without_folders(value: Json) -> Json:
    """Drop the folders of absolute paths, wherever they are in a record; a hub id stays."""
    if isinstance(value, Mapping):
        return {name: _without_folders(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_without_folders(part) for part in value]
    is_path = isinstance(value, str) and value.startswith(("/", "~"))
    return Path(str(value)).name if is_path else value


def _metadata(
    metrics: Mapping[str, Any], arguments: Mapping[str, Any], method: str, base: str | None
) -> str:
    """Return the YAML that the hub reads; the licence is left to the base model's."""
    from huggingface_hub import EvalResult, ModelCardData

    task, metric = str(metrics["task"]), str(metrics["metric"])
    result = EvalResult(
        task_type="text-classification",
        dataset_type=str(_without_folders(arguments["data"].get("dataset_name")) or task),
        dataset_name=task,
        dataset_split=str(metrics["split"]),
        metric_type=metric,
        metric_value=round(float(metrics["value"]), 6),
    )
    data = ModelCardData(
        base_model=base,
        library_name="transformers",
        pipeline_tag="text-classification",
        tags=["pgra", method],
        metrics=[metric],
        model_name=f"{task}-{method}",
        eval_results=[result],
    )
    return str(data.to_yaml()).rstrip()


def push_run(
    run: Path,
    repo: str,
    *,
    token: str | None = None,
    private: bool | None = None,
    revision: str | None = None,
) -> str:
    """Upload a finished run's reader with its model card; return the address of the commit.

    `repo` without a namespace is the user's own. `token` None takes HF_TOKEN, or the login's.
    `private` is for a new repository. `revision` is a branch. The card is written again.

    Raises:
        ConfigError: If there is no token, or the hub refuses it, the id or the upload.
    """
    from huggingface_hub import HfApi

    write_card(run)
    folder = _public_copy(run / READER_FOLDER)
    metrics = read_object(run / METRICS_FILE)
    message = f"{metrics['task']}: {metrics['split']} {metrics['metric']} {metrics['value']:.4f}"
    api = HfApi(token=token)
    try:
        repo = api.create_repo(repo, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo, branch=revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo, folder_path=folder.path, revision=revision, commit_message=message
        )
    except hub_errors(ValueError, RuntimeError) as error:
        # The client's error of a large file lacks its reason.
        reason = error.__cause__ if isinstance(error, RuntimeError) else error
        raise ConfigError(
            f"cannot push {run} to '{repo}': the hub says: {hub_reason(reason or error)} Check "
            "that the id is OWNER/NAME and that you are logged in (hf auth login, HF_TOKEN or "
            "--hub_token) and may write there"
        ) from None
    logger.info("run: %s is on the hub as %s", run, repo)
    return str(commit.commit_url)
