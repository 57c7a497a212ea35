"""`pgra.Classifier`: decides labels by what a frozen LM says of a text, from no example to many.

A text is read once, under a prompt of a few examples; `pgra.rerank.head` has the arithmetic. It is
an estimator of scikit-learn's kind.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from sklearn.base import BaseEstimator, ClassifierMixin

from pgra.arrays import Scores, Values, Vectors
from pgra.artifacts import digest
from pgra.data.examples import ExampleRows, as_rows, open_rows
from pgra.data.read import read_label
from pgra.data.tasks import LABEL, Task, TaskBase
from pgra.data.text import copy_key
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError, DataError, show
from pgra.exemplars.selector import pool_task
from pgra.lm import as_state_lm
from pgra.lm.base import DEPTHS
from pgra.lm.load import is_encoder
from pgra.lm.prefix import PromptedEncoder, read_once
from pgra.lm.state_lm import StateLM
from pgra.methods.head import LabelReader
from pgra.methods.held_out import HeldOut
from pgra.prompts import FewShotPrompt, task_format
from pgra.reader.calibration import decide
from pgra.rerank.base import query_key
from pgra.rerank.head import Fit, LabelModel, fit_labels
from pgra.rerank.reranker import read_examples
from pgra.rerank.states import PromptedFit, PromptedModel
from pgra.types import Example, Prediction, Query, as_list, is_query, read_queries

logger = logging.getLogger(__name__)

_ANSWER = "Label:"
LEAST_SEEN = 8  # texts whose mean opinion says more than that of no text


@dataclass(frozen=True)
class Known:
    """What was learned from: keys of texts, states (n, W), and examples of texts' digests."""

    keys: Sequence[int]
    states: Vectors
    examples: Sequence[Example]

    @classmethod
    def of(cls, examples: Sequence[Example], states: Vectors) -> "Known":
        """Take examples and their states; without states nothing."""
        examples = examples[: len(states)]
        keys = [query_key(example) for example in examples]
        texts = [digest(copy_key(example.text)) for example in examples]
        copies = [
            Example("", {"text": text}, example.label)
            for text, example in zip(texts, examples, strict=True)
        ]
        return cls(keys, states, copies)

    def joined(self, other: "Known") -> "Known":
        """Return these and others."""
        states = np.concatenate([self.states, other.states])
        return Known([*self.keys, *other.keys], states, [*self.examples, *other.examples])

    def keep(self, rows: Sequence[int]) -> "Known":
        """Return only these rows."""
        keys = [self.keys[row] for row in rows]
        return Known(keys, self.states[list(rows)], [self.examples[row] for row in rows])


class Classifier(ClassifierMixin, BaseEstimator, PromptedModel):  # type: ignore[misc]
    """Decides labels by a frozen LM: by what it answers, and by heads on its states.

    classifier = pgra.Classifier("bundled:smollm2-135m", labels=["billing", "bug"])
    classifier.predict(["I was charged twice."])  # without an example
    classifier.fit(texts, labels).predict_proba(["I was charged twice."])

    It is an estimator of scikit-learn's: `clone`, `cross_val_score`, `GridSearchCV` and `Pipeline`
    take it. Copies of one that was given a `pgra.CausalLM` share it.

    Attributes:
        classes_: The labels, in the order of probabilities.
    """

    classes_: npt.NDArray[Any]
    _model: LabelModel | None = None
    _examples: list[Example] | None  # None: it was loaded, and the texts are not known
    _fit: Fit | None

    def __init__(
        self,
        lm: Any,
        examples: ExampleRows = (),
        tokenizer: Any = None,
        *,
        labels: Sequence[Any] | Mapping[Any, str] | None = None,
        task: str | Path | Task | None = None,
        template: str = "Text: {text}",
        num_exemplars: int = 8,
        encoder: Any = "auto",
        seed: int = 0,
        device: str = "auto",
        max_prompt_tokens: int | None = None,
        chat_template: str = "off",
    ) -> None:
        """Find the LM; with examples, learn from them.

        Args:
            lm: As of `pgra.Reranker`; or an encoder, by its name or a `pgra.Encoder`, on whose
                vectors a head alone decides.
            examples: Labelled ones, as `fit` takes them; none are needed with labels or a task.
            tokenizer: That of a loaded model.
            labels: Those there are; or what each means, {"billing": "payments, invoices", ...}.
                None: those of the examples.
            task: A task's name, its YAML, or a `Task`, which has labels and words of its own.
            template: Without a task, how a text is shown.
            num_exemplars: Examples that the prompt shows, at least one a label, and as many as fit;
                heads learn from the others.
            encoder: A text encoder, as of `pgra.Encoder`, on whose vectors a head decides too: for
                topics, and for languages that the LM does not know. "auto": MiniLM, if it is at
                hand; "none".
            seed: Of the draw of the prompt's examples.
            device: Where the LM runs.
            max_prompt_tokens: Longest prompt; None: the LM's window.
            chat_template: As `--chat_template`.

        Raises:
            PgraError: If an example cannot be read, or the LM cannot be used.
        """
        self.lm = lm
        self.examples = examples
        self.tokenizer = tokenizer
        self.labels = labels
        self.task = task
        self.template = template
        self.num_exemplars = num_exemplars
        self.encoder = encoder
        self.seed = seed
        self.device = device
        self.max_prompt_tokens = max_prompt_tokens
        self.chat_template = chat_template
        if isinstance(lm, PromptedFit):
            self._restore(lm)
            return
        rows = as_rows(examples)
        if not isinstance(rows, list) or rows:
            self.fit(rows)
        elif labels is not None or task is not None:
            self._learn([], list(labels or self._open_task(()).labels))

    def fit(self, X: Any, y: Any = None) -> Self:
        """Learn from labelled texts, in place of those before.

        Args:
            X: Texts, with `y`. Or labelled rows: (text, label) pairs, mappings with a "label", a
                mapping of columns, a `datasets.Dataset`, a pandas table, `Example`s, or a file.
            y: Their labels: names or numbers, none missing.

        Raises:
            DataError: If a text is blank, or a row has no label or an unknown one.
            ConfigError: If there is one label alone.
        """
        if y is not None:
            texts = as_list("X", X)
            targets = np.asarray(y).tolist()
            if len(texts) != len(targets):
                raise DataError(f"X has {len(texts)} texts, and y {len(targets)} labels")
            X = list(zip(texts, targets, strict=True))
        elif isinstance(X, Mapping):
            X = [dict(zip(X, row, strict=True)) for row in zip(*X.values(), strict=True)]
        if self.task is not None:
            task = self._open_task(())
            return self._learn(read_examples(task, X), list(task.labels))
        examples, labels = _read_labelled(X, [str(label) for label in self.labels or ()])
        return self._learn(examples, list(self.labels or labels))

    def _open_task(self, labels: Sequence[str]) -> Task:
        """Return the task that was named, or one of these labels."""
        if self.task is None:
            return Task(name="own", labels=tuple(labels), prompt=self.template, answer=_ANSWER)
        return self.task if isinstance(self.task, TaskBase) else Task.load(str(self.task))

    def _learn(self, examples: Sequence[Example], labels: Sequence[Any]) -> Self:
        """Show some examples in the prompt, and learn from the others."""
        self.classes_ = np.array(labels)
        task = self._open_task([str(label) for label in labels])
        self._words = task.prompt_words
        self._examples = list(examples)
        exemplars: Sequence[Example] = ()
        if isinstance(self.lm, Encoder) or (isinstance(self.lm, str) and is_encoder(self.lm)):
            self._reader = LabelReader(None, self.lm, self._words, self.device)
        else:
            count = max(self.num_exemplars, len(labels)) if self.num_exemplars else 0
            exemplars = _draw(examples, self.seed)[:count]
            lm = as_state_lm(self.lm, self.tokenizer, device=self.device)
            encoder = self._put_under_prompt(lm, task, exemplars)
            exemplars = exemplars[: len(encoder.prompt.exemplar_ids)]
            self._reader = LabelReader(encoder, self.encoder, self._words, self.device)
        self._shown = {query_key(example) for example in exemplars}
        rest = [example for example in examples if query_key(example) not in self._shown]
        self._exemplars = Known.of(exemplars, self._reader.read_shown(exemplars))
        self._refit(Known.of(rest, self._reader.read(rest)))
        return self

    def _put_under_prompt(
        self, lm: StateLM, task: Task, exemplars: Sequence[Example]
    ) -> PromptedEncoder:
        """Show as many examples as the LM's window holds."""
        style = task_format(task)
        instruction = _describe(self.labels)
        if self.task is None:
            style = replace(style, template=replace(style.template, instruction=instruction))
        for count in range(len(exemplars), -1, -1):
            prompt = style.prompt(exemplars[:count])
            if not count and self.task is None:
                prompt = FewShotPrompt(style.template, instruction.strip())
            try:
                encoder = PromptedEncoder(
                    lm,
                    prompt,
                    max_prompt_tokens=self.max_prompt_tokens,
                    chat=self.chat_template,
                    depths=DEPTHS,
                )
                break
            except ConfigError:
                if not count:
                    raise
        if count < len(exemplars):
            logger.warning("the prompt has room for %d of %d examples", count, len(exemplars))
        return encoder

    def _refit(self, known: Known) -> None:
        """Fit heads and opinion to what is known."""
        self._known = known
        fit = self._cross_validate()
        self._fit = fit
        self._model = fit.model
        self._begin_mean()
        if self._needs_mean:
            self._model = replace(
                fit.model, prior=fit.model.opinion(self._reader.blank).mean(axis=0)
            )

    def _cross_validate(self) -> Fit:
        names = [str(label) for label in self.classes_.tolist()]
        columns = self._reader.columns
        whole = self._known.joined(self._exemplars)
        return fit_labels(
            whole.states, columns, whole.examples, names, num_shown=len(self._exemplars.keys)
        )

    def _begin_mean(self) -> None:
        """Begin the mean opinion over texts with those that were learned from."""
        self._seen = {*self._known.keys}
        if self._needs_mean:
            self._total = self._require_fit().opinion(self._known.states).sum(axis=0)

    @property
    def _needs_mean(self) -> bool:
        return len(self._known.keys) < LEAST_SEEN and self._require_fit().has_opinion

    def _score(self, queries: Any, lm_states: Vectors | None = None) -> Scores:
        """Return the log-probabilities of labels, (n, C); states of the LM if it read them."""
        model = self._require_fit()
        examples = read_queries(queries, self._reader.inputs)
        states = self._reader.read(examples, lm_states)
        if self._needs_mean:
            rows = {query_key(example): row for row, example in enumerate(examples)}
            new = [rows[key] for key in rows if key not in self._seen]
            self._total = self._total + model.opinion(states[new]).sum(axis=0)
            self._seen |= {*rows}
            if len(self._seen) >= LEAST_SEEN:
                model = replace(model, prior=self._total / np.float32(len(self._seen)))
            self._model = model
        return model.score(states)

    def _require_fit(self) -> LabelModel:
        if self._model is None:
            raise ConfigError("the classifier knows no labels: give labels=, examples=, or fit it")
        return self._model

    @property
    def prompt(self) -> FewShotPrompt | None:
        """What the LM reads a text under; None without an LM."""
        self._require_fit()
        prompted = self._reader.prompted
        return None if prompted is None else prompted.prompt

    def predict(self, X: Query | Iterable[Query]) -> Any:
        """Decide a text (or a mapping of the task's inputs), or each of a list of them.

        Where fewer than eight texts were learned from, the LM's opinion is taken less its mean over
        the different texts decided so far; before the eighth, over texts without content.

        Returns:
            A label, or those of a list, (n,).

        Raises:
            ConfigError: If it was not fitted, and has no labels.
            DataError: If a query lacks an input, is blank, or is not text.
        """
        best = self._score(X).argmax(axis=1)
        labels = self.classes_[best]
        return labels.tolist()[0] if is_query(X) else labels

    def predict_proba(self, X: Query | Iterable[Query]) -> Values:
        """Return the probabilities of labels, in the order of `classes_`, (n, C); see `predict`."""
        chances: Values = np.exp(self._score(X).astype(np.float64))
        chances /= chances.sum(axis=1, keepdims=True)
        return chances[0] if is_query(X) else chances

    def decide(self, X: Iterable[Query]) -> list[Prediction]:
        """Decide texts as `predict`, with the probability of each label by its name."""
        return self._decide(self._score(X))

    def _decide(self, scores: Scores) -> list[Prediction]:
        labels = [str(label) for label in self.classes_.tolist()]
        return decide([f"query-{number}" for number in range(len(scores))], scores, labels)

    def report(self) -> HeldOut:
        """Return what cross-validation says of it, beside nearest neighbours and an encoder's head.

        Printed, it is a few lines, and says which is best.

        Raises:
            ConfigError: If no head has learned from an example.
        """
        self._require_fit()
        if not self._known.keys:
            raise ConfigError("there is no example beside those in the prompt: give more")
        self._fit = self._fit or self._cross_validate()
        known = self._known
        held_out = HeldOut.of(self._fit)
        return held_out.beside(self._fit, known.states, known.examples, self._reader.encoder_name)

    def add(self, text: Query, label: Any) -> Self:
        """Learn from one text more; no other is read again.

        Raises:
            ConfigError: If it was not fitted, or has no such label: `fit` learns a new one.
            DataError: If the text is blank, or not text.
        """
        self._require_fit()
        if label not in self.classes_.tolist():
            raise ConfigError(f"label {label!r} is not of {self.classes_.tolist()}: fit learns it")
        (example,) = read_queries(text, self._reader.inputs)
        example = replace(example, label=str(label))
        if self._examples is not None:
            self._examples.append(example)
        self._refit(self._known.joined(Known.of([example], self._reader.read([example]))))
        return self

    def remove(self, text: Query) -> Self:
        """Forget a text: all is as if it had never been learned from.

        The others are read again only where the prompt shows the text.

        Raises:
            ConfigError: If it was not learned from; or if the prompt of one that was loaded shows
                it, which has no texts: fit it again.
        """
        self._require_fit()
        key = query_key(read_queries(text, self._reader.inputs)[0])
        rows = [row for row, other in enumerate(self._known.keys) if other != key]
        left = [example for example in self._examples or () if query_key(example) != key]
        if key in self._shown:
            if self._examples is None:
                raise ConfigError(
                    "the prompt shows that text, and the others are unknown here: fit it again"
                )
            return self._learn(left, self.classes_.tolist())
        if len(rows) == len(self._known.keys):
            raise ConfigError(f"{show(text)} was not learned from")
        if self._examples is not None:
            self._examples = left
        self._refit(self._known.keep(rows))
        return self

    def _fitted(self) -> PromptedFit:
        model = self._require_fit()
        whole = self._known.joined(self._exemplars)
        pairs = zip(whole.keys, whole.examples, strict=True)
        rows = [[key, example.text, example.label] for key, example in pairs]
        fields = {
            "labels": self.classes_.tolist(),
            "words": dict(self._words),
            "rows": rows,
            "num_exemplars": len(self._exemplars.keys),
            "exemplar_keys": sorted(self._shown),
            "encoder": self._reader.encoder_name,
        }
        arrays = {**vars(model), "known_states": whole.states}
        return PromptedFit(self._reader.prompted, arrays, fields)

    def _restore(self, fit: PromptedFit) -> None:
        fields = fit.fields
        self.lm = None if fit.encoder is None else fit.encoder.lm
        self.classes_ = np.array(fields["labels"])
        self._words = fields["words"]
        self._shown = {*fields["exemplar_keys"]}
        self._examples = None
        self._fit = None
        self._reader = LabelReader(fit.encoder, fields["encoder"], self._words, self.device)
        keys = [key for key, _, _ in fields["rows"]]
        examples = [Example("", {"text": text}, label) for _, text, label in fields["rows"]]
        arrays = dict(fit.arrays)
        whole = Known(keys, arrays.pop("known_states"), examples)
        count = len(examples) - fields["num_exemplars"]
        self._exemplars = whole.keep(range(count, len(examples)))
        self._known = whole.keep(range(count))
        self._model = LabelModel(**arrays)
        self._begin_mean()


def decide_each(classifiers: Sequence[Classifier], query: Query) -> list[Prediction]:
    """Let classifiers that share an LM decide one text, each a question of its own.

    The LM reads what their prompts begin with once: the text, if templates begin with it and no
    example stands before it.

    Raises:
        ConfigError: If one was not fitted, or they have different LMs.
    """
    for classifier in classifiers:
        classifier._require_fit()
    readers = [classifier._reader.prompted for classifier in classifiers]
    encoders = [reader for reader in readers if reader is not None]
    if len(encoders) < len(readers) or len({id(encoder.lm) for encoder in encoders}) > 1:
        raise ConfigError("the classifiers have different LMs: give all of them one pgra.CausalLM")
    examples = read_queries([query], encoders[0].prompt.template.inputs)
    states = read_once(encoders, examples[0].fields)
    decisions = []
    for classifier, state in zip(classifiers, states, strict=True):
        decisions += classifier._decide(classifier._score(examples, state[None]))
    return decisions


def _draw(examples: Sequence[Example], seed: int) -> list[Example]:
    """Order examples for a prompt, the labels in turn.

    Each label's order is by a hash of its texts, so that a text more or less changes little.
    """
    groups: dict[str, list[Example]] = defaultdict(list)
    for example in examples:
        groups[str(example.label)].append(example)
    drawn = []
    for label in sorted(groups, key=lambda label: digest([seed, label])):
        distinct = {example.text: example for example in groups[label]}
        ordered = sorted(distinct, key=lambda text: digest([seed, text]))
        drawn += [(turn, distinct[text]) for turn, text in enumerate(ordered)]
    return [example for _, example in sorted(drawn, key=lambda entry: entry[0])]


def _describe(labels: Sequence[Any] | Mapping[Any, str] | None) -> str:
    """Return the text before the first example: what each label means, if that was given."""
    if not isinstance(labels, Mapping):
        return ""
    meanings = "".join(f"{label}: {meaning}\n" for label, meaning in labels.items())
    return f"Labels:\n{meanings}\n"


def _read_labelled(rows: ExampleRows, labels: Sequence[str]) -> tuple[list[Example], Sequence[Any]]:
    """Return the examples of rows that name no task, and their labels: names, or all numbers.

    With `labels` each has one of these.
    """
    raw = open_rows(pool_task(("text",)), rows, "examples")
    examples: list[Example] = []
    are_numbers = raw.classes is None
    for row in raw.rows:
        name = read_label(row, LABEL, labels=labels, classes=raw.classes)
        examples.append(Example(f"example-{len(examples)}", {"text": row.text("text")}, name))
        are_numbers = are_numbers and type(row.value(LABEL)) is int
    names = {str(example.label) for example in examples}
    return examples, sorted(map(int, names)) if are_numbers else sorted(names)
