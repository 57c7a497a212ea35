"""Few-shot prompts: labelled examples, then a query whose answer is open. The reader's words.

`PromptFormat` writes all of them, in one of two formats. "task" is PGRA's: an instruction, then
texts under the task's template. "kate" is that of Liu et al. 2022, Table 11: `Sentence: ... Label:
Positive`, `Table: ... Sentence: ...`, `Q: ...` and `A: ...` on two lines; a blank line between
exemplars, no instruction before them.

A prompt is `prefix + suffix`: instruction and exemplars, the same for all texts of a task, then the
text under the template, P(x) of Guo et al. 2023, section 3.2. They are split before the blank line
between them, because byte-pair merges do not cross that place but do cross the one after it.
"""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pgra.arrays import Counts
from pgra.config import choose
from pgra.data.tasks import AnyTask, check_slots, check_words
from pgra.data.text import word_key
from pgra.errors import ConfigError, DataError
from pgra.types import Example, Json

logger = logging.getLogger(__name__)

FORMATS = ("kate", "task")
INSTRUCTION = "Follow the demonstrations:\n"
SEPARATOR = "\n\n"
CHATS = ("auto", "off", "turns")
_QUERY = "@the query@"  # stands for it while a chat is written
_BREAKS = re.compile(r"\n{2,}")


# How a prompt is written as a chat (of `CHATS`), and the LM's chat template.
Chat = tuple[str, Callable[[list[dict[str, str]]], str]]


@dataclass(frozen=True)
class PromptTemplate:
    """How one task shows texts to the LM.

    Attributes:
        body: P(x), with a slot for each input of the task.
        answer: What the LM completes, on a line of its own after P(x); "" where P(x) ends with it.
        inputs: The task's inputs. A passage fills the first one; a line of empty inputs alone is
            left out, so a passage has one state, whatever query it is compared with.
        instruction: Text before the first exemplar.
        one_line: Whether a text's line breaks become spaces, as in KATE's prompts.
        gap: Text before an exemplar's answer.
        separator: Text between exemplars, and between the last one and the query.
    """

    body: str
    answer: str = "The answer is"
    inputs: tuple[str, ...] = ("text",)
    instruction: str = INSTRUCTION
    one_line: bool = False
    gap: str = " "
    separator: str = SEPARATOR

    def __post_init__(self) -> None:
        check_slots(f"template {self.body!r}", self.body, self.inputs)

    def passage_fields(self, text: str) -> dict[str, str]:
        return {name: text if i == 0 else "" for i, name in enumerate(self.inputs)}

    def render(self, fields: Mapping[str, str]) -> str:
        """Fill P(x), without blank lines, which would look like the border between exemplars."""
        if self.one_line:
            return self.body.format_map({n: " ".join(v.split()) for n, v in fields.items()})
        values = {name: value.strip() for name, value in fields.items()}
        return _BREAKS.sub("\n", self.body.format_map(values)).strip("\n")

    def render_query(self, fields: Mapping[str, str], *, after_prefix: bool) -> str:
        """Fill P(x) and leave the answer open: the suffix of a prompt."""
        answer = f"\n{self.answer}" if self.answer else ""
        return f"{self.separator if after_prefix else ''}{self.render(fields)}{answer}"


@dataclass(frozen=True)
class FewShotPrompt:
    """A prompt up to its query: everything of h*(x) = LM(prefix + P(x)) but the LM and x.

    Attributes:
        template: How a text is shown.
        prefix: Instruction and exemplars, without the blank line after them; "" for none.
        exemplar_ids: Training examples in it, in its order.
        turns: P(x) and the answer of each.
        after: Of a chat, what follows P(x); then `prefix` is all that stands before it.
    """

    template: PromptTemplate
    prefix: str = ""
    exemplar_ids: tuple[str, ...] = ()
    turns: tuple[tuple[str, str], ...] = ()
    after: str = ""

    def as_chat(self, style: str, write: Callable[[list[dict[str, str]]], str]) -> "FewShotPrompt":
        """Write it as one message ("auto"), or a turn an exemplar ("turns"); see `Chat`.

        The LM's turn begins with the template's answer.
        """
        messages = list[dict[str, str]]()
        text = self.template.separator.join([self.prefix, _QUERY]) if self.prefix else _QUERY
        if style == "turns" and self.turns:
            for question, reply in self.turns:
                messages.append({"role": "user", "content": question})
                messages.append({"role": "assistant", "content": reply})
            messages[0]["content"] = self.template.instruction + messages[0]["content"]
            text = _QUERY
        messages.append({"role": "user", "content": text})
        before, _, after = write(messages).rpartition(_QUERY)
        return replace(self, prefix=before, after=after + self.template.answer)

    def write(self, fields: Mapping[str, str]) -> str:
        """Return the whole prompt of one text."""
        return self.prefix + self.suffix(fields)

    def suffix(self, fields: Mapping[str, str]) -> str:
        """Render one text; `prefix + suffix` is the whole prompt."""
        if self.after:
            return self.template.render(fields) + self.after
        return self.template.render_query(fields, after_prefix=bool(self.prefix))

    @property
    def fingerprint(self) -> dict[str, Json]:
        """What a state depends on, besides the LM."""
        fields: dict[str, Json] = {
            "prefix": self.prefix,
            "template": self.template.body,
            "answer": self.template.answer,
            "inputs": list(self.template.inputs),
        }
        return {**fields, "after": self.after} if self.after else fields


@dataclass(frozen=True)
class PromptFormat:
    """Writes prompts that end where the LM's answer begins, but for a space.

    `words` are the answers by label; empty where an example's label is its answer. `chat` is what
    `FewShotPrompt.as_chat` takes; None for plain text.
    """

    template: PromptTemplate
    words: Mapping[str, str]
    chat: Chat | None = None

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that a prompt depends on, besides exemplars and query."""
        fields = self.prompt(()).fingerprint
        if self.chat:
            fields["chat"] = self.chat[0]
        return {**fields, "instruction": self.template.instruction, "words": dict(self.words)}

    def prompt(self, exemplars: Sequence[Example]) -> FewShotPrompt:
        """Write the prefix of labelled examples, in their order; "" for none."""
        template = self.template
        prefix = ""
        texts = []
        turns = []
        for example in exemplars:
            label = example.label or ""
            word = self.words[label] if self.words else label
            reply = f"{template.answer}{template.gap}{word}".strip()
            if template.one_line:
                word = " ".join(word.split())
            text = template.render_query(example.fields, after_prefix=False)
            texts.append(f"{text}{template.gap}{word}")
            turns.append((template.render(example.fields), reply))
        if texts:
            prefix = template.instruction + template.separator.join(texts)
        ids = tuple(example.id for example in exemplars)
        prompt = FewShotPrompt(template, prefix, ids, tuple(turns))
        return prompt.as_chat(*self.chat) if self.chat else prompt

    def write(self, exemplars: Sequence[Example], fields: Mapping[str, str]) -> str:
        """Write a query after exemplars, in their order."""
        return self.prompt(exemplars).write(fields)


def prompt_template(task: AnyTask) -> PromptTemplate:
    """Return a task's template as the LM sees it; of written answers their frame."""
    return task_format(task).template


def task_format(task: AnyTask, name: str = "task") -> PromptFormat:
    """Return the format of a task, by its name in `FORMATS`; written answers have their own frame.

    "kate" shows all inputs as one sentence, and labels answer by their own names, capitalised. It
    is one frame for exemplars and query, with the answer at its end, such as "Q: {question} A:".
    """
    wording = task.wording(name)
    template = PromptTemplate(wording.body, wording.answer or "", task.inputs)
    if wording.answer is None:
        template = replace(template, instruction="", one_line=True)
    return PromptFormat(template, wording.words)


def answer_words(words: Mapping[str, str]) -> list[str]:
    """Return words as they follow a prompt; ConfigError if one is a prefix of another."""
    for label, mine in words.items():
        for other, longer in words.items():
            if label != other and longer.startswith(mine):
                raise ConfigError(
                    f"prompt word '{mine}' ({label}) begins '{longer}' ({other}): choose another"
                )
    return [f" {word}" for word in words.values()]


# Fit prompts into an LM's window: the last exemplar is dropped first, the query is never cut.
#
# Liu et al. 2022, section 3.2, use fewer exemplars for a whole task where 64 "exceed the token
# limit" of some query; here the other queries keep theirs.


CountTokens = Callable[[Sequence[str]], list[int]]
# returns the prompt of a query (by its index) with so many of its exemplars
Write = Callable[[int, int], str]


@dataclass(frozen=True)
class Fit:
    """Each query's exemplars that fit, those that do not, and its prompt's tokens, (B,)."""

    counts: Counts
    num_dropped: Counts
    num_tokens: Counts


def fit_prompts(
    count_tokens: CountTokens,
    write: Write,
    wanted: Sequence[int],
    *,
    names: Sequence[str],
    window: int,
    num_new_tokens: int,
    unit: str = "exemplar",
) -> Fit:
    """Find how many exemplars, or words of evidence, each query's prompt has room for.

    Args:
        count_tokens: Counts the LM's tokens of texts.
        write: Writes a query's prompt.
        wanted: Exemplars of each query, (B,).
        names: The queries' ids, for messages.
        window: Most tokens of prompt and answer together.
        num_new_tokens: Room for the answer.
        unit: What is fitted, for messages.

    Raises:
        DataError: If a query does not fit even without exemplars; it is named.
        ConfigError: If no query has room for a single exemplar, and all want one.
    """

    def count(queries: Counts, counts: Counts) -> Counts:
        """Count the tokens of each query's prompt; equal texts are counted once."""
        pairs = zip(queries.tolist(), counts.tolist(), strict=True)
        prompts = [write(query, number) for query, number in pairs]
        distinct = list(dict.fromkeys(prompts))
        tokens = dict(zip(distinct, count_tokens(distinct), strict=True))
        return np.array([tokens[text] for text in prompts], dtype=np.int64)

    room = window - num_new_tokens
    most = np.array(wanted, dtype=np.int64)
    low = np.full_like(most, -1)  # fits
    high = most.copy()  # what is longer does not
    lengths = np.zeros_like(most)
    tried = most
    while (low < high).any():
        (open_,) = np.nonzero(low < high)
        numbers = tried[open_]
        tokens = count(open_, numbers)
        fits = tokens <= room
        lengths[open_] = np.where(fits | (numbers == 0), tokens, lengths[open_])
        low[open_[fits]] = numbers[fits]
        high[open_[~fits]] = numbers[~fits] - 1
        tried = (low + high + 1) // 2
    if len(long := np.flatnonzero(low < 0)):
        raise DataError(
            f"query {names[long[0]]} has {lengths[long[0]]} tokens without any {unit}, of "
            f"{window}, {num_new_tokens} of them its answer: leave it out, or use another LM"
        )
    if len(most) and most.min() > 0 and low.max() == 0:
        raise ConfigError(
            f"the LM reads {window} tokens, and no query has room for one {unit}: use none of them"
        )
    return Fit(low, most - low, lengths)


# Verbalizers: which word the reader writes for which label.
#
# With a slot in the reader's template, the target is T5's own way to fill a gap (Raffel et al.
# 2020, section 3.1.4): `<extra_id_0> WORD <extra_id_1>`. Without one it is the word alone.


SLOT = "<extra_id_0>"
SLOT_END = "<extra_id_1>"
DECODES = ("official", "verbalizer")


@dataclass(frozen=True)
class Verbalizer:
    """Label to word and back; of the reader's template only the slot matters.

    Without `words` answers are written: a label is its own word.
    """

    words: Mapping[str, str]
    template: str

    def __post_init__(self) -> None:
        check_words("words", self.words)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(self.words)

    @property
    def has_slot(self) -> bool:
        return SLOT in self.template

    def target_text(self, label: str) -> str:
        """Return the reader's target for a label."""
        word = self.words[label] if self.words else label
        return f"{SLOT} {word} {SLOT_END}" if self.has_slot else word

    def target_ids(self, tokenizer: Any, labels: Sequence[str] | None = None) -> list[list[int]]:
        """Tokenise every label's target, end of sentence included, in the order of labels.

        Where answers are written, `labels` are these.
        """
        texts = [self.target_text(label) for label in labels or self.labels]
        return [list(ids) for ids in tokenizer(texts).input_ids] if texts else []

    def label_of_word(self, text: str) -> str | None:
        """Return the label whose word equals a generated text, None if there is none.

        Case, surplus spaces and surrounding punctuation do not count (`pgra.data.text.word_key`).
        """
        key = word_key(text)
        if key in self._labels or any(map(str.isalnum, key)):
            return self._labels.get(key)
        # Marks alone: "-." says "-", if that is a word.
        labels = [label for word, label in self._labels.items() if word in key]
        return labels[0] if len(labels) == 1 else None

    @cached_property
    def _labels(self) -> Mapping[str, str]:
        return {word_key(word): label for label, word in self.words.items()}

    def audit(self, tokenizer: Any, *, decode: str = "verbalizer") -> tuple[str, ...]:
        """Check that a tokenizer separates the words; return labels whose word is several tokens.

        One word may begin another: the next token decides. A decode of one token ("official") can
        never give the labels returned: with T5's vocabulary "Entity" is two, which caps the
        released code on TREC at 81.2 %.

        Raises:
            ConfigError: If two targets are the same tokens, a word has unknown pieces, the slot is
                no token of this tokenizer, or, for "official", two words begin with the same token
                or none is a single one.
        """
        choose("decode", decode, DECODES)
        slots = [SLOT, SLOT_END] if self.has_slot else []
        tokens = {}
        for text in (*slots, *self.words.values()):
            ids = tokens[text] = tuple(tokenizer(text, add_special_tokens=False).input_ids)
            if not ids or tokenizer.unk_token_id in ids or (text in slots and len(ids) > 1):
                raise ConfigError(
                    f"'{text}' is not in this reader's vocabulary: choose another word in the "
                    "task's verbalizer, or a --reader_template without <extra_id_0>"
                )
        words = [tokens[word] for word in self.words.values()]
        multi = tuple(label for label, word in self.words.items() if len(tokens[word]) > 1)
        begins = words if decode == "verbalizer" else [ids[:1] for ids in words]
        if len(set(begins)) < len(words):
            raise ConfigError(
                f"two of the words {', '.join(self.words.values())} are the same tokens, or begin "
                "with the same, to this reader: choose others in the task's verbalizer"
            )
        if decode == "official" and multi:
            if len(multi) == len(words):  # as with ByT5, whose tokens are bytes
                raise ConfigError(
                    "decode 'official' is one token, all words are more: use --decode verbalizer"
                )
            message = "decode 'official' writes one token: these labels can never be right: %s"
            logger.warning(message, ", ".join(multi))
        return multi
