"""PGRA whole (Guo et al. 2023, section 2): evidence that an LM picked, and a T5 that reads it.

    evidence = top d of k candidates, by the LM's states      (eqs. 1-3; `pgra.methods.stages`)
    label    = reader(query, evidence)                        Fusion-in-Decoder

Its settings are the paper's other readers: fid (the first stage's best), random, plain (no
evidence), exhaustive (the LM's best of the whole corpus).
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from pgra.artifacts import check_fingerprint
from pgra.core import Context, Example, Json, Scores
from pgra.data.tasks import Task, check_slots
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.lm.load import (
    ModelSource,
    choose_device,
    find_model,
    load_config,
    load_tokenizer,
)
from pgra.methods.arguments import METHODS, FolderArguments, PgraArguments, RunArguments
from pgra.methods.base import (
    SPLITS,
    Decisions,
    Method,
    TaskData,
    bundled_notes,
    task_name,
)
from pgra.methods.stages import Stages, neighbor_model, reads_prompt
from pgra.prompts import FewShotPrompt, Verbalizer, prompt_template
from pgra.reader import READER_FOLDER, RECORD_FILE
from pgra.reader.arguments import ReaderArguments, TrainingArguments, default_learning_rate
from pgra.reader.calibrate import Calibration, decide, fit_temperature
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SegmentLayout, TokenizedInputs, build_inputs
from pgra.reader.module import choose_precision
from pgra.reader.predict import T5Classifier
from pgra.reader.record import (
    ReaderRecord,
    check_reads_any,
    find_reader,
    read_record,
    write_record,
)
from pgra.reader.train import check_trackers, fit
from pgra.report.metrics import measure
from pgra.report.results import EvidenceLine
from pgra.rerank import Reference, find_reranker
from pgra.run_folder import write_card

logger = logging.getLogger(__name__)


class Pgra(Method):
    """Trains a fused T5 on evidence, and decides with it.

    `pgra` are the arguments, as the method decides them; `reader` scores the labels.
    """

    SECTIONS = METHODS["pgra"].sections
    CLASSIFIER: ClassVar[type[T5Classifier]] = T5Classifier
    COMBINES_SCORES: ClassVar[bool] = False  # of several inputs an example

    source: ModelSource
    stages: Stages
    reader: Any
    calibration = Calibration()

    def __init__(self, args: RunArguments, context: Context) -> None:
        super().__init__(args, context)
        self.pgra = args.pgra
        self.tokenized: dict[str, TokenizedInputs] = {}

    @property
    def training(self) -> TrainingArguments:
        training: TrainingArguments = self.args["training"]
        return training

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:
        """Whether a step is trained."""
        return args.trains and args["training"].max_steps != 0

    def open(self) -> None:
        Task.load(task_name(self.args))  # refuses a wrong name before models are looked for
        if self.COMBINES_SCORES and self.decode != "verbalizer":
            raise ConfigError(
                f"decode '{self.decode}' is not for method '{self.args.method}', which combines "
                "the scores of several inputs: leave it out"
            )
        self.source = find_model(self.pgra.reader.model_name_or_path)
        self.read_data()
        self.open_tokenizer()
        self.check()
        self.stages.open()

    def open_tokenizer(self) -> None:
        """Load the reader's tokenizer; refuse words that it cannot write."""
        self.tokenizer = load_tokenizer(self.source)
        self.verbalizer.audit(self.tokenizer, decode=self.decode)

    def read_data(self) -> None:
        """Read the task, with the LM's prompt."""
        self.stages = Stages.read(self.pgra, self.context)
        self.data = self.stages.data
        self.fingerprints, self.seconds = self.stages.fingerprints, self.stages.seconds

    def check(self) -> None:
        """Refuse what cannot be trained on these examples."""
        if not self.args.trains:
            return
        self.check_training(len(self.data.train))
        present = {example.label for example in self.data.train}
        if absent := [label for label in self.data.labels if label not in present]:
            in_prompt = {example.label for example in self.data.set_aside} & {*absent}
            hint = ", lower --num_exemplars (those in the prompt are not trained on)"
            raise DataError(
                f"no training example has label {', '.join(map(repr, absent))} (of "
                f"{len(self.data.train)} examples): add some, raise --max_train_samples"
                f"{hint if in_prompt else ''}, or take the label out of the task"
            )

    def check_training(self, num_examples: int) -> None:
        """Fill in what is not given; refuse what cannot be trained on so many examples an epoch."""
        training, world = self.training, self.context.worker.world
        check_trackers(training.report_to)
        precision = choose_precision(training, choose_device(self.context.device))
        training.bf16 = precision == "bfloat16"
        training.share_batch(world)
        training.check_rows(num_examples, world)
        if training.learning_rate is None:
            steps, _ = training.count_steps(num_examples, world)
            width = load_config(self.source).hidden_size
            training.learning_rate = default_learning_rate(width, steps)
            logger.info("training: learning rate %g", training.learning_rate)

    @cached_property
    def verbalizer(self) -> Verbalizer:
        """The reader's words and template."""
        task = self.data.choice
        return Verbalizer(task.reader_words, reader_template(task, self.pgra.reader))

    @cached_property
    def layout(self) -> SegmentLayout:
        args = self.pgra.reader
        order: Any = args.segment_order
        return SegmentLayout(self.verbalizer.template, order, args.max_segment_tokens)

    @property
    def decode(self) -> str:
        return self.pgra.reader.decode

    def identity(self) -> dict[str, Json]:
        """Return what decides the weights and predictions, besides the examples."""
        named: dict[str, Json] = {
            **self.pgra.reader.deciding(),
            "verbalizer": dict(self.verbalizer.words),
            "reader_template": self.verbalizer.template,
            "num_evidence": self.pgra.rerank.num_evidence,
            "reader_weights": self.source.identity,
        }
        if self.args.trains:
            named["num_processes"] = self.context.worker.world
            named |= {**self.training.deciding(), "metric_for_best_model": self.best_metric}
        return named

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        self.stages.find(splits)

    def inputs(self, split: str) -> TokenizedInputs:
        """Return the reader's inputs of a split, tokenised once for runs with other seeds too."""
        if split not in self.tokenized:
            lines = self.stages.evidence_lines(split)
            self.tokenized[split] = self.new_inputs(self.data.examples(split), lines)
        return self.tokenized[split]

    def new_inputs(
        self, examples: Sequence[Example], lines: Sequence[Sequence[EvidenceLine]]
    ) -> Any:
        """Return the reader's inputs of any examples with their evidence."""
        texts = [[line.text for line in found] for found in lines]
        return build_inputs(examples, texts, self.tokenizer, self.verbalizer, layout=self.layout)

    def load_module(self, trained: Path | None = None) -> FusionReader:
        """Load the reader that training starts from, or a trained one from its folder."""
        return FusionReader.from_name(str(trained or self.pgra.reader.model_name_or_path))

    def open_trained(self, home: Path) -> None:
        """Load a trained reader from its folder."""
        module = self.load_module(home).to(choose_device(self.pgra.runtime.device))
        self.reader = self.CLASSIFIER(module, self.tokenizer, self.verbalizer, self.decode)

    @property
    def best_metric(self) -> str:
        """What chooses the checkpoint."""
        return self.training.metric_for_best_model or self.data.metric

    def fit(self, folder: Path) -> Mapping[str, Json]:
        """Train the reader, from the last whole checkpoint if the run was stopped."""
        train, dev = self.inputs("train"), self.inputs("dev")
        module = self.load_module()
        self.reader = self.CLASSIFIER(module, self.tokenizer, self.verbalizer, self.decode)
        truth, labels = [str(label) for label in dev.labels], self.data.labels

        def evaluate() -> Mapping[str, float]:
            scores = self.reader.score(dev, self.context)
            decided = [p.label for p in decide(dev.example_ids, scores, labels)]
            return measure(self.data.metric, truth, decided, labels)

        result = fit(
            self.reader,
            train,
            self.training,
            self.context,
            folder=folder / READER_FOLDER,
            evaluate=evaluate,
            metric=self.best_metric,
        )
        self._describe(folder)
        return {
            "metric": self.best_metric,
            "value": result.best_metric,
            "step": result.best_step,
            "steps": result.steps,
            "train_loss": result.train_loss if result.steps else None,
            "seconds": round(result.seconds, 3),
        }

    def load(self, folder: Path) -> None:
        """Load the trained reader of a run, with its temperature if there is one."""
        home = folder / READER_FOLDER
        is_described = (home / RECORD_FILE).is_file()
        if is_described:  # its files are as they were written
            self.calibration = read_record(folder).calibration
        self.open_trained(home)
        if not is_described:  # the run was stopped after its training
            self._describe(folder)

    def _describe(self, folder: Path) -> None:
        """Fit the temperature on the dev set, and write the reader's record."""
        if self.decode == "verbalizer":  # else there are no probabilities
            self.fit_temperature(replace(self.context, progress=False))
        self.write_record(folder)

    def fit_temperature(self, context: Context) -> Scores:
        """Fit the temperature on the dev set, and return its scores."""
        with self.timed("calibration"):
            dev = self.inputs("dev")
            scores: Scores = self.reader.score(dev, context)
            self.calibration = fit_temperature(scores, self._columns(dev.labels))
        return scores

    def _columns(self, labels: Sequence[str | None]) -> list[int]:
        return [self.verbalizer.labels.index(str(label)) for label in labels]

    def write_record(self, folder: Path) -> None:
        if not self.context.is_main:
            return
        args = self.pgra
        record = ReaderRecord(
            task=self.data.task.name,
            inputs=self.data.task.inputs,
            metric=self.data.metric,
            words=dict(self.verbalizer.words),
            layout=self.layout,
            decode=self.decode,
            calibration=self.calibration,
            num_evidence=self.stages.depth,
            method=args.method,
            prompt=self.stages.prompt if reads_prompt(args) else None,
            base_model={"name": self.source.name, "identity": self.source.identity},
            seed=self.seed,
            arguments={k: v for k, v in self.args.as_json().items() if k != "training"},
            fingerprints=self.fingerprints,
        )
        write_record(folder / READER_FOLDER, record)

    def finish(self, folder: Path) -> None:
        """Write the model card of a trained reader."""
        if self.args.trains:
            write_card(folder)

    def decide(self, examples: Sequence[Example]) -> Decisions:
        """Decide a split's examples, or new ones, for which evidence is found now."""
        splits = [name for name in SPLITS if self.data.examples(name) == list(examples)]
        split = splits[0] if examples and splits else None
        if split is not None:
            inputs, lines = self.inputs(split), self.stages.evidence_lines(split)
        else:
            lines = self.stages.new_lines(examples)
            inputs = self.new_inputs(examples, lines)
        scores, lines = self.score(inputs, lines, split)
        temperature = self.calibration.temperature
        predictions = decide(
            inputs.example_ids, scores, self.verbalizer.labels, temperature=temperature
        )
        notes, known = list[str](), None
        if self.decode == "verbalizer":  # else there are no probabilities
            notes = [self.calibration.note] if self.calibration.note else []
            if split is not None:
                known = {"temperature": temperature, "dev_examples": self.calibration.num_examples}
        return Decisions(predictions, lines, notes=notes, calibration=known)

    def score(
        self,
        inputs: Any,
        lines: list[list[EvidenceLine]],
        split: str | None,  # noqa: ARG002  where they are from
    ) -> tuple[Scores, list[list[EvidenceLine]]]:
        """Score examples, and return the evidence that the reader read."""
        return self.reader.score(inputs, self.context), lines

    def models(self) -> list[str]:
        return [self.pgra.reader.model_name_or_path, *evidence_models(self.pgra)]

    def notes(self) -> list[str]:
        sources = self.pgra.corpus.sources if self.stages.depth else []
        return [*super().notes(), *bundled_notes([], sources)]

    def sample_prompt(self) -> str | None:
        """Return the LM's prompt of the first test query."""
        if not reads_prompt(self.pgra):
            return None
        return self.stages.reranker.whole_prompt(self.data.test[0]) or None

    @classmethod
    def restore(cls, folder: Path, args: RunArguments, context: Context) -> Self | None:
        """Open a finished run by its reader's folder, to decide new examples.

        Corpus, index and LM must be those of the run. Training data is read only where each query
        has exemplars of its own, and must then be where it was.

        Raises:
            ArtifactError: If the reader is not whole, or corpus, index or LM are not those that it
                was trained with; the difference is named.
        """
        home = find_reader(folder)
        record = read_record(home)
        check_reads_any(record)
        method = cls(_recorded_arguments(record, args), context)
        task = Task(
            name=record.task,
            inputs=record.inputs,
            labels=record.labels,
            prompt=f"{{{record.inputs[0]}}}",
            reader_template=record.layout.template,
            verbalizer=record.words,
        )
        method.data = TaskData(task, (), (), ())
        method.verbalizer, method.layout = record.verbalizer, record.layout
        method.calibration = record.calibration
        method.source = find_model(str(home))
        method.open_tokenizer()
        method.open_trained(home)
        method.stages = _open_recorded(home, record, method.data, method.pgra, context)
        return method


def _recorded_arguments(record: ReaderRecord, args: RunArguments) -> RunArguments:
    """Return a run's arguments elsewhere; dtypes that depend on the device stay what they were."""
    args = RunArguments({"folder": FolderArguments(), **args.sections})  # a reader alone has none
    made: Mapping[str, Any] = record.fingerprints
    lm = made.get("reranker", {})
    lm = lm.get("prefixes", [lm])[0]  # several are of one LM
    if "dtype" in lm:
        args = args.change("rerank", lm_dtype=lm["dtype"])
    encoder = _index_encoder(made) or lm.get("exemplar encoder")
    if isinstance(encoder, Mapping) and "part" not in encoder:  # a part of the T5 has no dtype
        args = args.change("retriever", encoder_dtype=encoder["dtype"])
    return args


def _index_encoder(made: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the encoder's part of an index's fingerprint; empty if there is none."""
    dense: Mapping[str, Any] = made.get("index", {})
    dense = dense.get("dense", dense)
    return dense if "encoder" in dense else {}


def _open_recorded(
    home: Path, record: ReaderRecord, data: TaskData, args: PgraArguments, context: Context
) -> Stages:
    """Open the stages; refuse what is not the run's before anything long begins."""
    prompt = record.prompt or FewShotPrompt(prompt_template(data.choice))
    if not record.num_evidence:  # nothing is searched
        return Stages(args, context, prompt, data)
    if not args.artifacts.is_dir():
        raise ArtifactError(
            f"{args.artifacts} does not exist, where the run's index and bank are looked for: name "
            "their folder with --artifacts_dir"
        )
    # A query's own neighbors are training examples, the one thing that the reader's folder does not
    # hold. That they are the run's, the reranker's fingerprint says.
    is_own = args.rerank.per_query and args.rerank.reranker == "prompted"
    exemplars = Stages.read(args, context).exemplars if is_own else None
    made: Mapping[str, Any] = record.fingerprints
    reference = Reference(made=made.get("reranker", {}))
    stages = Stages(args, context, prompt, data, exemplars=exemplars, reference=reference)
    _check(home, "corpus", made.get("corpus"), stages.corpus.fingerprint["corpus_sha256"])
    asked = dict(stages.reranker.fingerprint)
    _check(home, "reranker", made.get("reranker"), asked)
    encoder = _index_encoder(made)
    if encoder:  # by its folder's digest, before an index would be built with it
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


def reader_template(task: Task, args: ReaderArguments) -> str:
    """Return the reader's template: the user's or a profile's, else the task's.

    Raises:
        ConfigError: If it has other fields than the task (`--profile official` has one text, a pair
            has two).
    """
    if args.reader_template is None:
        return task.reader_text
    try:
        check_slots(f"template {args.reader_template!r}", args.reader_template, task.inputs)
    except ConfigError as error:
        raise ConfigError(
            f"reader_template does not fit task '{task.name}': {str(error).rstrip('.')}; give the "
            f"task's own, which overrides a profile's: --reader_template '{task.reader_text}'"
        ) from None
    return args.reader_template


def evidence_models(args: PgraArguments) -> list[str]:
    """Return the models that find the reader's evidence; none without evidence."""
    if args.rerank.num_evidence == 0:
        return []
    encodes = args.retriever.retriever in ("dense", "hybrid")
    models = [args.retriever.encoder] if encodes else []
    reads = find_reranker(args.rerank.reranker).models(args.rerank, args.rerank_options)
    if reads and args.rerank.per_query:
        models.append(neighbor_model(args))
    return list(dict.fromkeys([*models, *reads]))
