"""Reads examples and decides: one label each, with a probability for every label."""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from pgra.errors import ModelError
from pgra.models.batching import token_budget_batches
from pgra.models.fid import FusionReader
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.collate import (
    Collator,
    ReaderBatch,
    TokenizedInput,
    pad_targets,
    tokenize_inputs,
)
from pgra.types import Prediction, ReaderInput, Scores, Worker

logger = logging.getLogger(__name__)

# The logits are rows times target tokens times vocabulary: 256 rows of 4 tokens take 130 MB.
_MAX_ROWS = 256


def predict(
    reader: FusionReader,
    tokenizer: Any,
    inputs: Sequence[ReaderInput],
    verbalizer: Verbalizer,
    *,
    decode: str = "verbalizer",
    batch_tokens: int = 8192,
    progress: bool = False,
    worker: Worker | None = None,
) -> list[Prediction]:
    """Decide each example.

    Args:
        reader: On the device it is to run on.
        tokenizer: The reader's.
        inputs: In any order; their labels are not looked at.
        verbalizer: Gives each label its words.
        decode: "verbalizer" scores all tokens of every label's target; a probability is the
            softmax over labels. "official" writes one token, as `generate(max_length=3)` of the
            released code does; the label whose word it is has probability 1, and the first label
            where it is none's.
        batch_tokens: Most padded tokens in a batch.
        progress: Whether to show a bar.
        worker: This process's share when several run; every one gets all predictions.

    Returns:
        One for each input, in the order given, whatever the batches were.

    Raises:
        ConfigError: If the verbalizer does not suit the tokenizer.
        ModelError: If the reader's scores are not numbers.
    """
    worker = worker or Worker()
    verbalizer.audit(tokenizer, decode=decode)
    rows = tokenize_inputs(inputs, tokenizer, verbalizer, progress=progress)
    scores = score_rows(
        reader,
        tokenizer,
        rows,
        verbalizer,
        decode=decode,
        batch_tokens=batch_tokens,
        progress=progress,
        worker=worker,
    )
    return decide(inputs, scores, verbalizer)


def decide(
    inputs: Sequence[ReaderInput], scores: Scores, verbalizer: Verbalizer
) -> list[Prediction]:
    """Take each example's best label, ties by the task's order.

    Args:
        inputs: The B examples.
        scores: Log-probability of each of C labels, (B, C) float32.
        verbalizer: Names the labels.
    """
    if np.isnan(scores).any():
        name = inputs[int(np.isnan(scores).any(axis=1).argmax())].example_id
        raise ModelError(f"the reader's scores of example '{name}' are NaN: its weights are broken")
    weights = np.exp((scores - scores.max(axis=1, keepdims=True)).astype(np.float64))
    chances = weights / weights.sum(axis=1, keepdims=True)
    best = scores.argmax(axis=1)
    labels = verbalizer.labels
    return [
        Prediction(
            item.example_id, labels[best[i]], dict(zip(labels, map(float, row), strict=True))
        )
        for i, (item, row) in enumerate(zip(inputs, chances, strict=True))
    ]


def score_rows(
    reader: FusionReader,
    tokenizer: Any,
    rows: Sequence[TokenizedInput],
    verbalizer: Verbalizer,
    *,
    decode: str,
    batch_tokens: int,
    progress: bool,
    worker: Worker,
) -> Scores:
    """Score tokenised examples, (B, C) float32, in batches of like size, in the caller's order."""
    collate = Collator(tokenizer.pad_token_id)
    targets = pad_targets(verbalizer.target_ids(tokenizer)).to(reader.device)
    batches = token_budget_batches([row.size for row in rows], batch_tokens, max_rows=_MAX_ROWS)
    was_training = reader.training
    reader.eval()
    found: list[tuple[list[int], list[list[float]]]] = []
    show = progress and worker.is_main
    with tqdm(total=len(rows), desc="read", unit="ex", disable=not show) as bar:
        for indices in worker.share(batches):
            batch = collate([rows[i] for i in indices]).to(reader.device)
            if decode == "official":
                part = _score_official(reader, tokenizer, batch, verbalizer)
            else:
                part = reader.score_labels(batch.input_ids, batch.attention_mask, targets)
            found.append((indices, part.tolist()))
            # Other processes are guessed to be as far: their batches may be smaller.
            bar.update(min(len(indices) * worker.world, len(rows) - bar.n))
    reader.train(was_training)
    if worker.world > 1:
        found = gather_object(found)
    scores = np.full((len(rows), len(targets)), np.nan, dtype=np.float32)
    for indices, values in found:
        scores[indices] = values
    return scores


def _score_official(
    reader: FusionReader, tokenizer: Any, batch: ReaderBatch, verbalizer: Verbalizer
) -> Tensor:
    """Give log-probability 0 to the label whose word was written and -inf to the others."""
    count = 2 if verbalizer.has_slot else 1  # the slot's own token comes first
    written = reader.generate_tokens(batch.input_ids, batch.attention_mask, count)
    texts = tokenizer.batch_decode(written.cpu(), skip_special_tokens=True)
    found = [verbalizer.label_of_word(text) for text in texts]
    unknown = [text for text, label in zip(texts, found, strict=True) if label is None]
    if unknown:
        logger.debug("%d of %d are no label's word: %s", len(unknown), len(texts), unknown[:5])
    labels = verbalizer.labels
    scores = torch.full((len(found), len(labels)), -torch.inf)
    for i, label in enumerate(found):
        scores[i, 0 if label is None else labels.index(label)] = 0.0
    return scores
