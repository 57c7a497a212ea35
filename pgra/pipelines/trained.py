"""A run's reader once it is trained: its temperature, its record, its decisions on a split."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pgra.config import PgraArguments
from pgra.evaluation.reliability import BINS, measure_reliability
from pgra.models.fid import FusionReader
from pgra.models.loading import ModelSource
from pgra.models.rag import RagReader
from pgra.pipelines.found import Found
from pgra.pipelines.inputs import label_decision, segment_layout
from pgra.processes import Processes
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.attention import score_with_attention
from pgra.reader.pools import PooledInputs, choose_evidence
from pgra.reader.predict import Decision, batch_tokens_on, decide, score_inputs
from pgra.reader.record import ReaderRecord
from pgra.reader.temperature import Calibration, fit_temperature
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Candidates, Json, Prediction, Scores


@dataclass(frozen=True)
class Trained:
    """A reader that can decide.

    Attributes:
        reader: The T5, on its device.
        tokenizer: Its tokenizer.
        verbalizer: Its words.
        decision: How it decides.
        seed: Of its training.
        calibration: The temperature of its probabilities.
    """

    reader: FusionReader
    tokenizer: Any
    verbalizer: Verbalizer
    decision: Decision
    seed: int
    calibration: Calibration = Calibration()  # noqa: RUF009 (frozen)

    @property
    def is_scoring(self) -> bool:
        """Say whether it gives probabilities at all: the official decode does not."""
        return self.decision.decode == "verbalizer"

    @property
    def batch_tokens(self) -> int:
        """Give the most tokens of a batch on its device."""
        return batch_tokens_on(self.reader.device)

    @property
    def notes(self) -> list[str]:
        """Give what a reader of its probabilities must know."""
        return [self.calibration.note] if self.is_scoring and self.calibration.note else []

    def with_calibration(self, calibration: Calibration) -> "Trained":
        """Let it decide at that temperature."""
        decision = replace(self.decision, temperature=calibration.temperature)
        return replace(self, decision=decision, calibration=calibration)

    def calibrated(self, dev: TokenizedInputs, processes: Processes) -> "Trained":
        """Fit the temperature on the dev examples; without probabilities leave it as it is."""
        if not self.is_scoring:
            return self
        scores = score_inputs(
            self.reader,
            self.tokenizer,
            dev,
            self.verbalizer,
            decision=self.decision,
            batch_tokens=self.batch_tokens,
            progress=False,
            worker=processes.worker,
        )
        return self.with_calibration(fit_temperature(scores, self._columns(dev.labels)))

    def decide(
        self, inputs: TokenizedInputs, processes: Processes, *, attention: bool
    ) -> "Decided":
        """Decide a split's examples, which have labels.

        Args:
            inputs: The examples.
            processes: Who shares the work.
            attention: Whether to say what the reader looked at.
        """
        how: dict[str, Any] = {
            "decision": self.decision,
            "batch_tokens": self.batch_tokens,
            "progress": processes.worker.is_main,
            "worker": processes.worker,
        }
        best = None
        if isinstance(inputs, PooledInputs) and isinstance(self.reader, RagReader):
            chosen = choose_evidence(self.reader, inputs)
            inputs, best = chosen.inputs, chosen.evidence
        parts = (self.reader, self.tokenizer, inputs, self.verbalizer)
        shares = None
        if attention:
            attended = score_with_attention(*parts, **how)
            scores, shares = attended.scores, attended.shares
        else:
            scores = score_inputs(*parts, **how)
        temperature = self.decision.temperature
        predictions = decide(inputs.example_ids, scores, self.verbalizer, temperature=temperature)
        return Decided(predictions, self._reliability(scores, inputs), shares, best)

    def _reliability(self, scores: Scores, inputs: TokenizedInputs) -> Mapping[str, Json] | None:
        if not self.is_scoring:
            return None
        truth = self._columns(inputs.labels)
        before = measure_reliability(scores, truth)
        after = measure_reliability(scores, truth, temperature=self.calibration.temperature)
        return {
            "temperature": self.calibration.temperature,
            "dev_examples": self.calibration.num_examples,
            "bins": BINS,
            "nll": {"before": before.nll, "after": after.nll},
            "ece": {"before": before.ece, "after": after.ece},
        }

    def _columns(self, labels: Sequence[str | None]) -> list[int]:
        return [self.verbalizer.labels.index(str(label)) for label in labels]


@dataclass(frozen=True)
class Decided:
    """A split's decisions.

    Attributes:
        predictions: One for each example.
        calibration: The temperature, and nll and ece without and with it; None without
            probabilities.
        shares: Of each example a share of attention for each segment; None if not asked for.
        best: The evidence, where the reader itself chose it.
    """

    predictions: Sequence[Prediction]
    calibration: Mapping[str, Json] | None
    shares: Sequence[Sequence[float]] | None
    best: Candidates | None = None


def describe_reader(
    trained: Trained, found: Found, args: PgraArguments, source: ModelSource
) -> ReaderRecord:
    """Gather what a trained reader's folder says of itself.

    Args:
        trained: The reader.
        found: What it was trained on.
        args: The run's arguments.
        source: The T5 that it began as.
    """
    decision = label_decision(args.reader)
    return ReaderRecord(
        task=found.task.name,
        inputs=found.task.inputs,
        metric=found.task.metric,
        words=dict(found.task.verbalizer),
        layout=segment_layout(found.task, args.reader),
        decode=decision.decode,
        length_normalize=decision.length_normalize,
        calibration=trained.calibration,
        num_evidence=found.depth,
        method=args.method,
        prompt=found.prompt if found.depth else None,
        base_model={"name": source.name, "identity": source.identity},
        seed=trained.seed,
        arguments=asdict(args),
        fingerprints=found.fingerprints,
    )
