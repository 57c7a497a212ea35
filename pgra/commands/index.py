"""The first stage's index and its search: `pgra index build|info|search`, `pgra search`."""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pgra.artifacts import load_manifest
from pgra.commands.common import about, given_names, quiet_libraries, say, say_words
from pgra.config import Arguments, arg, choose, parse_arguments, wants_help
from pgra.core import MISSING_ROW, Candidates, Context, join_context
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.data.read import is_utf8
from pgra.errors import ConfigError, check_alone, visible
from pgra.methods.arguments import RuntimeArguments
from pgra.retrieval.base import (
    BuiltIndex,
    IndexRequest,
    Recipe,
    Retriever,
    RetrieverArguments,
    find_retriever,
    open_retriever,
)
from pgra.retrieval.trec import NUM_CANDIDATES, QueryFile, QueryFileArguments

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
class IndexInfoArguments(Arguments):
    """Which index is described."""

    index_dir: str = arg("", "The index; it may also stand first, bare.", must_be_given=True)


_UNUSED = ("method", "num_neighbors", "neighbor_encoder")


def main(argv: Sequence[str] | None = None) -> int:
    """Build an index, or look into it.

    build is what no word stands for. search and info take an index by its folder, which may stand
    first.

    Examples:
      pgra index --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6
      pgra index info DIR
      pgra index search DIR "a warm and funny film"
    """
    words = list(sys.argv[1:] if argv is None else argv)
    known = {"build": build, "search": search, "info": info}
    if len(words) == 1 and wants_help(words):
        say_words("pgra index", main, known)
        return 0
    word = words.pop(0) if words and not words[0].startswith("-") else "build"
    choose("word after pgra index", word, known)
    if word != "build":
        check_alone(f"pgra index {word}")
        is_named = words and not words[0].startswith("-")
        if is_named and (word == "info" or Path(words[0]).is_dir()):  # a folder may stand first
            words = ["--index_dir", words[0], *name_leading_texts(words[1:])]
    return known[word](words)


def build(argv: Sequence[str] | None = None) -> int:
    r"""Build the first stage's index of a corpus, or resume one that stopped.

    Example:
      pgra index build --corpus sentences.txt --encoder bundled:minilm-l6
      accelerate launch --num_processes 8 -m pgra index build --corpus sentences.txt \
          --index_factory IVF4096,Flat
      pgra index build --corpus sentences.txt --engine ray --artifacts_dir /shared/artifacts
    """
    runtime, corpus_args, args, own = parse_arguments(
        [RuntimeArguments, CorpusArguments, RetrieverArguments, BuildArguments],
        argv,
        prog="pgra index build",
        unused=(*_UNUSED, "index_dir"),
        **about(build),
    )
    context = join_context(runtime.device, Path(runtime.artifacts_dir))
    cls = find_retriever(args.retriever)  # before a corpus is fetched
    if own.engine == "ray":
        _check_ray(cls, context)
    quiet_libraries()
    corpus = open_corpus(corpus_args, context.artifacts)
    request = IndexRequest(
        args=args,
        corpus=corpus,
        context=context,
        output_dir=Path(own.output_dir) if own.output_dir else None,
        engine=own.engine,
        num_workers=own.num_workers,
    )
    indexes = cls.open(request).built
    if not indexes:
        raise ConfigError(f"retriever '{args.retriever}' has no index: there is nothing to build")
    if context.is_main:
        for built in indexes:
            say(describe_index(built))
        kept = "dropped" if corpus_args.drops_duplicates else "kept"
        say(
            f"corpus: {len(corpus):,} passages; {corpus.counts['blank']:,} blank lines dropped, "
            f"{corpus.counts['duplicates']:,} duplicates {kept}"
        )
    return 0


def _check_ray(cls: type[Retriever], context: Context) -> None:
    if importlib.util.find_spec("ray") is None:
        raise ConfigError("engine 'ray' needs Ray, which is not installed: pip install 'pgra[ray]'")
    if context.worker.world > 1:
        raise ConfigError(
            f"engine 'ray' shares the work itself, and a launcher started {context.worker.world} "
            "processes: start one, with pgra index build"
        )
    if not cls.encodes:
        raise ConfigError(f"{cls.__name__} encodes nothing: leave --engine ray out")


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
        lambda chosen: [
            *(TextArguments, QueryFileArguments),
            *(RuntimeArguments, CorpusArguments, SearchArguments),
            *find_options(chosen).values(),
        ],
        words,
        prog="pgra search",
        unused=_UNUSED,
        **about(search),
    )
    queries = QueryFile.read(own, texts.text)
    if not texts.text and queries is None:
        raise ConfigError('there is nothing to search with: pgra search "a text" --corpus ...')
    context = Context(artifacts=Path(runtime.artifacts_dir), device=runtime.device)
    given, usual = given_names(words), SearchArguments().num_candidates
    if own.is_run and "num_candidates" not in given and args.num_candidates == usual:
        args = replace(args, num_candidates=NUM_CANDIDATES)
    find_retriever(args.retriever)  # before a corpus is fetched
    quiet_libraries()
    has_corpus = "corpus" in given or corpus_args.corpus != CorpusArguments().corpus
    if args.index_dir is not None and not has_corpus:
        recipe = Recipe.read(Path(args.index_dir))
        # What else is given must fit the index.
        names = {field.name for field in fields(args)} & {*given, "num_candidates"}
        args = replace(recipe.retriever, **{name: getattr(args, name) for name in names})
        if corpus_args.corpus_id in (None, recipe.corpus.corpus_id):
            corpus = recipe.open_corpus(context.artifacts)
        else:
            named = replace(recipe.corpus, corpus_id=corpus_args.corpus_id)
            corpus = open_corpus(named, context.artifacts)
    else:
        corpus = open_corpus(corpus_args, context.artifacts)
    asked = texts.text if queries is None else list(queries.texts.values())
    k = min(args.num_candidates, len(corpus))
    args = replace(args, num_candidates=k)
    retriever = open_retriever(args, corpus, context, options=options[0] if options else None)
    found = retriever.retrieve(asked, min(k + own.drop_self, len(corpus)))
    if queries is not None and own.is_run:
        tag = f"pgra-{args.retriever.partition(':')[0]}"
        say(queries.finish(found, corpus, tag, k=k))
    else:
        say(visible(describe_hits(asked, found, corpus)))
    return 0


def info(argv: Sequence[str] | None = None) -> int:
    """Show what an index is: what it was made of, its rows, type, recall, bytes, versions."""
    prog = "pgra index info [DIR]"
    (args,) = parse_arguments([IndexInfoArguments], argv, prog=prog, **about(info))
    manifest = load_manifest(Path(args.index_dir))
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
    say("\n".join([f"index: {args.index_dir}", *known]))
    return 0


def _in_line(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_line(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def name_leading_texts(argv: Sequence[str] | None) -> list[str]:
    """Put --text before leading texts, so that `pgra search "a sentence"` works."""
    words = list(sys.argv[1:] if argv is None else argv)
    return ["--text", *words] if words and not words[0].startswith("-") else words


def describe_index(built: BuiltIndex) -> str:
    """Describe an index: what of it was found done, and how it is searched."""
    counts = built.manifest.counts
    size = f"{counts['dim']} dimensions" if "dim" in counts else f"{counts['words']} words"
    lines = [
        f"index: {built.folder}",
        f"{counts['rows']:,} passages, {counts['bytes']:,} bytes, {size}",
    ]
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
    if cut := counts.get("cut"):
        lines.append(f"{cut:,} passages were cut at max_encoder_tokens")
    return "\n  ".join(lines)


def describe_hits(texts: Sequence[str], candidates: Candidates, corpus: Corpus) -> str:
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
