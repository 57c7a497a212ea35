"""Reads examples, scores labels, and makes probabilities of the scores.

They have one temperature, fitted on the dev examples. Guo et al. 2017, "On Calibration of Modern
Neural Networks", section 4.2: of the ways they compare, the one with a single parameter is the best
or nearly so, and it changes no decision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.core import ALONE, Context, Prediction, Scores, gather, log_softmax
from pgra.errors import ModelError
from pgra.lm.batching import GroupCost, token_budget_batches
from pgra.lm.kernels import packed_for
from pgra.progress import Bar
from pgra.prompts import SLOT, SLOT_END, Verbalizer
from pgra.reader.fid import IGNORED, FusionReader, PackedSegments, pack_segments, pad_rows
from pgra.reader.inputs import SeparateInputs, TokenizedInputs, collate
from pgra.reader.train import Trainable

# The logits are rows times target tokens times vocabulary: 256 rows of 4 tokens take 130 MB.
_MAX_ROWS = 256
_WRITTEN_TOKENS = 20  # where the model does not say, as in transformers
LEAST_EXAMPLES = 50  # with 50, accuracy itself is unsure by 0.07 (one sigma)
# Temperatures lie between 1 / LARGEST and LARGEST. A fit at the upper border counts: the reader
# is sure and wrong. One at the lower does not: all dev examples are right, and too easy.
LARGEST = 10.0


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

    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:
        cost = GroupCost.on(device, is_training=True)
        return partial(collate, pad_token_id=self.tokenizer.pad_token_id, cost=cost)

    def predict(self, inputs: TokenizedInputs, context: Context = ALONE) -> list[Prediction]:
        """Decide each example, or write its answer; labels are not read.

        A NaN in the scores is a ModelError.
        """
        if not self.verbalizer.words:
            return written(inputs.example_ids, self.write(inputs, context))
        scores = self.score(inputs, context)
        labels, temperature = self.verbalizer.labels, self.temperature
        return decide(inputs.example_ids, scores, labels, temperature=temperature)

    def score(self, inputs: TokenizedInputs, context: Context = ALONE) -> Scores:
        """Return the log-probability of each of C labels, (B, C) float32."""
        if isinstance(inputs, SeparateInputs):
            return inputs.combine(self.score(inputs.alone(), context))
        if self.decode == "official":
            count = 2 if self.verbalizer.has_slot else 1  # the slot's own token comes first
            return self._scores_of(self.write(inputs, context, count=count))
        targets = pad_rows(self.verbalizer.target_ids(self.tokenizer), IGNORED).to(
            self.module.device
        )
        score = partial(self.module.score_labels, targets=targets)
        rows = self.map_batches(inputs, score, context)
        scores: Scores = rows.reshape(len(inputs), len(targets)).astype(np.float32)
        return scores

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
        to_pack = sum(inputs.sizes()) if not reader.is_half else 0
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


def decide(
    example_ids: Sequence[str], scores: Scores, labels: Sequence[str], *, temperature: float = 1.0
) -> list[Prediction]:
    """Take each example's best label, ties by the task's order; scores are (B, C) float32.

    A NaN is a ModelError. Probabilities are the softmax of scores divided by the temperature.
    """
    if np.isnan(scores).any():
        name = example_ids[int(np.isnan(scores).any(axis=1).argmax())]
        raise ModelError(f"the reader's scores of example '{name}' are NaN: its weights are broken")
    logits = (scores - scores.max(axis=1, keepdims=True)).astype(np.float64) / temperature
    chances = np.exp(logits)
    chances /= chances.sum(axis=1, keepdims=True)
    return [
        Prediction(name, labels[best], dict(zip(labels, row, strict=True)))
        for name, best, row in zip(
            example_ids, scores.argmax(axis=1), chances.tolist(), strict=True
        )
    ]


def negative_log_likelihood(
    scores: Scores, truth: Sequence[int], *, temperature: float = 1.0
) -> float:
    """Return the mean of -log p of the true labels, columns of the finite scores (B, C)."""
    chances = log_softmax(scores.astype(np.float64) / temperature)
    return float(-chances[np.arange(len(chances)), list(truth)].mean())


@dataclass(frozen=True)
class Calibration:
    """A reader's temperature, by which scores are divided before the softmax over labels.

    Attributes:
        num_examples: Dev examples that it was fitted on, 0 if it was not.
        note: Why it is 1; None where it was fitted.
    """

    temperature: float = 1.0
    num_examples: int = 0
    note: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:  # nor NaN
            raise ValueError(f"temperature is {self.temperature}: it is a number above 0")


def fit_temperature(scores: Scores, truth: Sequence[int]) -> Calibration:
    """Fit the temperature that makes the true labels most likely (Guo et al. 2017, eq. 9).

    `truth` has the true labels' columns of scores (B, C). With too few examples, or if no other
    temperature is better, it is 1, with a note.
    """
    from scipy.optimize import minimize_scalar  # a third of a second to import

    count, border = len(truth), math.log(LARGEST)

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(scores, truth, temperature=math.exp(log_temperature))

    why = f"{count} dev examples are too few to fit it (at least {LEAST_EXAMPLES})"
    if count >= LEAST_EXAMPLES:
        # In 1/T the loss is convex, so in log T it has one valley.
        best = float(minimize_scalar(loss, bounds=(-border, border), method="bounded").x)
        if best >= 0.01 - border and loss(best) < loss(0.0):
            return Calibration(LARGEST if best > border - 0.01 else math.exp(best), count)
        why = f"no other is better on the {count} dev examples"
    return Calibration(note=f"probabilities are not calibrated, temperature is 1: {why}")
