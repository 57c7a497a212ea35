"""A memory of what users corrected: `pgra memory add|list|search|update|delete|...|stream`.

A word's docstring is its help. torch is imported where it is needed: listing loads none.
"""

import contextlib
import math
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pgra.commands.common import about, quiet_libraries, say, say_words, typed_lines
from pgra.config import Arguments, arg, choose, parse_arguments, wants_help
from pgra.core import Context
from pgra.errors import ConfigError, visible
from pgra.memory import GeneratorArguments, SimilarityArguments
from pgra.memory.chat import Conversation, Talk, TalkingLMArguments, load_conversation, show_entry
from pgra.memory.experiment import Experiment, StreamArguments, choose_examples
from pgra.memory.families import Family, load_family, load_few_shot
from pgra.memory.log import MemoryEntry
from pgra.memory.lookup import LookupArguments, load_lookup, passing
from pgra.memory.memory import Memory
from pgra.memory.report import choose_threshold, write_report
from pgra.memory.stream import PromptedArguments, read_pairs, read_stream

_AHEAD = 16  # questions that an LM here is asked together
_LOOPBACK = ("127.0.0.1", "localhost")
_PATIENCE = 10  # seconds that a question which is under way has after Ctrl-C
_FAMILY = "Name of a YAML in configs/memory, or the path of one."


Parse = Callable[..., Any]  # reads a word's argument classes; see `_parse`


def main(argv: Sequence[str] | None = None) -> int:
    """Keep what users corrected, and use it on the next like question.

    Examples:
      pgra memory add "what is akin to < fast > ?" "when I ask for akin to, I want a synonym"
      pgra memory search "what is akin to < pretty > ?" --family lexical
      pgra memory list --memory memory.sqlite
      pgra memory stream --family lexical --stream linguistic_300.jsonl --lm bundled:smollm2-135m
      pgra memory chat --lm bundled:smollm2-135m
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or wants_help(words[:1]):
        say_words("pgra memory", main, _WORDS)
        return 0
    choose("word after pgra memory", words[0], _WORDS)
    _WORDS[words[0]](partial(_parse, words[0], words[1:]))
    return 0


def _parse(
    word: str,
    words: Sequence[str],
    *classes: type,
    bare: Sequence[str] = (),
    needs: Sequence[str] = (),
    may_lack: Sequence[str] = (),
) -> Any:
    """Read a word's arguments; those in `bare` may come first without names, and are needed."""
    count = next((i for i, text in enumerate(words) if text.startswith("--")), len(words))
    if bare == ("ids",):  # any number of them
        words, count = (["--ids", *words] if count else list(words)), 0
    if count > len(bare):
        raise ConfigError(f"'{words[len(bare)]}' is one text too many: put each in quotes")
    named = [f"--{name}={text}" for name, text in zip(bare, words[:count], strict=False)]
    texts = about(_WORDS[word])
    texts["epilog"] = texts["epilog"] or about(main)["epilog"]
    given = [*named, *words[count:]]
    parsed = parse_arguments(list(classes), given, prog=f"pgra memory {word}", **texts)
    values = {name: value for group in parsed for name, value in vars(group).items()}
    for name in (*bare, *needs):
        if name not in may_lack and not str(values[name] or "").strip():
            usage = [*(f'"{n.upper()}"' for n in bare), *(f"--{n} {n.upper()}" for n in needs)]
            raise ConfigError(f"{name} is missing: pgra memory {word} {' '.join(usage)}")
    return parsed


# The memory itself.


@dataclass(kw_only=True)
class MemoryArguments(Arguments):
    """Which memory, and whose part of it."""

    memory: str = arg("memory.sqlite", "The memory's file; add, import, chat and web make it.")
    user: str = arg(
        "",
        "Whose entries: a user's, a group's or a project's. What is added is found for this user's "
        "questions alone, beside what all share. Default: everyone's; what is added is for all.",
    )

    def open(
        self,
        lookup: LookupArguments | None = None,
        family: Family | None = None,
        device: str = "auto",
        **more: Any,
    ) -> Memory:
        """Open it, with the look-up and the gate that suit a family of questions."""
        how = (lookup or LookupArguments()).settle(family)
        open_lookup = load_lookup(how, Context(device=device), self.user)
        own = {"threshold": how.gate_of(family), "user": self.user, "create": False, **more}
        return Memory(self.memory, lookup=open_lookup, **own)


@dataclass(kw_only=True)
class WriterArguments(MemoryArguments):
    """Which memory, and who writes."""

    source: str = arg("user", "Who says it.")

    def open(self, *how: Any, **more: Any) -> Memory:
        return super().open(*how, source=self.source, **more)


@dataclass(kw_only=True)
class FamilyArguments(Arguments):
    """Of which family questions are, where it may be none."""

    family: str | None = arg(
        None,
        f"{_FAMILY} A file of pairs is a stream of it; default: questions of any kind.",
    )

    def load_family(self) -> Family | None:
        return None if self.family is None else load_family(self.family)


@dataclass(kw_only=True)
class AddArguments(WriterArguments):
    """What is added."""

    question: str | None = arg(None, "What was misunderstood; it may also stand first, bare.")
    feedback: str | None = arg(None, "What was meant; it may stand second.")


@dataclass(kw_only=True)
class ListArguments(MemoryArguments):
    """What is shown."""

    log: bool = arg(False, "Show every event instead of what is in the memory now.")
    verify: bool = arg(False, "Read every byte, and compare the entries with the log.")


@dataclass(kw_only=True)
class MemorySearchArguments(FamilyArguments, LookupArguments):
    """What is searched for."""

    question: str | None = arg(None, "A question; it may also stand first, bare.")
    k: int = arg(3, "Entries shown.", least=1)
    device: str = arg("auto", "Where the encoder runs.")


@dataclass(kw_only=True)
class ChangeArguments(WriterArguments):
    """Which entries change."""

    ids: list[int] = arg([], "Entries, as pgra memory list shows them; they may also stand first.")


@dataclass(kw_only=True)
class UpdateArguments(ChangeArguments):
    """Which entry is updated, and how."""

    feedback: str | None = arg(None, "What was meant; it may also stand second.")


@dataclass(kw_only=True)
class FileArguments(MemoryArguments):
    """Which memory, and which other file."""

    file: str | None = arg(None, "The file; it may also stand first, bare.")


def _add(parse: Parse) -> None:
    """Write what was meant by a question that was misunderstood."""
    (args,) = parse(AddArguments, bare=("question", "feedback"))
    with args.open(create=True) as memory:
        entry = memory.add(args.question, args.feedback)
    say(f"{args.memory}: noted, as entry {entry.id}")


def _list(parse: Parse) -> None:
    """Show a memory."""
    (args,) = parse(ListArguments)

    def show(event: MemoryEntry, kind: str = "") -> None:
        names = [event.time[:19], event.source, visible(event.user)]
        texts = "" if event.kind == "erase" else show_entry(event)
        say(f"{event.id:>6}  {'  '.join(filter(None, names))}  {kind}{texts}".rstrip())

    with args.open() as memory:
        if args.verify:
            memory.verify()
            say(f"{args.memory}: whole: {len(memory.events()):,} events, {len(memory):,} entries")
        if args.log:
            for event in memory.events():
                show(event, f"{event.kind} ")
        else:
            for entry in memory:
                show(entry)


def _search(parse: Parse) -> None:
    """Show which feedback a question would get."""
    where, args = parse(MemoryArguments, MemorySearchArguments, bare=("question",))
    family = args.load_family()
    most = family.num_remembered if family is not None and family.is_of_answers else 1
    quiet_libraries()
    with where.open(args, family, args.device) as memory:
        matches = memory.search(args.question, args.k, threshold=-math.inf)
        near = len(passing(matches, memory.threshold))
    for place, match in enumerate(matches):
        use = ("used" if place < most else "passes") if place < near else "too far"
        say(f"{match.score:9.4f}  {use:<7}  entry {match.id}  {show_entry(match)}")
    if not matches:
        say("nothing found")


def _update(parse: Parse) -> None:
    """Replace the feedback of an entry."""
    (args,) = parse(UpdateArguments, bare=("ids", "feedback"))
    if len(args.ids) != 1:
        raise ConfigError('name one entry: pgra memory update 7 "I mean ..."')
    with args.open() as memory:
        entry = memory.update(args.ids[0], args.feedback)
    say(f"{args.memory}: entry {args.ids[0]} is now entry {entry.id}: {show_entry(entry)}")


def _delete(parse: Parse) -> None:
    """Take entries out of the memory."""
    (args,) = parse(ChangeArguments, bare=("ids",))
    with args.open() as memory:
        memory.delete(*args.ids)
        say(f"{args.memory}: {len(args.ids):,} deleted, {len(memory):,} entries left")


def _erase(parse: Parse) -> None:
    """Take entries out of the log too, for ever.

    Examples:
      pgra memory erase 7
      pgra memory erase --user anna

    All that was ever said of the entry's question by its user goes, and without entries all that
    the user ever said: no byte of the texts is left in the memory's files or in its vectors, and
    the log says when they were erased. Files that were written from it (exports, copies, runs) are
    yours to delete.
    """
    (args,) = parse(ChangeArguments, bare=("ids",), may_lack=("ids",))
    with args.open() as memory:
        count = memory.erase(*args.ids) if args.ids else memory.erase_all()
        say(f"{args.memory}: {count:,} events erased, {len(memory):,} entries left")


def _export(parse: Parse) -> None:
    """Write the log to a jsonl file."""
    (args,) = parse(FileArguments, bare=("file",))
    with args.open() as memory:
        say(f"{args.file}: {memory.export(args.file):,} events")


def _import(parse: Parse) -> None:
    """Append the events of a jsonl file or of a memory; those that are there already are skipped.

    Examples:
      pgra memory import log.jsonl
      pgra memory import damaged.sqlite --memory new.sqlite

    Of a damaged memory all events that are left are read; it stays as it is.
    """
    (args,) = parse(FileArguments, bare=("file",))
    with args.open(create=True) as memory:
        count = memory.import_(args.file)
        say(f"{args.memory}: {count:,} events added; {len(memory):,} entries")


# The paper's experiments.


def _stream(parse: Parse) -> None:
    r"""Ask a stream of questions with a simulated user, with and without a memory.

    Examples:
      pgra memory stream --family lexical --stream linguistic_300.jsonl --lm bundled:smollm2-135m \
          --clarification_probabilities 0.5 1 --seeds 0 1 2
      pgra memory stream --family lexical --stream linguistic_300.jsonl --prefix kate \
          --prefix_examples 4 --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
      pgra memory stream --family hindi --stream hin_300.jsonl --dev_stream hin_dev.jsonl \
          --lookup encoder --encoder bundled:minilm-l6 --lm openai:MODEL
    """
    args, lookup, lm = parse(StreamArguments, LookupArguments, TalkingLMArguments)
    if args.dev_stream and lookup.threshold is not None:
        raise ConfigError("dev_stream chooses the threshold: leave out --threshold or --dev_stream")
    family = load_family(args.family)
    lookup = lookup.settle(family)
    few_shot = load_few_shot(args.prompt or family.prompt)
    streams = {seed: args.read_questions(family, seed) for seed in args.seeds}
    dev = read_stream(Path(args.dev_stream), family) if args.dev_stream else None
    quiet_libraries()
    if args.prefix == "kate":
        questions = [step.question for steps in streams.values() for step in steps]
        few_shot = choose_examples(few_shot, questions, args, lookup)
    open_lookup = load_lookup(lookup, args.context)
    gate = None if dev is None else choose_threshold(dev, open_lookup)
    experiment = Experiment(
        folder=Path(args.output_dir or f"runs/memory-{family.name}"),
        family=family,
        lm=args.open_lm(few_shot, lm),
        num_ahead=1 if lm.is_remote else _AHEAD,
        open_lookup=open_lookup,
        threshold=lookup.gate_of(family) if gate is None else gate.threshold,
        max_added=args.max_added,
    )
    results = experiment.run(streams, args.plan())
    say(write_report(experiment.folder, family, results, gate=gate).rstrip())
    say(f"\n{experiment.folder}: report.md, and a folder for each stream")


# Models that are trained for a memory.


@dataclass(kw_only=True)
class PairsArguments(FamilyArguments):
    """Which questions with feedback, and where the model goes."""

    pairs: str | None = arg(
        None,
        "jsonl with question and feedback (and type), a log of pgra memory export, or a memory; "
        "it may also stand first, bare.",
    )
    output_dir: str | None = arg(None, "New folder of the model.")
    device: str = arg("auto", "auto (a GPU if there is one), cpu, cuda, ...")


def _train_gud_ir(parse: Parse) -> None:
    """Train a seq2seq model to write the feedback that a question may need.

    Examples:
      pgra memory train-gud-ir pairs.jsonl --model bundled:t5-small-titles --output_dir gud-ir
      pgra memory search "what is akin to < pretty > ?" --lookup gud-ir --generator gud-ir
    """
    flags = "--lookup gud-ir --generator {folder}"
    _train_on_pairs(parse, GeneratorArguments, "train_generator", flags)


def _train_similarity(parse: Parse) -> None:
    r"""Train an encoder whose cosines of questions follow those of their feedback.

    Examples:
      pgra memory train-similarity pairs.jsonl --encoder bundled:minilm-l6 --output_dir similar
      pgra memory search "what is akin to < pretty > ?" --family lexical --lookup encoder \
          --encoder similar
    """
    flags = "--lookup encoder --encoder {folder} --key_form {key_form}"
    _train_on_pairs(parse, SimilarityArguments, "train_encoder", flags)


def _train_on_pairs(parse: Parse, arguments: type, function: str, flags: str) -> None:
    """Train a model for a look-up; `flags` are those that use it."""
    args, how = parse(PairsArguments, arguments, bare=("pairs",), needs=("output_dir",))
    quiet_libraries()
    from pgra.memory import train as training

    train = getattr(training, function)
    pairs = read_pairs(Path(args.pairs), args.load_family())
    done = train(pairs, Path(args.output_dir), how, Context(device=args.device))
    say(f"{done.folder}: {len(pairs):,} pairs, {done.steps:,} steps, {done.seconds:.0f} s")
    flags = flags.format(folder=done.folder, **vars(how))
    say(f"mean loss {done.train_loss:.4f}; look up with {flags}")


# A person with an LM.


@dataclass(kw_only=True)
class WebArguments(Arguments):
    """Where the page is."""

    host: str = arg("127.0.0.1", "Address that is listened at; by default for this machine alone.")
    port: int = arg(7860, "Its port; 0 takes any that is free.", least=0, below=65_536)


def _chat(parse: Parse) -> None:
    r"""Ask an LM, see what it understood, say what you meant, and ask again.

    Type a question, or one of the commands that /help lists.

    Examples:
      pgra memory chat --lm bundled:smollm2-135m
      printf 'what is akin to < pretty > ?\n/add I want a synonym\n' | \
          pgra memory chat --lm MODEL
    """
    where, *how = parse(WriterArguments, PromptedArguments, LookupArguments, TalkingLMArguments)
    with _conversation(where, *how) as conversation:
        say(f"{where.memory}: {len(conversation.memory):,} entries; {conversation.about}")
        say("/help lists what can be typed")
        Talk(conversation, say, is_watched=sys.stdin.isatty()).run(read_lines())


@contextlib.contextmanager
def _conversation(
    where: WriterArguments, chat: PromptedArguments, lookup: LookupArguments, lm: TalkingLMArguments
) -> Iterator[Conversation]:
    """Open the memory and then the LM, which takes longer."""
    quiet_libraries()
    family = load_family(chat.family)
    with where.open(lookup, family, chat.device, create=True, admin=False) as memory:
        yield load_conversation(memory, family, chat, lm)


def read_lines() -> Iterator[str]:
    """Yield what is typed or piped; piped lines are shown."""
    for line in typed_lines():
        if not sys.stdin.isatty():
            say(f"> {visible(line)}")
        yield line


def _web(parse: Parse) -> None:
    """Ask an LM in a browser, see what it understood, say what you meant, and ask again.

    Examples:
      pgra memory web --lm bundled:smollm2-135m
    """
    classes = (WriterArguments, PromptedArguments, LookupArguments, TalkingLMArguments)
    *how, web = parse(*classes, WebArguments)
    try:
        import uvicorn

        from pgra.memory.web import MemoryPage
    except ImportError as error:
        raise ConfigError(
            f"the page needs {error.name}: pip install 'pgra[web]', or use pgra memory chat"
        ) from None
    try:
        listener = socket.create_server((web.host, web.port))  # before the LM is loaded
    except OSError as error:
        raise ConfigError(
            f"cannot listen at {web.host}:{web.port} ({error.strerror}): give another --port (0 "
            "takes any that is free), or an address of this machine as --host"
        ) from None
    with listener, _conversation(*how) as conversation:
        page = MemoryPage(conversation)
        hosts = _LOOPBACK if web.host in _LOOPBACK else ("*",)
        config = uvicorn.Config(
            page.app(hosts),
            log_level="warning",
            lifespan="off",
            timeout_graceful_shutdown=_PATIENCE,
        )
        say(page.about)
        say(f"open http://{web.host}:{listener.getsockname()[1]}/ in a browser; Ctrl-C ends it")
        if hosts == ("*",):
            say("note: whoever reaches this address can read and change the memory")
        with contextlib.closing(page), contextlib.suppress(KeyboardInterrupt):
            uvicorn.Server(config).run(sockets=[listener])  # what is under way is answered first


_WORDS: Mapping[str, Callable[[Parse], None]] = {
    "add": _add,
    "list": _list,
    "search": _search,
    "update": _update,
    "delete": _delete,
    "erase": _erase,
    "export": _export,
    "import": _import,
    "stream": _stream,
    "chat": _chat,
    "web": _web,
    "train-gud-ir": _train_gud_ir,
    "train-similarity": _train_similarity,
}
