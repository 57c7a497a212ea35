"""A person in the simulated user's place: asks, sees what was understood, corrects, asks again.

Prompts, look-up, gate and LM are those of the streams (`pgra.memory.stream`; Madaan et al. 2022,
figure 1). The terminal (`Talk`) and the web page (`pgra.memory.web`) show the same conversation.
Stored texts are shown in full, with invisible characters (such as bidirectional marks) escaped.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pgra.config import arg, choose
from pgra.data.read import is_utf8, whole_number
from pgra.errors import DataError, PgraError, visible
from pgra.lm.base import CompleterArguments
from pgra.memory.families import Family, load_family
from pgra.memory.log import SHARED, Event, FeedbackLog, Part
from pgra.memory.lookup import LookupArguments, load_lookup
from pgra.memory.prompts import load_few_shot
from pgra.memory.stream import (
    BuiltPrompt,
    MemPrompt,
    PromptedArguments,
    PromptedLM,
    Step,
    match_form,
)

SAYING = """type a question, or
  /correct TEXT  {} the last question; it is noted, and the question asked again
  /forget ID ... take entries out of the memory
  /list          what is in the memory
  /prompt        what the LM read last
  /help          this
  /quit          leave (or Ctrl-D)"""
_SAYS = ("say what you meant by", "give the right answer of")
_LEAVES = ("/quit", "/exit")
_LEFT_OUT = "…"


def show_entry(entry: Event) -> str:
    """Render a key and its feedback in full, each in quotes on one line."""
    texts = (json.dumps(text, ensure_ascii=False) for text in (entry.key, entry.feedback))
    return visible(" -> ".join(texts))


@dataclass(kw_only=True)
class ChatArguments(PromptedArguments):
    """What a person talks to."""

    task: str = arg("", "Which entries count, and under which name corrections are written.")
    scope: str = arg(
        "",
        "Whose corrections are written, such as a user's name; those that are used are its own and "
        "those without a scope. Default: none.",
    )
    source: str = arg("user", "Who corrects.")


@dataclass(kw_only=True)
class TalkingLMArguments(CompleterArguments):
    """Which LM answers; there is no default, for few have room for one of the paper's size."""

    lm: str = arg(
        "",
        "Causal LM: a hub id (facebook/opt-13b is the paper's size), a folder or "
        "bundled:smollm2-135m; or openai:MODEL, behind an endpoint.",
        must_be_given=True,
    )


def read_understanding(family: Family, output: str) -> tuple[str, str]:
    """Split an output into understanding (… marks the answer's place) and answer, ignoring case.

    An output of no form of the family's answers is all answer, with "" as understanding.
    """
    text = output.strip()
    if (found := match_form(family, text)) is None:
        return "", output
    _, match = found
    start, end = match.span(1)
    return f"{text[:start]}{_LEFT_OUT}{text[end:]}", match.group(1)


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        output: What the LM wrote, cut to its answer.
        understanding: With … in the answer's place; "" if the output states none.
        answer: The whole output if it states no understanding.
        num_prompt_tokens: None where an endpoint does not report them.
        saved: The correction after which it was asked again.
    """

    question: str
    output: str
    understanding: str
    answer: str
    prompt: BuiltPrompt
    num_prompt_tokens: int | None
    saved: "SavedCorrection | None" = None


@dataclass(frozen=True)
class SavedCorrection:
    """A correction that was stored; `shown` is its text in a prompt where that differs, else ""."""

    entry: Event
    shown: str = ""


@dataclass(kw_only=True)
class Conversation:
    """What a person talks to. It holds no turns: any number of people may share one.

    Corrections are written under the task and scope of `part`, by `source`.
    """

    lm: PromptedLM
    system: MemPrompt
    part: Part = SHARED
    source: str = "user"
    about: str = ""

    def ask(self, question: str, saved: SavedCorrection | None = None) -> Turn:
        """Ask with what the memory has for the question; `saved` if it is asked after a correction.

        A question that is empty or does not fit the LM's window is a DataError.
        """
        question = question.strip()
        if not question:
            raise DataError("the question is empty: type one")
        prompt = self.system.ask(Step("", "", question, ""))
        (completion,) = self.lm.complete([prompt.text])
        output = self.lm.few_shot.read_output(completion.text)
        understanding, answer = read_understanding(self.system.family, output)
        num_tokens = completion.num_prompt_tokens
        return Turn(question, output, understanding, answer, prompt, num_tokens, saved)

    def correct(self, question: str, feedback: str) -> SavedCorrection:
        """Store what a person says of a misunderstood question; errors as `FeedbackLog.write`."""
        log, part = self.system.log, self.part
        entry = log.write(
            question, feedback.strip(), source=self.source, task=part.task, scope=part.scope
        )
        shown = self.lm.few_shot.as_data(entry.feedback)
        differs = shown != " ".join(entry.feedback.split())
        return SavedCorrection(entry, shown if differs else "")

    def forget(self, *entry_ids: int) -> None:
        """Take entries out, all or none; a DataError if one is gone or of another task or scope."""
        for entry_id in entry_ids:
            self._check_own(entry_id)
        self.system.log.forget(*entry_ids, source=self.source)

    def change(self, entry_id: int, feedback: str) -> Event:
        """Replace an entry's feedback; a DataError if it is gone, or of another task or scope."""
        self._check_own(entry_id)
        return self.system.log.correct(entry_id, feedback.strip(), source=self.source)

    def entries(self) -> list[Event]:
        """Return the entries of its task and scope, the oldest first."""
        return [entry for entry in self.system.log.entries() if self._owns(entry)]

    def _owns(self, event: Event) -> bool:
        return (event.task, event.scope) == (self.part.task, self.part.scope)

    def _check_own(self, entry_id: int) -> None:
        """Refuse an entry of another task or scope; the log refuses a missing one."""
        event = self.system.log.event(entry_id)
        if event is not None and event.kind != "erase" and not self._owns(event):
            raise DataError(f"entry {entry_id} is of another task or scope: it is not changed here")


def load_conversation(
    path: Path, chat: ChatArguments, lookup: LookupArguments, lm: CompleterArguments
) -> Callable[[FeedbackLog], Conversation]:
    """Load the models, after cheap checks; return a function that opens a conversation on a log."""
    family = load_family(chat.family)
    lookup = lookup.settle(family)
    few_shot = load_few_shot(chat.prompt or family.prompt)
    if path.exists():
        FeedbackLog.open(path, is_writable=False).close()
    gate, prompted = lookup.gate_of(family), chat.open_lm(few_shot, lm)
    part = Part(chat.task, chat.scope)
    open_lookup = load_lookup(lookup, chat.context, task=part.task, scope=part.scope)
    shown = "" if gate is None else f", gate {gate:g}"
    of = f"; scope {chat.scope}" if chat.scope else ""
    return lambda log: Conversation(
        lm=prompted,
        system=MemPrompt(family, few_shot, log, open_lookup(log), gate),
        part=part,
        source=chat.source,
        about=f"LM {lm.lm}; look-up {lookup.lookup}{shown}{of}",
    )


@dataclass
class Talk:
    """A conversation in a terminal.

    If `is_watched`, errors are shown and it continues; otherwise they are raised.
    """

    conversation: Conversation
    say: Callable[[str], None]
    is_watched: bool
    last: Turn | None = None

    def run(self, lines: Iterable[str]) -> None:
        """Carry out each line, until one leaves; what was stored before an error stays."""
        for line in lines:
            if line.strip().partition(" ")[0] in _LEAVES:
                return
            try:
                self._do(line)
            except PgraError as error:
                if not self.is_watched:
                    raise
                self.say(f"! {visible(str(error))}")

    def _do(self, line: str) -> None:
        says = _SAYS[self.conversation.system.family.is_of_answers]
        words: Mapping[str, Callable[[str], None]] = {
            "/correct": self._correct,
            "/forget": self._forget,
            "/list": self._list,
            "/prompt": lambda _: self.say(visible(self._asked().prompt.text)),
            "/help": lambda _: self.say(SAYING.format(says)),
        }
        word, _, rest = line.partition(" ")
        if not is_utf8(line):
            raise DataError("that line is not UTF-8: give plain text")
        if line.startswith("/"):
            choose("command", word, [*words, *_LEAVES])
            words[word](rest)
        elif line.strip():
            self._ask(line)

    def _ask(self, question: str) -> None:
        self.last = self.conversation.ask(question)
        self.say(show_turn(self.last, self.conversation.system))

    def _correct(self, text: str) -> None:
        question = self._asked().question
        saved = self.conversation.correct(question, text)
        self.say(f"noted, as entry {saved.entry.id}: {show_entry(saved.entry)}")
        if saved.shown:
            self.say(f"note: it is data, and stands in a prompt as: {visible(saved.shown)}")
        self._ask(question)

    def _forget(self, text: str) -> None:
        numbers = [whole_number(word) for word in text.split()]
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            raise DataError("name entries by their numbers, as /list shows them: /forget 7 9")
        self.conversation.forget(*known)
        self.say(f"{len(known):,} forgotten")

    def _list(self, _: str) -> None:
        entries = self.conversation.entries()
        for entry in entries:
            self.say(f"{entry.id:>6}  {show_entry(entry)}")
        if not entries:
            self.say("nothing is in the memory")

    def _asked(self) -> Turn:
        if self.last is None:
            raise DataError("nothing was asked yet: type a question first")
        return self.last


def show_turn(turn: Turn, system: MemPrompt) -> str:
    """Render an answer: understanding, answer, and the memory that was used."""
    understood = turn.understanding or "(the answer does not say)"
    lines = [] if system.family.is_of_answers else [f"understood  {visible(understood)}"]
    lines.append(f"answer      {visible(turn.answer) or '(nothing)'}")
    if not turn.prompt.found:
        lines.append("memory      nothing found")
    gate = "" if system.threshold is None else f" (gate {system.threshold:g})"
    for place, match in enumerate(turn.prompt.found):
        use = "used" if place < turn.prompt.num_used else "not used: too far"
        lines.append(f"memory      entry {match.entry.id}, score {match.score:.4f}{gate}, {use}")
        lines.append(f"            {show_entry(match.entry)}")
    return "\n".join(lines)
