"""The first stage's index and its search: `pgra index`, `pgra search`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from pgra.commands.common import given_names, parse, parse_chosen, quiet_libraries, say
from pgra.config import Arguments, arg
from pgra.context import ALONE, Context, join_context
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.errors import ConfigError, PartDone, check_alone, visible
from pgra.methods.arguments import RuntimeArguments
from pgra.parallel import Worker
from pgra.retrieval.base import (
    IndexRequest,
    Recipe,
    RetrieverArguments,
    find_retriever,
    open_retriever,
)
from pgra.retrieval.trec import NUM_CANDIDATES, QueryFileArguments, finish_run
from pgra.types import MISSING_ROW, Candidates, as_query

_SHOWN = 5  # passages of a text: a person reads them


@dataclass(kw_only=True)
class WorkArguments(Arguments):
    """Who shares the work, without `accelerate launch`."""

    shard: str | None = arg(
        None,
        "I/N: encode or read what part I, from 0, of N has to do, then what slow parts have left, "
        "and end. The same command without it continues from there.",
    )

    def join(self, device: str, artifacts: Path = ALONE.artifacts) -> Context:
        """Return the context of this part of the job, or else that of `accelerate launch`."""
        if self.shard is None:
            return join_context(device, artifacts)
        check_alone("--shard")
        rank, _, world = self.shard.partition("/")
        if not (rank.isdecimal() and world.isdecimal() and int(rank) < int(world)):
            raise ConfigError(f"--shard {self.shard!r} is not I/N, such as 0/8 to 7/8")
        worker = Worker(int(rank), int(world), is_part=True)
        return Context(worker, artifacts=artifacts, device=device)


@dataclass(kw_only=True)
class BuildArguments(WorkArguments):
    """Where an index goes, and who shares the work."""

    output_dir: str | None = arg(
        None, "Folder of the index (hybrid: of its dense half); default: under artifacts_dir."
    )


@dataclass(kw_only=True)
class TextArguments(Arguments):
    """What is looked up."""

    text: list[str] = arg([], "Texts, each in quotes; they may also stand first, bare.")

    def check(self) -> None:
        for text in self.text:
            as_query("--text", text)


_UNUSED = ("method", "num_neighbors", "neighbor_encoder")


def main(words: Sequence[str]) -> int:
    """Run `pgra index`, with or without its word, build."""
    return build(words[1:] if words[:1] == ["build"] else words)


def build(words: Sequence[str]) -> int:
    r"""Build the first stage's index of a corpus, or resume one that stopped.

    Example:
      pgra index build --corpus sentences.txt --encoder bundled:minilm-l6
      accelerate launch --num_processes 8 -m pgra index build --corpus sentences.txt \
          --index_factory IVF4096,Flat
      pgra index build --corpus sentences.txt --shard 0/8 --artifacts_dir /shared/artifacts
    """
    runtime, corpus_args, args, work = parse(
        build,
        [RuntimeArguments, CorpusArguments, RetrieverArguments, BuildArguments],
        words,
        "pgra index build",
        unused=(*_UNUSED, "index_dir"),
    )
    context = work.join(runtime.device, Path(runtime.artifacts_dir))
    cls = find_retriever(args.retriever)  # before a corpus is fetched
    quiet_libraries()
    corpus = open_corpus(corpus_args, context.artifacts)
    request = IndexRequest(
        args=args,
        corpus=corpus,
        context=context,
        output_dir=Path(work.output_dir) if work.output_dir else None,
    )
    try:
        indexes = cls.open(request).built
    except PartDone as done:
        say(str(done))
        return 0
    if not indexes:
        raise ConfigError(f"retriever '{args.retriever}' has no index: there is nothing to build")
    if context.is_main:
        for built in indexes:
            say(f"index: {built.folder}\n  reused {built.num_reused}")
            for name, value in sorted(built.manifest.counts.items()):
                if name != "recipe":
                    say(f"  {name} {value}")
        say("corpus: " + ", ".join(f"{name} {count}" for name, count in corpus.counts.items()))
    return 0


def search(words: Sequence[str]) -> int:
    r"""Look up the passages of a corpus, or of an index (--index_dir), that come near a text.

    With --task an LM then orders them under the task's prompt: pgra search --task NAME --help. With
    --reranker likelihood, cross-encoder or causal a model orders them without a task.

    Examples:
      pgra search "A warm and funny film." --corpus bundled:wikipedia-19k \
          --encoder bundled:minilm-l6
      pgra search --text "first text" "second text" --corpus sentences.txt --retriever bm25
      pgra search --queries queries.tsv --trec run.txt --qrels qrels.txt --corpus corpus.jsonl \
          --corpus_id _id --encoder bundled:minilm-l6
      pgra search "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
    """
    from pgra.methods.base import find_options

    check_alone("pgra search")
    classes = [
        TextArguments,
        QueryFileArguments,
        RuntimeArguments,
        CorpusArguments,
        RetrieverArguments,
    ]
    options, (texts, output, runtime, corpus_args, args) = parse_chosen(
        search, "pgra search", words, find_options, classes, unused=_UNUSED
    )
    queries = output.read(texts.text)
    if not queries:
        raise ConfigError('there is nothing to search with: pgra search "a text" --corpus ...')
    context = Context(artifacts=Path(runtime.artifacts_dir), device=runtime.device)
    names = given_names(words)
    usual = RetrieverArguments().num_candidates
    if "num_candidates" not in names and args.num_candidates == usual:
        args = replace(args, num_candidates=NUM_CANDIDATES if output.is_run else _SHOWN)
    find_retriever(args.retriever)  # before a corpus is fetched
    quiet_libraries()
    has_corpus = "corpus" in names or corpus_args.corpus != CorpusArguments().corpus
    if args.index_dir is None or has_corpus:
        corpus = open_corpus(corpus_args, context.artifacts)
    else:
        recipe = Recipe.read(Path(args.index_dir))
        # What else is given must fit the index.
        names = {field.name for field in fields(args)} & {*names, "num_candidates"}
        args = replace(recipe.retriever, **{name: getattr(args, name) for name in names})
        if corpus_args.corpus_id in (None, recipe.corpus.corpus_id):
            corpus = recipe.open_corpus(context.artifacts)
        else:
            named = replace(recipe.corpus, corpus_id=corpus_args.corpus_id)
            corpus = open_corpus(named, context.artifacts)
    k = min(args.num_candidates, len(corpus))
    args = replace(args, num_candidates=k)
    retriever = open_retriever(args, corpus, context, options=options.get("retriever_options"))
    candidates = retriever.retrieve(list(queries.values()), min(k + output.drop_self, len(corpus)))
    if output.is_run:
        tag = f"pgra-{args.retriever.partition(':')[0]}"
        say(finish_run(output, list(queries), candidates, corpus, tag=tag, k=k))
    else:
        say(visible(describe_hits(queries.values(), candidates, corpus)))
    return 0


def describe_hits(texts: Iterable[str], candidates: Candidates, corpus: Corpus) -> str:
    """Describe each text's candidates: rank, score, row and passage, best first."""
    lines = []
    for text, rows, scores in zip(texts, candidates.rows, candidates.scores, strict=True):
        lines.append(text)
        for rank, (row, score) in enumerate(zip(rows.tolist(), scores, strict=True), 1):
            if row != MISSING_ROW:
                lines.append(f"  {rank:>4}  {score:9.4f}  row {row:<9} {corpus[row]}")
        if rows[0] == MISSING_ROW:
            lines.append("  nothing found: no passage shares a word with it")
    return "\n".join(lines)
