"""A run's folder: which checkpoint to go on from, and the finished reader."""

import json
import shutil
import uuid
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.errors import ArtifactError
from pgra.io import sync_folder
from pgra.models.fid import FusionReader
from pgra.reader.arguments import ReaderTrainingArguments


def save_reader(reader: FusionReader, tokenizer: Any, folder: Path) -> None:
    """Write a plain T5 folder with its tokenizer, aside and renamed; an older one is replaced."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.with_name(f".{uuid.uuid4().hex[:8]}.partial")
    try:
        reader.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        if folder.exists():
            shutil.rmtree(folder)
        aside.rename(folder)
        sync_folder(folder.parent)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def last_checkpoint(output_dir: Path) -> Path | None:
    """Find the last whole checkpoint; one that was being written when a run died is passed over."""
    folders = [
        folder
        for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if folder.name.rpartition("-")[2].isdigit() and _is_whole(folder)
    ]
    return max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def _is_whole(checkpoint: Path) -> bool:
    """Say whether every file of a checkpoint is there to its end.

    The Trainer writes its state last, but it may write one checkpoint twice (at the end of a step
    and of an epoch), so that a killed run leaves the state whole and another file cut.
    """
    paths = [path for path in checkpoint.glob("*") if path.is_file()]
    if checkpoint / "trainer_state.json" not in paths:
        return False
    return all(_reads_to_its_end(path) for path in paths)


def _reads_to_its_end(path: Path) -> bool:
    try:
        if path.suffix == ".json":
            json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".safetensors":
            with safe_open(path, framework="pt"):
                pass
        elif path.suffix in (".bin", ".pt", ".pth"):
            return zipfile.is_zipfile(path)  # torch's format, whose directory stands at the end
    except (OSError, ValueError, SafetensorError):
        return False
    return True


def checkpoint_to_resume(arguments: ReaderTrainingArguments) -> Path | None:
    """Find what `resume_from_checkpoint` names: a folder, "true" for the last whole one, or none.

    Raises:
        ArtifactError: If there is no such checkpoint, or if none is asked for and the output folder
            holds another run's.
    """
    output_dir = Path(str(arguments.output_dir))
    last = last_checkpoint(output_dir)
    asked = str(arguments.resume_from_checkpoint or "")
    if asked.lower() in ("", "false"):
        if last is not None:
            raise ArtifactError(
                f"{output_dir} holds checkpoints ({last.name}): go on from there with "
                "--resume_from_checkpoint true, or choose another output_dir"
            )
        return None
    if asked.lower() == "true":
        if last is None:
            raise ArtifactError(
                f"{output_dir} holds no whole checkpoint to resume from: "
                "leave --resume_from_checkpoint out"
            )
        return last
    folder = Path(asked)
    if not _is_whole(folder):
        raise ArtifactError(
            f"{folder} is no whole checkpoint (trainer_state.json is missing, or a file is cut "
            "short): give a checkpoint-STEP folder, or true for the last one"
        )
    return folder
