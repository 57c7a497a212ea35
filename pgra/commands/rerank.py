"""Runs both retrieval stages: `pgra rerank`, for a task's splits or for texts of one's own."""

import shutil
import textwrap
from collections.abc import Sequence
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
    from pgra.types import Candidates

EXAMPLE = """examples:
  pgra rerank "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \\
      --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \\
      --num_candidates 50
  pgra rerank --task sst2 --config configs/experiments/paper.yaml

With texts, it shows the best of both stages side by side (the exemplars in the prompt are the
task's). Without, it runs both stages for all splits of the task, and says where their products lie.
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
        told = _rerank_texts(args, texts.text, show.num_shown, processes)
    else:
        told = _rerank_splits(args, processes)
    if processes.worker.is_main:
        say(told)
    return 0


def _names_num_evidence(words: Sequence[str]) -> bool:
    return any(word.split("=")[0] in ("--num_evidence", "--num-evidence") for word in words)


def _rerank_splits(args: "PgraArguments", processes: "Processes") -> str:
    from pgra.pipelines.pgra import SPLITS, find_evidence, read_task

    found = read_task(args)
    find_evidence(found, args, processes)
    lines = []
    for split in SPLITS:
        reused = " (reused)" if found.evidence[split].reused else ""
        lines.append(f"{found.task.name} {split}: {len(found.examples(split)):,} queries{reused}")
        lines.append(f"  candidates: {found.candidates[split].folder}")
        lines.append(f"  evidence:   {found.evidence[split].folder}")
    return "\n".join(lines)


def _rerank_texts(
    args: "PgraArguments", texts: Sequence[str], num_shown: int, processes: "Processes"
) -> str:
    """Take texts through both stages. Their states are kept in the bank, their candidates not."""
    from pgra.data.corpus import open_corpus
    from pgra.pipelines.pgra import read_task
    from pgra.rerank import open_reranker
    from pgra.retrieval import open_retriever
    from pgra.types import Example

    prompt = read_task(args).prompt
    queries = [
        Example(f"text-{number}", prompt.template.passage_fields(text))
        for number, text in enumerate(texts)
    ]
    device, progress = args.runtime.device, processes.worker.is_main
    corpus = open_corpus(args.corpus, args.artifacts)
    retriever = open_retriever(
        args.retriever,
        corpus,
        args.artifacts,
        device=device,
        processes=processes,
        progress=progress,
    )
    first = retriever.retrieve([query.text for query in queries], args.retriever.num_candidates)
    reranker = open_reranker(args.rerank, prompt, corpus, args.artifacts, device=device)
    reranker.prepare(queries, first.rows, processes=processes, progress=progress)
    second = reranker.rerank(queries, first)
    is_prompted = args.rerank.reranker == "prompted"
    how = f"{args.rerank.lm}, {args.rerank.similarity}" if is_prompted else "none"
    heads = (f"first stage: {args.retriever.retriever}", f"second stage: {how}")
    lines = []
    for place, text in enumerate(texts):
        left = [heads[0], *_best(first, place, num_shown, corpus)]
        right = [heads[1], *_best(second, place, num_shown, corpus)]
        lines += [f"query: {text}", *side_by_side(left, right), ""]
    return "\n".join(lines).rstrip()


def _best(candidates: "Candidates", query: int, count: int, corpus: "Corpus") -> list[str]:
    best = candidates.top(count)
    pairs = zip(best.rows[query].tolist(), best.scores[query].tolist(), strict=True)
    return [f"{_SCORE.format(score)}{corpus[row]}" for row, score in pairs if row != MISSING_ROW]


def side_by_side(
    left: Sequence[str], right: Sequence[str], *, width: int | None = None
) -> list[str]:
    """Lay two lists in two columns, item beside item; long items are folded.

    Args:
        left: Items of the left column.
        right: Items of the right one.
        width: Of both together, in characters; None is the terminal's.
    """
    width = shutil.get_terminal_size((120, 24)).columns if width is None else width
    column = max(30, (width - 2) // 2)
    hang = " " * len(_SCORE.format(0))
    lines = []
    for pair in zip_longest(left, right, fillvalue=""):
        folded = [textwrap.wrap(item, column, subsequent_indent=hang) for item in pair]
        lines += [
            f"{one:<{column}}  {other}".rstrip()
            for one, other in zip_longest(*folded, fillvalue="")
        ]
    return lines
