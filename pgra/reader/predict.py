"""Reads examples and scores labels."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.core import ALONE, Context, Prediction, Scores, gather
from pgra.lm.batching import GroupCost, token_budget_batches
from pgra.lm.kernels import packed_for
from pgra.progress import Bar
from pgra.prompts import SLOT, Verbalizer
from pgra.reader.calibrate import decide
from pgra.reader.fid import FusionReader, PackedSegments, pack_segments
from pgra.reader.inputs import SeparateInputs, TokenizedInputs, collate, pad_targets
from pgra.reader.module import Trainable

# The logits are rows times target tokens times vocabulary: 256 rows of 4 tokens take 130 MB.
_MAX_ROWS = 256


@dataclass(frozen=True)
class T5Classifier(Trainable):
    """A fused T5 that decides a task's labels.

    The context's processes share all work, and each gets all results, in the order given.

    Attributes:
        decode: "verbalizer" scores each label's whole target, by the sum of its tokens'
            log-probabilities. "official" writes one token, as `generate(max_length=3)` of the
            released code does; its label, or the first if it is no label's, has probability 1.
        temperature: Divides scores before the softmax over labels (Guo et al. 2017, eq. 9).
        batch_tokens: The most in a batch; None is what suits the module's device.
    """

    module: FusionReader
    verbalizer: Verbalizer
    decode: str = "verbalizer"
    temperature: float = 1.0
    batch_tokens: int | None = None

    @property
    def labels(self) -> Sequence[str]:
        """The labels in the task's order."""
        return self.verbalizer.labels

    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:
        cost = GroupCost.on(device, is_training=True)
        return partial(collate, pad_token_id=self.tokenizer.pad_token_id, cost=cost)

    def predict(self, inputs: TokenizedInputs, context: Context = ALONE) -> list[Prediction]:
        """Decide each example; their labels are not read. A NaN in the scores is a ModelError."""
        scores = self.score(inputs, context)
        return decide(inputs.example_ids, scores, self.labels, temperature=self.temperature)

    def score(self, inputs: TokenizedInputs, context: Context = ALONE) -> Scores:
        """Return the log-probability of each of C labels, (B, C) float32."""
        if isinstance(inputs, SeparateInputs):
            return inputs.combine(self.score(inputs.alone(), context))
        if self.decode == "official":
            written = self.map_batches(inputs, self._write, context)
            return self._scores_of(written)
        targets = pad_targets(self.verbalizer.target_ids(self.tokenizer)).to(self.module.device)
        rows = self.map_batches(
            inputs, lambda packed: self.module.score_labels(packed, targets), context
        )
        scores: Scores = rows.reshape(len(inputs), len(self.labels)).astype(np.float32)
        return scores

    def map_batches(
        self,
        inputs: TokenizedInputs,
        work: Callable[[PackedSegments], Tensor],
        context: Context = ALONE,
    ) -> npt.NDArray[Any]:
        """Apply `work` to all inputs, in batches of similar size, without dropout.

        `work` returns a row for each example of a batch, (B, W); all rows stay on the device until
        all batches are read. The result has a row for each input, in their order.
        """
        reader, worker = self.module, context.worker
        cost, budget = GroupCost.on(reader.device), self.batch_tokens
        if budget is None:  # more leave less padding in a call
            budget = 1 << (17 if reader.device.type == "cuda" else 15)
        batches = token_budget_batches(inputs.sizes(), budget, max_rows=_MAX_ROWS)
        was_training = reader.training
        reader.eval()
        rows: list[int] = []
        found: list[Tensor] = []
        hidden = not context.shows_progress
        # What is packed multiplies float32.
        to_pack = sum(inputs.sizes()) if reader.precision == "float32" else 0
        with (
            reader.deciding(),
            packed_for(reader.model.get_encoder(), to_pack),
            Bar(total=len(inputs), desc="read", unit="ex", disable=hidden) as bar,
        ):
            for indices in worker.share(batches):
                packed = pack_segments(
                    [inputs[i].segments for i in indices],
                    pad_token_id=self.tokenizer.pad_token_id,
                    cost=cost,
                )
                rows += indices
                found.append(work(packed.to(reader.device)))
                # Other processes are guessed to be as far: their batches may be smaller.
                bar.update(min(len(indices) * worker.world, len(inputs) - bar.n))
        reader.train(was_training)
        made = torch.cat(found).cpu().numpy() if found else ()
        values = dict(gather(list(zip(rows, made, strict=True)), worker))
        return np.array([values[i] for i in range(len(inputs))])

    def _write(self, packed: PackedSegments) -> Tensor:
        """Write a batch's tokens, (B, T) int64."""
        count = 2 if self.verbalizer.has_slot else 1  # the slot's own token comes first
        return self.module.write(packed, count)

    def _scores_of(self, written: Tensor | npt.NDArray[Any]) -> Scores:
        """Give log-probability 0 to the label whose word was written and -inf to the others."""
        texts = self.tokenizer.batch_decode(written, skip_special_tokens=True)
        texts = [text.replace(SLOT, "") for text in texts]  # to mT5's tokenizer it is a plain piece
        found = [self.verbalizer.label_of_word(text) for text in texts]
        scores = np.full((len(found), len(self.labels)), -np.inf, dtype=np.float32)
        for i, label in enumerate(found):
            scores[i, 0 if label is None else self.labels.index(label)] = 0.0
        return scores
