"""Reads examples and decides: calibrated probabilities, and which evidence was looked at."""

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from accelerate.utils import gather_object
from torch import Tensor
from tqdm import tqdm

from pgra.core import Prediction, Scores, Worker
from pgra.errors import ModelError
from pgra.lm.batching import GroupCost, PackedSegments, token_budget_batches
from pgra.lm.kernels import packed_for
from pgra.prompts.verbalizer import SLOT, Verbalizer
from pgra.reader.fid import IGNORED, Fused, FusionReader
from pgra.reader.inputs import Collator, TokenizedInputs, pad_targets
from pgra.reader.rag import PooledInputs, RagReader, SeparateInputs, choose_evidence

logger = logging.getLogger(__name__)

T = TypeVar("T")
# The logits are rows times target tokens times vocabulary: 256 rows of 4 tokens take 130 MB.
_MAX_ROWS = 256


@dataclass(frozen=True)
class Decision:
    """How labels are decided.

    Attributes:
        decode: "verbalizer" scores all tokens of every label's target, by the sum of their
            log-probabilities: what the reader was trained to raise, and a longer word has no
            handicap that training did not see. "official" writes one token, as
            `generate(max_length=3)` of the released code does; the label whose word it is has
            probability 1, and the first label where it is none's.
        length_normalize: Whether the sum is divided by the number of tokens, for a reader that was
            not trained on these words.
        temperature: What scores are divided by before the softmax over labels (Guo et al. 2017,
            eq. 9). It changes no decision.
    """

    decode: str = "verbalizer"
    length_normalize: bool = False
    temperature: float = 1.0


def batch_tokens_on(device: torch.device) -> int:
    """Say how many tokens a batch that is decided may have: more leave less padding in a call."""
    return 1 << 17 if device.type == "cuda" else 1 << 15


def predict(
    reader: FusionReader,
    tokenizer: Any,
    inputs: TokenizedInputs,
    verbalizer: Verbalizer,
    *,
    decision: Decision = Decision(),
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
        decision: How.
        batch_tokens: Most tokens in a batch.
        progress: Whether to show a bar.
        worker: This process's share when several run; every one gets all predictions.

    Returns:
        One for each input, in the order given, whatever the batches were.

    Raises:
        ConfigError: If the verbalizer does not suit the tokenizer.
        ModelError: If the reader's scores are not numbers.
    """
    verbalizer.audit(tokenizer, decode=decision.decode)
    scores = score_inputs(
        reader,
        tokenizer,
        inputs,
        verbalizer,
        decision=decision,
        batch_tokens=batch_tokens,
        progress=progress,
        worker=worker or Worker(),
    )
    return decide(inputs.example_ids, scores, verbalizer, temperature=decision.temperature)


def decide(
    example_ids: Sequence[str], scores: Scores, verbalizer: Verbalizer, *, temperature: float = 1.0
) -> list[Prediction]:
    """Take each example's best label, ties by the task's order.

    Args:
        example_ids: Names of the B examples.
        scores: Log-probability of each of C labels, (B, C) float32.
        verbalizer: Names the labels.
        temperature: What scores are divided by before the softmax.
    """
    if np.isnan(scores).any():
        name = example_ids[int(np.isnan(scores).any(axis=1).argmax())]
        raise ModelError(f"the reader's scores of example '{name}' are NaN: its weights are broken")
    best, labels = scores.argmax(axis=1), verbalizer.labels
    chances = label_chances(scores, temperature)
    return [
        Prediction(name, labels[best[i]], dict(zip(labels, map(float, row), strict=True)))
        for i, (name, row) in enumerate(zip(example_ids, chances, strict=True))
    ]


def label_chances(scores: Scores, temperature: float = 1.0) -> npt.NDArray[np.float64]:
    """Give the softmax over labels of scores divided by a temperature, (B, C)."""
    logits = (scores - scores.max(axis=1, keepdims=True)).astype(np.float64) / temperature
    weights = np.exp(logits)
    chances: npt.NDArray[np.float64] = weights / weights.sum(axis=1, keepdims=True)
    return chances


def score_inputs(
    reader: FusionReader,
    tokenizer: Any,
    inputs: TokenizedInputs,
    verbalizer: Verbalizer,
    *,
    decision: Decision,
    batch_tokens: int,
    progress: bool,
    worker: Worker,
) -> Scores:
    """Score tokenised examples, (B, C) float32, in batches of like size, in the caller's order.

    Those whose segments are read each alone get what their segments' scores combine to; the
    evidence of those that have candidates is chosen first.
    """
    if isinstance(inputs, PooledInputs) and isinstance(reader, RagReader):
        inputs = choose_evidence(reader, inputs).inputs
    if isinstance(inputs, SeparateInputs):
        each = score_inputs(
            reader,
            tokenizer,
            inputs.alone(),
            verbalizer,
            decision=decision,
            batch_tokens=batch_tokens,
            progress=progress,
            worker=worker,
        )
        return inputs.combine(each)
    scorer = LabelScorer(reader, tokenizer, verbalizer, decision)
    rows = map_batches(
        reader,
        inputs,
        lambda _, packed: scorer(packed).tolist(),
        pad_token_id=tokenizer.pad_token_id,
        batch_tokens=batch_tokens,
        progress=progress,
        worker=worker,
    )
    return np.array(rows, dtype=np.float32).reshape(len(inputs), len(verbalizer.labels))


class LabelScorer:
    """Scores one batch."""

    def __init__(
        self, reader: FusionReader, tokenizer: Any, verbalizer: Verbalizer, decision: Decision
    ) -> None:
        self._reader, self._tokenizer, self._verbalizer = reader, tokenizer, verbalizer
        self._decision = decision
        self.targets = pad_targets(verbalizer.target_ids(tokenizer)).to(reader.device)  # (C, T)

    def __call__(self, packed: PackedSegments, fused: Fused | None = None) -> Tensor:
        """Give the log-probability of each label, (B, C) float32."""
        if self._decision.decode == "official":
            return _score_official(self._reader, self._tokenizer, packed, self._verbalizer)
        scores = self._reader.score_labels(packed, self.targets, fused=fused)
        if self._decision.length_normalize:
            scores = scores / (self.targets != IGNORED).sum(dim=1)
        return scores


def map_batches(
    reader: FusionReader,
    inputs: TokenizedInputs,
    work: Callable[[list[int], PackedSegments], Sequence[T]],
    *,
    pad_token_id: int,
    batch_tokens: int,
    progress: bool = False,
    worker: Worker | None = None,
) -> list[T]:
    """Do something with all inputs, in batches of like size.

    Args:
        reader: On the device it is to run on; without dropout meanwhile.
        inputs: In any order.
        work: Gives a value for each example of a batch, from their places and their segments.
        pad_token_id: The tokenizer's.
        batch_tokens: Most tokens in a batch.
        progress: Whether to show a bar.
        worker: This process's share when several run; every one gets all values.

    Returns:
        One value for each input, in the order given.
    """
    worker = worker or Worker()
    collate = Collator(pad_token_id, GroupCost.on(reader.device))
    batches = token_budget_batches(inputs.sizes(), batch_tokens, max_rows=_MAX_ROWS)
    was_training = reader.training
    reader.eval()
    found: list[tuple[list[int], Sequence[T]]] = []
    show = progress and worker.is_main
    with (
        packed_for(reader.t5.get_encoder(), sum(inputs.sizes())),
        tqdm(total=len(inputs), desc="read", unit="ex", disable=not show) as bar,
    ):
        for indices in worker.share(batches):
            packed = collate([inputs[i] for i in indices]).packed.to(reader.device)
            found.append((indices, work(indices, packed)))
            # Other processes are guessed to be as far: their batches may be smaller.
            bar.update(min(len(indices) * worker.world, len(inputs) - bar.n))
    reader.train(was_training)
    if worker.world > 1:
        found = gather_object(found)
    by_place = {
        place: value
        for indices, values in found
        for place, value in zip(indices, values, strict=True)
    }
    return [by_place[place] for place in range(len(inputs))]


def _score_official(
    reader: FusionReader, tokenizer: Any, packed: PackedSegments, verbalizer: Verbalizer
) -> Tensor:
    """Give log-probability 0 to the label whose word was written and -inf to the others."""
    count = 2 if verbalizer.has_slot else 1  # the slot's own token comes first
    written = reader.generate(packed, max_new_tokens=count, do_sample=False, num_beams=1)
    texts = tokenizer.batch_decode(written.cpu(), skip_special_tokens=True)
    texts = [text.replace(SLOT, "") for text in texts]  # to mT5's tokenizer it is a plain piece
    found = [verbalizer.label_of_word(text) for text in texts]
    unknown = [text for text, label in zip(texts, found, strict=True) if label is None]
    if unknown:
        logger.debug("%d of %d are no label's word: %s", len(unknown), len(texts), unknown[:5])
    labels = verbalizer.labels
    scores = torch.full((len(found), len(labels)), -torch.inf)
    for i, label in enumerate(found):
        scores[i, 0 if label is None else labels.index(label)] = 0.0
    return scores


# Calibrates a reader's probabilities: one temperature, fitted on the dev examples.
#
# Guo et al. 2017, "On Calibration of Modern Neural Networks", section 4.2: of all ways they
# compare, the one with a single parameter is the best or nearly so, and it changes no decision.


LEAST_EXAMPLES = 50
"""Fewer tell too little: the share of right answers of 50 is itself unsure by 0.07 (one sigma)."""
LARGEST = 10.0
"""Temperatures lie between 1 / LARGEST and LARGEST. The upper border is taken: of a reader that is
sure and wrong nothing better can be said. The lower is not: if all dev examples are right, a
smaller one is better without end, and says only that there were few."""


@dataclass(frozen=True)
class Calibration:
    """How sure a reader may be.

    Attributes:
        temperature: What scores are divided by before the softmax over labels; 1 changes nothing.
        num_examples: Dev examples that it was fitted on, 0 if it was not.
        note: Why it is 1, where it was not fitted or did not help; or that it is the largest.
    """

    temperature: float = 1.0
    num_examples: int = 0
    note: str | None = None


def negative_log_likelihood(
    scores: Scores, truth: Sequence[int], *, temperature: float = 1.0
) -> float:
    """Give the mean of -log p of the true labels.

    Args:
        scores: Log-probability of each of C labels, (B, C), all finite.
        truth: The true label's column, of each example.
        temperature: What scores are divided by.
    """
    logits = scores.astype(np.float64) / temperature
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(len(logits)), list(truth)]
    return float((np.log(np.exp(logits).sum(axis=1)) - chosen).mean())


def fit_temperature(scores: Scores, truth: Sequence[int]) -> Calibration:
    """Fit the temperature that makes the true labels most likely (Guo et al. 2017, eq. 9).

    Args:
        scores: Log-probability of each of C labels, (B, C).
        truth: The true label's column, of each example.

    Returns:
        A temperature of 1 with a note, where there are too few examples or no other is better.
    """
    from scipy.optimize import minimize_scalar  # a third of a second to import

    if len(truth) < LEAST_EXAMPLES:
        return _uncalibrated(
            f"{len(truth)} dev examples are too few to fit it (at least {LEAST_EXAMPLES})"
        )

    def loss(log_temperature: float) -> float:
        return negative_log_likelihood(scores, truth, temperature=math.exp(log_temperature))

    # In 1/T the loss is convex, so in log T it has one valley.
    border = math.log(LARGEST)
    found = minimize_scalar(loss, bounds=(-border, border), method="bounded")
    best = float(found.x)
    if not loss(best) < loss(0.0):
        return _uncalibrated(f"no other is better on the {len(truth)} dev examples")
    if best < 0.01 - border:
        return _uncalibrated(f"the {len(truth)} dev examples are too easy to name another")
    is_last = best > border - 0.01
    note = (
        f"temperature is {LARGEST:g}, the largest: probabilities tell little" if is_last else None
    )
    return Calibration(LARGEST if is_last else math.exp(best), len(truth), note)


def _uncalibrated(why: str) -> Calibration:
    return Calibration(note=f"probabilities are not calibrated, temperature is 1: {why}")


# What the reader looks at: the share of its cross-attention that each evidence gets.


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
