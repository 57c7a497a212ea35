"""What the reader reads: segments, each the query and one evidence, within a token limit.

Guo et al. 2023, section 3.3. A query and a passage are tokenised once, however many segments they
stand in; a segment's tokens are those of its first part, of a space and its second part, and the
end. Evidence is cut before the query; of the query only the task's own text is cut, never the
template around it: a reader that loses its slot guesses.
"""

import logging
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from pgra.config import at_least, choose
from pgra.errors import ConfigError, DataError
from pgra.models.segments import TokenIds
from pgra.prompts.template import check_template
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Example

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


@dataclass(frozen=True)
class BuiltInputs:
    """Reader inputs, and what did not fit.

    Attributes:
        inputs: One for each example, in order.
        queries_cut: Examples whose own text was shortened.
        evidence_cut: Evidence texts that were shortened, of all examples.
    """

    inputs: TokenizedInputs
    queries_cut: int
    evidence_cut: int


def build_inputs(
    examples: Sequence[Example],
    evidence: Sequence[Sequence[str]],
    tokenizer: Any,
    verbalizer: Verbalizer,
    *,
    layout: SegmentLayout,
) -> BuiltInputs:
    """Put examples and their evidence into segments that fit, as tokens.

    Args:
        examples: The queries.
        evidence: N texts an example, N may differ; none gives one segment, the query alone.
        tokenizer: The reader's.
        verbalizer: Gives each label its target.
        layout: Template, order and limit.

    Returns:
        Inputs in the order given, and how many texts were shortened.

    Raises:
        ConfigError: If the template asks for a field that an example lacks, or leaves no room.
        DataError: If an example has a label that the verbalizer does not know.
        ValueError: If there are not as many lists of evidence as examples.
    """
    if len(examples) != len(evidence):
        raise ValueError(f"{len(examples)} examples, {len(evidence)} lists of evidence")
    for fields in {tuple(example.fields) for example in examples}:
        check_template(layout.template, fields)
    queries, queries_cut = fit_queries(examples, tokenizer, layout)
    is_first = layout.order == "query_first"
    distinct = list(dict.fromkeys(chain.from_iterable(evidence)))
    query_ids = tokenize_parts(queries, tokenizer, is_first=is_first)
    tokens = tokenize_parts(distinct, tokenizer, is_first=not is_first)
    texts = dict(zip(distinct, tokens, strict=True))
    join = Join(tokenizer.eos_token_id, layout)
    alone = query_ids if is_first else tokenize_parts(queries, tokenizer, is_first=True)
    segments = [
        [join(query_ids[i], texts[text]) if text else join.close(alone[i]) for text in found]
        or [join.close(alone[i])]
        for i, found in enumerate(evidence)
    ]
    if queries_cut or join.num_cut:
        logger.info(
            "cut to %d tokens: %d of %d queries, %d of %d evidence texts",
            layout.max_tokens,
            queries_cut,
            len(examples),
            join.num_cut,
            sum(map(len, evidence)),
        )
    return BuiltInputs(
        TokenizedInputs.of(examples, segments, tokenizer, verbalizer), queries_cut, join.num_cut
    )


class Join:
    """Puts a query and one evidence into one segment, and counts the evidence that it cut."""

    def __init__(self, end: int, layout: SegmentLayout) -> None:
        """Take the end's token and the limit."""
        self._end = np.array([end], dtype=np.int32)
        self._is_first = layout.order == "query_first"
        self._room = layout.max_tokens - 1
        self.num_cut = 0

    def __call__(self, query: TokenIds, evidence: TokenIds) -> TokenIds:
        """Give both, the evidence cut to the room that the query leaves."""
        room = self._room - len(query)
        if len(evidence) > room:
            evidence = evidence[:room]
            self.num_cut += 1
        parts = (query, evidence) if self._is_first else (evidence, query)
        return np.concatenate([*parts, self._end])

    def close(self, query: TokenIds) -> TokenIds:
        """Give the query alone."""
        return np.concatenate([query, self._end])


def tokenize_parts(texts: Sequence[str], tokenizer: Any, *, is_first: bool) -> list[TokenIds]:
    """Tokenise parts of segments, without the end; behind another part they follow a space."""
    given = list(texts) if is_first else [f" {text}" for text in texts]
    return [
        np.array(ids, dtype=np.int32)
        for start in range(0, len(given), _CHUNK)
        for ids in tokenizer(given[start : start + _CHUNK], add_special_tokens=False).input_ids
    ]


def fit_queries(
    examples: Sequence[Example], tokenizer: Any, layout: SegmentLayout
) -> tuple[list[str], int]:
    """Show examples in the template, shortened until they fit.

    Returns:
        A text for each, and how many were shortened.

    Raises:
        ConfigError: If the limit is less than the template's own tokens.
    """
    queries = [layout.template.format_map(example.fields) for example in examples]
    sizes = [len(ids) + 1 for ids in tokenize_parts(queries, tokenizer, is_first=True)]
    too_long = [i for i, size in enumerate(sizes) if size > layout.max_tokens]
    for i in too_long:
        queries[i] = _fit_query(examples[i], tokenizer, layout)
    return queries, len(too_long)


def _fit_query(example: Example, tokenizer: Any, layout: SegmentLayout) -> str:
    """Shorten the longest field, and then the next, until the query fits."""
    fields: Mapping[str, str] = dict(example.fields)

    def over(name: str, kept: int) -> int:
        text = layout.template.format_map({**fields, name: fields[name][:kept].rstrip()})
        return len(tokenize_parts([text], tokenizer, is_first=True)[0]) + 1 - layout.max_tokens

    while True:
        longest = max(fields, key=lambda name: len(fields[name]))
        surplus = over(longest, 0)
        if surplus <= 0:
            break
        if not fields[longest]:
            raise ConfigError(
                f"max_segment_tokens ({layout.max_tokens}) is less than the reader template's own "
                f"{layout.max_tokens + surplus} tokens ({layout.template!r})"
            )
        fields = {**fields, longest: ""}
    # The most characters that fit: tokens grow with characters.
    most = bisect_left(range(1, len(fields[longest])), 1, key=lambda n: over(longest, n))
    fields = {**fields, longest: fields[longest][:most].rstrip()}
    return layout.template.format_map(fields)


def check_labels(inputs: TokenizedInputs, labels: Sequence[str]) -> None:
    """Refuse inputs to learn from that lack a known label.

    Raises:
        DataError: If one has none, or one that the task does not know.
    """
    for name, label in zip(inputs.example_ids, inputs.labels, strict=True):
        if label not in labels:
            raise DataError(
                f"example '{name}' has label {label!r}, the task knows: {', '.join(labels)}"
            )
