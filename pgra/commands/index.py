"""The first stage's index: `pgra index`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import WorkArguments, parse, quiet_libraries, say
from pgra.config import arg
from pgra.data.corpus import CorpusArguments, open_corpus
from pgra.errors import ConfigError, PartDone
from pgra.methods.arguments import RuntimeArguments
from pgra.retrieval.base import IndexRequest, RetrieverArguments, find_retriever


@dataclass(kw_only=True)
class BuildArguments(WorkArguments):
    """Where an index goes, and who shares the work."""

    output_dir: str | None = arg(
        None, "Folder of the index (bm25+dense: of the second); default: under artifacts_dir."
    )


def main(words: Sequence[str]) -> int:
    r"""Build the first stage's index of a corpus, or resume one that stopped.

    Example:
      pgra index --corpus sentences.txt --encoder bundled:minilm-l6
      accelerate launch --num_processes 8 -m pgra index --corpus sentences.txt \
          --index_factory IVF4096,Flat
      pgra index --corpus sentences.txt --shard 0/8 --artifacts_dir /shared/artifacts
    """
    runtime, corpus_args, args, work = parse(
        main,
        [RuntimeArguments, CorpusArguments, RetrieverArguments, BuildArguments],
        words,
        unused=("method", "num_neighbors", "neighbor_encoder", "index_dir"),
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
            say(f"index: {built.folder}\n  reused {built.reused}")
            for name, value in sorted(built.manifest.counts.items()):
                if name != "recipe":
                    say(f"  {name} {value}")
        say("corpus: " + ", ".join(f"{name} {count}" for name, count in corpus.counts.items()))
    return 0
