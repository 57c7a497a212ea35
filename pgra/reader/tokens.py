"""Tokenised inputs of the reader: a few arrays for a whole split, made once and kept on disk."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.errors import DataError
from pgra.io import (
    artifact_dir,
    is_finished,
    read_array,
    read_manifest,
    write_array,
    write_manifest,
)
from pgra.models.segments import TokenIds
from pgra.processes import Processes
from pgra.prompts.verbalizer import Verbalizer
from pgra.types import Example, Json

STAGE = "inputs"


@dataclass(frozen=True)
class TokenizedInput:
    """One example as tokens.

    Attributes:
        example_id: The example it was made from.
        segments: N arrays of token ids, int32, each the query with one evidence.
        target: Token ids of the label's target, None without a label.
    """

    example_id: str
    segments: tuple[TokenIds, ...]
    target: TokenIds | None


@dataclass(frozen=True)
class TokenizedInputs:
    """A split's examples as tokens: a sequence of `TokenizedInput`.

    Attributes:
        example_ids: One a row.
        labels: The labels' names, None where an example has none.
        targets: Target tokens by label.
        tokens: Those of all segments, one after the other, int32.
        segment_ends: Where each segment ends among them, (S,) int64.
        example_ends: Where each example's segments end among the segments, (B,) int64.
    """

    example_ids: Sequence[str]
    labels: Sequence[str | None]
    targets: Mapping[str, TokenIds]
    tokens: TokenIds
    segment_ends: npt.NDArray[np.int64]
    example_ends: npt.NDArray[np.int64]

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        segments: Sequence[Sequence[TokenIds]],
        tokenizer: Any,
        verbalizer: Verbalizer,
    ) -> "TokenizedInputs":
        """Put segments into arrays.

        Args:
            examples: The examples, labelled or not.
            segments: Token ids of each one's segments, at least one.
            tokenizer: The reader's.
            verbalizer: Gives each label its target.

        Raises:
            DataError: If an example has a label that the verbalizer does not know.
        """
        flat = [segment for found in segments for segment in found]
        tokens = np.concatenate(flat) if flat else np.empty(0, np.int32)
        ends = np.cumsum([len(segment) for segment in flat], dtype=np.int64)
        owners = np.cumsum([len(found) for found in segments], dtype=np.int64)
        return cls.from_arrays((tokens, ends, owners), examples, tokenizer, verbalizer)

    @classmethod
    def from_arrays(
        cls,
        arrays: Sequence[npt.NDArray[Any]],
        examples: Sequence[Example],
        tokenizer: Any,
        verbalizer: Verbalizer,
    ) -> "TokenizedInputs":
        """Name the rows of `tokens`, `segment_ends` and `example_ends`; the rest as in `of`."""
        for example in examples:
            if example.label is not None and example.label not in verbalizer.labels:
                raise DataError(
                    f"example '{example.id}' has label {example.label!r}, "
                    f"the task knows: {', '.join(verbalizer.labels)}"
                )
        ids = zip(verbalizer.labels, verbalizer.target_ids(tokenizer), strict=True)
        targets = {label: np.array(target, dtype=np.int32) for label, target in ids}
        tokens, segment_ends, example_ends = arrays
        return cls(
            [example.id for example in examples],
            [example.label for example in examples],
            targets,
            tokens,
            segment_ends,
            example_ends,
        )

    def __len__(self) -> int:
        """Count the examples."""
        return len(self.example_ids)

    def __getitem__(self, row: int) -> TokenizedInput:
        """Give one example."""
        if not 0 <= row < len(self):
            raise IndexError(row)
        first = int(self.example_ends[row - 1]) if row else 0
        ends = self.segment_ends[first : int(self.example_ends[row])].tolist()
        starts = [int(self.segment_ends[first - 1]) if first else 0, *ends[:-1]]
        label = self.labels[row]
        return TokenizedInput(
            self.example_ids[row],
            tuple(self.tokens[start:end] for start, end in zip(starts, ends, strict=True)),
            None if label is None else self.targets[label],
        )

    def __iter__(self) -> Iterator[TokenizedInput]:
        """Give all examples in order."""
        return (self[row] for row in range(len(self)))

    def sizes(self) -> list[int]:
        """Count each example's tokens over all its segments."""
        if not len(self):
            return []
        ends = self.segment_ends[self.example_ends - 1]
        sizes: list[int] = np.diff(ends, prepend=0).tolist()
        return sizes


def store_inputs(
    root: Path,
    split: str,
    fingerprint: Mapping[str, Json],
    make: Callable[[], TokenizedInputs],
    *,
    examples: Sequence[Example],
    tokenizer: Any,
    verbalizer: Verbalizer,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> TokenizedInputs:
    """Read a split's tokenised inputs, or make and write them.

    Args:
        root: Folder of the tokenised inputs of a task.
        split: Name of the split.
        fingerprint: All that determines the tokens.
        make: Makes them; called in the main process only.
        examples: The split's examples.
        tokenizer: The reader's.
        verbalizer: Gives each label its target.
        processes: Who waits.

    Raises:
        ArtifactError: If what is there is damaged.
    """
    folder = artifact_dir(root, split, fingerprint)
    names = ("tokens", "segment_ends", "example_ends")
    reused = is_finished(folder)
    processes.barrier()  # all have looked before the main process writes
    if not reused and processes.worker.is_main:
        start = time.perf_counter()
        made = make()
        for name in names:
            write_array(folder / f"{name}.npy", getattr(made, name))
        counts = {"examples": len(made), "segments": len(made.segment_ends)}
        write_manifest(
            folder,
            stage=STAGE,
            fingerprint=fingerprint,
            counts={**counts, "tokens": len(made.tokens)},
            seconds=time.perf_counter() - start,
        )
    processes.barrier()
    read_manifest(folder, stage=STAGE, fingerprint=fingerprint)
    arrays = [read_array(folder / f"{name}.npy") for name in names]
    return TokenizedInputs.from_arrays(arrays, examples, tokenizer, verbalizer)
