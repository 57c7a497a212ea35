"""PGRA whole (Guo et al. 2023, section 2): evidence that an LM picked, and a T5 that reads it.

    evidence = top d of k candidates, by the LM's states      (eqs. 1-3; `pgra.methods.stages`)
    label    = reader(query, evidence)                        Fusion-in-Decoder

Its settings are the paper's other readers: fid (the first stage's best), random, plain (no
evidence), exhaustive (no first stage).
"""

import copy
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from pgra.artifacts import check_fingerprint
from pgra.config import (
    CorpusArguments,
    PgraArguments,
    ReaderArguments,
    RerankArguments,
    RetrieverArguments,
    RunArguments,
    choose,
)
from pgra.core import Candidates, Context, Example, Json, Prediction, Scores
from pgra.data.tasks import METRICS, Task
from pgra.errors import ArtifactError, ConfigError
from pgra.lm.load import choose_device, find_model, load_tokenizer, tokenizer_identity
from pgra.methods.base import (
    SPLITS,
    Decisions,
    Forecast,
    Method,
    TaskInfo,
    arguments_from,
    bundled_notes,
)
from pgra.methods.stages import Stages, neighbor_model
from pgra.prompts.template import check_template
from pgra.prompts.verbalizer import Verbalizer
from pgra.publish import write_card
from pgra.reader.arguments import ReaderTrainingArguments, check_trainer
from pgra.reader.calibrate import Calibration, decide, fit_temperature
from pgra.reader.fid import FusionReader
from pgra.reader.fields import NOT_DECIDING
from pgra.reader.inputs import SegmentLayout, TokenizedInputs, build_inputs, store_inputs
from pgra.reader.module import check_adapters
from pgra.reader.predict import Decision, T5Classifier
from pgra.reader.record import (
    READER_FOLDER,
    RECORD_FILE,
    Reader,
    ReaderRecord,
    find_reader,
    read_record,
    write_record,
)
from pgra.reader.train import TrainResult, check_batches, check_classes, train_reader
from pgra.report.metrics import BINS, measure, measure_reliability
from pgra.report.results import PREDICTIONS_FILE, add_attention
from pgra.rerank import Reference, find_reranker
from pgra.rerank.similarity import find_similarity
from pgra.retrieval.base import examples_digest

logger = logging.getLogger(__name__)


class Pgra(Method):
    """Trains a fused T5 on evidence, and decides with it.

    Attributes:
        pgra: The arguments, as the method decides them.
        stages: Both retrieval stages, on the task.
        trained: The reader, once it is trained or loaded.
    """

    SECTIONS: ClassVar[Mapping[str, type]] = {
        "corpus": CorpusArguments,
        "retriever": RetrieverArguments,
        "rerank": RerankArguments,
        "reader": ReaderArguments,
        "training": ReaderTrainingArguments,
    }
    SEEDS = "seeds of the reader (order of examples, dropout); data, prompt and evidence are alike"
    CLASSIFIER: ClassVar[type[T5Classifier]] = T5Classifier

    trained: "TrainedReader"

    def __init__(self, args: RunArguments, context: Context) -> None:
        """See `Method`."""
        super().__init__(args, context)
        self.pgra = args.pgra

    @property
    def training(self) -> ReaderTrainingArguments:
        """The Trainer's arguments."""
        training: ReaderTrainingArguments = self.args["training"]
        return training

    def open(self) -> None:
        """Read task and models' names, and refuse what cannot work."""
        args = self.pgra
        check_training(args, self.training)
        self.source = find_model(args.reader.model_name_or_path)
        check_adapters(args.reader, self.source)
        self.tokenizer = load_tokenizer(self.source)
        self.read_data()
        self.verbalizer.audit(self.tokenizer, decode=args.reader.decode)
        self.check()
        self.stages.open()

    def read_data(self) -> None:
        """Read the task, with the LM's prompt."""
        self.stages = Stages.read(self.pgra, self.context)
        self.data = self.stages.data
        self.fingerprints, self.seconds = self.stages.fingerprints, self.stages.seconds

    def check(self) -> None:
        """Refuse what cannot be trained on these examples."""
        check_training(self.pgra, self.training)
        check_batches(len(self.data.train), self.training)
        check_classes([str(example.label) for example in self.data.train], self.data.labels)

    @property
    def task(self) -> Task:
        """The task, which has labels."""
        assert isinstance(self.data.task, Task)
        return self.data.task

    @property
    def verbalizer(self) -> Verbalizer:
        """The reader's words and template."""
        return Verbalizer(self.task.verbalizer, reader_template(self.task, self.pgra.reader))

    @property
    def layout(self) -> SegmentLayout:
        """How segments are put together."""
        args = self.pgra.reader
        template = reader_template(self.task, args)
        return SegmentLayout(template, args.segment_order, args.max_segment_tokens)

    def identity(self) -> dict[str, Json]:
        """Return what decides the weights and predictions, besides the examples."""
        args = self.pgra
        return {
            **args.reader.deciding(),
            "verbalizer": dict(self.task.verbalizer),
            "reader_template": args.reader.reader_template or self.task.reader_template,
            "num_evidence": args.rerank.num_evidence,
            "reader_weights": self.source.identity,
            "num_processes": self.training.world_size,
            **training_identity(self.training, self.data.metric),
        }

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        """Find the evidence of splits."""
        self.stages.find(splits)

    def inputs(self, split: str) -> TokenizedInputs:
        """Return what the reader reads of a split: tokenised once, and kept."""
        examples, depth = self.data.examples(split), self.stages.depth
        fields: dict[str, Json] = {
            **asdict(self.layout),
            "tokenizer": tokenizer_identity(self.tokenizer),
            "examples": examples_digest(examples),
            "evidence": self.fingerprints.get(f"evidence/{split}"),
            "corpus": self.fingerprints.get("corpus"),
            "num_evidence": depth,
        }

        def build() -> TokenizedInputs:
            texts = [[line.text for line in lines] for lines in self.stages.evidence_lines(split)]
            parts = (examples, texts, self.tokenizer, self.verbalizer)
            return build_inputs(*parts, layout=self.layout)

        return store_inputs(
            self.pgra.artifacts / "inputs" / self.data.task.name,
            split,
            fields,
            build,
            examples=examples,
            tokenizer=self.tokenizer,
            verbalizer=self.verbalizer,
            context=self.context,
        )

    def open_reader(self, trained: Path | None = None) -> FusionReader:
        """Load the reader that training starts from, or a trained one from its folder."""
        return FusionReader.from_name(str(trained or self.pgra.reader.model_name_or_path))

    def fit(self, folder: Path) -> Mapping[str, Json]:
        """Train the reader, going on from the last whole checkpoint if the run was stopped."""
        args, training, metric = self.pgra.reader, self.training, self.data.metric
        splits = {split: self.inputs(split) for split in ("train", "dev")}
        reader = self.open_reader()
        if args.dropout_rate is not None:
            reader.set_dropout(args.dropout_rate)
        if args.lora_rank is not None:
            reader.add_adapters(args, seed=self.seed)
        self.trained = self._trained(reader)
        result = train_reader(
            self.trained.classifier,
            splits["train"],
            splits["dev"],
            measure=lambda truth, decided: measure(metric, truth, decided, self.data.labels),
            metric=metric,
            arguments=training,
        )
        self._describe(folder)
        return training_record(result, training)

    def load(self, folder: Path) -> None:
        """Load the trained reader of a run, with its temperature where that is known."""
        home = folder / READER_FOLDER
        reader = self.open_reader(home).to(choose_device(self.pgra.runtime.device))
        self.trained = self._trained(reader)
        if (home / RECORD_FILE).is_file():
            self.trained.calibrate(read_record(folder, verify=False).calibration)
        else:  # the run was stopped behind its training
            self._describe(folder)

    @property
    def _decision(self) -> Decision:
        return Decision(self.pgra.reader.decode, self.pgra.reader.length_normalize)

    def _trained(self, reader: FusionReader) -> "TrainedReader":
        parts = (reader, self.tokenizer, self.verbalizer, self._decision)
        return TrainedReader(self.CLASSIFIER(*parts), self.context)

    def _describe(self, folder: Path) -> None:
        """Fit the temperature on the dev set, and say in the reader's folder what it is."""
        with self.timed("calibration"):
            self.trained.fit_temperature(self.inputs("dev"))
        self.write_record(folder, self.trained.calibration)

    def write_record(self, folder: Path, calibration: Calibration) -> None:
        """Finish the reader's folder."""
        if not self.context.is_main:
            return
        args = self.pgra
        record = ReaderRecord(
            task=self.data.task.name,
            inputs=self.data.task.inputs,
            metric=self.data.metric,
            words=dict(self.verbalizer.words),
            layout=self.layout,
            decode=self._decision.decode,
            length_normalize=self._decision.length_normalize,
            calibration=calibration,
            num_evidence=self.stages.depth,
            method=args.method,
            prompt=self.stages.prompt if self.stages.depth else None,
            base_model={"name": self.source.name, "identity": self.source.identity},
            seed=self.seed,
            arguments={k: v for k, v in self.args.as_json().items() if k != "training"},
            fingerprints=self.fingerprints,
        )
        write_record(folder / READER_FOLDER, record)

    def finish(self, folder: Path) -> None:
        """Write the model card."""
        write_card(folder)

    def reuse(self, folder: Path) -> None:
        """Say how attention is added to a run that was made without."""
        if self.pgra.reader.evidence_attention and self.stages.depth:
            with (folder / PREDICTIONS_FILE).open(encoding="utf-8") as lines:
                if '"attention": ' not in lines.readline():
                    command = f"pgra evaluate --run {folder} --evidence_attention"
                    logger.warning("attention: %s adds it", command)

    def decide(self, examples: Sequence[Example]) -> Decisions:
        """Decide a split's examples with the evidence that was found for them."""
        split = next(name for name in SPLITS if self.data.examples(name) == list(examples))
        attention = self.pgra.reader.evidence_attention and self.stages.depth > 0
        read = self.trained.decide(self.inputs(split), attention=attention)
        lines = self.stages.evidence_lines(split)
        if read.best is not None:
            ranked = self.stages.ranked(split)
            lines = self.stages.lines(replace(ranked, best=read.best))
        if read.shares is not None:
            lines = add_attention(lines, read.shares)
        notes = self.trained.notes
        return Decisions(read.predictions, lines, notes=notes, calibration=read.calibration)

    def models(self) -> list[str]:
        """Return the reader, and the models that find its evidence."""
        return [self.pgra.reader.model_name_or_path, *evidence_models(self.pgra)]

    def notes(self) -> list[str]:
        """Return what a reader of the numbers must know of data, corpus and models."""
        sources = self.pgra.corpus.sources if self.stages.depth else []
        return [*super().notes(), *bundled_notes([], sources)]

    def sample_prompt(self) -> str:
        """Return the LM's prompt of the first test query, under every prefix."""
        query, prompt = self.data.test[0], self.stages.prompt
        texts = self.stages.reranker.prompts(query) if self.stages.depth else []
        if not texts:
            texts = [each.prefix + each.suffix(query.fields) for each in (prompt, *prompt.others)]
        return "\n\n--- the next prefix ---\n\n".join(texts)

    @classmethod
    def restore(cls, folder: Path, args: RunArguments, context: Context) -> "RestoredReader":
        """Open a finished run to decide new examples; see `RestoredReader`."""
        return RestoredReader(folder, context, artifacts=args.runtime.artifacts_dir)

    def foresee(self) -> Forecast:
        """Tell what the LM has yet to read: of a bank, what its candidates and its sample need."""
        args = self.pgra
        if not args.rerank.num_evidence or args.rerank.reranker == "none":
            return Forecast({}, "the LM reads nothing")
        cost = self.stages.plan(seconds=0).cost
        if cost is None:
            return Forecast(None, f"what reranker {args.rerank.reranker} reads is not known")
        bank, texts = self.stages.reranker.store, cost.to_read
        note = cost.basis if texts else "all read"
        if texts and cost.reads_pairs:
            note += f": each passage with each query, about {cost.reading.tokens:,} tokens"
        if args.is_exhaustive or args.rerank.bank == "full":
            return Forecast({(bank,): texts}, note, cost.is_exact)
        first = {k: v for k, v in asdict(args.retriever).items() if k != "num_candidates"}
        parts: dict[tuple[str, ...], int] = {(bank, str(first)): texts - cost.for_fit}
        if find_similarity(args.rerank.similarity).is_fitted:
            parts[bank, str(first), "sample"] = cost.for_fit
        return Forecast(parts, note, cost.is_exact)


# The reader once it is trained.


@dataclass(frozen=True)
class ReadSplit:
    """What a reader says of a split.

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
    best: Candidates | None


class TrainedReader:
    """A reader that can decide.

    Attributes:
        classifier: What scores the labels, with the temperature.
        calibration: Where that comes from.
    """

    def __init__(self, classifier: T5Classifier, context: Context) -> None:
        self.classifier, self.calibration, self._context = classifier, Calibration(), context

    @property
    def is_scoring(self) -> bool:
        """Whether it gives probabilities at all: the official decode does not."""
        return self.classifier.decision.decode == "verbalizer"

    @property
    def notes(self) -> list[str]:
        """What a reader of its probabilities must know."""
        return [self.calibration.note] if self.is_scoring and self.calibration.note else []

    def calibrate(self, calibration: Calibration) -> None:
        """Let it decide at a temperature."""
        self.calibration = calibration
        decision = replace(self.classifier.decision, temperature=calibration.temperature)
        self.classifier = replace(self.classifier, decision=decision)

    def fit_temperature(self, dev: TokenizedInputs) -> None:
        """Fit the temperature on the dev examples; without probabilities leave it as it is."""
        if self.is_scoring:
            scores = self.classifier.score(dev, replace(self._context, progress=False))
            self.calibrate(fit_temperature(scores, self._columns(dev.labels)))

    def decide(self, inputs: TokenizedInputs, *, attention: bool) -> ReadSplit:
        """Decide a split's examples, which have labels.

        Args:
            inputs: The examples.
            attention: Whether to say what the reader looked at.
        """
        inputs, best = self.classifier.choose(inputs)
        shares = None
        if attention:
            scores, shares = self.classifier.attend(inputs, self._context)
        else:
            scores = self.classifier.score(inputs, self._context)
        predictions = decide(
            inputs.example_ids,
            scores,
            self.classifier.labels,
            temperature=self.calibration.temperature,
        )
        return ReadSplit(predictions, self._reliability(scores, inputs), shares, best)

    def _reliability(self, scores: Scores, inputs: TokenizedInputs) -> Mapping[str, Json] | None:
        if not self.is_scoring:
            return None
        return reliability(scores, self._columns(inputs.labels), self.calibration)

    def _columns(self, labels: Sequence[str | None]) -> list[int]:
        return [self.classifier.labels.index(str(label)) for label in labels]


def reliability(
    scores: Scores, truth: Sequence[int], calibration: Calibration
) -> Mapping[str, Json]:
    """Return a temperature, and what it changes about labelled examples."""
    before = measure_reliability(scores, truth)
    after = measure_reliability(scores, truth, temperature=calibration.temperature)
    return {
        "temperature": calibration.temperature,
        "dev_examples": calibration.num_examples,
        "bins": BINS,
        "nll": {"before": before.nll, "after": after.nll},
        "ece": {"before": before.ece, "after": after.ece},
    }


class RestoredReader:
    """A finished run on new queries: evidence by its own index, bank and prompt, then its reader.

    No training data is read: the reader's folder holds the prompt. Only where each query has
    exemplars of its own are they chosen anew, and the training data must be where it was. Corpus,
    index and LM must be those that the run was made with.

    Attributes:
        reader: Its reader.
        stages: Both stages; None for a plain T5, which searches nothing.
        about: The task.
    """

    def __init__(self, folder: Path, context: Context, *, artifacts: str | None = None) -> None:
        """Load a run.

        Args:
            folder: The run, or its reader's folder, wherever that was moved.
            context: What computes, whatever the run's was.
            artifacts: Folder of its index and bank; None is where they were.

        Raises:
            ArtifactError: If the reader is not whole, or corpus, index or LM are not those that it
                was trained with; what differs is named.
            PgraError: As each stage says.
        """
        home = find_reader(folder)
        self.reader = self.load_reader(home, context)
        record = self.reader.record
        self.about = TaskInfo(record.task, record.inputs, record.labels)
        self.attention = False
        self.stages = None
        if record.num_evidence:
            runtime = {"device": context.device}
            if artifacts is not None:
                runtime["artifacts_dir"] = artifacts
            args = _recorded_arguments(home, record, runtime)
            context = replace(context, artifacts=args.artifacts)
            self.stages = _open_recorded(home, record, args, context)

    @classmethod
    def load_reader(cls, home: Path, context: Context) -> Any:
        """Load what reads: it has a `record`, and a `predict` of fields and evidence."""
        return Reader.load(home, device=context.device)

    def decide(self, examples: Sequence[Example]) -> Decisions:
        """Find evidence for examples and decide them."""
        lines: list[list[Any]] = [[] for _ in examples]
        if self.stages is not None and examples:
            lines = self.stages.lines(self.stages.search(examples))
        fields = [example.fields for example in examples]
        texts = [[line.text for line in found] for found in lines]
        predictions = self.reader.predict(fields, texts)
        if self.attention:
            lines = add_attention(lines, self.reader.attention(fields, texts))
        return Decisions(predictions, lines)


def _recorded_arguments(
    home: Path, record: ReaderRecord, runtime: Mapping[str, Any]
) -> PgraArguments:
    """Read a run's arguments; dtypes that depend on the device stay what they were."""
    changes: dict[str, dict[str, Any]] = {"runtime": dict(runtime)}
    lm = record.fingerprints.get("reranker")
    encoder = _encoder_fields(record) or _exemplar_encoder(lm)
    if isinstance(lm, Mapping) and "dtype" in lm:
        changes["rerank"] = {"lm_dtype": lm["dtype"]}
    if encoder is not None:
        changes["retriever"] = {"encoder_dtype": encoder["dtype"]}
    try:
        return arguments_from(record.arguments, changes).pgra
    except (KeyError, TypeError) as error:
        raise ArtifactError(
            f"{home / RECORD_FILE} holds arguments that this version of pgra does not know "
            f"({error}): use the version that it names, or train again"
        ) from None


def _encoder_fields(record: ReaderRecord) -> Mapping[str, Json] | None:
    """Return what a run's index says of its encoder; None if it has none."""
    index = record.fingerprints.get("index")
    dense = index.get("dense", index) if isinstance(index, Mapping) else None
    return dense if isinstance(dense, Mapping) and "encoder" in dense else None


def _exemplar_encoder(lm: Json) -> Mapping[str, Json] | None:
    """Return what a reranker says of the first stage's encoder, where that finds exemplars."""
    encoder = lm.get("exemplar encoder") if isinstance(lm, Mapping) else None
    return encoder if isinstance(encoder, Mapping) and "part" not in encoder else None


def _open_recorded(
    home: Path, record: ReaderRecord, args: PgraArguments, context: Context
) -> Stages:
    """Open the stages; refuse what is not the run's before anything long is begun."""
    assert record.prompt is not None  # it has evidence
    if not args.artifacts.is_dir():
        raise ArtifactError(
            f"{args.artifacts} does not exist, where the run's index and bank are looked for: name "
            "their folder with --artifacts_dir"
        )
    # A query's own neighbors are training examples, the one thing that the reader's folder does not
    # hold. That they are the run's, the reranker's fingerprint says.
    is_own = args.rerank.per_query and args.rerank.reranker == "prompted"
    exemplars = Stages.read(args, context).exemplars if is_own else None
    made = record.fingerprints
    lm = made.get("reranker")
    reference = Reference(made=lm if isinstance(lm, Mapping) else {})
    stages = Stages(args, context, record.prompt, exemplars=exemplars, reference=reference)
    _check(home, "corpus", made.get("corpus"), stages.corpus.fingerprint["corpus_sha256"])
    _check(home, "reranker", made.get("reranker"), dict(stages.reranker.fingerprint))
    stages.reranker.check()  # before an index would be built
    if args.is_exhaustive:
        return stages
    encoder = _encoder_fields(record)
    if encoder is not None:  # its folder's digest tells before an index would be built with it
        _check(home, "encoder", encoder["encoder"], find_model(args.retriever.encoder).identity)
    _check(home, "index", made.get("index"), dict(stages.retriever.fingerprint))
    return stages


def _check(home: Path, stage: str, made: Json, asked: Json) -> None:
    """Refuse a stage that is not the run's; the first field that differs is named."""
    pair = [
        {f"{stage} {name}": field for name, field in value.items()}
        if isinstance(value, Mapping)
        else {stage: value}
        for value in (made, asked)
    ]
    way_out = "restore it, or train again"
    check_fingerprint(
        home, made=pair[0], asked=pair[1], now="what is there now is", way_out=way_out
    )


# What is refused before anything is trained, and what decides a training.


def check_training(args: PgraArguments, training: ReaderTrainingArguments) -> None:
    """Refuse another device for the training, what cannot be made, and uploads of every checkpoint.

    Raises:
        ConfigError: If it is asked for.
    """
    device = choose_device(args.runtime.device)
    if (device.type, device.index or 0) != (training.device.type, training.device.index or 0):
        raise ConfigError(
            f"device is '{args.runtime.device}', but the Trainer uses {training.device}: choose a "
            "GPU by CUDA_VISIBLE_DEVICES, or the CPU by --device cpu --use_cpu"
        )
    check_trainer(training)
    if training.metric_for_best_model is not None:
        name = training.metric_for_best_model.removeprefix("eval_")
        choose("metric_for_best_model", name, ["loss", *METRICS])
    if training.push_to_hub:
        raise ConfigError(
            "push_to_hub would have the Trainer upload every checkpoint: take it out with "
            "pgra.publish.take_target, and push the finished run with push_run"
        )


def training_record(result: TrainResult, training: ReaderTrainingArguments) -> dict[str, Json]:
    """Return what a training says of itself in `training.json`."""
    return {
        "metric": str(training.metric_for_best_model).removeprefix("eval_"),
        "greater_is_better": bool(training.greater_is_better),
        "value": result.best_metric,
        "step": result.best_step,
        "steps": result.steps,
        "train_loss": result.train_loss,
        "seconds": round(result.seconds, 3),
    }


def training_identity(training: ReaderTrainingArguments, metric: str) -> dict[str, Json]:
    """Return the Trainer's arguments that decide the weights, as they will be resolved.

    Args:
        training: All of them.
        metric: The task's, which chooses the checkpoint where no other is named.
    """
    chosen = copy.copy(training)
    chosen.choose_metric(metric)
    return {
        name: _plain(value) for name, value in chosen.to_dict().items() if name not in NOT_DECIDING
    }


def _plain(value: Any) -> Json:
    """Write a whole number in one way: 0 is a default of `transformers`, 0.0 the command line's."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list) else value


def reader_template(task: Task, args: ReaderArguments) -> str:
    """Return how the reader sees a query: as asked for, or by a profile, else as the task says.

    Raises:
        ConfigError: If what was asked for has other fields than the task (`--profile official` has
            one text, a pair has two); the task's own is named.
    """
    if not args.reader_template:
        return task.reader_template
    try:
        check_template(args.reader_template, task.inputs)
    except ConfigError as error:
        raise ConfigError(
            f"reader_template does not fit task '{task.name}': {str(error).rstrip('.')}; give the "
            f"task's own, which wins over a profile's: --reader_template '{task.reader_template}'"
        ) from None
    return args.reader_template


def evidence_models(args: PgraArguments) -> list[str]:
    """Return the models that find the reader's evidence; none without any."""
    if args.rerank.num_evidence == 0:
        return []
    models = [args.retriever.encoder] if args.retriever.retriever in ("dense", "hybrid") else []
    reads = find_reranker(args.rerank.reranker).models(args.rerank, args.rerank_options)
    if reads and args.rerank.per_query:
        models.append(neighbor_model(args))
    return list(dict.fromkeys([*models, *reads]))
