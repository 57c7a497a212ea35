"""Label consistency of what each way finds (Guo et al. 2023, section 4.1), with no reader trained.

Similarities, prompts and corpora can so be compared in minutes: the LM's states are in the bank,
and a plain reader that is there already labels each text once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pgra.config import PAIR_SIMILARITIES, PgraArguments
from pgra.data.corpus import open_corpus
from pgra.errors import ConfigError
from pgra.evaluation.consistency import Consistency, measure_consistency
from pgra.evaluation.consistency_tables import score_table
from pgra.evaluation.tables import Table
from pgra.io import write_json, write_text
from pgra.pipelines.found import Found
from pgra.pipelines.pgra import find_evidence, read_task
from pgra.pipelines.pseudo_labels import (
    distinct_evidence,
    label_texts,
    open_labeler,
    sample_corpora,
)
from pgra.processes import Processes
from pgra.rerank.similarity import WAYS
from pgra.types import Json

RANDOM, FIRST_STAGE = "random", "first stage"
_EXHAUSTIVE = "exhaustive "
Lines = Sequence[Mapping[str, Any]]


def ways_of(args: PgraArguments) -> dict[str, PgraArguments]:
    """Give the arguments of each way, by name: chance, the first stage, and each similarity.

    A similarity orders the k candidates, and with a bank of the whole corpus all of it too (but
    not by several prefixes, whose scores are averaged for candidates only). With a prefix a query
    only the similarities of two states alone are ways.

    Args:
        args: What the ways have in common.

    Raises:
        ConfigError: If there is nothing to compare.
    """
    if args.is_exhaustive or args.rerank.reranker == "none" or not args.rerank.num_evidence:
        raise ConfigError(
            "the ways are compared with a first stage, a reranker and evidence: leave out "
            "--retriever exhaustive, --reranker none and --num_evidence 0 (--bank full adds the "
            "exhaustive search)"
        )
    none = replace(args.rerank, reranker="none")
    chance = replace(args.retriever, retriever="random")
    ways = {
        RANDOM: replace(args, retriever=chance, rerank=none),
        FIRST_STAGE: replace(args, rerank=none),
    }
    everything = replace(args.retriever, retriever="exhaustive")
    for name in PAIR_SIMILARITIES if args.rerank.exemplars == "knn" else WAYS:
        own = replace(args, rerank=replace(args.rerank, similarity=name))
        ways[name] = own
        if args.rerank.bank == "full" and args.rerank.num_prefixes == 1:
            ways[_EXHAUSTIVE + name] = replace(own, retriever=everything)
    return ways


@dataclass(frozen=True)
class EvidenceStudy:
    """What was measured.

    Attributes:
        runs: By way and depth, in the order of the table.
        table: The same, with differences to the first stage.
    """

    runs: Sequence[Consistency]
    table: Table


def compare_evidence(
    args: PgraArguments,
    labeler: Path,
    output_dir: Path,
    *,
    depths: Sequence[int] = (),
    centre: bool = True,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> EvidenceStudy:
    """Measure on the test split how consistent the evidence of each way is.

    Args:
        args: The task, corpus and models; d is the largest depth.
        labeler: A finished run of `--num_evidence 0`.
        output_dir: Gets `evidence.json` and `evidence.md`, and the pseudo-labels.
        depths: How many of a query's best are looked at; none means d alone.
        centre: Whether the labeler is centred at its medians over the corpus; else labels are the
            paper's.
        processes: Who shares the LM's work.

    Raises:
        ConfigError: If a depth exceeds d, or the labeler has other labels than the task.
        PgraError: As the stages and `open_labeler` say.
    """
    reader = open_labeler(labeler)
    most = args.rerank.num_evidence
    for depth in depths:
        if not 1 <= depth <= most:
            raise ConfigError(f"depth is {depth}: it must lie between 1 and num_evidence, {most}")
    found, lines = _find_all(args, processes)
    labels = list(found.task.labels)
    if sorted(reader.record.words) != sorted(labels):
        raise ConfigError(
            f"{labeler} decides {', '.join(reader.record.words)}, and {found.task.name} has "
            f"{', '.join(labels)}: give a plain run of this task"
        )
    texts = distinct_evidence(list(lines.values()))
    corpora = [open_corpus(args.corpus, args.artifacts, is_told=False)] if centre else []
    known = label_texts(
        *(reader, texts, output_dir / "pseudo_labels"),
        sample=sample_corpora(corpora),
        device=args.runtime.device,
    )
    runs = [
        measure_consistency(way, found.task.name, told, known.labels, labels=labels, depth=depth)
        for depth in depths or (most,)
        for way, told in lines.items()
    ]
    tables = [
        score_table([r for r in runs if r.depth == depth], baseline=FIRST_STAGE, paper={})
        for depth in depths or (most,)
    ]
    notes = [*tables[0].notes, reader.note, known.note(found.task.name, texts)]
    rows = [row for table in tables for row in table.rows]
    table = replace(tables[0], rows=rows, notes=notes)
    write_text(output_dir / "evidence.md", table.to_markdown() + "\n")
    told: dict[str, Json] = {**reader.describe(), **known.describe(texts)}
    write_json(
        output_dir / "evidence.json",
        {"labeler": told, "ways": [_without_answers(run) for run in runs]},
    )
    return EvidenceStudy(runs, table)


def _without_answers(run: Consistency) -> dict[str, Any]:
    """Give what was measured; no reader decided anything."""
    return {key: value for key, value in run.as_json().items() if key != "by_count"}


def _find_all(args: PgraArguments, processes: Processes) -> tuple[Found, dict[str, Lines]]:
    lines: dict[str, Lines] = {}
    ways, task = ways_of(args), read_task(args)
    for way, own in ways.items():
        found = replace(task.copy(), candidates={}, evidence={})
        find_evidence(found, own, processes, splits=("test",))
        told = zip(found.examples("test"), found.evidence_texts("test"), strict=True)
        lines[way] = [
            {
                "id": example.id,
                "label": example.label,
                "prediction": None,
                "evidence": [{"text": text} for text in texts],
            }
            for example, texts in told
        ]
    return task, lines
