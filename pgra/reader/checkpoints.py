"""A run's folder: which checkpoint to go on from, and the finished reader."""

import fnmatch
import json
import logging
import shutil
import uuid
import zipfile
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from transformers import TrainerState
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.errors import ArtifactError
from pgra.io import sync_folder
from pgra.models.fid import FusionReader
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.stopping import early_stopping_count

logger = logging.getLogger(__name__)

_STATE_FILE = "trainer_state.json"


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


def last_checkpoint(output_dir: Path, *, processes: int | None = None) -> Path | None:
    """Find the last whole checkpoint; one that was being written when a run died is passed over.

    Args:
        output_dir: The run.
        processes: How many must find their random state in it; None asks for any.
    """
    folders = [
        folder
        for folder in output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*")
        if folder.name.rpartition("-")[2].isdigit() and _fault(folder, processes) is None
    ]
    return max(folders, key=lambda folder: int(folder.name.rpartition("-")[2]), default=None)


def _fault(checkpoint: Path, processes: int | None = None) -> str | None:
    """Say why a checkpoint cannot be gone on from; None if it is whole.

    The Trainer writes its state last, but it may write one checkpoint twice (at the end of a step
    and of an epoch), so that a killed run leaves the state whole and another file cut; and each
    process writes its random state when it comes to it.
    """
    names = {path.name for path in checkpoint.glob("*") if path.is_file()}
    random: tuple[str, ...]
    if processes is None:
        random = ("rng_state*.pth",)
    elif processes == 1:
        random = ("rng_state.pth",)
    else:
        random = tuple(f"rng_state_{rank}.pth" for rank in range(processes))
    for pattern in (_STATE_FILE, "*.safetensors", "optimizer.pt", "scheduler.pt", *random):
        if not fnmatch.filter(names, pattern):
            return f"{pattern} is missing"
    cut = [name for name in sorted(names) if not _reads_to_its_end(checkpoint / name)]
    return f"{cut[0]} is cut short" if cut else None


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

    A folder of another run is where this one began: its own checkpoints then come first.

    Raises:
        ArtifactError: If there is no such checkpoint, or if none is asked for and the output folder
            holds another run's.
    """
    output_dir = Path(str(arguments.output_dir))
    last = last_checkpoint(output_dir, processes=arguments.world_size)
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
                f"{output_dir} holds no whole checkpoint to resume from{_faults(output_dir)}: "
                "leave --resume_from_checkpoint out"
            )
        return _with_best(last, arguments)
    folder = Path(asked)
    if last is not None and folder.resolve().parent != output_dir.resolve():
        logger.info("going on from %s, which this run made after %s", last, folder)
        return _with_best(last, arguments)
    fault = _fault(folder, arguments.world_size)
    if fault:
        raise ArtifactError(
            f"{folder} is no whole checkpoint ({fault}): give a checkpoint-STEP folder, or true "
            "for the last one"
        )
    return _with_best(folder, arguments)


def _faults(output_dir: Path) -> str:
    """Say what is wrong with the checkpoints that there are, in brackets."""
    folders = sorted(output_dir.glob(f"{PREFIX_CHECKPOINT_DIR}-*"))
    return "".join(f" ({folder.name}: {_fault(folder)})" for folder in folders[:1])


def _with_best(checkpoint: Path, arguments: ReaderTrainingArguments) -> Path:
    """Refuse a checkpoint whose run could not end with its best weights."""
    told = read_state(checkpoint).best_model_checkpoint
    if arguments.load_best_model_at_end and told and best_checkpoint(checkpoint) is None:
        raise ArtifactError(
            f"{checkpoint} tells of a better one, {told}, that is gone or "
            "damaged: bring it back, or choose another output_dir"
        )
    return checkpoint


def read_state(checkpoint: Path) -> Any:
    """Read the Trainer's state in a checkpoint.

    Raises:
        ArtifactError: If it cannot be read.
    """
    try:
        return TrainerState.load_from_json(str(checkpoint / _STATE_FILE))
    except (OSError, ValueError, TypeError) as error:
        raise ArtifactError(
            f"{checkpoint / _STATE_FILE} is damaged ({error}): delete {checkpoint}"
        ) from None


def best_checkpoint(checkpoint: Path) -> Path | None:
    """Find the checkpoint with the best weights up to this one; None if there is none.

    The folder of a run may have been moved since: beside this one is looked first.
    """
    state = read_state(checkpoint)
    if not state.best_model_checkpoint:
        return None
    told = Path(state.best_model_checkpoint)
    places = (checkpoint.with_name(told.name), told)
    return next((place for place in places if _fault(place) is None), None)


def is_finished(checkpoint: Path, arguments: ReaderTrainingArguments) -> bool:
    """Say whether no step is left to do after a checkpoint: the Trainer would do one more."""
    state = read_state(checkpoint)
    patience = arguments.early_stopping_patience
    waited = early_stopping_count(state.stateful_callbacks)
    return state.global_step >= state.max_steps or (patience is not None and waited >= patience)


def load_weights(reader: FusionReader, checkpoint: Path) -> None:
    """Put a checkpoint's weights into a reader."""
    weights: dict[str, Any] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        weights.update(load_file(path))
    reader.load_state_dict(weights)
