"""A person in the simulated user's place: asks, sees what was understood, says what was meant.

Prompts, look-up, gate and LM are those of the streams (`pgra.memory.stream`; Madaan et al. 2022,
figure 1). The terminal (`Talk`) and the web page (`pgra.memory.web`) show the same conversation.
Stored texts are shown in full, with invisible characters (such as bidirectional marks) escaped.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from pgra.config import arg, choose
from pgra.data.read import is_utf8, whole_number
from pgra.errors import DataError, PgraError, visible
from pgra.lm.base import CompleterArguments
from pgra.memory.families import Family, load_few_shot
from pgra.memory.log import MemoryEntry
from pgra.memory.memory import Memory
from pgra.memory.stream import (
    BuiltPrompt,
    MemPrompt,
    PromptedArguments,
    PromptedLM,
    Step,
    match_form,
)

COMMANDS = """type a question, or
  /add TEXT      {} the last question; it is noted, and the question asked again
  /delete ID ... take entries out of the memory
  /list          what is in the memory
  /prompt        what the LM read last
  /help          this
  /quit          leave (or Ctrl-D)"""
_SAYS = ("say what you meant by", "give the right answer of")
_LEAVES = ("/quit", "/exit")
_LEFT_OUT = "…"


def show_entry(entry: MemoryEntry) -> str:
    """Render a question and its feedback in full, each in quotes on one line."""
    texts = (json.dumps(text, ensure_ascii=False) for text in (entry.question, entry.feedback))
    return visible(" -> ".join(texts))


@dataclass(kw_only=True)
class TalkingLMArguments(CompleterArguments):
    """Which LM answers; there is no default, for few have room for one of the paper's size."""

    lm: str = arg(
        "",
        "Causal LM: a hub id (facebook/opt-13b is the paper's size), a folder or "
        "bundled:smollm2-135m; or openai:MODEL, at an endpoint.",
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
        saved: The entry of the feedback after which it was asked again.
    """

    question: str
    output: str
    understanding: str
    answer: str
    prompt: BuiltPrompt
    num_prompt_tokens: int | None
    saved: MemoryEntry | None = None


@dataclass(frozen=True)
class Conversation:
    """What a person talks to. It holds no turns: any number of people may share one."""

    lm: PromptedLM
    system: MemPrompt
    about: str = ""

    @property
    def memory(self) -> Memory:
        return self.system.memory

    def ask(self, question: str, saved: MemoryEntry | None = None) -> Turn:
        """Ask with what the memory has for the question; `saved` if it is asked after a feedback.

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


def load_conversation(
    memory: Memory, family: Family, chat: PromptedArguments, lm: CompleterArguments
) -> Conversation:
    """Load the LM that a person talks to, about questions of a family."""
    few_shot = load_few_shot(chat.prompt or family.prompt)
    gate = "" if memory.threshold is None else f", gate {memory.threshold:g}"
    of = f"; user {memory.user}" if memory.user else ""
    return Conversation(
        lm=chat.open_lm(few_shot, lm),
        system=MemPrompt(family, few_shot, memory),
        about=f"LM {lm.lm}; {type(memory.lookup).__name__}{gate}{of}",
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
        commands: Mapping[str, Callable[[str], None]] = {
            "/add": self._add,
            "/delete": self._delete,
            "/list": self._list,
            "/prompt": lambda _: self.say(visible(self._asked.prompt.text)),
            "/help": lambda _: self.say(
                COMMANDS.format(_SAYS[self.conversation.system.family.is_of_answers])
            ),
        }
        name, _, rest = line.partition(" ")
        if not is_utf8(line):
            raise DataError("that line is not UTF-8: give plain text")
        if line.startswith("/"):
            choose("command", name, [*commands, *_LEAVES])
            commands[name](rest)
        elif line.strip():
            self._show(self.conversation.ask(line))

    def _add(self, text: str) -> None:
        question = self._asked.question
        entry = self.conversation.memory.add(question, text.strip())
        self.say(f"noted, as entry {entry.id}: {show_entry(entry)}")
        self._show(self.conversation.ask(question))

    def _show(self, turn: Turn) -> None:
        self.last = turn
        self.say(show_turn(turn, self.conversation.system))

    def _delete(self, text: str) -> None:
        numbers = [whole_number(word) for word in text.split()]
        known = [number for number in numbers if number is not None]
        if not known or len(known) < len(numbers):
            raise DataError("name entries by their numbers, as /list shows them: /delete 7 9")
        self.conversation.memory.delete(*known)
        self.say(f"{len(known):,} deleted")

    def _list(self, _: str) -> None:
        lines = [f"{entry.id:>6}  {show_entry(entry)}" for entry in self.conversation.memory]
        self.say("\n".join(lines) or "nothing is in the memory")

    @property
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
    threshold = system.memory.threshold
    gate = "" if threshold is None else f" (gate {threshold:g})"
    for place, match in enumerate(turn.prompt.found):
        use = "used" if place < turn.prompt.num_used else "not used: too far"
        lines.append(f"memory      entry {match.id}, score {match.score:.4f}{gate}, {use}")
        lines.append(f"            {show_entry(match)}")
    return "\n".join(lines)
