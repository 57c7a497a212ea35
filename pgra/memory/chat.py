"""A person in the simulated user's place: asks, sees what was understood, says what was meant.

Prompts, look-up, gate and LM are those of the streams (`pgra.memory.stream`; Madaan et al. 2022,
figure 1). The terminal (`talk`) and the web page (`page`) show the same conversation. Stored texts
are shown in full, with invisible characters (such as bidirectional marks) escaped.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.config import choose
from pgra.data.read import whole_number
from pgra.errors import DataError, PgraError, visible
from pgra.memory.families import ANY, Family
from pgra.memory.log import MemoryEntry
from pgra.memory.memory import Memory
from pgra.memory.stream import BuiltPrompt, MemPrompt, PromptedLM
from pgra.types import as_query, is_utf8

if TYPE_CHECKING:
    from starlette.responses import Response

    Page = Callable[[Mapping[str, str]], Response]

_LEFT_OUT = "…"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
}
_MOST_SHOWN = 200  # entries on a page


def show_entry(entry: MemoryEntry) -> str:
    """Render a question and its feedback in full, each in quotes on one line."""
    texts = (json.dumps(text, ensure_ascii=False) for text in (entry.question, entry.feedback))
    return visible(" -> ".join(texts))


def entry_number(text: str) -> int:
    """Read an entry's number; a DataError if it is not one."""
    if (number := whole_number(text)) is None:
        raise DataError(f"'{text}' is not the number of an entry")
    return number


def read_understanding(family: Family, output: str) -> tuple[str, str]:
    """Split an output into understanding (… marks the answer's place) and answer, ignoring case.

    An output that has no form of the family's answers is all answer, with "" as understanding.
    """
    text = output.strip()
    for form in family.answers.values():
        pattern = re.escape(form).replace(r"\{word\}", ".+?").replace(r"\{answer\}", "(.+)")
        if match := re.fullmatch(pattern, text, flags=re.IGNORECASE | re.DOTALL):
            start, end = match.span(1)
            return f"{text[:start]}{_LEFT_OUT}{text[end:]}", match.group(1)
    return "", output


@dataclass(frozen=True)
class Turn:
    """A question and its answer.

    Attributes:
        understanding: With … in the answer's place; "" if the output does not state it.
        answer: The whole output, cut to its answer, if it states no understanding.
        num_prompt_tokens: None where an endpoint does not report them.
        saved: The entry of the feedback after which it was asked again.
    """

    question: str
    prompt: BuiltPrompt
    understanding: str = ""
    answer: str = ""
    num_prompt_tokens: int | None = None
    saved: MemoryEntry | None = None


@dataclass(frozen=True)
class Conversation:
    """What a person talks to. It holds no turns: any number of people may share one.

    Without an LM a turn shows what one would read.
    """

    lm: PromptedLM | None
    memory: Memory

    @property
    def family(self) -> Family:
        return self.lm.family if self.lm else ANY

    def ask(self, question: str, saved: MemoryEntry | None = None) -> Turn:
        """Ask with what the memory has for the question; `saved` if it is asked after a feedback.

        A question that is empty or does not fit the LM's window is a DataError.
        """
        question = as_query("the question", question)
        if self.lm is None:
            near = self.memory.search(question)
            prompt = BuiltPrompt(self.memory.prompt(question), near, len(near))
            return Turn(question, prompt, saved=saved)
        prompt = MemPrompt(self.lm, self.memory).ask(question)
        (completion,) = self.lm.complete([prompt.text])
        output = self.lm.few_shot.read_output(completion.text)
        understanding, answer = read_understanding(self.lm.family, output)
        size = completion.num_prompt_tokens
        return Turn(question, prompt, understanding, answer, size, saved)


def talk(
    conversation: Conversation,
    lines: Iterable[str],
    say: Callable[[str], None],
    *,
    is_watched: bool,
) -> None:
    """Carry out each line of a terminal, until one leaves; what an error finds stored stays.

    If it `is_watched`, errors are shown and it continues; otherwise they are raised.
    """
    last: Turn | None = None
    for line in lines:
        if line.split()[:1] == ["/quit"]:
            return
        try:
            reply = _reply(conversation, line, last)
        except PgraError as error:
            if not is_watched:
                raise
            reply = f"! {visible(str(error))}"
        if isinstance(reply, Turn):
            last = reply
            reply = show_turn(reply, conversation)
        if reply:
            say(reply)


def _reply(conversation: Conversation, line: str, last: Turn | None) -> Turn | str:
    """Return the answer to a question, or what a command shows."""
    if not is_utf8(line):
        raise DataError("that line is not UTF-8: give plain text")
    if not line.startswith("/"):
        return conversation.ask(line) if line.strip() else ""
    name, _, rest = line.partition(" ")
    choose("command", name, ("/add", "/delete", "/list", "/prompt", "/quit"))
    memory = conversation.memory
    if name == "/delete":
        return f"{memory.delete(*map(entry_number, rest.split())):,} deleted"
    if name == "/list":
        entries = [f"{entry.id:>6}  {show_entry(entry)}" for entry in memory]
        return "\n".join(entries) or "nothing is in the memory"
    if last is None:
        raise DataError("nothing was asked yet: type a question first")
    if name == "/prompt":
        return visible(last.prompt.text)
    return conversation.ask(last.question, memory.add(last.question, rest.strip()))


def show_turn(turn: Turn, conversation: Conversation) -> str:
    """Render an answer: understanding, answer, and the memory that was used."""
    lines = []
    if turn.saved:
        lines.append(f"noted, as entry {turn.saved.id}: {show_entry(turn.saved)}")
    if conversation.family.answers:
        understood = turn.understanding or "(the answer does not say)"
        lines.append(f"understood  {visible(understood)}")
    lines.append(f"answer      {visible(turn.answer) or '(nothing)'}")
    if not turn.prompt.matches:
        lines.append("memory      nothing found")
    threshold = conversation.memory.threshold
    gate = "" if threshold is None else f" (gate {threshold:g})"
    for rank, match in enumerate(turn.prompt.matches):
        use = "used" if rank < turn.prompt.num_used else "not used: too far"
        lines.append(f"memory      entry {match.id}, score {match.score:.4f}{gate}, {use}")
        lines.append(f"            {show_entry(match)}")
    return "\n".join(lines)


def page(conversation: Conversation) -> "Page":
    """Return what renders the page of a conversation, from the fields of a form.

    One Jinja2 template of plain forms, escaped and without a script. The server keeps no state but
    the memory, which all visitors share.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from starlette.responses import HTMLResponse

    loader = FileSystemLoader(Path(__file__).parent / "assets")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    pages.filters["visible"] = visible
    template = pages.get_template("memory.html")

    def render(typed: Mapping[str, str]) -> "Response":
        turn = None
        error = ""
        try:
            turn = _act(conversation, typed)
        except PgraError as refusal:
            error = str(refusal)
        entries = list(conversation.memory)
        text = template.render(
            conversation=conversation,
            turn=turn,
            entries=entries[: -_MOST_SHOWN - 1 : -1],
            num_entries=len(entries),
            error=error,
            typed=typed,
        )
        return HTMLResponse(text, 422 if error else 200, headers=_HEADERS)

    return render


def _act(conversation: Conversation, typed: Mapping[str, str]) -> Turn | None:
    name = typed.get("do")
    memory = conversation.memory
    question = typed.get("question", "")
    feedback = typed.get("feedback", "").strip()
    if name == "ask":
        return conversation.ask(question)
    if name == "add":
        return conversation.ask(question, memory.add(question, feedback))
    if name == "update":
        memory.update(entry_number(typed.get("entry", "")), feedback)
    elif name == "delete":
        memory.delete(entry_number(typed.get("entry", "")))
    return None
