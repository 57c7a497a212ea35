"""System One's decisions: typed questions about a state, and a probability for every option.

Requests, prompts and answers are those of transformers' `pipeline("decision")`, whose
documentation says what they hold. Here the LM reads a state once for all questions, its opinion
is taken less what it says of states without content (Zhao et al. 2021, "Calibrate Before Use",
arXiv 2102.09690, section 4), and feedback is learned from (`pgra.rerank.head`).
"""

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from string import ascii_uppercase
from typing import Any

import numpy as np
from transformers.decision import (
    DECISION_PROMPT,
    DecisionConfig,
    Question,
    parse_questions,
)

from pgra.arrays import Vectors
from pgra.artifacts import canonical_json
from pgra.errors import ConfigError, DataError, show
from pgra.lm.base import DEPTHS
from pgra.lm.batching import share_tokens
from pgra.lm.prefix import StateColumns, depth_widths
from pgra.lm.state_lm import StateLM
from pgra.methods.classifier import LEAST_SEEN, Classifier, decide_each
from pgra.rerank.head import LabelModel, affine, fit_labels, softmax
from pgra.rerank.similarity import Calibrated
from pgra.types import Example, Json

_MOST_OPTIONS = 255  # the protocol's
_MOST_BIASES = 4096  # questions


@dataclass
class Learned:
    """What was learned of a question: state (W,) and option by text, and the model of these."""

    rows: dict[str, tuple[Vectors, str]] = field(default_factory=dict)
    model: LabelModel | None = None


class Decider:
    """Answers questions about a state by an LM, by feedback, or by saved classifiers.

    A question goes to the first classifier whose labels are its options (of a score the numbers of
    its levels, of yes or no "true" and "false") and whose template has its instructions.
    """

    def __init__(
        self,
        lm: StateLM | None,
        classifiers: Mapping[str, Classifier] | None = None,
        *,
        label_bias: str = "content-free",
    ) -> None:
        """Take an open LM, and classifiers by name that have the same or none.

        With the `label_bias` "none" the LM's opinion is as `pipeline("decision")` has it.
        """
        self.lm = lm
        self.classifiers = classifiers or {}
        self.label_bias = label_bias
        self._biases: dict[str, Vectors] = {}  # mean logits of states without content, (C,)
        self._learned: dict[str, Learned] = {}
        self._config = DecisionConfig()
        if lm is not None:
            self._tokenizer = copy.deepcopy(lm.tokenizer)  # it gets tokens of the protocol's own
            self._layers = lm.layers_at(DEPTHS)
            self._config.labels = dict.fromkeys(("choice", "score"), self._name_options())
            if self._tokenizer.chat_template is None:
                self._config.chat_template = f"{DECISION_PROMPT}\nAnswer:\n"

    def _name_options(self) -> list[str]:
        """Return A to Z as transformers, then two letters, as far as each is one token."""
        pairs = ["".join(pair) for pair in product(ascii_uppercase, repeat=2)]
        ids = self._tokenizer(pairs, add_special_tokens=False)["input_ids"]
        single = [pair for pair, tokens in zip(pairs, ids, strict=True) if len(tokens) == 1]
        return [*ascii_uppercase, *single][:_MOST_OPTIONS]

    def answer(self, state: Json, questions: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer to each question, as `pipeline("decision")` does.

        Raises:
            DataError: If a question is not one, nothing here can answer it, or it is too long with
                the state.
        """
        text = _as_text(state)
        parsed = self._parse(questions)
        decided = []
        classifiers = []
        left = []
        for question in parsed:
            classifier = self._find_classifier(question)
            if classifier is None:
                left.append(question)
            else:
                decided.append(question)
                classifiers.append(classifier)
        if classifiers and all(classifier.prompt for classifier in classifiers):
            decisions = decide_each(classifiers, text)
        else:
            decisions = [classifier.decide([text])[0] for classifier in classifiers]
        chances = {}
        for question, decision in zip(decided, decisions, strict=True):
            chances[question.name] = [decision.scores[option] for option in question.options]
        if left:
            self._read_biases(left, questions)
            rows = self._read([state], left, questions)
            for question, row in zip(left, rows, strict=True):
                chances[question.name] = self._decide(question, row[None])
        return {question.name: question.answer(chances[question.name]) for question in parsed}

    def learn(self, state: Json, question: Mapping[str, Any], answer: Json) -> None:
        """Learn a question's answer about a state; it replaces an earlier one about the same.

        Args:
            state: As of `answer`.
            question: As of `answer`.
            answer: A choice's option, a score's level from 0, or whether yes is right.

        Raises:
            DataError: As `answer`, or if the answer is not an option.
        """
        text = _as_text(state)
        (parsed,) = self._parse({"": question})
        label = _as_text(answer)
        if label not in parsed.options:
            raise DataError(f"answer {show(answer)} is not of {show(parsed.options)}")
        classifier = self._find_classifier(parsed)
        if classifier is not None:
            classifier.add(text, classifier.classes_.dtype.type(label))
            return
        self._read_biases([parsed], {"": question})
        (row,) = self._read([state], [parsed], {"": question})
        learned = self._learned.setdefault(_key(parsed), Learned())
        learned.rows[text] = row, label
        learned.model = None

    def _parse(self, questions: Mapping[str, Any]) -> list[Question]:
        try:
            parsed: list[Question] = parse_questions(dict(questions), self._config)
        except ValueError as error:
            raise DataError(str(error)) from None
        return parsed

    def _find_classifier(self, question: Question) -> Classifier | None:
        """Return the classifier that decides a question; None where it is left to the LM."""
        instructions = question.instructions or ""
        for name, classifier in self.classifiers.items():
            prompt = classifier.prompt
            if prompt is not None and _as_text(instructions) not in prompt.template.body:
                continue
            labels = [str(label) for label in classifier.classes_.tolist()]
            if {*labels} == {*question.options}:
                return classifier
            if prompt is not None and instructions:
                raise DataError(
                    f"question {show(question.name)} has the options {show(question.options)}, and "
                    f"the classifier '{name}' of its instructions {show(labels)}: give these"
                )
        if self.lm is None:
            raise DataError(
                f"question {show(question.name)} is not of a --classifier "
                f"({show([*self.classifiers])}), and there is no LM: give --lm"
            )
        return None

    def _read(
        self, states: Sequence[Json], questions: Sequence[Question], raw: Mapping[str, Any]
    ) -> Vectors:
        """Return the LM's states after each question about each state, (n, W).

        What the prompts begin with runs once.
        """
        assert self.lm is not None
        prompts = []
        wanted = {question.name: raw[question.name] for question in questions}
        for state in states:
            request = {"state": state, "questions": wanted}
            for inputs, _ in self._config.prepare_inputs(request, self._tokenizer):
                prompts.append(inputs["input_ids"][0].tolist())
        longest = max(map(len, prompts))
        if longest > self.lm.window:
            raise DataError(
                f"the state and a question have {longest} tokens, and '{self.lm.source.name}' "
                f"reads {self.lm.window}: shorten the state"
            )
        begin = self.lm.share_prefix(share_tokens(prompts), lambda: prompts, self._layers)
        return begin(prompts, int)().float().numpy()

    def _read_biases(self, questions: Sequence[Question], raw: Mapping[str, Any]) -> None:
        """Read what the LM says of new questions without content."""
        if len(self._biases) > _MOST_BIASES:
            self._biases.clear()
        new = [question for question in questions if _key(question) not in self._biases]
        if new:
            blanks = self._read(Calibrated.content_free, new, raw)
            for number, question in enumerate(new):
                logits = self._opinion(question, blanks[number :: len(new)])
                self._biases[_key(question)] = logits.mean(axis=0)

    def _words(self, question: Question) -> Vectors:
        """Return what gives the logits of a question's labels, (C, H + 1)."""
        assert self.lm is not None
        words = self.lm.word_rows(self.lm.tokenize(question.labels))
        if words is None:
            raise ConfigError(f"--lm {self.lm.source.name} gives no logits: name its weights")
        return words

    def _opinion(self, question: Question, states: Vectors) -> Vectors:
        """Return the LM's logits of a question's labels, (n, C)."""
        words = self._words(question)
        return affine(states[:, 1 - words.shape[1] :], words)

    def _decide(self, question: Question, states: Vectors) -> list[float]:
        """Return the probabilities of a question's options."""
        learned = self._learned.get(_key(question))
        if learned is not None:
            learned.model = learned.model or self._fit(question, learned)
            logits = learned.model.score(states)
        else:
            logits = self._opinion(question, states)
            if self.label_bias != "none":
                logits = logits - self._biases[_key(question)]
        chances: list[float] = softmax(logits)[0].tolist()
        return chances

    def _fit(self, question: Question, learned: Learned) -> LabelModel:
        """Fit heads and opinion to what was learned."""
        words = self._words(question)
        states = np.stack([row for row, _ in learned.rows.values()])
        widths = depth_widths(states.shape[1], words.shape[1] - 1, self._layers)
        examples = [Example("", {"text": text}, row[1]) for text, row in learned.rows.items()]
        columns = StateColumns(widths, words=words)
        model = fit_labels(states, columns, examples, question.options).model
        if len(examples) < LEAST_SEEN:
            model = replace(model, prior=self._biases[_key(question)])
        return model


def _key(question: Question) -> str:
    return canonical_json(
        [question.type, question.instructions, question.options, question.descriptions]
    )


def _as_text(state: Json) -> str:
    """Write a state, instructions or an answer as the prompt shows them."""
    return state if isinstance(state, str) else json.dumps(state, ensure_ascii=False)
