"""Everything about the first stage's index: `pgra index build|info|verify|search|add|remove`."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import quiet_libraries, say
from pgra.commands.search import SearchArguments, TextArguments
from pgra.config import CorpusArguments, RetrieverArguments, RuntimeArguments, parse_arguments
from pgra.errors import ArtifactError, ConfigError, DataError, unknown_name

if TYPE_CHECKING:
    from pgra.artifacts import Manifest
    from pgra.core import Candidates
    from pgra.data.corpus import Corpus


# Words what an index is, and what it finds: for `pgra index`.


_STAGES = {"dense_index": "dense", "bm25_index": "bm25"}


def describe_manifest(folder: Path, manifest: "Manifest") -> str:
    """Word what an index says of itself."""
    counts: Mapping[str, Any] = manifest.counts
    made = manifest.fingerprint
    recipe: Mapping[str, Any] = counts.get("recipe") or {"corpus": {}, "retriever": {}}
    names = recipe["corpus"].get("corpus", "not told")
    bytes_ = sum(int(record["bytes"]) for record in manifest.files.values())
    told: list[tuple[str, object]] = [
        ("kind", _STAGES.get(manifest.stage, manifest.stage)),
        ("corpus", names if isinstance(names, str) else ", ".join(names)),
        ("corpus sha256", made.get("corpus_sha256")),
        ("rows", f"{counts['rows']:,}"),
        ("removed", f"{counts['removed']:,}" if "removed" in counts else None),
        ("encoder", recipe["retriever"].get("encoder") if "encoder" in made else None),
        ("weights", made.get("encoder")),
        ("pooling", made.get("pooling")),
        ("tokens read", made.get("max_tokens")),
        ("cut", f"{counts['cut']:,} passages" if "cut" in counts else None),
        ("width", counts.get("dim")),
        ("words", counts.get("words")),
        ("type", made.get("factory")),
        ("trained on", _trained(counts)),
        ("recall", _recall(counts)),
        ("bytes", f"{bytes_:,} in {len(manifest.files)} files"),
        ("made", f"{manifest.created}, in {manifest.seconds:,.1f} s"),
        ("by", ", ".join(f"{name} {number}" for name, number in manifest.versions.items())),
    ]
    lines = [f"  {name:<14} {value}" for name, value in told if value is not None]
    return "\n".join([f"index: {folder}", *lines])


def _trained(counts: Mapping[str, Any]) -> str | None:
    rows = counts.get("trained_rows")
    return None if rows is None else f"a sample of the first {rows:,} rows, before it grew"


def _recall(counts: Mapping[str, Any]) -> str | None:
    if counts.get("is_exact"):
        return "exact search of the float16 vectors"
    recall = counts.get("recall")
    return ", ".join(f"@{k} {share}" for k, share in recall.items()) if recall else None


def describe_ranks(texts: Sequence[str], candidates: "Candidates", corpus: "Corpus") -> str:
    """Word each text's candidates: rank, score, row and passage."""
    from pgra.core import MISSING_ROW

    lines = []
    for place, text in enumerate(texts):
        lines.append(text)
        pairs = zip(candidates.rows[place].tolist(), candidates.scores[place].tolist(), strict=True)
        found = [(row, score) for row, score in pairs if row != MISSING_ROW]
        lines += [
            f"  {rank:>4}  {score:9.4f}  row {row:<9} {corpus[row]}"
            for rank, (row, score) in enumerate(found, 1)
        ]
        lines += [] if found else ["  nothing found: no passage shares a word with it"]
    return "\n".join(lines)


HELP = """usage: pgra index [build|info|verify|search|add|remove] [--help]

commands:
  build      build an index of a corpus, or go on where that stopped (the default;
             the same as python -m index_build)
  info       what an index is: encoder, corpus, rows, type, recall, bytes, versions
  verify     read every byte of it, and of its corpus; exit code 1 names what is damaged
  search     the passages near a text: rank, score, row and text
  add        append the passages of further files; old shards and rows stay as they are
  remove     remove rows: no search gives them any more

An index is its folder, which may stand first, or what the arguments of build find.

examples:
  pgra index --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6
  pgra index info --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6
  pgra index verify DIR
  pgra index search DIR "a warm and funny film"
  pgra index add DIR --corpus more.txt
  pgra index remove DIR --rows 5 9
"""


_BUILD = [RuntimeArguments, CorpusArguments, RetrieverArguments]


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class AddArguments:
    """Which index grows, and by what."""

    index_dir: str | None = _arg(None, "The index; it may also stand first, bare.")
    corpus: list[str] = field(
        default_factory=list,
        metadata={"help": "Files whose passages are appended, read by the rules of the index's."},
    )

    def __post_init__(self) -> None:
        """Refuse to add nothing, or to nothing."""
        if self.index_dir is None:
            raise ConfigError("no index is named: pgra index add DIR --corpus MORE")
        if not self.corpus:
            raise ConfigError("there is nothing to add: pgra index add DIR --corpus MORE")


@dataclass(kw_only=True)
class RemoveArguments:
    """Which rows of which index."""

    index_dir: str | None = _arg(None, "The index; it may also stand first, bare.")
    rows: list[int] = field(
        default_factory=list,
        metadata={"help": "Rows to remove, as pgra index search shows them."},
    )
    rows_file: str | None = _arg(None, "A text file with one row a line, beside or for --rows.")

    def __post_init__(self) -> None:
        """Refuse to remove nothing, or from nothing."""
        if self.index_dir is None:
            raise ConfigError("no index is named: pgra index remove DIR --rows 5 9")
        if not self.rows and self.rows_file is None:
            raise ConfigError("no rows are named: pgra index remove DIR --rows 5 9")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one of the words after `pgra index`."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        if words[0] not in _WORDS:
            raise ConfigError(unknown_name("word after pgra index", words[0], _WORDS))
        return _WORDS[words[0]](words[1:])
    if words in (["--help"], ["-h"]):
        say(HELP.rstrip())
        return 0
    return _build(words)


def _build(words: Sequence[str]) -> int:
    code: int = import_module("index_build.__main__").main(words)
    return code


def _parse(words: Sequence[str], classes: Sequence[type], *, word: str, about: str) -> Any:
    prog = f"pgra index {word}"
    return parse_arguments(classes, words, prog=prog, description=about, epilog=HELP)


def _name_leading_index(words: Sequence[str]) -> list[str]:
    """Put --index_dir before a folder that stands first."""
    is_bare = words and not words[0].startswith("-")
    return ["--index_dir", *words] if is_bare else list(words)


def _info(words: Sequence[str]) -> int:
    from pgra.artifacts import load_manifest

    runtime, corpus, args = _parse(
        _name_leading_index(words), _BUILD, word="info", about="Say what an index is."
    )
    for folder in _find(runtime, corpus, args):
        say(describe_manifest(folder, load_manifest(folder)))
    return 0


def _verify(words: Sequence[str]) -> int:
    from pgra.retrieval.maintain import verify_index

    runtime, corpus, args = _parse(
        _name_leading_index(words),
        _BUILD,
        word="verify",
        about="Compare every byte of an index with what was written.",
    )
    is_whole = True
    for folder in _find(runtime, corpus, args):
        verdict = verify_index(folder)
        is_whole = is_whole and not verdict.damage
        told = "damaged" if verdict.damage else f"whole: {verdict.num_files} files as written"
        lines = [f"  damaged: {what}" for what in verdict.damage]
        lines += [f"  note: {note}" for note in verdict.notes]
        say("\n".join([f"{folder}: {told}", *lines]))
    return 0 if is_whole else 1


def _search(words: Sequence[str]) -> int:
    from pgra.retrieval import open_retriever

    texts, runtime, corpus_args, args = _parse(
        _name_index_and_texts(words),
        [TextArguments, RuntimeArguments, CorpusArguments, SearchArguments],
        word="search",
        about="Look up the passages near a text.",
    )
    if not texts.text:
        raise ConfigError('there is nothing to search with: pgra index search DIR "a text"')
    folder, *_ = _find(runtime, corpus_args, args)
    artifacts = Path(runtime.artifacts_dir)
    settled, corpus = _open(folder, artifacts)
    retriever = open_retriever(
        replace(settled, num_candidates=args.num_candidates),
        corpus,
        artifacts,
        device=runtime.device,
    )
    say(describe_ranks(texts.text, retriever.retrieve(texts.text, args.num_candidates), corpus))
    return 0


def _name_index_and_texts(words: Sequence[str]) -> list[str]:
    bare = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    first, rest = list(words[:bare]), list(words[bare:])
    named = ["--index_dir", first.pop(0)] if first and Path(first[0]).is_dir() else []
    return [*named, *(["--text", *first] if first else []), *rest]


def _add(words: Sequence[str]) -> int:
    from pgra.retrieval.maintain import add_passages

    build = import_module("index_build.__main__")
    runtime, args = _parse(
        _name_leading_index(words),
        [RuntimeArguments, AddArguments],
        word="add",
        about="Append the passages of further files to an index.",
    )
    quiet_libraries()
    was = _rows(Path(args.index_dir))
    grown = add_passages(
        Path(args.index_dir), args.corpus, Path(runtime.artifacts_dir), device=runtime.device
    )
    count = int(str(grown.manifest.counts["rows"])) - was
    told = f"added {count:,} passages" if count else "nothing to add: it has these passages"
    moved = "" if grown.folder == Path(args.index_dir) else f"\n  was {args.index_dir}"
    say(f"{build.describe_index(grown)}{moved}\n  {told}")
    return 0


def _rows(folder: Path) -> int:
    from pgra.artifacts import load_manifest

    return int(str(load_manifest(folder).counts["rows"]))


def _remove(words: Sequence[str]) -> int:
    from pgra.retrieval.shards import remove_rows

    (args,) = _parse(
        _name_leading_index(words),
        [RemoveArguments],
        word="remove",
        about="Remove rows from an index.",
    )
    rows = [*args.rows, *(_read_rows(Path(args.rows_file)) if args.rows_file else ())]
    counts = remove_rows(Path(args.index_dir), rows).counts
    gone, whole = int(str(counts["removed"])), int(str(counts["rows"]))
    say(f"index: {args.index_dir}\n  {gone:,} of {whole:,} rows are removed, {whole - gone:,} left")
    return 0


def _read_rows(path: Path) -> list[int]:
    from pgra.data.read import check_file, read_lines

    check_file(path, ("txt",))
    rows = []
    for line in read_lines(path):
        text = line.text.strip()
        if text and not text.isdecimal():
            raise DataError(
                f"{path}, line {line.number}: '{text[:40]}' is no row: one number a line"
            )
        rows += [int(text)] if text else []
    return rows


def _find(
    runtime: RuntimeArguments, corpus_args: CorpusArguments, args: RetrieverArguments
) -> list[Path]:
    """Find the index that the arguments name, two for hybrid; nothing is built."""
    if args.index_dir is not None:
        return [Path(args.index_dir)]
    from pgra.artifacts import is_finished
    from pgra.data.corpus import open_corpus
    from pgra.retrieval import IndexRequest, check_first_stage, find_indexes

    check_first_stage(args.retriever)
    quiet_libraries()
    artifacts = Path(runtime.artifacts_dir)
    corpus = open_corpus(corpus_args, artifacts)
    request = IndexRequest(args=args, corpus=corpus, artifacts=artifacts, device=runtime.device)
    folders = find_indexes(request)
    for folder in folders:
        if not is_finished(folder):
            raise ArtifactError(
                f"there is no finished index of {', '.join(corpus_args.sources)} by these "
                f"arguments (it would be {folder}): make it with pgra index build, or name its "
                "folder first"
            )
    return folders


def _open(folder: Path, artifacts: Path) -> "tuple[RetrieverArguments, Corpus]":
    """Give the arguments of an index and its corpus, from its folder alone."""
    from pgra.artifacts import load_manifest
    from pgra.data.corpus import load_corpus, open_corpus
    from pgra.retrieval.dense import Recipe

    quiet_libraries()
    recipe = Recipe.read(folder, load_manifest(folder))
    if recipe.corpus_folder.is_dir():
        return recipe.retriever, load_corpus(recipe.corpus_folder)
    return recipe.retriever, open_corpus(recipe.corpus, artifacts)


_WORDS: Mapping[str, Callable[[Sequence[str]], int]] = {
    "build": _build,
    "info": _info,
    "verify": _verify,
    "search": _search,
    "add": _add,
    "remove": _remove,
}
