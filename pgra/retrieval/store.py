"""Candidates on disk: what a stage found for a split, made once."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pgra.io import (
    artifact_dir,
    digest,
    is_finished,
    read_array,
    read_manifest,
    write_array,
    write_manifest,
)
from pgra.processes import Processes
from pgra.types import Candidates, Example, Json

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Stored:
    """Candidates and where they lie.

    Attributes:
        candidates: (B, K).
        folder: Where they lie.
        fingerprint: What they were made from.
        reused: Whether they were there already.
    """

    candidates: Candidates
    folder: Path
    fingerprint: Mapping[str, Json]
    reused: bool


def examples_digest(examples: Sequence[Example]) -> str:
    """Give a digest of the texts of a split, in order."""
    return digest([dict(example.fields) for example in examples])


def candidates_fields(
    made_of: Mapping[str, Json], retriever: str, num_candidates: int, *, examples: Sequence[Example]
) -> Mapping[str, Json]:
    """Give all that determines the first stage's candidates of a split.

    Args:
        made_of: The retriever's fingerprint.
        retriever: Its name.
        num_candidates: The paper's k.
        examples: The split's queries.
    """
    return {
        **made_of,
        "retriever": retriever,
        "num_candidates": num_candidates,
        "queries": examples_digest(examples),
    }


def no_measure(found: Candidates) -> Mapping[str, Json]:  # noqa: ARG001
    """Count nothing more."""
    return {}


def store_candidates(
    root: Path,
    split: str,
    fingerprint: Mapping[str, Json],
    make: Callable[[], Candidates],
    *,
    stage: str,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
    measure: Callable[[Candidates], Mapping[str, Json]] = no_measure,
) -> Stored:
    """Read a split's candidates, or make and write them.

    Args:
        root: Folder of the stage's products for a task.
        split: Name of the split.
        fingerprint: All that determines the candidates.
        make: Finds them; called in the main process only.
        stage: "candidates" or "evidence".
        processes: Who waits.
        measure: Gives further counts for the manifest, where they are made.

    Raises:
        ArtifactError: If what is there is damaged.
    """
    folder = artifact_dir(root, split, fingerprint)
    reused = is_finished(folder)
    processes.barrier()  # all have looked before the main process writes
    if not reused and processes.worker.is_main:
        start = time.perf_counter()
        found = make()
        write_array(folder / "rows.npy", found.rows)
        write_array(folder / "scores.npy", found.scores)
        counts = {"queries": len(found), "candidates": found.rows.shape[1], **measure(found)}
        seconds = time.perf_counter() - start
        write_manifest(folder, stage=stage, fingerprint=fingerprint, counts=counts, seconds=seconds)
    processes.barrier()
    read_manifest(folder, stage=stage, fingerprint=fingerprint)
    rows, scores = read_array(folder / "rows.npy"), read_array(folder / "scores.npy")
    return Stored(
        Candidates(np.asarray(rows), np.asarray(scores)), folder, dict(fingerprint), reused
    )
