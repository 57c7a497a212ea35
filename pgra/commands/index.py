"""The first stage's index and its search: `pgra index build|info|search|add`, `pgra search`."""

import logging
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import about, given_names, quiet_libraries, say, say_words
from pgra.commands.trec import NUM_CANDIDATES, QueryFile, QueryFileArguments
from pgra.config import Arguments, arg, choose, parse_arguments
from pgra.core import MISSING_ROW, Context, join_context
from pgra.data.corpus import CorpusArguments
from pgra.data.read import is_utf8
from pgra.errors import ArtifactError, ConfigError, check_alone, visible
from pgra.help import wants_help
from pgra.methods.arguments import RuntimeArguments
from pgra.retrieval.base import RetrieverArguments

if TYPE_CHECKING:
    from pgra.core import Candidates
    from pgra.data.corpus import Corpus
    from pgra.retrieval import BuiltIndex, IndexRequest

logger = logging.getLogger(__name__)

_NO_WORD = "no passage shares a word with it that fewer than half of the passages have"


@dataclass(kw_only=True)
class BuildArguments(Arguments):
    """What only building takes."""

    output_dir: str | None = arg(
        None,
        "Folder of the index (hybrid: of its dense half); default: under artifacts_dir, where "
        "other programs find it. Elsewhere, name it to them with --index_dir.",
    )
    engine: str = arg(
        "local",
        "Who encodes: local (this process, or those of a launcher), or ray (a Ray cluster whose "
        "machines share artifacts_dir or output_dir; without a cluster, this machine).",
        choices=("local", "ray"),
    )
    num_workers: int | None = arg(
        None,
        "Shards that --engine ray encodes at once, a GPU or a CPU each; default: as many as the "
        "cluster has.",
        least=1,
        needs={"engine": "ray"},
    )


@dataclass(kw_only=True)
class TextArguments(Arguments):
    """What is looked up."""

    text: list[str] = arg(
        [], "One text or several, each in quotes; they may also stand first, bare."
    )

    def check(self) -> None:
        if not all(text.strip() for text in self.text):
            raise ConfigError("--text holds an empty text: give words to search with")
        for text in self.text:
            if not is_utf8(text):
                raise ConfigError(f"--text {text!a} holds a NUL or bytes that are not UTF-8")


@dataclass(kw_only=True)
class SearchArguments(RetrieverArguments):
    """The first stage, with few hits: a person reads them."""

    num_candidates: int = arg(
        5,
        f"Passages shown for each text; with --trec or --qrels {NUM_CANDIDATES} where it is not "
        "given.",
        least=1,
        is_common=True,
    )


@dataclass(kw_only=True)
class IndexAddArguments(Arguments):
    """Which index grows, and by what."""

    index_dir: str = arg("", "The index; it may also stand first, bare.", must_be_given=True)
    corpus: list[str] = arg(
        [],
        "Files whose passages are appended, read by the rules of the index's.",
        must_be_given=True,
    )


_FIND = (RuntimeArguments, CorpusArguments, RetrieverArguments)
_SEARCH = (
    *(TextArguments, QueryFileArguments),
    *(RuntimeArguments, CorpusArguments, SearchArguments),
)
_UNUSED = ("method", "num_neighbors", "neighbor_encoder")
_FOR_BUILDING = ("encoder_batch_tokens", "num_candidates", "rescore_factor", "shard_rows")


def main(argv: Sequence[str] | None = None) -> int:
    """Build an index, grow or look into it.

    An index is its folder, which may stand first, or what the arguments of build find; build is
    what no word stands for.

    Examples:
      pgra index --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6
      pgra index info --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6
      pgra index search DIR "a warm and funny film"
      pgra index add DIR --corpus more.txt
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if len(words) == 1 and wants_help(words):
        functions = {word: run for word, (run, _, _) in _WORDS.items()}
        say_words("pgra index", main, {"build": build, "search": search, **functions})
        return 0
    word = words.pop(0) if words and not words[0].startswith("-") else "build"
    choose("word after pgra index", word, ["build", "search", *_WORDS])
    if word == "build":
        return build(words)
    check_alone(f"pgra index {word}")
    is_named = words and not words[0].startswith("-")
    if is_named and (word != "search" or Path(words[0]).is_dir()):  # a folder may stand first
        words = ["--index_dir", words[0], *name_leading_texts(words[1:])]
    if word == "search":
        return search(words)
    run, classes, unused = _WORDS[word]
    texts = {**about(main), "description": about(run)["description"]}
    prog = f"pgra index {word} [DIR]"
    return run(*parse_arguments(classes, words, prog=prog, unused=unused, **texts))


def build(argv: Sequence[str] | None = None) -> int:
    r"""Build the first stage's index of a corpus, or go on where that stopped.

    Example:
      pgra index build --corpus sentences.txt --encoder bundled:minilm-l6
      accelerate launch --num_processes 8 -m pgra index build --corpus sentences.txt \
          --index_factory IVF4096,Flat
      pgra index build --corpus sentences.txt --engine ray --artifacts_dir /shared/artifacts
    """
    runtime, corpus_args, args, own = parse_arguments(
        [*_FIND, BuildArguments],
        argv,
        prog="pgra index build",
        unused=(*_UNUSED, "index_dir"),
        **about(build),
    )
    from pgra.retrieval import find_retriever

    context = join_context(runtime.device, Path(runtime.artifacts_dir))
    if own.engine == "ray":
        from pgra.retrieval.ray_engine import check_engine

        check_engine(args.retriever, num_processes=context.worker.world)
    request = replace(
        _request(corpus_args, args, context),
        output_dir=own.output_dir and Path(own.output_dir),
        engine=own.engine,
        num_workers=own.num_workers,
    )
    built_indexes = find_retriever(args.retriever).prepare(request)
    if context.is_main:
        for built in built_indexes:
            say(describe_index(built))
        corpus = request.corpus
        spoiled = corpus.counts["not_utf8"]
        kept = "dropped" if corpus_args.drops_duplicates else "kept"
        say(
            f"corpus: {len(corpus):,} passages; {corpus.counts['blank']:,} blank lines dropped, "
            f"{corpus.counts['duplicates']:,} duplicates {kept}"
            + (f", {spoiled:,} lines dropped that are not UTF-8" if spoiled else "")
        )
    return 0


def search(argv: Sequence[str] | None = None) -> int:
    r"""Look up the passages of a corpus, or of an index (--index_dir), that come near a text.

    Examples:
      pgra search "A warm and funny film." --corpus bundled:wikipedia-19k \
          --encoder bundled:minilm-l6
      pgra search --text "first text" "second text" --corpus sentences.txt --retriever bm25
      pgra search --queries queries.tsv --trec run.txt --qrels qrels.txt --corpus corpus.jsonl \
          --corpus_id _id --encoder bundled:minilm-l6
    """
    from pgra.methods.base import find_options

    words = name_leading_texts(argv)
    texts, own, runtime, corpus_args, args, *options = parse_arguments(
        lambda chosen: [*_SEARCH, *find_options(chosen).values()],
        words,
        prog="pgra search",
        unused=_UNUSED,
        **about(search),
    )
    queries = QueryFile.read(own, texts.text)
    if not texts.text and queries is None:
        raise ConfigError('there is nothing to search with: pgra search "a text" --corpus ...')
    context, given = _context(runtime), given_names(words)
    has_corpus = "corpus" in given or corpus_args.corpus != CorpusArguments().corpus
    if args.index_dir is not None and not has_corpus:
        request = _recipe_request(corpus_args, args, context, given)
    else:
        request = _request(corpus_args, args, context)
    request = replace(request, options=options[0] if options else None)
    return _show(texts.text, queries, _deepen(request, own, words))


def _recipe_request(
    corpus_args: CorpusArguments, args: SearchArguments, context: Context, given: Collection[str]
) -> "IndexRequest":
    """Name an index's corpus and encoder by its recipe; what else is given must fit the index."""
    from pgra.artifacts import load_manifest
    from pgra.data.corpus import load_corpus, open_corpus
    from pgra.retrieval import IndexRequest
    from pgra.retrieval.base import Recipe

    quiet_libraries()
    folder = Path(str(args.index_dir))
    recipe = Recipe.read(folder, load_manifest(folder))
    if recipe.corpus_folder.is_dir():
        corpus = load_corpus(recipe.corpus_folder)
    else:
        corpus = open_corpus(recipe.corpus, context.artifacts)
    named = replace(recipe.corpus, corpus_id=corpus_args.corpus_id or recipe.corpus.corpus_id)
    names = {field.name for field in fields(args)} & {*given, "num_candidates"}
    asked = replace(recipe.retriever, **{name: getattr(args, name) for name in names})
    return IndexRequest(args=asked, corpus=replace(corpus, made_by=named), context=context)


def _deepen(
    request: "IndexRequest", own: QueryFileArguments, words: Sequence[str]
) -> "IndexRequest":
    """Search deeper where a run is made and neither words nor a YAML say how deep."""
    usual = SearchArguments().num_candidates
    is_said = "num_candidates" in given_names(words) or request.args.num_candidates != usual
    if is_said or not own.is_run:
        return request
    most = min(NUM_CANDIDATES, len(request.corpus))
    return replace(request, args=replace(request.args, num_candidates=most))


def _show(texts: Sequence[str], queries: QueryFile | None, request: "IndexRequest") -> int:
    from pgra.retrieval import open_retriever

    if queries is not None:
        texts = list(queries.texts.values())
    args, corpus = request.args, request.corpus
    if args.num_candidates > len(corpus):  # a person reads them: no harm
        shown = (args.num_candidates, len(corpus))
        logger.warning("num_candidates is %d, and the corpus has %d passages: all", *shown)
        args = replace(args, num_candidates=len(corpus))
    retriever = open_retriever(args, corpus, request.context, options=request.options)
    depth = args.num_candidates
    drops_self = queries is not None and queries.args.drop_self
    found = retriever.retrieve(texts, min(depth + drops_self, len(corpus)))
    if queries is not None and queries.args.is_run:
        tag = f"pgra-{args.retriever.partition(':')[0]}"
        say(queries.finish(found, corpus, tag, depth=depth))
    else:
        say(visible(describe_hits(texts, found, corpus)))
    return 0


def _info(*found_by: Any) -> int:
    """Say what an index is: what it was made of, its rows, type, recall, bytes, versions."""
    from pgra.artifacts import load_manifest

    for folder in _find(*found_by):
        manifest = load_manifest(folder)
        recipe = manifest.counts.get("recipe")
        told = ("recipe", "texts_per_second", "training_seconds")  # below, or of its making
        counts = {name: value for name, value in manifest.counts.items() if name not in told}
        size = sum(int(record["bytes"]) for record in manifest.files.values())
        lines: dict[str, object] = {"kind": manifest.stage}
        if recipe is not None:
            lines["corpus"] = ", ".join(CorpusArguments(**recipe["corpus"]).sources)
            lines["model"] = recipe["retriever"]["encoder"]
        lines |= {**manifest.fingerprint, **counts, "files": len(manifest.files), "bytes": size}
        lines |= {"created": manifest.created, "versions": manifest.versions}
        known = [f"  {name:<18} {_in_line(value)}" for name, value in lines.items()]
        say("\n".join([f"index: {folder}", *known]))
    return 0


def _in_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_line(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _add(runtime: RuntimeArguments, args: IndexAddArguments) -> int:
    """Append the passages of further files; old shards and rows stay as they are."""
    from pgra.artifacts import load_manifest
    from pgra.retrieval.dense import add_passages

    quiet_libraries()
    folder = Path(args.index_dir)
    was = load_manifest(folder).counts["rows"]
    grown = add_passages(folder, args.corpus, _context(runtime))
    more = grown.manifest.counts["rows"] - was
    added = f"added {more:,} passages" if more else "nothing to add: it has these passages"
    moved = "" if grown.folder == folder else f"\n  was {folder}"
    say(f"{describe_index(grown)}{moved}\n  {added}")
    return 0


# Each word's function, its classes of arguments, and which of these it does not use.
_WORDS: Mapping[str, tuple[Callable[..., int], Sequence[type], Sequence[str]]] = {
    "info": (_info, _FIND, (*_UNUSED, *_FOR_BUILDING)),
    "add": (_add, (RuntimeArguments, IndexAddArguments), ["method"]),
}


def name_leading_texts(argv: Sequence[str] | None) -> list[str]:
    """Put --text before leading texts, so that `pgra search "a sentence"` works."""
    words = list(sys.argv[1:] if argv is None else argv)
    return ["--text", *words] if words and not words[0].startswith("-") else words


def _context(runtime: RuntimeArguments) -> Context:
    return Context(artifacts=Path(runtime.artifacts_dir), device=runtime.device)


def _request(
    corpus_args: CorpusArguments, args: RetrieverArguments, context: Context
) -> "IndexRequest":
    """Open the corpus of an index; refuse an unknown retriever."""
    from pgra.data.corpus import open_corpus
    from pgra.retrieval import IndexRequest, find_retriever

    find_retriever(args.retriever)  # before a corpus is fetched
    quiet_libraries()
    corpus = open_corpus(corpus_args, context.artifacts)
    return IndexRequest(args=args, corpus=corpus, context=context)


def _find(
    runtime: RuntimeArguments, corpus_args: CorpusArguments, args: RetrieverArguments
) -> list[Path]:
    """Find the index that the arguments name, two for hybrid; nothing is built."""
    if args.index_dir is not None:
        return [Path(args.index_dir)]
    from pgra.artifacts import is_finished
    from pgra.retrieval import find_retriever

    request = _request(corpus_args, args, _context(runtime))
    folders = find_retriever(args.retriever).folders(request)
    for folder in folders:
        if not is_finished(folder):
            raise ArtifactError(
                f"there is no finished index of {', '.join(corpus_args.sources)} by these "
                f"arguments (it would be {folder}): make it with pgra index build, or name its "
                "folder first"
            )
    return folders


def describe_index(built: "BuiltIndex") -> str:
    """Describe an index: what of it was found done, and how it is searched."""
    counts = built.manifest.counts
    size = f"{counts['dim']} dimensions" if "dim" in counts else f"{counts['words']} words"
    lines = [f"{counts['rows']:,} passages, {counts['bytes']:,} bytes, {size}"]
    if built.num_reused == counts["rows"]:
        lines.append("reused: nothing was left to encode")
    else:
        reused = f"; {built.num_reused:,} passages reused" if built.num_reused else ""
        lines.append(f"{counts['texts_per_second']} texts/s{reused}")
    if counts.get("is_exact"):
        lines.append("exact search of the float16 vectors")
    elif "is_exact" in counts:
        shares = ", ".join(f"@{depth} {share}" for depth, share in counts["recall"].items())
        lines.append(f"index {built.manifest.fingerprint['factory']}, recall {shares}")
    for name, what in {
        "trained_rows": "trained on a sample of its first {:,} rows, no more",
        "cut": "{:,} passages were cut at max_encoder_tokens",
    }.items():
        if counts.get(name):
            lines.append(what.format(counts[name]))
    return "\n  ".join([f"index: {built.folder}", *lines])


def describe_hits(texts: Sequence[str], candidates: "Candidates", corpus: "Corpus") -> str:
    """Describe each text's candidates: rank, score, row and passage, best first."""
    lines = []
    for text, rows, scores in zip(texts, candidates.rows, candidates.scores, strict=True):
        pairs = [(row, score) for row, score in zip(rows.tolist(), scores, strict=True)]
        found = [(row, score) for row, score in pairs if row != MISSING_ROW]
        lines.append(text)
        lines += [
            f"  {rank:>4}  {score:9.4f}  row {row:<9} {corpus[row]}"
            for rank, (row, score) in enumerate(found, 1)
        ]
        if not found:
            lines.append(f"  nothing found: {_NO_WORD}")
    return "\n".join(lines)
