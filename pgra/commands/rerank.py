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


def search(argv: Sequence[str]) -> int:
    """Run both stages where a task, an LM or a reranker is named, else the first alone."""
    words = common.name_leading("--text", argv)
    if common.given_names(words) & {"task", "lm", "reranker"}:
        return main(words)
    return first_stage.search(words)


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
    from pgra.methods.base import find_options

    stages = {name: cls for name, cls in common.SECTIONS.items() if name != "reader"}
    sections, (texts, files, show, work) = common.parse_chosen(
        main,
        "pgra search --task NAME",
        words,
        lambda chosen: stages | find_options(chosen),
        [TextArguments, QueryFileArguments, ShowArguments, WorkArguments],
    )
    named_queries = files.read(texts.text)
    queries = list(named_queries.values())
    if queries:  # all candidates are ordered
        every = sections["retriever"].num_candidates
        sections["rerank"] = replace(sections["rerank"], num_evidence=every)
    args = RunArguments({**sections, "reader": ReaderArguments()})
    if args.rerank.num_evidence == 0:
        raise ConfigError("num_evidence is 0: there is nothing to rerank; ask for at least 1")
    common.quiet_libraries()
    context = work.join(args.runtime.device)
    if context.worker.is_part:
        message = read_part(args, queries, context)
    elif files.is_run:
        stages, _, best = _search(args, queries, context)
        if not context.is_main:
            return 0
        tag = f"pgra-{args.rerank.reranker}"
        depth = best.rows.shape[1]
        message = finish_run(files, list(named_queries), best, stages.corpus, tag=tag, k=depth)
    elif queries:
        message = visible(_show_texts(args, queries, show.num_shown, context))
    else:
        message = _rerank_splits(args, context)
    if context.is_main:
        common.say(message)
    return 0


def _rerank_splits(args: RunArguments, context: "Context") -> str:
    from pgra.methods.base import SPLITS
    from pgra.methods.stages import Stages

    stages = Stages.read(args, context)
    stages.find()
    task = stages.data.task.name
    lines = []
    for split in SPLITS:
        evidence = stages.evidence[split]
        reused = " (reused)" if evidence.reused else ""
        lines.append(f"{task} {split}: {len(stages.data.examples(split)):,} queries{reused}")
        lines.append(f"  candidates: {stages.candidates[split].folder}")
        lines.append(f"  evidence:   {evidence.folder}")
    return "\n".join(lines)


def _open(args: RunArguments, texts: Sequence[str], context: "Context") -> Any:
    """Open the stages, and write texts as queries."""
    from pgra.methods.stages import Stages
    from pgra.types import Example

    open_stages = Stages.without_task if args.data.task is None and texts else Stages.read
    stages = open_stages(args, context)
    stages.finds_itself = True
    fields = stages.prompt.template.passage_fields
    return stages, [Example(f"text-{number}", fields(text)) for number, text in enumerate(texts)]


def _search(args: RunArguments, texts: Sequence[str], context: "Context") -> Any:
    """Find evidence for texts; their states are kept in the bank, the evidence is not."""
    stages, queries = _open(args, texts, context)
    return stages, *stages.search(queries)


def read_part(args: RunArguments, texts: Sequence[str], context: "Context") -> str:
    """Let the reranker's model read a part of what it has to read, of splits or for texts."""
    stages, queries = _open(args, texts, context)
    stages.open()
    examples, rows = stages.wanted(queries)
    cost = stages.reranker.prepare(examples, rows)
    left = stages.reranker.count_missing(examples, rows)
    return f"{cost}; {left or 'none'} are still with other parts"


def _show_texts(args: RunArguments, texts: Sequence[str], count: int, context: "Context") -> str:
    stages, first, best = _search(args, texts, context)
    results = {
        f"first stage: {args.retriever.retriever}": first.top(count),
        f"second stage: {args.rerank.reranker}": best.top(count),
    }
    lines = []
    for query, text in enumerate(texts):
        lines.append(f"query: {text}")
        for title, hits in results.items():
            lines.append(title)
            for row, score in zip(hits.rows[query].tolist(), hits.scores[query], strict=True):
                if row != MISSING_ROW:
                    lines.append(f"{score:>10.4f}  {stages.corpus[row]}")
    return "\n".join(lines)
