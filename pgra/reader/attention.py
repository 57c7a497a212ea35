"""What the reader looks at: the share of its cross-attention that each evidence gets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from pgra.models.fid import FusionReader
from pgra.models.segments import PackedSegments
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.predict import Decision, LabelScorer, map_batches
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Scores, Worker


@dataclass(frozen=True)
class Attended:
    """Scores, and what the reader looked at while it wrote the label it decided for.

    Attributes:
        scores: Log-probability of each of C labels, (B, C) float32.
        shares: Of each example a share for each segment; they add up to 1.
    """

    scores: Scores
    shares: list[list[float]]


def score_with_attention(
    reader: FusionReader,
    tokenizer: Any,
    inputs: TokenizedInputs,
    verbalizer: Verbalizer,
    *,
    decision: Decision,
    batch_tokens: int,
    progress: bool = False,
    worker: Worker | None = None,
) -> Attended:
    """Score tokenised examples as `score_inputs`, and say what the reader looked at.

    The encoder runs once for both; the decoder writes the decided label's target once more, with
    the attention that gives its weights.

    Args:
        reader: On the device it is to run on.
        tokenizer: The reader's.
        inputs: In any order.
        verbalizer: Gives each label its words.
        decision: How labels are decided.
        batch_tokens: Most tokens in a batch.
        progress: Whether to show a bar.
        worker: This process's share when several run; every one gets all.
    """
    scorer = LabelScorer(reader, tokenizer, verbalizer, decision)

    @torch.inference_mode()
    def work(
        indices: list[int], packed: PackedSegments
    ) -> Sequence[tuple[list[float], list[float]]]:
        fused = reader.fuse(packed)
        scores = scorer(packed, fused).cpu().numpy()
        written = scorer.targets[scores.argmax(axis=1)]  # ties by the task's order of labels
        lengths = [[len(segment) for segment in inputs[i].segments] for i in indices]
        shares = reader.attention_mass(packed, lengths, written, fused=fused)
        return list(zip(scores.tolist(), shares, strict=True))

    rows = map_batches(
        reader,
        inputs,
        work,
        pad_token_id=tokenizer.pad_token_id,
        batch_tokens=batch_tokens,
        progress=progress,
        worker=worker,
    )
    scores = np.array([row for row, _ in rows], dtype=np.float32)
    return Attended(
        scores.reshape(len(inputs), len(verbalizer.labels)), [shares for _, shares in rows]
    )
