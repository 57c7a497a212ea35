"""A run's folder: its records and checks, its reader's model card, and the reader's way to the hub.

`pgra.runs` says what each file is. The card (`README.md`, by the template in `configs/cards/`) is
written from the run's files alone, and names no folder of this machine.
"""

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from string import Formatter
from typing import Any

from pgra import __version__
from pgra.artifacts import (
    TemporaryFolder,
    canonical_json,
    check_fingerprint,
    digest,
    find_damage,
    without_folders,
    write_sealed,
    write_text,
)
from pgra.config import config_root
from pgra.data.read import push_folder
from pgra.errors import ArtifactError, DamageError
from pgra.reader import READER_FOLDER, RECORD_FILE
from pgra.report.results import FREE, METRICS_FILE, read_metrics, read_object
from pgra.types import Json

IDENTITY_FILE = "run.json"
ARGUMENTS_FILE = "arguments.json"
TRAINING_FILE = "training.json"
PROMPT_FILE = "prompt.txt"
CARD_FILE = "README.md"
WEIGHTS_FILE = "model.safetensors"


def check_same_run(
    folder: Path,
    asked: Mapping[str, Json],
    arguments: Mapping[str, Mapping[str, Json]],
    *,
    is_whole: bool = True,
) -> None:
    """Raise an ArtifactError if a folder holds another run, or one that lost its record.

    It names the `arguments` that differ, if any do. A run without a checkpoint may be replaced.
    Unless `is_whole`, only known fields are compared.
    """
    begun = [folder / READER_FOLDER, folder / METRICS_FILE, *folder.glob("checkpoint-*")]
    if not any(item.exists() for item in begun):
        return
    made = read_object(folder / IDENTITY_FILE)
    if not is_whole:
        made = {name: value for name, value in made.items() if name in asked}
    way_out = "choose another --output_dir"
    try:
        check_fingerprint(folder, made=made, asked=asked, way_out=way_out)
    except ArtifactError:
        before = read_object(folder / ARGUMENTS_FILE)
        changes = []
        for section, new in arguments.items():
            old = before.get(section, {})
            for name in old.keys() & new.keys() - FREE - {"artifacts_dir", "device"}:
                if canonical_json(old[name]) != canonical_json(new[name]):
                    changes.append(f"--{name} {old[name]} (now {new[name]})")
        # The number of processes is no flag, but decides some.
        if not changes or made.get("num_processes") != asked.get("num_processes"):
            raise
        raise ArtifactError(
            f"{folder} was made with {', '.join(sorted(changes))}: {way_out}"
        ) from None


def check_same_inputs(
    folder: Path, asked: Mapping[str, Json], *, free: Collection[str] = ()
) -> None:
    """Raise an ArtifactError if a run's inputs changed.

    Fields in `free` may differ, and how many processes trained it.
    """
    made = read_object(folder / IDENTITY_FILE)
    both = {*asked} & {*made} - {*free, "num_processes"}
    check_fingerprint(
        folder,
        made={name: made[name] for name in both},
        asked={name: asked[name] for name in both},
        way_out="its data, task or models changed since; restore them, or run it again",
    )


def remove_checkpoints(folder: Path) -> None:
    """Delete a run's checkpoints: they only serve to resume, and many runs' would fill a disk."""
    for checkpoint in folder.glob("checkpoint-*"):
        shutil.rmtree(checkpoint)


def reader_checksum(folder: Path) -> str:
    """Return a digest of a run's weights, by the checksums in its reader's record."""
    files = read_object(folder / READER_FOLDER / RECORD_FILE)["files"]
    return digest({n: files[n]["xxh3"] for n in files if n.endswith(".safetensors")})


def read_training(folder: Path) -> dict[str, Any] | None:
    """Return the record of a finished training; None if it is not finished."""
    names = (TRAINING_FILE, f"{READER_FOLDER}/{RECORD_FILE}")
    is_whole = all((folder / name).is_file() for name in names)
    return read_object(folder / TRAINING_FILE) if is_whole else None


def check_reader(folder: Path) -> None:
    """Compare a run's reader with its record; a DamageError names a file that differs."""
    home = folder / READER_FOLDER
    for name, what in find_damage(home, read_object(home / RECORD_FILE)["files"]):
        raise DamageError(f"{home / name} {what}", "train again in another folder")


# For others: the model card and the hub.


def write_card(run: Path) -> None:
    """Write a finished run's model card into its reader's folder.

    Raises:
        ArtifactError: If the run is not finished, or damaged.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    from pgra.reader.record import OWN_INPUTS

    check_reader(run)
    identity = read_object(run / IDENTITY_FILE)
    metrics = read_metrics(run)
    arguments = without_folders(read_object(run / ARGUMENTS_FILE))
    method = identity["method"]
    task = metrics["task"]
    metric = metrics["metric"]
    repo, at, _ = str(identity["reader_weights"]).partition("@")
    kind = "text-classification" if identity["labels"] else "question-answering"
    result = EvalResult(
        task_type=kind,
        dataset_type=arguments["data"]["dataset_name"] or task,
        dataset_name=task,
        dataset_split=metrics["split"],
        metric_type=metric,
        metric_value=round(float(metrics["value"]), 6),
    )
    data = ModelCardData(  # the licence is left to the base model's
        base_model=repo if at else None,  # of the hub
        library_name="transformers",
        pipeline_tag=kind,
        tags=["pgra", method],
        metrics=[metric],
        model_name=f"{task}-{method}",
        eval_results=[result],
    )
    fields = Formatter().parse(str(identity["reader_template"]))
    card = ModelCard.from_template(
        data,
        template_path=str(config_root() / "cards" / "reader.md"),
        method=method,
        base=repo if at else arguments["reader"]["model_name_or_path"],
        has_own_inputs=method in OWN_INPUTS,
        identity=identity,
        result=metrics,
        arguments=arguments,
        fields=", ".join(f"{name}=..." for _, name, _, _ in fields if name),
        versions={"pgra": __version__, **metrics["versions"]},
    )
    write_text(run / READER_FOLDER / CARD_FILE, f"{card.content.rstrip()}\n")


def push_run(run: Path, repo: str, *, private: bool | None = None) -> str:
    """Upload a finished run's reader with its model card; return the address of the commit.

    The card is written again. The record that is uploaded names no folder of this machine.

    Raises:
        ConfigError: If there is no token, or the hub refuses it, the id or the upload.
    """
    write_card(run)
    reader = run / READER_FOLDER
    copy = TemporaryFolder()
    for path in reader.glob("[!.]*"):
        if path.name != RECORD_FILE:
            (copy.path / path.name).symlink_to(path.resolve())
    record = read_object(reader / RECORD_FILE)
    for name in ("arguments", "fingerprints"):
        record[name] = without_folders(record[name])
    write_sealed(copy.path / RECORD_FILE, record)
    metrics = read_metrics(run)
    message = f"{metrics['task']}: {metrics['split']} {metrics['metric']} {metrics['value']:.4f}"
    return push_folder(run, copy.path, repo, message, private=private)
