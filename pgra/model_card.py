"""A trained reader for others: its model card, and its way to the hub.

The card (`README.md`, by the template in `configs/cards/`) is written from the run's files alone,
and names no folder of this machine.
"""

from pathlib import Path
from string import Formatter

from pgra import __version__
from pgra.artifacts import TemporaryFolder, without_folders, write_sealed, write_text
from pgra.config import config_root
from pgra.data.read import push_folder
from pgra.reader.record import read_record
from pgra.run_folder import (
    ARGUMENTS_FILE,
    CARD_FILE,
    IDENTITY_FILE,
    RECORD_FILE,
    RunFolder,
    read_metrics,
    read_object,
)


def write_card(run: Path) -> None:
    """Write a finished run's model card into its reader's folder.

    Raises:
        ArtifactError: If the run is not finished, or damaged.
    """
    from huggingface_hub import EvalResult, ModelCard, ModelCardData

    folder = RunFolder(run)
    record = read_record(run)  # refuses a damaged one
    identity = folder.read(IDENTITY_FILE)
    metrics = read_metrics(run)
    arguments = without_folders(folder.read(ARGUMENTS_FILE))
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
        has_own_inputs=record.has_own_inputs,
        identity=identity,
        result=metrics,
        arguments=arguments,
        fields=", ".join(f"{name}=..." for _, name, _, _ in fields if name),
        versions={"pgra": __version__, **metrics["versions"]},
    )
    write_text(folder.reader_folder / CARD_FILE, f"{card.content.rstrip()}\n")


def push_run(run: Path, repo: str, *, private: bool | None = None) -> str:
    """Upload a finished run's reader with its model card; return the address of the commit.

    The card is written again. The record that is uploaded names no folder of this machine.

    Raises:
        ConfigError: If there is no token, or the hub refuses it, the id or the upload.
    """
    write_card(run)
    reader = RunFolder(run).reader_folder
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
