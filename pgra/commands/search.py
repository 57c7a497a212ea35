"""Looks up passages near a text: `pgra search`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pgra.commands.common import quiet_libraries, say
from pgra.config import CorpusArguments, RetrieverArguments, RuntimeArguments, parse_arguments
from pgra.core import MISSING_ROW
from pgra.data.read import is_utf8
from pgra.errors import ConfigError

if TYPE_CHECKING:
    from pgra.core import Candidates
    from pgra.data.corpus import Corpus


# Texts on a command line: what `pgra search` and `pgra rerank` look up.


@dataclass(kw_only=True)
class TextArguments:
    """What is looked up."""

    text: list[str] = field(
        default_factory=list,
        metadata={"help": "One text or several, each in quotes; they may also stand first, bare."},
    )

    def __post_init__(self) -> None:
        """Refuse a text with nothing in it, or that is no text."""
        if not all(text.strip() for text in self.text):
            raise ConfigError("--text holds an empty text: give words to search with")
        for text in self.text:
            if not is_utf8(text):
                raise ConfigError(f"--text {text!a} holds a NUL or bytes that are not UTF-8")


def name_leading_texts(argv: Sequence[str] | None) -> list[str]:
    """Put --text before texts that stand first, so that `pgra search "a sentence"` works."""
    words = list(sys.argv[1:] if argv is None else argv)
    return ["--text", *words] if words and not words[0].startswith("-") else words


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
