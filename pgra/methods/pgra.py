"""PGRA whole (Guo et al. 2023, section 2): evidence that an LM picked, and a T5 that reads it.

    evidence = top d of k candidates, by the LM's states      (eqs. 1-3; `pgra.methods.stages`)
    label    = reader(query, evidence)                        Fusion-in-Decoder

Its settings are the paper's other readers: fid (the first stage's best), random, plain (no
evidence).
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import numpy as np

from pgra.arrays import Scores
from pgra.artifacts import check_fingerprint
from pgra.data.answers import AnsweredExample
from pgra.data.tasks import AnyTask, Task, bare_task, check_slots, load_any_task
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.lm.load import ModelSource, choose_device, find_model, load_config, load_tokenizer
from pgra.methods.arguments import METHODS, RunArguments
from pgra.methods.base import (
    SPLITS,
    Decisions,
    Method,
    TaskData,
    decide_labels,
    label_shares,
    measure_answers,
    task_name,
)
from pgra.methods.stages import Stages, reads_prompt
from pgra.model_card import write_card
from pgra.prompts import FewShotPrompt, Verbalizer, prompt_template
from pgra.reader.arguments import default_learning_rate
from pgra.reader.calibration import (
    MOST_TEXTS,
    Calibration,
    find_lean,
    fit_calibration,
)
from pgra.reader.fid import FusionReader
from pgra.reader.inputs import SegmentLayout, TokenizedInputs, build_inputs
from pgra.reader.predict import T5Classifier, written
from pgra.reader.record import ReaderRecord, check_reads_any, find_reader, read_record, write_record
from pgra.reader.train import fit, uses_bf16
from pgra.report.results import EvidenceLine
from pgra.rerank import FitData, find_reranker
from pgra.run_folder import READER_FOLDER, RECORD_FILE
from pgra.types import Example, Fields, Json

logger = logging.getLogger(__name__)


class Pgra(Method):
    """Trains a fused T5 on evidence, and decides with it, or writes answers.

    `reader` scores the labels, or writes.
    """

    SECTIONS = METHODS["pgra"].sections
    CLASSIFIER: ClassVar[type[T5Classifier]] = T5Classifier
    HAS_OWN_INPUTS: ClassVar[bool] = False  # several an example, which it alone makes

    source: ModelSource
    stages: Stages
    reader: T5Classifier
    calibration = Calibration()

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:
        """Whether a step is trained."""
        return args.trains and args["training"].max_steps != 0

    def open(self) -> None:
        if self.HAS_OWN_INPUTS and self.decode != "verbalizer":
            raise ConfigError(f"decode '{self.decode}' is not for method '{self.args.method}'")
        load_any_task(task_name(self.args))  # refuses a wrong name before models are looked for
        self.source = find_model(self.args.reader.model_name_or_path)
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
        self.stages = Stages.read(self.args, self.context, self.reranker)
        self.data = self.stages.data
        self.fingerprints = self.stages.fingerprints
        self.seconds = self.stages.seconds

    def check(self) -> None:
        """Refuse what cannot be trained on these examples."""
        if not self.args.trains:
            return
        self.check_training(len(self.data.train))
        present = {example.label for example in self.data.train}
        if absent := [label for label in self.data.labels if label not in present]:
            raise DataError(
                f"no training example has label {', '.join(map(repr, absent))}: add some"
            )

    def check_training(self, num_examples: int) -> None:
        """Fill in what is not given; refuse what cannot be trained on so many examples an epoch."""
        training = self.args.training
        world = self.context.worker.world
        training.bf16 = uses_bf16(training, choose_device(self.context.device))
        num_sharing = training.share_batch(world)
        if num_sharing < world:
            logger.warning(
                "training: a step of %d examples is shared by %d of %d processes",
                training.total_train_batch_size,
                num_sharing,
                world,
            )
        steps, _ = training.count_steps(num_examples, num_sharing)
        if training.learning_rate is None:
            width = load_config(self.source).hidden_size
            training.learning_rate = default_learning_rate(width, steps)
            logger.info("training: learning rate %g", training.learning_rate)

    @cached_property
    def verbalizer(self) -> Verbalizer:
        """The reader's words, and its template: the user's or a profile's, else the task's."""
        task = self.data.task
        template = self.args.reader.reader_template
        if template is not None:
            check_slots(f"reader_template {template!r}", template, task.inputs)
        return Verbalizer(task.reader_words, template or task.reader_text)

    @cached_property
    def layout(self) -> SegmentLayout:
        args = self.args.reader
        return SegmentLayout(self.verbalizer.template, args.segment_order, args.max_segment_tokens)

    @property
    def decode(self) -> str:
        return self.args.reader.decode

    def identity(self) -> dict[str, Json]:
        """Return what decides the weights and predictions, besides the examples."""
        named: dict[str, Json] = {
            **self.args.reader.deciding(),
            "verbalizer": dict(self.verbalizer.words),
            "reader_template": self.verbalizer.template,
            "num_evidence": self.args.rerank.num_evidence,
            "reader_weights": self.source.identity,
        }
        if not self.data.labels:
            named |= {"max_new_tokens": self.data.task.max_new_tokens, "stop": self.data.task.stop}
        if self.args.trains:
            named |= self.args.training.deciding()
        return named

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        self.stages.find(splits)

    def inputs(self, split: str) -> Any:
        """Return the reader's inputs of a split."""
        return self.new_inputs(self.data.examples(split), self.stages.evidence_lines(split))

    def new_inputs(
        self, examples: Sequence[Example], lines: Sequence[Sequence[EvidenceLine]]
    ) -> Any:
        """Return the reader's inputs of any examples with their evidence."""
        texts = [[line.text for line in evidence] for evidence in lines]
        return build_inputs(examples, texts, self.tokenizer, self.verbalizer, layout=self.layout)

    def load_module(self, trained: Path | None = None) -> FusionReader:
        """Load the reader that training starts from, or a trained one from its folder."""
        source = self.source if trained is None else find_model(str(trained))
        return FusionReader.from_source(source)

    def open_reader(self, trained: Path | None = None) -> None:
        """Open the reader that training starts from, or a trained one from its folder."""
        module = self.load_module(trained).to(choose_device(self.context.device))
        if not self.data.labels and trained is None:  # else its folder has it
            module.model.generation_config.max_new_tokens = self.data.task.max_new_tokens
        self.reader = self.CLASSIFIER(module, self.tokenizer, self.verbalizer, self.decode)

    def fit(self, folder: Path) -> Fields | None:
        """Train the reader, from the last whole checkpoint if the run was stopped."""
        train = self.inputs("train")
        dev = self.inputs("dev")
        self.open_reader()

        def evaluate() -> Mapping[str, float]:
            if not self.data.labels:
                return self.data.measure_dev(self.write(dev))
            return self.data.measure_dev_scores(self.score(dev))

        start = time.monotonic()
        progress = fit(
            self.reader,
            train,
            self.args.training,
            self.context,
            folder=folder / READER_FOLDER,
            evaluate=evaluate,
            metric=self.data.metric,
        )
        seconds = time.monotonic() - start
        self._describe(folder)
        return {
            "metric": self.data.metric,
            "value": progress.best_value,
            "step": progress.best_step,
            "steps": progress.step,
            "train_loss": fmean(progress.losses) if progress.losses else None,
            "seconds": round(seconds, 3),
        }

    def load(self, folder: Path) -> None:
        """Load the trained reader of a run, with its calibration if there is one."""
        home = folder / READER_FOLDER
        if not (home / RECORD_FILE).is_file():  # the run was stopped after its training
            self.open_reader(home)
            self._describe(folder)
            return
        record = read_record(home)  # checks the files
        self.open_reader(home)
        self.calibration = record.calibration

    def _describe(self, folder: Path) -> None:
        """Fit label bias and temperature, and write the reader's record."""
        if self.decode == "verbalizer" and self.data.labels:  # else there are no probabilities
            self.calibrate()
        self.write_record(folder)

    def calibrate(self) -> Scores:
        """Fit label bias and temperature; return the dev set's scores."""
        seen: list[Scores] = []

        def score_texts() -> Scores:
            seen.append(self.score_texts())
            return seen[-1]

        with self.timed("calibration"):
            scores = self.score(self.inputs("dev"))
            seen.append(scores)
            truth = [self.data.labels.index(str(example.label)) for example in self.data.dev]
            shares = label_shares(self.data)
            label_bias = self.args["reader"].label_bias
            self.calibration = fit_calibration(label_bias, scores, truth, shares, score_texts)
        texts = np.concatenate(seen)
        label = find_lean(texts, shares)
        if label is not None:
            logger.warning(
                "reader: answers '%s' to nearly all of %d texts of dev and train before its label "
                "bias is taken out: more --max_steps may help",
                self.data.labels[label],
                len(texts),
            )
        return scores

    def score_texts(self) -> Scores:
        """Score training texts, of which the labels are not looked at."""
        inputs = self.inputs("train")
        rows = np.random.default_rng(0).permutation(len(inputs))[:MOST_TEXTS]
        return self.score(inputs.take(np.sort(rows).tolist()))

    def write_record(self, folder: Path) -> None:
        if not self.context.is_main:
            return
        args = self.args
        record = ReaderRecord(
            task=self.data.task.name,
            inputs=self.data.task.inputs,
            words=dict(self.verbalizer.words),
            layout=self.layout,
            decode=self.decode,
            calibration=self.calibration,
            num_evidence=self.stages.depth,
            method=self.name(args),
            has_own_inputs=self.HAS_OWN_INPUTS,
            prompt=self.stages.prompt if reads_prompt(args) else None,
            seed=self.seed,
            arguments={k: v for k, v in self.args.as_json().items() if k != "training"},
            fingerprints=self.fingerprints,
        )
        if self.stages.depth:
            self.stages.reranker.save(folder / READER_FOLDER)
        write_record(folder / READER_FOLDER, record)

    def finish(self, folder: Path) -> None:
        """Write the model card of a trained reader."""
        if self.args.trains:
            write_card(folder)

    def decide(self, examples: Sequence[Example]) -> Decisions:
        """Decide a split's examples, or new ones, for which evidence is found now."""
        splits = (s for s in SPLITS if examples and self.data.examples(s) == list(examples))
        split = next(splits, None)
        inputs, lines = self.read(examples, split)
        if self.data.labels:
            scores = self.score(inputs)
            decided = decide_labels(
                examples, scores, self.data, self.calibration, self.args["reader"].label_bias
            )
        else:
            decided = Decisions(written([example.id for example in examples], self.write(inputs)))
        decided = replace(decided, evidence=lines)
        if split is None or self.data.labels:
            return decided
        more = self.stages.find_answers(split, lines)
        return measure_answers(self.data.task, self.data.answered(split), decided, more)

    def read(
        self, examples: Sequence[Example], split: str | None
    ) -> tuple[Any, list[list[EvidenceLine]]]:
        """Return the reader's inputs of a split's examples, or of new ones, and their evidence."""
        if split:
            return self.inputs(split), self.stages.evidence_lines(split)
        lines = self.stages.new_lines(examples)
        return self.new_inputs(examples, lines), lines

    def score(self, inputs: Any) -> Scores:
        """Return the log-probability of each label, (B, C)."""
        return self.reader.score(inputs, self.context)

    def score_answers(self, inputs: Any, questions: Sequence[AnsweredExample]) -> list[float]:
        """Return the log-probability of each question's likeliest right answer, (B,)."""
        quiet = replace(self.context, progress=False)
        template = self.verbalizer.template
        best = []
        for row, question in enumerate(questions):
            words = Verbalizer({answer: answer for answer in question.answers}, template)
            alone = TokenizedInputs([question.id], [None], {}, inputs.segments[row : row + 1])
            scores = replace(self.reader, verbalizer=words).score(alone, quiet)
            best.append(float(scores.max()))
        return best

    def write(self, inputs: Any) -> list[str]:
        """Return the text that is written for each of the reader's inputs, (B,)."""
        return self.reader.write(inputs, self.context)

    @classmethod
    def sources(cls, args: RunArguments) -> list[tuple[str, str]]:
        sources = [*super().sources(args), ("model", args.reader.model_name_or_path)]
        if not args.rerank.num_evidence:
            return sources
        sources += [("corpus", name) for name in args.corpus.sources]
        models = find_reranker(args.rerank.reranker).models(args.rerank, args.rerank_options)
        if "dense" in args.retriever.retriever.split("+"):
            models = [args.retriever.encoder, *models]
        return [*sources, *(("model", name) for name in models)]

    def sample_prompt(self) -> str | None:
        """Return the LM's prompt of the first test query."""
        if not reads_prompt(self.args):
            return None
        return self.stages.reranker.whole_prompt(self.data.test[0]) or None

    def restore(self, folder: Path) -> bool:
        """Open a finished run by its reader's folder, to decide new examples.

        Corpus, index and LM must be those of the run.

        Raises:
            ArtifactError: If the reader is not whole, or corpus, index or LM are not those that it
                was trained with; the difference is named.
        """
        home = find_reader(folder)
        record = read_record(home)
        check_reads_any(record)
        self.args = _recorded_arguments(record, self.args)
        self.data = TaskData(_recorded_task(record), (), (), ())
        self.verbalizer = record.verbalizer
        self.layout = record.layout
        self.calibration = record.calibration
        self.source = find_model(str(home))
        self.open_tokenizer()
        self.open_reader(home)
        self.stages = _open_recorded(home, record, self)
        return True


def _recorded_task(record: ReaderRecord) -> AnyTask:
    """Return as much of a run's task as its reader and its stages need."""
    if not record.words:
        return bare_task(record.task, record.inputs)
    return Task(
        name=record.task,
        inputs=record.inputs,
        labels=record.labels,
        prompt=f"{{{record.inputs[0]}}}",
        reader_template=record.layout.template,
        verbalizer=record.words,
    )


def _recorded_arguments(record: ReaderRecord, args: RunArguments) -> RunArguments:
    """Return a run's arguments elsewhere; dtypes that depend on the device stay what they were."""
    fingerprints: Mapping[str, Any] = record.fingerprints
    lm = fingerprints.get("reranker", {})
    if "dtype" in lm:
        args = args.change("rerank", lm_dtype=lm["dtype"])
    index = fingerprints.get("index", {})
    index = index.get("dense", index)  # of bm25+dense
    if "encoder" in index:
        args = args.change("retriever", encoder_dtype=index["dtype"])
    return args


def _open_recorded(home: Path, record: ReaderRecord, method: Pgra) -> Stages:
    """Open a method's stages; refuse what is not the run's before anything long begins."""
    args = method.args
    context = method.context
    data = method.data
    prompt = record.prompt or FewShotPrompt(prompt_template(data.task))
    if not record.num_evidence:  # nothing is searched
        return Stages(args, context, prompt, data)
    if not context.artifacts.is_dir():
        raise ArtifactError(
            f"{context.artifacts} does not exist: name the run's folder with --artifacts_dir"
        )
    fingerprints: Mapping[str, Any] = record.fingerprints
    reference = FitData(fingerprint=fingerprints["reranker"], folder=home)
    stages = Stages(
        args,
        context,
        prompt,
        data,
        reference=reference,
        ready=method.reranker,
    )
    check = partial(
        check_fingerprint, home, now="what is there now is", way_out="restore it, or train again"
    )
    corpus = stages.corpus.fingerprint["corpus_sha256"]
    check(made={"corpus": fingerprints["corpus"]}, asked={"corpus": corpus})
    check(made=fingerprints["reranker"], asked=dict(stages.reranker.fingerprint))
    index = fingerprints["index"]
    encoder = index.get("dense", index).get("encoder")
    if encoder:  # by its folder's digest, before an index would be built with it
        now = find_model(args.retriever.encoder).identity
        check(made={"encoder": encoder}, asked={"encoder": now})
    check(made=index, asked=dict(stages.retriever.fingerprint))
    return stages
