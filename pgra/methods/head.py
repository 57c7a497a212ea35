"""`--method head`: a logistic head on a frozen LM's prompted states, learnt from few labels.

    label = argmax_y softmax(W z(LM(prefix + P(x))) / T)[y]

Cho et al. 2023, "Prompt-Augmented Linear Probing" (arXiv 2212.10873, section 3). The LM reads each
training example once under the task's prompt; `pgra.rerank.head` fits W, and T is fitted on the dev
examples. Nothing of the LM is trained, so a run takes seconds.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

from pgra.arrays import Scores, Vectors
from pgra.data.examples import ExampleRows, open_rows
from pgra.data.read import read_label
from pgra.data.tasks import LABEL, Task
from pgra.exemplars.selector import pool_task
from pgra.lm.prefix import PromptedEncoder
from pgra.methods.arguments import METHODS, RunArguments
from pgra.methods.base import SPLITS, Decisions, Method, TaskData, decide_labels
from pgra.methods.stages import set_aside, write_prompt
from pgra.reader.calibration import LEAST_EXAMPLES, Calibration, decide, fit_temperature
from pgra.rerank.bank import query_keys
from pgra.rerank.head import check_labels, fit_labels, head_logits
from pgra.rerank.reranker import TaskPrompt, open_encoder
from pgra.rerank.states import PromptedFit, PromptedModel, StateBank
from pgra.types import Example, Json, Prediction, Query, is_query, read_queries

logger = logging.getLogger(__name__)

_UNDIVIDED = ("train", "test")


class StateHead:
    """A logistic head on an encoder's states.

    Attributes:
        encoder: The LM under its prompt.
        labels: In the order of scores.
        accuracy: Share of the examples that a head which has not seen them decides rightly.
    """

    weights: Vectors  # (C, H + 1), the bias at the end
    stats: Vectors  # mean and spread of the states by column, (2, H)
    accuracy: float

    def __init__(self, encoder: PromptedEncoder, labels: Sequence[Any]) -> None:
        self.encoder = encoder
        self.labels = labels

    def fit(self, states: Vectors, examples: Sequence[Example]) -> None:
        """Fit the head to the states of labelled examples, (n, H).

        Raises:
            ConfigError: If a label has fewer than two different texts.
        """
        names = [str(label) for label in self.labels]
        check_labels(names, examples)
        head = fit_labels(states, examples, names)
        self.weights = head.weights
        self.stats = head.stats
        self.accuracy = float(head.is_right.mean())

    def score(self, states: Vectors) -> Scores:
        """Return the log-probabilities of labels, less a constant, (n, C) float32."""
        return head_logits(states, self.stats, self.weights)


class Classifier(PromptedModel):
    """Decides labels by a head on a frozen LM's states.

    classifier = pgra.Classifier("bundled:smollm2-135m", [("I was charged twice.", "billing"), ...])
    classifier.predict(["Can I get an invoice?"])  # for each its `label`, and `scores` by label

    Attributes:
        encoder: The LM under its prompt.
        labels: In the order of scores; numbers where all of the examples' labels are.
        accuracy: Share of the examples that a head which has not seen them decides rightly.
    """

    labels: Sequence[Any]
    accuracy: float

    def __init__(
        self,
        lm: Any,
        examples: ExampleRows = (),
        tokenizer: Any = None,
        *,
        task: str | Path | Task | None = None,
        template: str = "{text}",
        num_exemplars: int = 0,
        seed: int = 0,
        **options: Any,
    ) -> None:
        """Read the examples, and fit the head.

        Args:
            lm: As of `pgra.Reranker`.
            examples: Labelled ones: (text, label) pairs, mappings with a "label", a
                `datasets.Dataset`, a pandas table, `Example`s, or a file of the same; of each label
                two different texts at least.
            tokenizer: That of a loaded model.
            task: A task's name, its YAML, or a `Task`, whose labels are names; None: the labels of
                the examples, in order, shown by the template.
            template: Without a task, how a text is shown.
            num_exemplars: Draw so many of the examples for the prompt; the head learns from the
                others.
            seed: Of the draw.
            **options: Further arguments of `pgra.Reranker` for the LM: `lm_layer`, `device`,
                `dtype`, `max_prompt_tokens`, `chat_template`.

        Raises:
            PgraError: If an example cannot be read, a label has fewer than two texts beside those
                in the prompt, or the LM cannot be used.
        """
        if isinstance(lm, PromptedFit):
            self._head = StateHead(lm.encoder, lm.fields["labels"])
            vars(self._head).update(lm.arrays, accuracy=lm.fields["accuracy"])
        else:
            labels: Sequence[Any] = ()
            if task is None:
                examples, labels = _read_labelled(examples)
                names = tuple(map(str, labels))
                task = Task(name="own", labels=names, prompt=template, answer="")
            prompt = TaskPrompt.write(task, None, examples, num_exemplars, seed)
            encoder = open_encoder(lm, prompt.prompt, tokenizer, **options)
            self._head = StateHead(encoder, labels or list(prompt.words))
            self._head.fit(encoder.encode_examples(prompt.rest), prompt.rest)
        self.encoder = self._head.encoder
        self.labels = self._head.labels
        self.accuracy = self._head.accuracy

    @overload
    def predict(self, queries: Query) -> Prediction: ...  # type: ignore[overload-overlap]
    @overload
    def predict(self, queries: Iterable[Query]) -> list[Prediction]: ...
    def predict(self, queries: Query | Iterable[Query]) -> Prediction | list[Prediction]:
        """Decide a text (or a mapping of the task's inputs), or each of a list of them.

        Returns:
            A `Prediction`, or a list of them: `label`, and `scores`, the probability of each label.

        Raises:
            DataError: If a query lacks an input, is blank, or is not text.
        """
        examples = read_queries(queries, self.encoder.prompt.template.inputs)
        scores = self._head.score(self.encoder.encode_examples(examples))
        predictions = decide([example.id for example in examples], scores, self.labels)
        return predictions[0] if is_query(queries) else predictions

    def _fitted(self) -> PromptedFit:
        arrays = {"weights": self._head.weights, "stats": self._head.stats}
        fields = {"labels": list(self.labels), "accuracy": self.accuracy}
        return PromptedFit(self.encoder, arrays, fields)


def _read_labelled(rows: ExampleRows) -> tuple[list[Example], Sequence[Any]]:
    """Return the examples of rows that name no task, and their labels: names, or all numbers."""
    raw = open_rows(pool_task(("text",)), rows, "examples")
    examples = []
    are_numbers = raw.classes is None
    for row in raw.rows:
        name = read_label(row, LABEL, classes=raw.classes)
        examples.append(Example("", {"text": row.text("text")}, name))
        are_numbers = are_numbers and type(row.value(LABEL)) is int
    names = {str(example.label) for example in examples}
    return examples, sorted(map(int, names)) if are_numbers else sorted(names)


class HeadMethod(Method):
    """Reads training examples with a frozen LM, fits a head to their states, and decides by it."""

    SECTIONS = METHODS["head"].sections

    calibration = Calibration()

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:  # noqa: ARG003 (the contract's)
        return False

    def open(self) -> None:
        """Read the task, write the prompt and find the LM.

        Raises:
            ConfigError: If there are too few examples for the prompt, or it leaves no room.
            DataError: If the data cannot be read.
            ModelError: If the LM cannot be used.
        """
        data = TaskData.read(self.args, least_dev=LEAST_EXAMPLES).labelled()
        args = self.args["head"]
        prompt = write_prompt(data, args)
        self.data = set_aside(data, prompt.exemplar_ids)
        # Without a dev set it learned from all rows, as others' pools: there is no division.
        self.fingerprints |= self.data.fingerprints(SPLITS if self.data.dev else _UNDIVIDED)
        encoder = PromptedEncoder.open(args, prompt, self.context.device)
        self.head = StateHead(encoder, self.data.labels)
        self.bank = StateBank(
            encoder,
            encoder.fingerprint,
            self.context,
            shard_rows=args.bank_shard_rows,
            suffix="-queries",
        )

    def check(self) -> None:
        check_labels(self.data.labels, self.data.train)

    def identity(self) -> dict[str, Json]:
        return dict(self.head.encoder.fingerprint)

    def sources(self) -> list[str]:
        return [self.args["head"].lm, *super().sources()]

    def prepare(self, splits: Sequence[str] = SPLITS) -> None:
        with self.timed("states"):
            for split in splits:
                self._read(self.data.examples(split))

    def _read(self, examples: Sequence[Example]) -> Vectors:
        """Return states, (n, H); those of splits are kept in the LM's bank of queries."""
        encoder = self.head.encoder
        if all(list(examples) != self.data.examples(split) for split in SPLITS):
            return encoder.encode_examples(examples)
        self.bank.read_queries(examples, "LM reads texts")
        return self.bank.states(query_keys(examples))

    def fit(self, folder: Path) -> Mapping[str, Json]:  # noqa: ARG002 (it is fitted again to load)
        train = self.data.train
        dev = self.data.dev
        labels = list(self.data.labels)
        self.head.fit(self._read(train), train)
        scores = self.head.score(self._read(dev))
        self.calibration = fit_temperature(scores, [labels.index(str(e.label)) for e in dev])
        record: dict[str, Json] = {"held_out_accuracy": self.head.accuracy}
        if not dev:  # too few to fit a temperature
            return record
        values = self.data.measure_dev([labels[number] for number in scores.argmax(axis=1)])
        metric = self.data.metric
        return {"metric": metric, "value": values[metric], **record}

    def decide(self, examples: Sequence[Example]) -> Decisions:
        scores = self.head.score(self._read(examples))
        self.head.encoder.release()
        return decide_labels(examples, scores, self.data, self.calibration, "none")

    def sample_prompt(self) -> str:
        return self.head.encoder.prompt.write(self.data.test[0].fields)
