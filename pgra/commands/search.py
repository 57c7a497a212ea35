"""Looks up passages near a text: `pgra search`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.arguments import parse_arguments
from pgra.commands.common import quiet_libraries, say
from pgra.commands.texts import TextArguments, name_leading_texts
from pgra.config import CorpusArguments, RetrieverArguments, RuntimeArguments
from pgra.errors import ConfigError
from pgra.types import MISSING_ROW

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus
    from pgra.types import Candidates

EXAMPLE = """examples:
  pgra search "A warm and funny film." --corpus bundled:wikipedia-19k \\
      --encoder bundled:minilm-l6
  pgra search --text "first text" "second text" --corpus sentences.txt --retriever bm25
"""


@dataclass(kw_only=True)
class SearchArguments(RetrieverArguments):
    """The first stage, with few hits: a person reads them."""

    num_candidates: int = field(default=5, metadata={"help": "Passages shown for each text."})


def main(argv: Sequence[str] | None = None) -> int:
    """Open the index, or build it, and show each text's nearest passages."""
    texts, runtime, corpus_args, args = parse_arguments(
        [TextArguments, RuntimeArguments, CorpusArguments, SearchArguments],
        name_leading_texts(argv),
        prog="pgra search",
        description="Look up the passages of a corpus that come near a text.",
        epilog=EXAMPLE,
    )
    if not texts.text:
        raise ConfigError('there is nothing to search with: pgra search "a text" --corpus ...')
    from pgra.data.corpus import open_corpus
    from pgra.retrieval import check_first_stage, open_retriever

    check_first_stage(args.retriever)  # before a corpus is fetched
    quiet_libraries()
    artifacts = Path(runtime.artifacts_dir)
    corpus = open_corpus(corpus_args, artifacts)
    retriever = open_retriever(args, corpus, artifacts, device=runtime.device)
    say(describe_hits(texts.text, retriever.retrieve(texts.text, args.num_candidates), corpus))
    return 0


def describe_hits(texts: Sequence[str], candidates: "Candidates", corpus: "Corpus") -> str:
    """Word each text's candidates: score, row and passage, best first."""
    lines = []
    for place, text in enumerate(texts):
        lines.append(text)
        pairs = zip(candidates.rows[place].tolist(), candidates.scores[place].tolist(), strict=True)
        found = [(row, score) for row, score in pairs if row != MISSING_ROW]
        lines += [f"  {score:9.4f}  row {row:<9} {corpus[row]}" for row, score in found]
        lines += [] if found else ["  nothing found: no passage shares a word with it"]
    return "\n".join(lines)
