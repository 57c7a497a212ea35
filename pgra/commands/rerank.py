"""Runs both retrieval stages: `pgra rerank`, for a task's splits or for texts of one's own."""

import shutil
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import TYPE_CHECKING

from pgra.arguments import parse_arguments
from pgra.commands.common import SECTIONS, quiet_libraries, say
from pgra.commands.texts import TextArguments, name_leading_texts
from pgra.config import PgraArguments, ReaderArguments, at_least
from pgra.errors import ConfigError
from pgra.types import MISSING_ROW

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus
    from pgra.processes import Processes
    from pgra.rerank import Reranker
    from pgra.types import Candidates, Example

EXAMPLE = """examples:
  pgra rerank "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \\
      --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \\
      --num_candidates 50
  pgra rerank "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \\
      --corpus bundled:wikipedia-19k --max_passages 300 --lm bundled:smollm2-135m \\
      --retriever exhaustive
  pgra rerank --task sst2 --config configs/experiments/paper.yaml

With texts, it shows the best of both stages side by side (the exemplars in the prompt are the
task's). Without, it runs both stages for all splits of the task, and says where their products lie.
With --retriever exhaustive there is one stage: the LM reads the whole corpus once, and the best of
all of it is evidence.
"""
_SECTIONS = [cls for name, cls in SECTIONS.items() if name != "reader"]
_SCORE = "{:>10.4f}  "


@dataclass(kw_only=True)
class ShowArguments:
    """How much is shown."""

    num_shown: int = field(
        default=5, metadata={"help": "Passages of each stage that are shown for a text."}
    )

    def __post_init__(self) -> None:
        """Refuse to show nothing."""
        at_least("num_shown", self.num_shown, 1)


def main(argv: Sequence[str] | None = None) -> int:
    """Find evidence for texts, or for a task's splits."""
    from pgra.processes import join_processes

    words = name_leading_texts(argv)
    texts, show, *sections = parse_arguments(
        [TextArguments, ShowArguments, *_SECTIONS],
        words,
        prog="pgra rerank",
        description="Find candidates and let an LM order them under a task's prompt.",
        epilog=EXAMPLE,
    )
    names = [name for name in SECTIONS if name != "reader"]
    parts = dict(zip(names, sections, strict=True))
    if texts.text and not _names_num_evidence(words):  # all candidates are ordered and shown
        most = parts["retriever"].num_candidates
        kept = min(parts["rerank"].num_evidence, most)
        parts["rerank"] = replace(parts["rerank"], num_evidence=kept)
    args = PgraArguments(**parts, reader=ReaderArguments())
    if args.rerank.num_evidence == 0:
        raise ConfigError("num_evidence is 0: there is nothing to rerank; ask for at least 1")
    quiet_libraries()
    processes = join_processes(args.runtime.device)
    if texts.text:
        told = _show_texts(args, texts.text, show.num_shown, processes)
    else:
        told = _rerank_splits(args, processes)
    if processes.worker.is_main:
        say(told)
    return 0


def _names_num_evidence(words: Sequence[str]) -> bool:
    return any(word.split("=")[0] in ("--num_evidence", "--num-evidence") for word in words)


def _rerank_splits(args: "PgraArguments", processes: "Processes") -> str:
    from pgra.pipelines.found import SPLITS
    from pgra.pipelines.pgra import find_evidence, read_task

    found = read_task(args)
    find_evidence(found, args, processes)
    lines = []
    for split in SPLITS:
        reused = " (reused)" if found.evidence[split].reused else ""
        lines.append(f"{found.task.name} {split}: {len(found.examples(split)):,} queries{reused}")
        if not args.is_exhaustive:
            lines.append(f"  candidates: {found.candidates[split].folder}")
        lines.append(f"  evidence:   {found.evidence[split].folder}")
    return "\n".join(lines)


def _show_texts(
    args: "PgraArguments", texts: Sequence[str], num_shown: int, processes: "Processes"
) -> str:
    """Find evidence for texts. Their states are kept in the bank, what is found is not."""
    from pgra.data.corpus import open_corpus
    from pgra.pipelines.pgra import read_task
    from pgra.rerank import open_reranker
    from pgra.types import Example

    prompt = read_task(args).prompt
    queries = [
        Example(f"text-{number}", prompt.template.passage_fields(text))
        for number, text in enumerate(texts)
    ]
    corpus = open_corpus(args.corpus, args.artifacts)

    def open_second() -> "Reranker":
        device = args.runtime.device
        return open_reranker(args.rerank, prompt, corpus, args.artifacts, device=device)

    if args.is_exhaustive:
        columns = _search_all(args, queries, num_shown, open_second(), processes)
    else:
        columns = _run_both(args, queries, corpus, open_second, processes)
    lines = []
    for place, text in enumerate(texts):
        items = [[head, *_best(found, place, num_shown, corpus)] for head, found in columns]
        lines += [f"query: {text}", *side_by_side(*items), ""]
    return "\n".join(lines).rstrip()


def _run_both(
    args: "PgraArguments",
    queries: "Sequence[Example]",
    corpus: "Corpus",
    open_second: "Callable[[], Reranker]",
    processes: "Processes",
) -> "list[tuple[str, Candidates]]":
    """Take queries through both stages; give each stage's name and order."""
    from pgra.retrieval import open_retriever

    progress = processes.worker.is_main
    retriever = open_retriever(
        args.retriever,
        corpus,
        args.artifacts,
        device=args.runtime.device,
        processes=processes,
        progress=progress,
    )
    first = retriever.retrieve([query.text for query in queries], args.retriever.num_candidates)
    reranker = open_second()
    reranker.prepare(queries, first.rows, processes=processes, progress=progress)
    how = _describe_lm(args) if args.rerank.reranker == "prompted" else "none"
    return [
        (f"first stage: {args.retriever.retriever}", first),
        (f"second stage: {how}", reranker.rerank(queries, first)),
    ]


def _search_all(
    args: "PgraArguments",
    queries: "Sequence[Example]",
    num_shown: int,
    reranker: "Reranker",
    processes: "Processes",
) -> "list[tuple[str, Candidates]]":
    """Search the whole corpus for queries."""
    from pgra.rerank.exhaustive import open_exhaustive

    search = open_exhaustive(reranker, args.artifacts, factory=args.retriever.index_factory)
    search.prepare(queries, processes=processes, progress=processes.worker.is_main)
    found = search.search(queries, min(num_shown, search.num_rows))
    return [(f"exhaustive, {search.num_rows:,} passages: {_describe_lm(args)}", found)]


def _describe_lm(args: "PgraArguments") -> str:
    return f"{args.rerank.lm}, {args.rerank.similarity}"


def _best(candidates: "Candidates", query: int, count: int, corpus: "Corpus") -> list[str]:
    best = candidates.top(count)
    pairs = zip(best.rows[query].tolist(), best.scores[query].tolist(), strict=True)
    return [f"{_SCORE.format(score)}{corpus[row]}" for row, score in pairs if row != MISSING_ROW]


def side_by_side(*columns: Sequence[str], width: int | None = None) -> list[str]:
    """Lay lists in columns, item beside item; long items are folded.

    Args:
        columns: Items of each column, from left to right.
        width: Of all together, in characters; None is the terminal's.
    """
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    column = max(30, (width - 2 * (len(columns) - 1)) // len(columns))
    hang = " " * len(_SCORE.format(0))
    lines = []
    for items in zip_longest(*columns, fillvalue=""):
        folded = [textwrap.wrap(item, column, subsequent_indent=hang) for item in items]
        lines += [
            "  ".join(f"{part:<{column}}" for part in parts).rstrip()
            for parts in zip_longest(*folded, fillvalue="")
        ]
    return lines
