"""A memory of what users corrected: `pgra memory add|list|search|update|delete|...|lab`.

A word's docstring is its help. torch is imported where it is needed: listing loads none.
"""

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

from pgra.commands.common import about, parse, quiet_libraries, say, typed_lines
from pgra.config import Arguments, HelpParser, arg, choose, wants_help
from pgra.context import Context
from pgra.errors import ConfigError, visible
from pgra.memory.chat import Conversation, entry_number, show_entry, talk
from pgra.memory.families import Family, load_family
from pgra.memory.lookup import LookupArguments, load_lookup, passing
from pgra.memory.memory import Memory
from pgra.memory.report import write_report
from pgra.memory.stream import Experiment, PromptedArguments, StreamArguments, choose_examples


def main(words: Sequence[str]) -> int:
    """Keep what users corrected, and use it on the next like question.

    Examples:
      pgra memory add "what is akin to < fast > ?" "when I ask for akin to, I want a synonym"
      pgra memory search "what is akin to < pretty > ?" --family lexical
      pgra memory list --memory memory.sqlite
      pgra memory lab stream --stream linguistic_300.jsonl --lm bundled:smollm2-135m
      pgra memory chat --lm bundled:smollm2-135m
    """
    length = 2 if words[:1] == ["lab"] else 1
    word = " ".join(words[:length])
    if word in ("", "lab") or wants_help(word.split()[-1:]):
        functions = {
            name: about(function)["description"] for name, (function, *_) in _WORDS.items()
        }
        HelpParser("pgra memory", **about(main), words=functions).show()
        return 0
    choose("word after pgra memory", word, _WORDS)
    function, usage, *classes = _WORDS[word]
    texts = list(takewhile(lambda text: not text.startswith("--"), words[length:]))
    prog = f"pgra memory {word} {usage}".strip()
    groups = parse(function, classes, words[length + len(texts) :], prog)
    names = usage.split()
    least = sum(not name.startswith("[") for name in names)
    if len(texts) < least or (len(texts) > len(names) and not usage.endswith(("...", "...]"))):
        raise ConfigError(f"give {prog}, each text in quotes")
    if classes == [MemoryArguments]:
        with groups[0].open(create=word in ("add", "import")) as memory:
            say(f"{memory.path}: {function(memory, *texts)}")
    else:
        function(*groups, *texts)
    return 0


# The memory itself.


@dataclass(kw_only=True)
class MemoryArguments(Arguments):
    """Which memory, and whose part of it."""

    memory: str = arg("memory.sqlite", "The memory's file; add, import and chat make it.")
    user: str = arg(
        "", "A user's: what is added is found for their questions alone, beside what all share."
    )

    def open(self, *, create: bool = False) -> Memory:
        return Memory(self.memory, user=self.user, create=create)

    def open_for(
        self, lookup: LookupArguments, family: Family | None, device: str, *, create: bool
    ) -> Memory:
        """Open it with the look-up and the gate that suit a family of questions."""
        lookup = lookup.resolve(family)
        return Memory(
            self.memory,
            lookup=load_lookup(lookup, Context(device=device), self.user),
            threshold=lookup.threshold,
            user=self.user,
            create=create,
            admin=False,
        )


@dataclass(kw_only=True)
class ListArguments(MemoryArguments):
    """What is shown."""

    log: bool = arg(False, "Show every event instead of what is in the memory now.")
    verify: bool = arg(False, "Read every byte, and compare the entries with the log.")


@dataclass(kw_only=True)
class FamilyArguments(Arguments):
    """Of which family questions are, where it may be none."""

    family: str | None = arg(
        None,
        "Name of a YAML in configs/memory, or the path of one; default: questions of any kind.",
    )
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, ...")

    def load_family(self) -> Family | None:
        return None if self.family is None else load_family(self.family)


@dataclass(kw_only=True)
class MemorySearchArguments(FamilyArguments, LookupArguments):
    """What is searched for."""

    k: int = arg(3, "Entries shown.", least=1)


def _add(memory: Memory, question: str, feedback: str) -> str:
    """Write what was meant by a question that was misunderstood."""
    return f"noted, as entry {memory.add(question, feedback).id}"


def _list(args: ListArguments) -> None:
    """Show a memory."""
    with args.open() as memory:
        if args.verify:
            memory.verify()
            say(f"{args.memory}: whole: {len(memory.events()):,} events, {len(memory):,} entries")
        for event in memory.events() if args.log else memory:
            names = [event.time[:19], event.source, visible(event.user)]
            kind = f"{event.kind} " if args.log else ""
            texts = "" if event.kind == "erase" else show_entry(event)
            say(f"{event.id:>6}  {'  '.join(filter(None, names))}  {kind}{texts}".rstrip())


def _search(where: MemoryArguments, args: MemorySearchArguments, question: str) -> None:
    """Show which feedback a question would get."""
    quiet_libraries()
    with where.open_for(args, args.load_family(), args.device, create=False) as memory:
        matches = memory.search(question, args.k, threshold=-math.inf)
        near = len(passing(matches, memory.threshold))
    for rank, match in enumerate(matches):
        use = "passes" if rank < near else "too far"
        say(f"{match.score:9.4f}  {use:<7}  entry {match.id}  {show_entry(match)}")
    if not matches:
        say("nothing found")


def _update(memory: Memory, entry_id: str, feedback: str) -> str:
    """Replace the feedback of an entry."""
    entry = memory.update(entry_number(entry_id), feedback)
    return f"entry {entry_id} is now entry {entry.id}: {show_entry(entry)}"


def _delete(memory: Memory, *ids: str) -> str:
    """Take entries out of the memory."""
    count = memory.delete(*map(entry_number, ids))
    return f"{count:,} deleted, {len(memory):,} entries left"


def _erase(memory: Memory, *ids: str) -> str:
    """Take entries out of the log too, for ever.

    Examples:
      pgra memory erase 7
      pgra memory erase --user anna

    All that was ever said of the entry's question by its user goes, and without entries all that
    the user ever said: no byte of the texts is left in the memory's files or in its vectors, and
    the log says when they were erased. Files that were written from it (exports, copies, runs) are
    yours to delete.
    """
    count = memory.erase(*map(entry_number, ids)) if ids else memory.erase_all()
    return f"{count:,} events erased, {len(memory):,} entries left"


def _export(memory: Memory, file: str) -> str:
    """Write the log to a jsonl file."""
    return f"{memory.export(file):,} events are in {file}"


def _import(memory: Memory, file: str) -> str:
    """Append the events of a jsonl file or of a memory; those that are there already are skipped.

    Examples:
      pgra memory import log.jsonl
      pgra memory import damaged.sqlite --memory new.sqlite

    Of a damaged memory all events that are left are read; it stays as it is.
    """
    count = memory.import_(file)
    return f"{count:,} events added; {len(memory):,} entries"


# The paper's experiments.


def _stream(args: StreamArguments, lookup: LookupArguments) -> None:
    r"""Ask a stream of questions with a simulated user, with and without a memory.

    Examples:
      pgra memory lab stream --family lexical --stream linguistic_300.jsonl \
          --lm bundled:smollm2-135m --clarification_probabilities 0.5 1 --seeds 0 1 2
      pgra memory lab stream --family lexical --stream linguistic_300.jsonl --prefix kate \
          --prefix_examples 4 --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
    """
    family = load_family(args.family)
    lookup = lookup.resolve(family, is_encoder_shared=args.prefix == "kate")
    streams = {seed: args.read_questions(family, seed) for seed in args.seeds}
    quiet_libraries()
    lm = args.open_lm()
    if args.prefix == "kate":
        questions = [step.question for step in chain(*streams.values())]
        lm = replace(lm, few_shot=choose_examples(lm.few_shot, questions, args, lookup))
    experiment = Experiment(
        folder=Path(args.output_dir or f"runs/memory-{family.name}"),
        lm=lm,
        open_lookup=load_lookup(lookup, args.context),
        threshold=lookup.threshold,
    )
    results = experiment.run(streams, args.plan())
    say(write_report(experiment.folder, family, results).rstrip())
    say(f"\n{experiment.folder}: report.md, and a folder for each stream")


# A person with an LM.


@contextlib.contextmanager
def open_conversation(
    where: MemoryArguments, chat: PromptedArguments, lookup: LookupArguments
) -> Iterator[Conversation]:
    """Open an LM, if one is named, and the memory that it is asked with."""
    quiet_libraries()
    family = load_family(chat.family)
    with where.open_for(lookup, family, chat.device, create=True) as memory:
        yield Conversation(chat.open_lm() if chat.lm else None, memory)


def _chat(where: MemoryArguments, chat: PromptedArguments, lookup: LookupArguments) -> None:
    r"""Ask an LM, see what it understood, say what you meant, and ask again.

    Type a question, or
      /add TEXT      say what you meant by the last question; it is noted, and asked again
      /delete ID ... take entries out of the memory
      /list          what is in the memory
      /prompt        what the LM read last
      /quit          leave (or Ctrl-D)

    Examples:
      pgra memory chat --lm bundled:smollm2-135m
      printf 'what is akin to < pretty > ?\n/add I want a synonym\n' | \
          pgra memory chat --lm MODEL
    """

    def read_lines() -> Iterator[str]:
        for line in typed_lines():
            if not sys.stdin.isatty():
                say(f"> {visible(line)}")
            yield line

    chat.check_named()
    with open_conversation(where, chat, lookup) as conversation:
        say(f"{where.memory}: {len(conversation.memory):,} entries; LM {chat.lm}")
        say("type a question, /add TEXT, /delete ID, /list, /prompt or /quit")
        talk(conversation, read_lines(), say, is_watched=sys.stdin.isatty())


# By word: its function, what stands before its flags, and its arguments' classes.
_WORDS: Mapping[str, tuple[Any, ...]] = {
    "add": (_add, "QUESTION FEEDBACK", MemoryArguments),
    "list": (_list, "", ListArguments),
    "search": (_search, "QUESTION", MemoryArguments, MemorySearchArguments),
    "update": (_update, "ID FEEDBACK", MemoryArguments),
    "delete": (_delete, "ID...", MemoryArguments),
    "erase": (_erase, "[ID...]", MemoryArguments),
    "export": (_export, "FILE", MemoryArguments),
    "import": (_import, "FILE", MemoryArguments),
    "chat": (_chat, "", MemoryArguments, PromptedArguments, LookupArguments),
    "lab stream": (_stream, "", StreamArguments, LookupArguments),
}
