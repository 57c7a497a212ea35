"""Both retrieval stages, for a task's splits or for texts: `pgra search --task NAME`."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from pgra.commands import common
from pgra.commands import index as first_stage
from pgra.commands.index import TextArguments, WorkArguments
from pgra.config import Arguments, arg
from pgra.errors import ConfigError, visible
from pgra.methods.arguments import RunArguments
from pgra.reader.arguments import ReaderArguments
from pgra.retrieval.trec import QueryFileArguments, finish_run
from pgra.types import MISSING_ROW

if TYPE_CHECKING:
    from pgra.context import Context


@dataclass(kw_only=True)
class ShowArguments(Arguments):
    """How much is shown."""

    num_shown: int = arg(5, "Passages of each stage that are shown for a text.", least=1)


def search(argv: Sequence[str] | None = None) -> int:
    """Run both stages where a task, an LM or a reranker is named, else the first alone."""
    words = common.name_leading("--text", argv)
    own = common.given_names(words) & {"task", "lm", "reranker"}
    return main(words) if own else first_stage.search(words)


def main(words: Sequence[str]) -> int:
    r"""Find candidates and let a model order them, such as an LM under a prompt.

    Examples:
      pgra search "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m \
          --num_candidates 50
      pgra search "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --max_passages 300 --lm bundled:smollm2-135m \
          --retriever exhaustive
      pgra search "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --reranker cross-encoder \
          --cross_encoder cross-encoder/ms-marco-MiniLM-L6-v2
      pgra search "Where is it?" --corpus docs.txt --encoder bundled:minilm-l6 \
          --reranker likelihood --lm bundled:smollm2-135m
      pgra search --task sst2 --config configs/experiments/paper.yaml

    With texts, it shows the best of both stages (the exemplars in the prompt are the task's; only
    --reranker prompted needs a task); with --queries FILE and --trec or --qrels, it writes the
    second stage's order of all candidates as a TREC run, or measures it. Without, it runs both
    stages for all splits of the task, and says where their products lie. With --retriever
    exhaustive the LM reads the whole corpus once, and candidates are the best of all of it.
    """
    parts, (texts, own, show, work) = common.parse_stages(
        words,
        [TextArguments, QueryFileArguments, ShowArguments, WorkArguments],
        without=["reader"],
        prog="pgra search --task NAME",
        **common.about(main),
    )
    queries = own.read(texts.text)
    asked = list(queries.values())
    if asked:  # all candidates are ordered
        every = parts["retriever"].num_candidates
        parts["rerank"] = replace(parts["rerank"], num_evidence=every)
    args = RunArguments({**parts, "reader": ReaderArguments()})
    if args.rerank.num_evidence == 0:
        raise ConfigError("num_evidence is 0: there is nothing to rerank; ask for at least 1")
    common.quiet_libraries()
    context = work.join(args.runtime.device)
    if context.worker.is_part:
        message = read_part(args, asked, context)
    elif own.is_run:
        search, _, best = _search(args, asked, context)
        if not context.is_main:
            return 0
        tag = f"pgra-{args.rerank.reranker}"
        depth = best.rows.shape[1]
        message = finish_run(own, list(queries), best, search.corpus, tag=tag, k=depth)
    elif asked:
        message = visible(_show_texts(args, asked, show.num_shown, context))
    else:
        message = _rerank_splits(args, context)
    if context.is_main:
        common.say(message)
    return 0


def _rerank_splits(args: RunArguments, context: "Context") -> str:
    from pgra.methods.base import SPLITS
    from pgra.methods.stages import Stages

    found = Stages.read(args, context)
    found.find()
    lines = []
    for split in SPLITS:
        reused = " (reused)" if found.evidence[split].reused else ""
        lines.append(
            f"{found.data.task.name} {split}: {len(found.data.examples(split)):,} queries{reused}"
        )
        lines.append(f"  candidates: {found.candidates[split].folder}")
        lines.append(f"  evidence:   {found.evidence[split].folder}")
    return "\n".join(lines)


def _open(args: RunArguments, texts: Sequence[str], context: "Context") -> Any:
    """Open the stages, and write texts as queries."""
    from pgra.methods.stages import Stages
    from pgra.types import Example

    is_bare = args.data.task is None and texts
    search = Stages.without_task(args, context) if is_bare else Stages.read(args, context)
    search.finds_itself = True
    fields = search.prompt.template.passage_fields
    return search, [Example(f"text-{number}", fields(text)) for number, text in enumerate(texts)]


def _search(args: RunArguments, texts: Sequence[str], context: "Context") -> Any:
    """Find evidence for texts; their states are kept in the bank, what is found is not."""
    search, queries = _open(args, texts, context)
    return search, *search.search(queries)


def read_part(args: RunArguments, texts: Sequence[str], context: "Context") -> str:
    """Let the reranker's model read a part of what it has to read, of splits or for texts."""
    stages, queries = _open(args, texts, context)
    stages.open()
    asked = stages.wanted(queries)
    work = stages.reranker.prepare(*asked)
    left = stages.reranker.count_missing(*asked)
    return f"{work}; {left or 'none'} are still with other parts"


def _show_texts(args: RunArguments, texts: Sequence[str], count: int, context: "Context") -> str:
    search, first, best = _search(args, texts, context)
    stages = (
        (f"first stage: {args.retriever.retriever}", first.top(count)),
        (f"second stage: {args.rerank.reranker}", best.top(count)),
    )
    lines = []
    for query, text in enumerate(texts):
        lines.append(f"query: {text}")
        for head, found in stages:
            pairs = zip(found.rows[query].tolist(), found.scores[query].tolist(), strict=True)
            shown = [f"{s:>10.4f}  {search.corpus[row]}" for row, s in pairs if row != MISSING_ROW]
            lines += [head, *shown]
    return "\n".join(lines)
