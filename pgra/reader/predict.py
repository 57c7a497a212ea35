"""Reads examples, scores labels, and decides."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Array, Scores
from pgra.context import ALONE, Context
from pgra.lm.batching import GroupCost, token_budget_batches
from pgra.lm.kernels import packed_for
from pgra.parallel import gather
from pgra.progress import Bar
from pgra.prompts import SLOT, SLOT_END, Verbalizer
from pgra.reader.calibration import Calibration, decide
from pgra.reader.fid import IGNORED, FusionReader, PackedSegments, pack_segments, pad_rows
from pgra.reader.inputs import TokenizedInputs, collate
from pgra.types import Prediction

# The logits are rows times target tokens times vocabulary: 256 rows of 4 tokens take 130 MB.
_MAX_ROWS = 256
_WRITTEN_TOKENS = 20  # where the model does not say, as in transformers


# Rows to the arguments of a forward pass.
Collate = Callable[[Sequence[Any]], dict[str, Any]]


@dataclass(frozen=True)
class T5Classifier:
    """A fused T5 that decides a task's labels.

    The context's processes share all work, and each gets all results, in the order given.

    Attributes:
        decode: "verbalizer" scores each label's whole target, by the sum of its tokens'
            log-probabilities. "official" writes one token, as `generate(max_length=3)` of the
            released code does; its label, or the first if no label has it, has probability 1.
        calibration: What is done to scores before the softmax over labels.
    """

    module: FusionReader
    tokenizer: Any
    verbalizer: Verbalizer
    decode: str = "verbalizer"
    calibration: Calibration = field(default_factory=Calibration)

    def save(self, folder: Path) -> None:
        """Write a plain model folder with its tokenizer."""
        self.module.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    def collator(self, device: torch.device) -> Collate:
        """Return a function that makes a batch of rows to train on."""
        cost = GroupCost.on(device, is_training=True)
        return partial(collate, pad_token_id=self.tokenizer.pad_token_id, cost=cost)

    def predict(self, inputs: TokenizedInputs, context: Context = ALONE) -> list[Prediction]:
        """Decide each example, or write its answer; labels are not read.

        A NaN in the scores is a ModelError.
        """
        if not self.verbalizer.words:
            return written(inputs.example_ids, self.write(inputs, context))
        scores = self.calibration.apply(self.score(inputs, context))
        return decide(inputs.example_ids, scores, self.verbalizer.labels)

    def score(self, inputs: TokenizedInputs, context: Context = ALONE) -> Scores:
        """Return the log-probability of each of C labels, (B, C) float32."""
        if self.decode == "official":
            count = 2 if self.verbalizer.has_slot else 1  # the slot's own token comes first
            return self._scores_of(self.write(inputs, context, count=count))
        targets = pad_rows(self.verbalizer.target_ids(self.tokenizer), IGNORED)
        score = partial(self.module.score_labels, targets=targets.to(self.module.device))
        rows = self.map_batches(inputs, score, context)
        return np.asarray(rows.reshape(len(inputs), len(targets)), np.float32)

    def write(
        self, inputs: TokenizedInputs, context: Context = ALONE, *, count: int | None = None
    ) -> list[str]:
        """Write a text for each example, (B,), greedily.

        It has at most `count` tokens, by default those of the model's `generation_config`.
        """
        count = count or self.module.model.generation_config.max_new_tokens or _WRITTEN_TOKENS
        rows = self.map_batches(inputs, partial(self.module.write, count=count), context)
        texts = self.tokenizer.batch_decode(rows, skip_special_tokens=True)
        # To mT5's tokenizer slots are plain pieces.
        return [text.replace(SLOT, "").partition(SLOT_END)[0].strip() for text in texts]

    def map_batches(
        self,
        inputs: TokenizedInputs,
        work: Callable[[PackedSegments], Tensor],
        context: Context,
    ) -> Array:
        """Apply `work` to all inputs, in batches of similar size, without dropout.

        `work` returns a row for each example of a batch, (B, W); all rows stay on the device until
        all batches are read. The result has a row for each input, in their order.
        """
        reader = self.module
        worker = context.worker
        cost = GroupCost.on(reader.device)
        sizes = inputs.sizes()
        budget = 1 << (17 if reader.device.type == "cuda" else 15)  # tokens of a batch
        batches = token_budget_batches(sizes, budget, max_rows=_MAX_ROWS)
        was_training = reader.training
        reader.eval()
        rows: list[int] = []
        outputs: list[Tensor] = []
        is_hidden = not context.shows_progress
        # What is packed multiplies float32.
        to_pack = 0 if reader.is_half else sum(sizes)
        with (
            reader.deciding(),
            packed_for(reader.model.get_encoder(), to_pack),
            Bar(total=len(inputs), desc="read", unit="ex", disable=is_hidden) as bar,
        ):
            for indices in worker.share(batches):
                packed = pack_segments(
                    [inputs.segments[i] for i in indices],
                    pad_token_id=self.tokenizer.pad_token_id,
                    cost=cost,
                )
                rows += indices
                outputs.append(work(packed.to(reader.device)))
                # Other processes are guessed to be as far: their batches may be smaller.
                bar.update(min(len(indices) * worker.world, len(inputs) - bar.n))
        reader.train(was_training)
        values = torch.cat(outputs).cpu().numpy() if outputs else ()
        value_of = dict(gather(list(zip(rows, values, strict=True)), worker))
        return np.array([value_of[row] for row in range(len(inputs))])

    def _scores_of(self, texts: Sequence[str]) -> Scores:
        """Give log-probability 0 to the label whose word was written and -inf to the others."""
        labels = self.verbalizer.labels
        scores = np.full((len(texts), len(labels)), -np.inf, dtype=np.float32)
        for i, text in enumerate(texts):
            label = self.verbalizer.label_of_word(text)
            scores[i, 0 if label is None else labels.index(label)] = 0.0
        return scores


# Labels and probabilities out of scores.


def written(example_ids: Sequence[str], texts: Sequence[str]) -> list[Prediction]:
    """Return written texts as predictions, which have no probabilities."""
    return [Prediction(name, text, {}) for name, text in zip(example_ids, texts, strict=True)]
