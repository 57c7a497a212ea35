"""What the reader reads: segments, each the query and one evidence, within a token limit.

Guo et al. 2023, section 3.3. Evidence is cut before the query; of the query only the task's own
text is cut, never the template around it: a reader that loses its slot guesses.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pgra.config import at_least, choose
from pgra.errors import ConfigError, DataError
from pgra.prompts.template import check_template
from pgra.types import Example, ReaderInput

logger = logging.getLogger(__name__)

SEGMENT_ORDERS = ("evidence_first", "query_first")
_CHUNK = 4096


@dataclass(frozen=True)
class SegmentLayout:
    """How a segment is put together.

    Attributes:
        template: How the query is shown, with a slot for each field it uses.
        order: "query_first", or "evidence_first" as in the paper's code.
        max_tokens: Most tokens of a segment, the end of sentence included.
    """

    template: str
    order: str = "query_first"
    max_tokens: int = 128

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        choose("segment order", self.order, SEGMENT_ORDERS)
        at_least("max_segment_tokens", self.max_tokens, 1)

    def join(self, query: str, evidence: str) -> str:
        """Put a query and one evidence into one segment."""
        parts = [query, evidence] if self.order == "query_first" else [evidence, query]
        return " ".join(part for part in parts if part)


@dataclass(frozen=True)
class BuiltInputs:
    """Reader inputs, and what did not fit.

    Attributes:
        inputs: One for each example, in order.
        queries_cut: Examples whose own text was shortened.
        evidence_cut: Evidence texts that were shortened, of all examples.
    """

    inputs: list[ReaderInput]
    queries_cut: int
    evidence_cut: int


def build_inputs(
    examples: Sequence[Example],
    evidence: Sequence[Sequence[str]],
    tokenizer: Any,
    *,
    layout: SegmentLayout,
) -> BuiltInputs:
    """Put examples and their evidence into segments that fit.

    Args:
        examples: The queries.
        evidence: N texts an example, N may differ; none gives one segment, the query alone.
        tokenizer: The reader's.
        layout: Template, order and limit.

    Returns:
        Inputs in the order given, and how many texts were shortened.

    Raises:
        ConfigError: If the template asks for a field that an example lacks, or leaves no room.
        ValueError: If there are not as many lists of evidence as examples.
    """
    if len(examples) != len(evidence):
        raise ValueError(f"{len(examples)} examples, {len(evidence)} lists of evidence")
    for fields in {tuple(example.fields) for example in examples}:
        check_template(layout.template, fields)
    queries, queries_cut = _fit_queries(examples, tokenizer, layout)
    owners = [i for i, texts in enumerate(evidence) for _ in texts]
    texts = [text for texts in evidence for text in texts]
    joined, evidence_cut = _fit_evidence([queries[i] for i in owners], texts, tokenizer, layout)
    segments: list[list[str]] = [[] for _ in examples]
    for owner, segment in zip(owners, joined, strict=True):
        segments[owner].append(segment)
    if queries_cut or evidence_cut:
        logger.info(
            "cut to %d tokens: %d of %d queries, %d of %d evidence texts",
            layout.max_tokens,
            queries_cut,
            len(examples),
            evidence_cut,
            len(texts),
        )
    inputs = [
        ReaderInput(example.id, tuple(found or [query]), example.label)
        for example, found, query in zip(examples, segments, queries, strict=True)
    ]
    return BuiltInputs(inputs, queries_cut, evidence_cut)


def count_tokens(texts: Sequence[str], tokenizer: Any) -> list[int]:
    """Count the tokens of texts, the end of sentence included."""
    return [len(ids) for chunk in _chunks(texts) for ids in tokenizer(chunk).input_ids]


def _chunks(texts: Sequence[str]) -> Iterator[list[str]]:
    return (list(texts[start : start + _CHUNK]) for start in range(0, len(texts), _CHUNK))


def _fit_queries(
    examples: Sequence[Example], tokenizer: Any, layout: SegmentLayout
) -> tuple[list[str], int]:
    queries = [layout.template.format_map(example.fields) for example in examples]
    too_long = _too_long(queries, tokenizer, layout.max_tokens)
    for i in too_long:
        queries[i] = _fit_query(examples[i], tokenizer, layout)
    return queries, len(too_long)


def _fit_query(example: Example, tokenizer: Any, layout: SegmentLayout) -> str:
    """Shorten the longest field, again and again, until the query fits."""
    fields: Mapping[str, str] = dict(example.fields)
    while True:
        query = layout.template.format_map(fields)
        over = count_tokens([query], tokenizer)[0] - layout.max_tokens
        if over <= 0:
            return query
        longest = max(fields, key=lambda name: len(fields[name]))
        if not fields[longest]:
            raise ConfigError(
                f"max_segment_tokens ({layout.max_tokens}) is less than the reader template's own "
                f"{layout.max_tokens + over} tokens ({layout.template!r})"
            )
        fields = {**fields, longest: _shorten(fields[longest], over, tokenizer)}


def _fit_evidence(
    queries: Sequence[str], texts: Sequence[str], tokenizer: Any, layout: SegmentLayout
) -> tuple[list[str], int]:
    """Shorten evidence until each segment fits; the queries do already."""
    kept = list(texts)
    segments = [layout.join(q, text) for q, text in zip(queries, kept, strict=True)]
    todo = first = _too_long(segments, tokenizer, layout.max_tokens)
    while todo:
        for i, over in todo.items():
            kept[i] = _shorten(kept[i], over, tokenizer)
            segments[i] = layout.join(queries[i], kept[i])
        again = list(todo)
        found = _too_long([segments[i] for i in again], tokenizer, layout.max_tokens)
        todo = {again[place]: over for place, over in found.items()}
    return segments, len(first)


def _too_long(texts: Sequence[str], tokenizer: Any, limit: int) -> dict[int, int]:
    """Give by index how many tokens over the limit a text is."""
    counts = count_tokens(texts, tokenizer)
    return {i: count - limit for i, count in enumerate(counts) if count > limit}


def _shorten(text: str, surplus: int, tokenizer: Any) -> str:
    """Take at least `surplus` tokens, and at least one, off a text's end."""
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    kept = len(encoded.input_ids) - surplus
    while kept > 0:
        shorter = text[: encoded.offset_mapping[kept - 1][1]].rstrip()
        if len(shorter) < len(text):
            return shorter
        kept -= 1  # several tokens may stand for one character, such as an ellipsis
    return ""


def check_labels(inputs: Sequence[ReaderInput], labels: Sequence[str]) -> None:
    """Refuse inputs to learn from that lack a known label.

    Raises:
        DataError: If one has none, or one that the task does not know.
    """
    for item in inputs:
        if item.label not in labels:
            raise DataError(
                f"example '{item.example_id}' has label {item.label!r}, "
                f"the task knows: {', '.join(labels)}"
            )
