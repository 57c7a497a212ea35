"""A memory of what users corrected: `pgra memory add|list|lookup|correct|forget|...|stream`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from pgra.commands.common import quiet_libraries, say
from pgra.commands.memory_arguments import (
    AddArguments,
    ChangeArguments,
    FamilyArguments,
    FileArguments,
    ListArguments,
    MemoryArguments,
    QuestionArguments,
)
from pgra.config import parse_arguments
from pgra.errors import ConfigError, unknown_name
from pgra.memory.families import Family, load_family
from pgra.memory.log import (
    Event,
    FeedbackLog,
    export_log,
    import_events,
    read_events,
    salvage,
)
from pgra.memory.lookup import (
    find_collisions,
    find_near,
    lookup_opener,
    passing,
    show_entry,
    show_near,
)

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
  chat       ask an LM, see what it understood and which memory it used, correct it, ask again
  web        the same as a page in your browser
  labels     what corrected labels are worth to a finished run, by a simulated user
  score      how many outputs in a file understood their question
  train-gud-ir      a model that writes the feedback a question may need, for --lookup gud-ir
  train-similarity  an encoder whose questions are as near as their feedback

examples:
  pgra memory add "what is akin to < fast > ?" "when I ask for akin to, I want a synonym"
  pgra memory lookup "what is akin to < pretty > ?" --family lexical
  pgra memory add "So bad it is good." positive --task sst2
  pgra memory list --memory memory.sqlite
  pgra memory stream --family lexical --stream linguistic_300.jsonl --lm bundled:smollm2-135m
  pgra memory chat --lm bundled:smollm2-135m
"""


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
    is_relative = not _follows_release(args)
    with FeedbackLog.open(Path(memory.memory)) as log:
        entry = log.write(args.question, args.feedback, **whose)
        say(f"{memory.memory}: noted, as entry {entry.id} of {len(log):,}")
        for near in find_near(log, entry, is_relative=is_relative):
            say(show_near(near))
    return 0


def _family(args: FamilyArguments) -> Family | None:
    return None if args.family is None else load_family(args.family)


def _follows_release(args: FamilyArguments) -> bool:
    family = _family(args)
    return family is not None and family.follows_release


def _list(words: Sequence[str]) -> int:
    memory, args = _parse(words, [ListArguments], (), word="list", about="Show a memory.")
    is_relative = not _follows_release(args)
    with FeedbackLog.open(Path(memory.memory), is_writable=False) as log:
        if args.verify:
            log.verify()
            say(f"{memory.memory}: whole: {log.last_id:,} events, {len(log):,} entries")
        if args.log:
            for event in log.events():
                told = f"{event.kind} {show_entry(event)}"
                say(f"{event.id:>6}  {_origin(event)}  {told}")
        elif args.collisions:
            _list_collisions(list(log.entries()), is_relative=is_relative)
        else:
            for entry in log.entries():
                say(f"{entry.id:>6}  {_origin(entry)}  {show_entry(entry)}")
    return 0


def _origin(one: Any) -> str:
    return "  ".join(part for part in (one.time[:19], one.source, one.task) if part)


def _list_collisions(entries: Sequence[Event], *, is_relative: bool) -> None:
    keys, meanings = [one.key for one in entries], [one.feedback for one in entries]
    found = find_collisions(keys, meanings, is_relative=is_relative)
    for pair in found:
        one, other = entries[pair.first], entries[pair.second]
        say(f"distance {pair.distance}: entry {one.id} {show_entry(one)}")
        say(f"            entry {other.id} {show_entry(other)}")
    say(f"{len(found):,} pairs of near keys with different feedback")


def _lookup(words: Sequence[str]) -> int:
    memory, args = _parse(
        words,
        [QuestionArguments],
        ("--question",),
        word="lookup",
        about="Show which feedback a question would get.",
    )
    family = _family(args)
    settled = args.settle(family)
    gate = settled.gate_of(family)
    most = family.num_remembered if family is not None and family.is_of_answers else 1
    quiet_libraries()
    # Vectors are written beside it, so that it must be writable for an encoder's look-up only.
    with FeedbackLog.open(Path(memory.memory), is_writable=False) as log:
        lookup = lookup_opener(settled, device=args.device, task=args.task)(log)
        matches = lookup.find(args.question, args.num_matches)
    near = len(passing(matches, gate))
    for place, match in enumerate(matches):
        told = ("used" if place < most else "passes") if place < near else "too far"
        say(f"{match.score:9.4f}  {told:<7}  entry {match.entry.id}  {show_entry(match.entry)}")
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
    say(f"{memory.memory}: entry {args.ids[0]} is now entry {entry.id}: {show_entry(entry)}")
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


def _command(name: str, function: str = "main") -> Callable[[Sequence[str]], int]:
    """Give what runs a word of a module of its own, which is imported when it is called."""

    def run(words: Sequence[str]) -> int:
        module = import_module(f"pgra.commands.memory_{name}")
        code: int = getattr(module, function)(words)
        return code

    return run


_WORDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "add": _add,
    "list": _list,
    "lookup": _lookup,
    "correct": _correct,
    "forget": _forget,
    "export": _export,
    "import": _import,
    "salvage": _salvage,
    "gate": _command("gate"),
    "finetune": _command("finetune"),
    "stream": _command("stream"),
    "chat": _command("chat"),
    "web": _command("web"),
    "labels": _command("labels"),
    "score": _command("score"),
    "train-gud-ir": _command("train", "train_gud_ir"),
    "train-similarity": _command("train", "train_similarity"),
}
