"""What the reader reads of a task: its words, its segments, as tokens that are made once."""

from dataclasses import asdict
from typing import Any

from pgra.config import PgraArguments, ReaderArguments
from pgra.data.tasks import Task
from pgra.errors import ConfigError
from pgra.models.loading import tokenizer_identity
from pgra.pipelines.found import Found
from pgra.processes import Processes
from pgra.prompts.template import check_template
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.inputs import SegmentLayout, build_inputs
from pgra.reader.predict import Decision
from pgra.reader.tokens import TokenizedInputs, store_inputs
from pgra.retrieval.store import examples_digest
from pgra.types import Json


def reader_template(task: Task, args: ReaderArguments) -> str:
    """Give how the reader sees a query: as asked for, or by a profile, else as the task says.

    Raises:
        ConfigError: If what was asked for has other fields than the task (`--profile official` has
            one text, a pair has two); the task's own is named.
    """
    if not args.reader_template:
        return task.reader_template
    try:
        check_template(args.reader_template, task.inputs)
    except ConfigError as error:
        raise ConfigError(
            f"reader_template does not fit task '{task.name}': {str(error).rstrip('.')}; give the "
            f"task's own, which wins over a profile's: --reader_template '{task.reader_template}'"
        ) from None
    return args.reader_template


def task_verbalizer(task: Task, args: ReaderArguments) -> Verbalizer:
    """Give the reader's words and template for a task.

    Raises:
        ConfigError: If the template does not fit the task.
    """
    return Verbalizer(task.verbalizer, reader_template(task, args))


def segment_layout(task: Task, args: ReaderArguments) -> SegmentLayout:
    """Give how a task's segments are put together.

    Raises:
        ConfigError: If the template does not fit the task.
    """
    return SegmentLayout(reader_template(task, args), args.segment_order, args.max_segment_tokens)


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
