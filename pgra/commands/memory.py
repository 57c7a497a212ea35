"""A memory of what users corrected: `pgra memory add|list|lookup|correct|forget|...|stream`."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pgra.arguments import parse_arguments
from pgra.commands.common import quiet_libraries, say
from pgra.commands.memory_arguments import (
    AddArguments,
    ChangeArguments,
    FileArguments,
    ListArguments,
    MemoryArguments,
    QuestionArguments,
)
from pgra.errors import ConfigError, unknown_name
from pgra.memory.events import Entry, Event
from pgra.memory.exchange import export_log, import_events, read_events
from pgra.memory.keys import find_collisions
from pgra.memory.log import FeedbackLog
from pgra.memory.opening import lookup_opener
from pgra.memory.salvage import salvage

HELP = """usage: pgra memory COMMAND [--help]

commands:
  add        write what was meant by a question that was misunderstood
  list       what is in the memory; --log shows every event, --verify reads everything
  lookup     which feedback a question would get, and whether it passes the gate
  correct    replace the feedback of an entry
  forget     take entries out; the log keeps what they were
  export     write the log to a jsonl file
  import     append the events of a jsonl file, all or none
  salvage    read what is left of a damaged memory into a new one
  gate       how often a look-up finds right and wrong feedback, on questions of known type
  finetune   teach a small LM to do what clarifications ask for
  stream     the paper's experiment: a simulated user, with and without a memory

examples:
  pgra memory add "what is akin to < fast > ?" "when I ask for akin to, I want a synonym"
  pgra memory lookup "what is akin to < pretty > ?"
  pgra memory list --memory memory.sqlite
  pgra memory stream --family lexical --stream linguistic_300.jsonl --lm bundled:smollm2-135m
"""
_NEAR = 3  # entries of near keys that are told of
_COMPARED = 10_000  # entries a new one is compared with; of larger memories list --collisions tells


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the words after `pgra memory`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        say(HELP.rstrip())
        return 0
    if words[0] not in _WORDS:
        raise ConfigError(unknown_name("word after pgra memory", words[0], _WORDS))
    return _WORDS[words[0]](words[1:])


def _parse(
    words: Sequence[str], classes: Sequence[type], names: Sequence[str], *, word: str, about: str
) -> Any:
    """Read arguments, of which the first may stand bare, in the order of `names`."""
    bare = next((i for i, told in enumerate(words) if told.startswith("--")), len(words))
    if bare > len(names):
        raise ConfigError(f"'{words[len(names)]}' is one text too many: put each in quotes")
    named = [part for pair in zip(names, words[:bare], strict=False) for part in pair]
    prog = f"pgra memory {word}"
    told = [*named, *words[bare:]]
    return parse_arguments(
        [MemoryArguments, *classes], told, prog=prog, description=about, epilog=HELP
    )


def _add(words: Sequence[str]) -> int:
    memory, args = _parse(
        words,
        [AddArguments],
        ("--question", "--feedback"),
        word="add",
        about="Write what was meant by a question that was misunderstood.",
    )
    whose = {"source": args.source, "task": args.task}
    # Refused here, before a memory is made.
    Event(kind="write", key=args.question, feedback=args.feedback, time="", **whose)
    with FeedbackLog.open(Path(memory.memory)) as log:
        entry = log.write(args.question, args.feedback, **whose)
        say(f"{memory.memory}: noted, as entry {entry.id} of {len(log):,}")
        if len(log) <= _COMPARED:
            _say_collisions([one for one in log.entries() if one.task == entry.task], entry)
    return 0


def _say_collisions(others: Sequence[Entry], entry: Entry) -> None:
    pairs = (([one, entry], one) for one in others if one.id != entry.id)
    near = [
        (found[0].distance, one)
        for both, one in pairs
        if (found := find_collisions([e.key for e in both], [e.feedback for e in both]))
    ]
    for distance, one in sorted(near, key=lambda pair: (pair[0], -pair[1].id))[:_NEAR]:
        say(
            f"note: entry {one.id} has a key at edit distance {distance} and another feedback, so "
            f"that one may be found for the other: {_shown(one)}"
        )


def _shown(entry: Entry) -> str:
    """Show a key and its feedback in full, each in quotes, so that it is seen where they end."""
    key, feedback = (json.dumps(text, ensure_ascii=False) for text in (entry.key, entry.feedback))
    return f"{key} -> {feedback}"


def _list(words: Sequence[str]) -> int:
    memory, args = _parse(words, [ListArguments], (), word="list", about="Show a memory.")
    with FeedbackLog.open(Path(memory.memory), is_writable=False) as log:
        if args.verify:
            log.verify()
            say(f"{memory.memory}: whole: {log.last_id:,} events, {len(log):,} entries")
        if args.log:
            for event in log.events():
                told = f" -> {json.dumps(event.feedback, ensure_ascii=False)}"
                say(f"{event.id:>6}  {_origin(event)}  {event.kind} {_key(event)}{told}")
        elif args.collisions:
            _list_collisions(list(log.entries()))
        else:
            for entry in log.entries():
                say(f"{entry.id:>6}  {_origin(entry)}  {_shown(entry)}")
    return 0


def _key(event: Any) -> str:
    return json.dumps(event.key, ensure_ascii=False)


def _origin(one: Any) -> str:
    return "  ".join(part for part in (one.time[:19], one.source, one.task) if part)


def _list_collisions(entries: Sequence[Entry]) -> None:
    keys, meanings = [one.key for one in entries], [one.feedback for one in entries]
    found = find_collisions(keys, meanings)
    for pair in found:
        one, other = entries[pair.first], entries[pair.second]
        say(f"distance {pair.distance}: entry {one.id} {_shown(one)}")
        say(f"            entry {other.id} {_shown(other)}")
    say(f"{len(found):,} pairs of near keys with different feedback")


def _lookup(words: Sequence[str]) -> int:
    memory, args = _parse(
        words,
        [QuestionArguments],
        ("--question",),
        word="lookup",
        about="Show which feedback a question would get.",
    )
    quiet_libraries()
    # Vectors are written beside it, so that it must be writable for an encoder's look-up only.
    with FeedbackLog.open(Path(memory.memory), is_writable=False) as log:
        lookup = lookup_opener(args, device=args.device, task=args.task)(log)
        matches = lookup.find(args.question, args.num_matches)
    for place, match in enumerate(matches):
        passes = match.score >= args.gate
        told = ("used" if place == 0 else "passes") if passes else "too far"
        say(f"{match.score:9.4f}  {told:<7}  entry {match.entry.id}  {_shown(match.entry)}")
    if not matches:
        say("nothing found")
    return 0


def _correct(words: Sequence[str]) -> int:
    memory, args = _parse(
        words,
        [ChangeArguments],
        ("--ids", "--feedback"),
        word="correct",
        about="Replace the feedback of an entry.",
    )
    if len(args.ids) != 1 or args.feedback is None:
        raise ConfigError('name one entry and what was meant: pgra memory correct 7 "I mean ..."')
    with FeedbackLog.open(Path(memory.memory), may_make=False) as log:
        entry = log.correct(args.ids[0], args.feedback, source=args.source)
    say(f"{memory.memory}: entry {args.ids[0]} is now entry {entry.id}: {_shown(entry)}")
    return 0


def _forget(words: Sequence[str]) -> int:
    named = ["--ids", *words] if words and not words[0].startswith("--") else words
    memory, args = _parse(
        named, [ChangeArguments], (), word="forget", about="Take entries out of the memory."
    )
    if not args.ids:
        raise ConfigError("no entry is named: pgra memory forget 7 9")
    with FeedbackLog.open(Path(memory.memory), may_make=False) as log:
        log.forget(*args.ids, source=args.source)
        say(f"{memory.memory}: {len(args.ids):,} forgotten, {len(log):,} entries left")
    return 0


def _file(words: Sequence[str], *, word: str, about: str) -> Any:
    return _parse(words, [FileArguments], ("--file",), word=word, about=about)


def _export(words: Sequence[str]) -> int:
    memory, args = _file(words, word="export", about="Write the log to a jsonl file.")
    with FeedbackLog.open(Path(memory.memory), is_writable=False) as log:
        count = export_log(log, Path(args.file))
    say(f"{args.file}: {count:,} events")
    return 0


def _import(words: Sequence[str]) -> int:
    memory, args = _file(words, word="import", about="Append the events of a jsonl file.")
    events = read_events(Path(args.file))  # before a memory is made
    with FeedbackLog.open(Path(memory.memory)) as log:
        count = import_events(log, events)
        told = f"{count:,} events added, {len(events) - count:,} were there"
        say(f"{memory.memory}: {told}; {len(log):,} entries")
    return 0


def _salvage(words: Sequence[str]) -> int:
    _, args = _file(words, word="salvage", about="Read what is left of a damaged memory.")
    if args.output is None:
        raise ConfigError("salvage needs a new file: pgra memory salvage OLD --output NEW.sqlite")
    found = salvage(Path(args.file), Path(args.output))
    say(f"{args.output}: {found.kept:,} events of {args.file} were read whole")
    if found.lost:
        shown = ", ".join(map(str, found.lost[:20])) + (", ..." if len(found.lost) > 20 else "")
        say(f"lost: {len(found.lost):,} events, with these numbers: {shown}")
    say("what was written after the last of them, if anything, is not known of")
    return 0


def _stream(words: Sequence[str]) -> int:
    code: int = import_module("pgra.commands.memory_stream").main(words)
    return code


def _finetune(words: Sequence[str]) -> int:
    code: int = import_module("pgra.commands.memory_finetune").main(words)
    return code


def _gate(words: Sequence[str]) -> int:
    code: int = import_module("pgra.commands.memory_gate").main(words)
    return code


_WORDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "add": _add,
    "list": _list,
    "lookup": _lookup,
    "correct": _correct,
    "forget": _forget,
    "export": _export,
    "import": _import,
    "salvage": _salvage,
    "gate": _gate,
    "finetune": _finetune,
    "stream": _stream,
}
