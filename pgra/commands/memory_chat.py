"""A person asks an LM with a memory, and corrects what it understood: `pgra memory chat`."""

import contextlib
import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pgra.commands.common import quiet_libraries, say
from pgra.commands.memory_arguments import ChatArguments, MemoryArguments
from pgra.config import parse_arguments
from pgra.core import Context
from pgra.data.read import is_utf8
from pgra.errors import ConfigError, DataError, PgraError, unknown_name
from pgra.lm.base import CompleterArguments, LanguageModel, open_lm
from pgra.memory.chat import Conversation, Turn
from pgra.memory.families import Family, load_family
from pgra.memory.log import FeedbackLog
from pgra.memory.lookup import (
    LookupArguments,
    OpenLookup,
    lookup_opener,
    show_entry,
    show_near,
    visible,
)
from pgra.memory.prompts import FewShot, load_few_shot

EXAMPLE = """examples:
  pgra memory chat --lm bundled:smollm2-135m
  printf 'what is akin to < pretty > ?\\n/correct I want a synonym\\n' | pgra memory chat --lm MODEL
"""
SAYING = """type a question, or
  /correct TEXT  say what you meant by the last question; it is noted, and the question asked again
  /forget ID ... take entries out of the memory
  /list          what is in the memory
  /prompt        what the LM read last
  /help          this
  /quit          leave (or Ctrl-D)"""
SAYING_ANSWERS = SAYING.replace("say what you meant by", "give the right answer of")
_LEAVES = ("/quit", "/exit")


def main(argv: Sequence[str] | None = None) -> int:
    """Talk until there is nothing more to read."""
    memory, chat, lookup, lm = parse_arguments(
        [MemoryArguments, ChatArguments, LookupArguments, CompleterArguments],
        argv,
        prog="pgra memory chat",
        description="Ask an LM, see what it understood, correct it, and ask again. " + SAYING,
        epilog=EXAMPLE,
    )
    opening = Opening.load(Path(memory.memory), chat, lookup=lookup, lm=lm)
    with FeedbackLog.open(Path(memory.memory)) as log:
        conversation = opening.open(log)
        say(f"{log.path}: {len(log):,} entries; {opening.describe()}")
        say("/help tells what can be typed")
        Talk(conversation, is_watched=sys.stdin.isatty()).run(read_lines())
    return 0


@dataclass(frozen=True, kw_only=True)
class Opening:
    """What a conversation is made of but for its memory, which is opened by who uses it.

    Attributes:
        chat: What is asked for.
        lookup: Which look-up, settled for the family.
        lm: The LM's name.
        family: Of the questions.
        few_shot: The prompt.
        completer: The LM.
        open_lookup: Opens the look-up of a memory.
    """

    chat: ChatArguments
    lookup: LookupArguments
    lm: str
    family: Family
    few_shot: FewShot
    completer: LanguageModel
    open_lookup: OpenLookup

    @classmethod
    def load(
        cls, path: Path, chat: ChatArguments, *, lookup: LookupArguments, lm: CompleterArguments
    ) -> Self:
        """Load what takes long, after all that can be refused at once.

        Args:
            path: The memory; one that is damaged is refused, one that is missing not made.
            chat: What is asked for.
            lookup: Which look-up.
            lm: Which LM.

        Raises:
            PgraError: For what a user can mend.
        """
        family = load_family(chat.family)
        lookup = lookup.settle(family)
        few_shot = load_few_shot(chat.prompt or family.prompt)
        if path.exists():
            FeedbackLog.open(path, is_writable=False).close()
        quiet_libraries()
        return cls(
            chat=chat,
            lookup=lookup,
            lm=lm.lm,
            family=family,
            few_shot=few_shot,
            completer=open_lm(lm, Context(artifacts=Path(chat.artifacts_dir), device=chat.device)),
            open_lookup=lookup_opener(lookup, device=chat.device, task=chat.task),
        )

    def open(self, log: FeedbackLog) -> Conversation:
        """Open a conversation on a memory."""
        return Conversation(
            family=self.family,
            few_shot=self.few_shot,
            completer=self.completer,
            log=log,
            lookup=self.open_lookup(log),
            threshold=self.gate,
            task=self.chat.task,
            source=self.chat.source,
            max_new_tokens=self.chat.max_new_tokens,
            max_prompt_tokens=self.chat.max_prompt_tokens,
        )

    @property
    def gate(self) -> float | None:
        """Give the look-up's threshold; None lets all through."""
        return self.lookup.gate_of(self.family)

    def describe(self) -> str:
        """Say what is talked to."""
        gate = "" if self.gate is None else f", gate {self.gate:g}"
        return f"LM {self.lm}; look-up {self.lookup.lookup}{gate}"


def read_lines() -> Iterator[str]:
    """Give what is typed, or what stands in a pipe, line by line."""
    if isinstance(sys.stdin, io.TextIOWrapper):  # what is not UTF-8 is refused by the line
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    if not sys.stdin.isatty():
        for line in sys.stdin:
            line = line.rstrip("\r\n")
            say(f"> {visible(line)}")
            yield line
        return
    with contextlib.suppress(ImportError):  # not on every system; then lines have no history
        import readline  # noqa: F401 (input() uses it once it is there)
    with contextlib.suppress(EOFError):
        while True:
            yield input("> ")
    say("")


class Talk:
    """A conversation in a terminal."""

    def __init__(self, conversation: Conversation, *, is_watched: bool) -> None:
        """Begin.

        Args:
            conversation: With its memory.
            is_watched: Whether a person sees an error and goes on; a script ends with it.
        """
        self._conversation, self._is_watched = conversation, is_watched
        self._last: Turn | None = None
        self._words: Mapping[str, Callable[[str], None]] = {
            "/correct": self._correct,
            "/forget": self._forget,
            "/list": self._list,
            "/prompt": self._prompt,
            "/help": self._help,
        }

    def run(self, lines: Iterator[str]) -> None:
        """Do what each line says, until one leaves.

        Raises:
            PgraError: Of a line in a script; what was noted before stands.
        """
        for line in lines:
            if line.split()[:1] and line.split()[0] in _LEAVES:
                return
            try:
                self._do(line)
            except PgraError as error:
                if not self._is_watched:
                    raise
                say(f"! {visible(str(error))}")

    def _do(self, line: str) -> None:
        if not is_utf8(line):
            raise DataError("that line is not UTF-8: give plain text")
        if not line.strip():
            return
        if not line.startswith("/"):
            self._ask(line)
            return
        word, _, rest = line.partition(" ")
        if word not in self._words:
            raise ConfigError(unknown_name("command", word, [*self._words, *_LEAVES]))
        self._words[word](rest)

    def _ask(self, question: str) -> None:
        self._last = self._conversation.ask(question)
        say(show_turn(self._last, self._conversation))

    def _correct(self, text: str) -> None:
        asked = self._asked()
        noted = self._conversation.correct(asked.question, text)
        say(f"noted, as entry {noted.entry.id}: {show_entry(noted.entry)}")
        if noted.in_prompt:
            say(f"note: it is data, and stands in a prompt as: {visible(noted.in_prompt)}")
        for near in noted.near:
            say(show_near(near))
        self._ask(asked.question)

    def _forget(self, text: str) -> None:
        words = text.split()
        if not words or not all(word.isascii() and word.isdigit() for word in words):
            raise DataError("name entries by their numbers, as /list shows them: /forget 7 9")
        self._conversation.forget(*(int(word) for word in words))
        say(f"{len(words):,} forgotten")

    def _list(self, _: str) -> None:
        entries = self._conversation.entries()
        for entry in entries:
            say(f"{entry.id:>6}  {show_entry(entry)}")
        if not entries:
            say("nothing is in the memory")

    def _prompt(self, _: str) -> None:
        say(visible(self._asked().prompt))

    def _help(self, _: str) -> None:
        say(SAYING_ANSWERS if self._conversation.wants_answers else SAYING)

    def _asked(self) -> Turn:
        if self._last is None:
            raise DataError("nothing was asked yet: type a question first")
        return self._last


def show_turn(turn: Turn, conversation: Conversation) -> str:
    """Lay out what a question gave: understanding, answer, and the memory that was used."""
    understood = turn.reading.understanding or "(the answer does not say)"
    lines = [] if conversation.wants_answers else [f"understood  {visible(understood)}"]
    lines.append(f"answer      {visible(turn.reading.answer) or '(nothing)'}")
    if not turn.found:
        lines.append("memory      nothing found")
    for place, match in enumerate(turn.found):
        told = "used" if place < turn.num_used else "not used: too far"
        gate = "" if conversation.threshold is None else f" (gate {conversation.threshold:g})"
        lines.append(f"memory      entry {match.entry.id}, score {match.score:.4f}{gate}, {told}")
        lines.append(f"            {show_entry(match.entry)}")
    return "\n".join(lines)
