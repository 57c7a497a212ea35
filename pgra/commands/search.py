"""Search for texts or for a task's splits, by one stage or two: `pgra search`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pgra.commands import common
from pgra.commands.common import TextArguments, WorkArguments
from pgra.config import Arguments, Defaults, arg
from pgra.data.corpus import Corpus, CorpusArguments
from pgra.errors import ConfigError, visible
from pgra.methods.arguments import RalmArguments, RunArguments
from pgra.reader.arguments import ReaderArguments
from pgra.retrieval.base import Recipe
from pgra.retrieval.trec import QueryFileArguments, finish_run

if TYPE_CHECKING:
    from pgra.context import Context
    from pgra.methods.stages import Stages
    from pgra.report.results import EvidenceLine

_NUM_CANDIDATES = 20  # of a text without a task: an LM reads them while a person waits
_ANSWER_TOKENS = 16
_ENCODER = "bundled:minilm-l6"


@dataclass(kw_only=True)
class ShowArguments(Arguments):
    """How much is shown."""

    num_shown: int = arg(5, "Passages that are shown for a text.", least=1)
    answer: bool = arg(
        False, "Let --lm answer each text from the passages shown, and name the one that has it."
    )


def main(argv: Sequence[str]) -> int:
    r"""Find the passages of a corpus that come near a text, and let a model order them.

    Examples:
      pgra search "Who wrote Hamlet?" --corpus docs.txt
      pgra search "Who wrote Hamlet?" --corpus docs.txt --lm bundled:smollm2-135m
      pgra search --queries queries.tsv --trec run.txt --qrels qrels.txt --corpus corpus.jsonl \
          --corpus_id _id --retriever bm25+dense
      pgra search "Who wrote Hamlet?" --corpus docs.txt --reranker cross-encoder \
          --cross_encoder cross-encoder/ms-marco-MiniLM-L6-v2
      pgra search "A warm and funny film." --task sst2 --dataset_name bundled:rotten-tomatoes \
          --corpus bundled:wikipedia-19k --encoder bundled:minilm-l6 --lm bundled:smollm2-135m
      pgra search --task sst2 --config configs/experiments/paper.yaml

    Without a task, MiniLM finds 20 candidates, and --lm orders them by the likelihood of the text
    after each and the first stage's score; long documents want --passage_words 100. With --task the
    LM orders them under the task's prompt; without texts it does so for all splits, and says where
    the products lie. With --queries FILE and --trec or --qrels the order of all candidates is
    written as a TREC run, or measured.
    """
    from pgra.methods.base import find_options

    words = common.name_leading("--text", argv)
    names = common.given_names(words)
    if not names & {"task", "reranker"}:
        words += ["--reranker", "likelihood" if "lm" in names else "none"]
    stages = {name: cls for name, cls in common.SECTIONS.items() if name != "reader"}
    parse = partial(
        common.parse_chosen,
        main,
        "pgra search",
        words,
        lambda chosen: stages | find_options(chosen),
        [TextArguments, QueryFileArguments, ShowArguments, WorkArguments],
    )
    sections, (texts, files, show, work) = parse()
    if show.answer and "lm" not in names:
        raise ConfigError("--answer needs --lm, which writes it")
    named_queries = files.read(texts.text)
    queries = list(named_queries.values())
    corpus = None
    if sections["data"].task is None:
        if not queries:
            raise ConfigError('there is nothing to search with: pgra search "a text" --corpus ...')
        sections, corpus = _choose_defaults(parse, sections)
    if queries:  # all candidates are ordered
        count = sections["retriever"].num_candidates
        sections["rerank"] = replace(sections["rerank"], num_evidence=count)
    args = RunArguments({**sections, "reader": ReaderArguments()})
    common.quiet_libraries()
    context = work.join(args.runtime.device)
    if context.worker.is_part:
        message = read_part(args, queries, context, corpus)
    elif files.compare:
        from pgra.experiments.search_ways import compare_ways

        message = compare_ways(files, args, named_queries, context, corpus)
    elif queries:
        opened = _open(args, context, corpus)
        examples = opened.write_queries(queries, drop_self=files.drop_self)
        candidates, best = opened.search(examples)
        if not context.is_main:
            return 0
        if files.trec or files.qrels:  # a run is made, rather than hits shown
            name = args.rerank.reranker
            name = args.retriever.retriever.partition(":")[0] if name == "none" else name
            ids = list(named_queries)
            message = finish_run(files, ids, best, opened.corpus, tag=f"pgra-{name}")
        else:
            hits = [line[: show.num_shown] for line in opened.lines(candidates, best)]
            answers = _answer(args, queries, hits, context) if show.answer else queries
            message = visible(describe_hits(answers, hits))
    else:
        message = _rerank_splits(args, context)
    if context.is_main:
        common.say(message)
    return 0


def _choose_defaults(
    parse: Callable[..., Any], sections: Mapping[str, Any]
) -> tuple[dict[str, Any], Corpus | None]:
    """Read the words over what a person without a task leaves out; return a given index's corpus.

    An index that is given without a corpus brings its own, and its encoder.
    """
    values: dict[str, Any] = {"encoder": _ENCODER}
    index_dir = sections["retriever"].index_dir
    recipe = None
    if index_dir is not None and sections["corpus"].corpus == CorpusArguments().corpus:
        recipe = Recipe.read(Path(index_dir))
        values = {**asdict(recipe.retriever), **asdict(recipe.corpus)}
    values["num_candidates"] = _NUM_CANDIDATES
    chosen, _ = parse(defaults=[Defaults("pgra search", values)])
    if recipe is None or chosen["corpus"] != recipe.corpus:
        return chosen, None
    return chosen, recipe.open_corpus(Path(chosen["runtime"].artifacts_dir))


def _open(args: RunArguments, context: "Context", corpus: Corpus | None = None) -> "Stages":
    from pgra.methods.stages import Stages

    if args.data.task is None:
        return Stages.without_task(args, context, corpus)
    return Stages.read(args, context)


def read_part(
    args: RunArguments, texts: Sequence[str], context: "Context", corpus: Corpus | None = None
) -> str:
    """Let the reranker's model read a part of what it has to read, of splits or for texts."""
    stages = _open(args, context, corpus)
    stages.open()
    examples, rows = stages.wanted(stages.write_queries(texts))
    cost = stages.reranker.prepare(examples, rows)
    left = stages.reranker.count_missing(examples, rows)
    return f"{cost}; {left or 'none'} are still with other parts"


def _rerank_splits(args: RunArguments, context: "Context") -> str:
    if args.rerank.num_evidence == 0:
        raise ConfigError("num_evidence is 0: there is nothing to rerank; ask for at least 1")
    stages = _open(args, context)
    stages.find()
    products = [*stages.candidates.values(), *stages.evidence.values()]
    return "\n".join(f"{p.folder}{' (reused)' if p.reused else ''}" for p in products)


def _answer(
    args: RunArguments,
    texts: Sequence[str],
    hits: "Sequence[Sequence[EvidenceLine]]",
    context: "Context",
) -> list[str]:
    """Return texts with the LM's answers from their passages, and the first that has it."""
    from pgra.methods.kate import write_answers
    from pgra.methods.ralm import open_reader, write_prompts
    from pgra.report.metrics import has_answer

    lm = open_reader(args.rerank.lm, args.rerank, context)
    prompts = write_prompts(
        lm,
        texts,
        [f"Question: {text}\nAnswer:" for text in texts],
        [[hit.text for hit in passages] for passages in hits],
        max_tokens=RalmArguments.max_reader_tokens,
        num_new_tokens=_ANSWER_TOKENS,
    )
    lines = []
    written = write_answers(lm, prompts, _ANSWER_TOKENS, "\n", context)
    for text, answer, passages in zip(texts, written, hits, strict=True):
        rows = [hit.row for hit in passages if has_answer(hit.text, [answer])]
        source = f"row {rows[0]}" if rows else "in none of the passages: do not rely on it"
        lines.append(f"{text}\n  answer: {answer} ({source})")
    return lines


def describe_hits(texts: Sequence[str], hits: "Sequence[Sequence[EvidenceLine]]") -> str:
    """Describe each text's passages: rank, score, row and text."""
    lines = []
    for text, passages in zip(texts, hits, strict=True):
        lines.append(text)
        for rank, hit in enumerate(passages, 1):
            lines.append(f"  {rank:>4}  {hit.score:9.4f}  row {hit.row:<9} {hit.text}")
        if not passages:
            lines.append(
                "  nothing found: no passage shares a word with it that most passages lack"
            )
    return "\n".join(lines)
