"""Builds a first-stage index, alone or on many GPUs (`accelerate launch -m index_build`).

On many CPUs it is `torchrun -m index_build`: `accelerate launch --cpu` starts one process only.
A stopped job run again goes on where it stopped; a finished index is found and reused.
"""

import itertools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands.common import quiet_libraries, say
from pgra.config import (
    CorpusArguments,
    RetrieverArguments,
    RuntimeArguments,
    at_least,
    choose,
    parse_arguments,
)
from pgra.core import join_context
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.retrieval import BuiltIndex

MOST_QUERIES = 1000
ENGINES = ("local", "ray")
EXAMPLE = """example:
  python -m index_build --corpus sentences.txt --encoder bundled:minilm-l6
  accelerate launch --num_processes 8 -m index_build --corpus sentences.txt \\
      --index_factory IVF4096,Flat
  python -m index_build --corpus sentences.txt --engine ray --artifacts_dir /shared/artifacts
"""


@dataclass(kw_only=True)
class BuildArguments:
    """What only this program takes."""

    output_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder of the index (hybrid: of its dense half); default: under "
            "artifacts_dir, where other programs find it. Elsewhere, name it to them with "
            "--index_dir."
        },
    )
    recall_queries: str | None = field(
        default=None,
        metadata={
            "help": "Text file, a query a line, to measure an approximate index's recall with; "
            "default: passages drawn from the corpus, each without itself. A finished index is not "
            "measured again."
        },
    )
    engine: str = field(
        default="local",
        metadata={
            "help": "Who encodes: local (this process, or those of a launcher), or ray (a Ray "
            "cluster whose machines share artifacts_dir or output_dir; without a cluster, this "
            "machine)."
        },
    )
    num_workers: int | None = field(
        default=None,
        metadata={
            "help": "Shards that --engine ray encodes at once, a GPU or a CPU each; default: as "
            "many as the cluster has."
        },
    )

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        choose("engine", self.engine, ENGINES)
        at_least("num_workers", self.num_workers, 1)
        if self.num_workers is not None and self.engine != "ray":
            raise ConfigError("num_workers is for --engine ray: add it, or leave it out")


def main(argv: Sequence[str] | None = None) -> int:
    """Build an index, or find that it is there, and say what it is."""
    runtime, corpus_args, args, build = parse_arguments(
        [RuntimeArguments, CorpusArguments, RetrieverArguments, BuildArguments],
        argv,
        prog="python -m index_build",
        description="Build the first stage's index of a corpus.",
        epilog=EXAMPLE,
    )
    if args.index_dir is not None:
        raise ConfigError("index_dir names an index to use; this program builds one in output_dir")
    from pgra.data.corpus import open_corpus
    from pgra.retrieval import IndexRequest, check_first_stage, prepare_index
    from pgra.retrieval.ray_engine import check_engine

    check_first_stage(args.retriever)  # before a corpus is fetched
    context = join_context(runtime.device)
    check_engine(build.engine, retriever=args.retriever, num_processes=context.worker.world)
    quiet_libraries()
    worker = context.worker
    artifacts = Path(runtime.artifacts_dir)
    corpus = open_corpus(corpus_args, artifacts)
    request = IndexRequest(
        args=args,
        corpus=corpus,
        artifacts=artifacts,
        output_dir=None if build.output_dir is None else Path(build.output_dir),
        device=runtime.device,
        context=context,
        progress=worker.is_main,
        queries=None if build.recall_queries is None else read_queries(build.recall_queries),
        engine=build.engine,
        num_workers=build.num_workers,
    )
    built_indexes = prepare_index(request)
    if worker.is_main:
        for built in built_indexes:
            say(describe_index(built))
        spoiled = corpus.counts["not_utf8"]
        kept = "dropped" if corpus_args.drop_duplicates else "kept"
        say(
            f"corpus: {len(corpus):,} passages; {corpus.counts['blank']:,} blank lines dropped, "
            f"{corpus.counts['duplicates']:,} duplicates {kept}"
            + (f", {spoiled:,} lines dropped that are not UTF-8" if spoiled else "")
        )
    return 0


def read_queries(name: str) -> list[str]:
    """Read the first texts of a file, a line each.

    Raises:
        ConfigError: If it cannot be read or has none.
    """
    try:
        with Path(name).open(encoding="utf-8") as file:
            lines = (line.strip() for line in file)
            texts = list(itertools.islice((line for line in lines if line), MOST_QUERIES))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"recall_queries {name} cannot be read: {error}") from None
    if not texts:
        raise ConfigError(f"recall_queries {name} holds no text: write a query a line")
    return texts


def describe_index(built: "BuiltIndex") -> str:
    """Word what an index is, and what of it was found done."""
    counts: Mapping[str, Any] = built.manifest.counts
    rows = int(str(counts["rows"]))
    lines = [
        f"index: {built.folder}",
        f"  {rows:,} passages, {int(str(counts['bytes'])):,} bytes"
        + (f", {counts['dim']} dimensions" if "dim" in counts else f", {counts['words']} words"),
    ]
    if built.num_reused == rows:
        lines.append("  reused: nothing was left to encode")
    else:
        reused = f"; {built.num_reused:,} passages reused" if built.num_reused else ""
        lines.append(f"  {counts['texts_per_second']} texts/s{reused}")
    if "is_exact" in counts:
        lines += describe_search(built)
    if "trained_rows" in counts:
        lines.append(f"  trained on a sample of its first {counts['trained_rows']:,} rows, no more")
    if "removed" in counts:
        lines.append(f"  {counts['removed']:,} rows are removed")
    if counts.get("cut"):
        lines.append(f"  {counts['cut']:,} passages were cut at max_encoder_tokens")
    return "\n".join(lines)


def describe_search(built: "BuiltIndex") -> list[str]:
    """Word how a dense index is searched, how well and how fast."""
    counts: Mapping[str, Any] = built.manifest.counts
    speed = counts.get("queries_per_second")
    told = "" if speed is None else f", {speed:,} queries/s in one call"
    if counts["is_exact"]:
        has_file = any(name.endswith(".faiss") for name in built.manifest.files)
        where = "" if has_file else ", shard by shard from the disk"
        return [f"  exact search of the float16 vectors{where}{told}"]
    lines = [f"  index {built.manifest.fingerprint['factory']}{told}"]
    if "trained_on" in counts:
        seconds = counts.get("training_seconds")
        told = "" if seconds is None else f" in {seconds:,} s"
        lines.append(f"  trained on {counts['trained_on']:,} passages{told}")
    setting = [f"{name} {value}" for name, value in counts.get("search", {}).items()]
    if "rescore_factor" in counts:
        before = _shares(counts["recall_without_rescoring"])
        setting.append(
            f"hits x {counts['rescore_factor']} scored again exactly (without: {before})"
        )
    of = f" of {counts['recall_of']}" if "recall_of" in counts else ""
    with_it = f" with {', '.join(setting)}" if setting else ""
    return [*lines, f"  recall {_shares(counts['recall'])}{of}{with_it}"]


def _shares(recall: Mapping[str, float]) -> str:
    return ", ".join(f"@{depth} {share}" for depth, share in recall.items())


if __name__ == "__main__":
    from pgra.cli import run

    sys.exit(run(main))
