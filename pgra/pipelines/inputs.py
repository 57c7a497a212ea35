"""What the reader reads of a task: its words, its segments, as tokens that are made once."""

from dataclasses import asdict
from typing import Any

from pgra.config import PgraArguments, ReaderArguments
from pgra.data.tasks import Task
from pgra.models.loading import tokenizer_identity
from pgra.pipelines.found import Found
from pgra.processes import Processes
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs
from pgra.reader.predict import Decision
from pgra.reader.tokens import TokenizedInputs, store_inputs
from pgra.retrieval.store import examples_digest
from pgra.types import Json


def task_verbalizer(task: Task, args: ReaderArguments) -> Verbalizer:
    """Give the reader's words and template for a task."""
    return Verbalizer(task.verbalizer, args.reader_template or task.reader_template)


def segment_layout(task: Task, args: ReaderArguments) -> SegmentLayout:
    """Give how a task's segments are put together."""
    template = args.reader_template or task.reader_template
    return SegmentLayout(template, args.segment_order, args.max_segment_tokens)


def label_decision(args: ReaderArguments) -> Decision:
    """Give how labels are decided."""
    return Decision(args.decode, args.length_normalize)


def read_inputs(
    found: Found,
    split: str,
    args: PgraArguments,
    tokenizer: Any,
    processes: Processes = Processes(),  # noqa: B008 (frozen)
) -> TokenizedInputs:
    """Tokenise a split with its evidence, or take up what is there.

    Args:
        found: The task's examples with their evidence.
        split: Which of them.
        args: Layout, depth and where products go.
        tokenizer: The reader's.
        processes: Who waits.

    Raises:
        PgraError: As `build_inputs` and `store_inputs`.
    """
    examples, layout = found.examples(split), segment_layout(found.task, args.reader)
    verbalizer = task_verbalizer(found.task, args.reader)
    fields: dict[str, Json] = {
        **asdict(layout),
        "tokenizer": tokenizer_identity(tokenizer),
        "examples": examples_digest(examples),
        "evidence": found.fingerprints.get(f"evidence/{split}"),
        "corpus": found.fingerprints.get("corpus"),
        "num_evidence": found.depth,
    }
    return store_inputs(
        args.artifacts / "inputs" / found.task.name,
        split,
        fields,
        lambda: (
            build_inputs(
                examples, found.evidence_texts(split), tokenizer, verbalizer, layout=layout
            ).inputs
        ),
        examples=examples,
        tokenizer=tokenizer,
        verbalizer=verbalizer,
        processes=processes,
    )
