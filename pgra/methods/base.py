"""What methods with a trained reader share: stages done once, the trained reader, its notes."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pgra.config import PgraArguments, choose
from pgra.core import ALONE, Candidates, Context, Json, Prediction, Scores
from pgra.data.bundled import BUNDLED_DATA, BUNDLED_MODELS
from pgra.errors import ConfigError
from pgra.lm.load import BUNDLED, ModelSource, choose_device, find_model, load_tokenizer
from pgra.methods.pgra import (
    find_evidence,
    label_decision,
    neighbor_model,
    open_stages,
    read_inputs,
    read_task,
    segment_layout,
    task_verbalizer,
)
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.arguments import ReaderTrainingArguments, check_trainer
from pgra.reader.calibrate import Calibration, decide, fit_temperature
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import TokenizedInputs
from pgra.reader.module import check_adapters
from pgra.reader.predict import Decision, T5Classifier
from pgra.reader.rag import PooledInputs, RagClassifier, RagReader, choose_evidence
from pgra.reader.record import ReaderRecord
from pgra.reader.train import check_batches, check_classes
from pgra.report.metrics import BINS, LABEL_METRICS, measure_reliability
from pgra.rerank import find_reranker
from pgra.run_folder import (
    Found,
    check_same_checkpoint,
    check_same_run,
    check_writable,
    run_identity,
)

# A run's reader once it is trained: its temperature, its record, its decisions on a split.


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
    def classifier(self) -> T5Classifier:
        """Return what scores the labels."""
        parts = (self.tokenizer, self.verbalizer, self.decision)
        if isinstance(self.reader, RagReader):
            return RagClassifier(self.reader, *parts)
        return T5Classifier(self.reader, *parts)

    @property
    def notes(self) -> list[str]:
        """Give what a reader of its probabilities must know."""
        return [self.calibration.note] if self.is_scoring and self.calibration.note else []

    def with_calibration(self, calibration: Calibration) -> "Trained":
        """Let it decide at that temperature."""
        decision = replace(self.decision, temperature=calibration.temperature)
        return replace(self, decision=decision, calibration=calibration)

    def calibrated(self, dev: TokenizedInputs, context: Context) -> "Trained":
        """Fit the temperature on the dev examples; without probabilities leave it as it is."""
        if not self.is_scoring:
            return self
        scores = self.classifier.score(dev, replace(context, progress=False))
        return self.with_calibration(fit_temperature(scores, self._columns(dev.labels)))

    def decide(self, inputs: TokenizedInputs, context: Context, *, attention: bool) -> "Decided":
        """Decide a split's examples, which have labels.

        Args:
            inputs: The examples.
            context: Who shares the work.
            attention: Whether to say what the reader looked at.
        """
        best = None
        if isinstance(inputs, PooledInputs) and isinstance(self.reader, RagReader):
            chosen = choose_evidence(self.reader, inputs)
            inputs, best = chosen.inputs, chosen.evidence
        shares = None
        if attention:
            attended = self.classifier.attend(inputs, context)
            scores, shares = attended.scores, attended.shares
        else:
            scores = self.classifier.score(inputs, context)
        labels, temperature = self.verbalizer.labels, self.decision.temperature
        predictions = decide(inputs.example_ids, scores, labels, temperature=temperature)
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


@dataclass(frozen=True)
class Prepared:
    """What runs that differ only in their training share: the stages before it, done once.

    Attributes:
        args: Everything before the reader's training.
        found: The examples with their evidence.
        source: The reader that training starts from.
        tokenizer: Its tokenizer.
        context: Who shares the work.
    """

    args: PgraArguments
    found: Found
    source: ModelSource
    tokenizer: Any
    context: Context

    @property
    def verbalizer(self) -> Verbalizer:
        """Give the reader's words and template."""
        return task_verbalizer(self.found.task, self.args.reader)

    def trained(self, reader: FusionReader, seed: int) -> Trained:
        """Give a reader with what it needs to decide."""
        decision = label_decision(self.args.reader)
        return Trained(reader, self.tokenizer, self.verbalizer, decision, seed)

    def open_reader(self, trained: Path | None = None) -> FusionReader:
        """Load the reader that training starts from, or a trained one from its folder."""
        return FusionReader.from_name(str(trained or self.args.reader.model_name_or_path))

    def inputs(self, split: str) -> TokenizedInputs:
        """Give what the reader reads of a split."""
        return read_inputs(self.found, split, self.args, self.tokenizer, self.context)


def prepare_runs(
    args: PgraArguments,
    trainings: Sequence[ReaderTrainingArguments],
    context: Context = ALONE,
) -> Prepared:
    """Run the stages before the reader, once what can be refused was refused.

    Args:
        args: Everything before the reader's training.
        trainings: Of all runs that will follow, as far as they are known.
        context: Who shares the work.

    Raises:
        ArtifactError: If a run's folder holds another run.
        PgraError: As each stage says.
    """
    for training in trainings:
        check_writable(Path(str(training.output_dir)))
        check_training(args, training)
    source = find_model(args.reader.model_name_or_path)
    check_adapters(args.reader, source)
    prepared = Prepared(args, read_task(args), source, load_tokenizer(source), context)
    found = prepared.found
    prepared.verbalizer.audit(prepared.tokenizer, decode=args.reader.decode)
    for training in trainings:
        check_batches(len(found.splits.train), training)
    check_classes([str(example.label) for example in found.splits.train], found.task.labels)
    open_stages(found, args)
    for training in trainings:
        asked = run_identity(args, training, found, source)
        check_run(Path(str(training.output_dir)), asked, training, is_whole=False)
    find_evidence(found, args, context)  # long
    return prepared


def check_run(
    folder: Path,
    identity: Mapping[str, Json],
    training: ReaderTrainingArguments,
    *,
    is_whole: bool = True,
) -> None:
    """Refuse another run's folder, and another run's checkpoint.

    Raises:
        ArtifactError: If it is; the first difference is named.
    """
    check_same_run(folder, identity, is_whole=is_whole)
    asked = str(training.resume_from_checkpoint or "")
    if asked.lower() not in ("", "true", "false"):
        check_same_checkpoint(Path(asked), identity, is_whole=is_whole)


def check_training(args: PgraArguments, training: ReaderTrainingArguments) -> None:
    """Refuse another device for the training, what cannot be made, and uploads of every checkpoint.

    Raises:
        ConfigError: If it is asked for.
    """
    _check_device(args.runtime.device, training)
    check_trainer(training)
    if training.metric_for_best_model is not None:
        name = training.metric_for_best_model.removeprefix("eval_")
        choose("metric_for_best_model", name, ["loss", *LABEL_METRICS])
    if training.push_to_hub:
        raise ConfigError(
            "push_to_hub would have the Trainer upload every checkpoint: take it out with "
            "pgra.publish.take_target, and push the finished run with push_run"
        )


def _check_device(name: str, training: ReaderTrainingArguments) -> None:
    """Refuse to retrieve on one device and train on another."""
    asked = choose_device(name)
    if (asked.type, asked.index or 0) != (training.device.type, training.device.index or 0):
        raise ConfigError(
            f"device is '{name}', but the Trainer uses {training.device}: choose a GPU by "
            "CUDA_VISIBLE_DEVICES, or the CPU by --device cpu --use_cpu"
        )


# What a reader of a run's numbers must know beside them: bundled models and data, leaks.


def evidence_models(args: PgraArguments) -> list[str]:
    """Name the models that find the reader's evidence, or its demonstrations; none without any."""
    if args.system == "lm-bff":
        return [args.retriever.encoder]
    if args.rerank.num_evidence == 0:
        return []
    models = [args.retriever.encoder] if args.retriever.retriever in ("dense", "hybrid") else []
    reads = find_reranker(args.rerank.reranker).models(args.rerank)
    if reads and args.rerank.exemplars == "knn":
        models.append(neighbor_model(args))
    return list(dict.fromkeys([*models, *reads]))


def run_notes(args: PgraArguments, found: Found, models: Sequence[str]) -> list[str]:
    """Gather what a reader of the numbers must know.

    Args:
        args: Which data and corpus.
        found: The examples.
        models: Names of all models that the run used, as the user wrote them.
    """
    sources = args.corpus.sources if found.depth else ()
    shared = found.splits.notes.get("test_rows_in_train")
    return [
        *bundled_notes(models, [args.data.dataset_name or "", *sources]),
        *([f"{shared} test texts also stand in the training file"] if shared else []),
    ]


def bundled_notes(models: Sequence[str], data: Sequence[str]) -> list[str]:
    """Gather what is to be known of bundled models and data among some names.

    Args:
        models: Names of models, as the user wrote them.
        data: Names of data sets and corpora.
    """
    notes = []
    for name in models:
        model = BUNDLED_MODELS.get(name.removeprefix(BUNDLED)) if BUNDLED in name else None
        notes += [f"{name}: {model.note}"] if model and model.note else []
    for name in data:
        part = BUNDLED_DATA.get(name.removeprefix(BUNDLED)) if BUNDLED in name else None
        notes += [f"{name}: {part.note}"] if part and part.note else []
    return notes
