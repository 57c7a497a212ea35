"""The reader's inputs: queries, segments within a token limit, token arrays.

Guo et al. 2023, section 3.3. A query and a passage are tokenised once, however many segments have
them; a segment's tokens are those of its first part, of a space and its second part, and the end.
Evidence is cut before the query; of the query only the task's own text is cut, never the template.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self

import numpy as np

from pgra.errors import ConfigError
from pgra.lm.batching import GroupCost
from pgra.prompts import Verbalizer
from pgra.reader.fid import IGNORED, TokenIds, pack_segments, pad_rows
from pgra.types import Example

# Tokenised inputs of the reader.


@dataclass(frozen=True)
class TokenizedInput:
    """One example as tokens: N segments of int32 ids, each the query with one evidence.

    `target` has the ids of the label's target, None without a label.
    """

    segments: Sequence[TokenIds]
    target: TokenIds | None


@dataclass(frozen=True)
class TokenizedInputs:
    """A split's examples as tokens: a sequence of `TokenizedInput`.

    Attributes:
        labels: The labels' names, None where an example has none.
        targets: Target tokens by label, or by answer.
        segments: Each example's, as tokens.
    """

    example_ids: Sequence[str]
    labels: Sequence[str | None]
    targets: Mapping[str, TokenIds]
    segments: Sequence[Sequence[TokenIds]]

    @classmethod
    def of(
        cls,
        examples: Sequence[Example],
        segments: Sequence[Sequence[TokenIds]],
        tokenizer: Any,
        verbalizer: Verbalizer,
    ) -> Self:
        """Put examples beside their segments."""
        labels = [example.label for example in examples]
        names = verbalizer.labels or [name for name in dict.fromkeys(labels) if name is not None]
        targets = zip(names, verbalizer.target_ids(tokenizer, names), strict=True)
        return cls(
            [example.id for example in examples],
            labels,
            {label: np.array(target, dtype=np.int32) for label, target in targets},
            segments,
        )

    def __len__(self) -> int:
        return len(self.example_ids)

    def __getitem__(self, row: int) -> TokenizedInput:
        label = self.labels[row]
        target = None if label is None else self.targets[label]
        return TokenizedInput(self.segments[row], target)

    def take(self, rows: Sequence[int]) -> Self:
        """Return some of the examples."""
        return replace(
            self,
            example_ids=[self.example_ids[row] for row in rows],
            labels=[self.labels[row] for row in rows],
            segments=[self.segments[row] for row in rows],
        )

    def sizes(self) -> list[int]:
        """Count each example's tokens over all its segments."""
        return [sum(map(len, segments)) for segments in self.segments]


# Segments: a query and one evidence within the limit.


@dataclass(frozen=True)
class SegmentLayout:
    """How a query and an evidence become a segment of at most `max_tokens`, its end included.

    `template` shows the query; the paper's code has the order "evidence_first".
    """

    template: str
    order: str = "query_first"
    max_tokens: int = 128


def build_inputs(
    examples: Sequence[Example],
    evidence: Sequence[Sequence[str]],
    tokenizer: Any,
    verbalizer: Verbalizer,
    *,
    layout: SegmentLayout,
) -> TokenizedInputs:
    """Put examples and their evidence into segments that fit, as tokens, in the order given.

    An example has any number of evidence texts; without any its one segment is the query alone.

    Raises:
        ConfigError: If the template leaves no room.
    """
    queries = fit_queries(examples, tokenizer, layout)
    is_first = layout.order == "query_first"
    beside = tokenize_parts(queries, tokenizer, is_first=is_first)
    alone = beside if is_first else tokenize_parts(queries, tokenizer, is_first=True)
    texts = list(dict.fromkeys(chain.from_iterable(evidence)))
    tokens = tokenize_parts(texts, tokenizer, is_first=not is_first)
    tokens_of = dict(zip(texts, tokens, strict=True))
    join = Join(tokenizer.eos_token_id, layout)
    segments = []
    for query, query_alone, query_evidence in zip(beside, alone, evidence, strict=True):
        segments.append(
            [
                join(query, tokens_of[text]) if text else join.close(query_alone)
                for text in query_evidence or [""]
            ]
        )
    return TokenizedInputs.of(examples, segments, tokenizer, verbalizer)


@dataclass(frozen=True)
class Join:
    """Puts a query and one evidence into one segment; `end` is the token after all."""

    end: int
    layout: SegmentLayout

    def __call__(self, query: TokenIds, evidence: TokenIds) -> TokenIds:
        evidence = evidence[: self.layout.max_tokens - 1 - len(query)]
        is_first = self.layout.order == "query_first"
        return self.close(query, evidence) if is_first else self.close(evidence, query)

    def close(self, *parts: TokenIds) -> TokenIds:
        return np.append(np.concatenate(parts), np.int32(self.end))


def tokenize_parts(texts: Sequence[str], tokenizer: Any, *, is_first: bool) -> list[TokenIds]:
    """Tokenise parts of segments, without the end; after another part they follow a space."""
    if not texts:
        return []
    parts = list(texts) if is_first else [f" {text}" for text in texts]
    token_ids = tokenizer(parts, add_special_tokens=False).input_ids
    return [np.array(ids, dtype=np.int32) for ids in token_ids]


def fit_queries(examples: Sequence[Example], tokenizer: Any, layout: SegmentLayout) -> list[str]:
    """Show examples in the template, shortened until they fit.

    Raises:
        ConfigError: If the limit is less than the template's own tokens.
    """
    queries = [layout.template.format_map(example.fields) for example in examples]
    sizes = _query_sizes(queries, tokenizer, layout)
    return [
        query if size < layout.max_tokens else _fit_query(example, tokenizer, layout)
        for example, query, size in zip(examples, queries, sizes, strict=True)
    ]


def _query_sizes(queries: Sequence[str], tokenizer: Any, layout: SegmentLayout) -> list[int]:
    """Count the tokens of queries; after evidence a query may have one more."""
    sizes = []
    for is_first in {True, layout.order == "query_first"}:
        sizes.append(list(map(len, tokenize_parts(queries, tokenizer, is_first=is_first))))
    return list(map(max, zip(*sizes, strict=True)))


def _fit_query(example: Example, tokenizer: Any, layout: SegmentLayout) -> str:
    """Shorten the longest field, and then the next, until the query fits."""
    fields = dict(example.fields)

    def shorten(name: str, length: int) -> str:
        return layout.template.format_map({**fields, name: fields[name][:length].rstrip()})

    def excess(name: str, length: int) -> int:
        return _query_sizes([shorten(name, length)], tokenizer, layout)[0] + 1 - layout.max_tokens

    for name in sorted(fields, key=lambda name: len(fields[name]), reverse=True):
        if excess(name, 0) <= 0:
            # The most characters that fit: tokens grow with characters.
            most = bisect_left(range(1, len(fields[name])), 1, key=lambda n: excess(name, n))
            return shorten(name, most)
        fields[name] = ""
    raise ConfigError(
        f"max_segment_tokens ({layout.max_tokens}) is less than the reader template's own "
        f"{layout.max_tokens + excess(name, 0)} tokens ({layout.template!r})"
    )


# Batches of tokenised inputs: segments in groups of like length, targets padded.


def collate(
    rows: Sequence[TokenizedInput], *, pad_token_id: int, cost: GroupCost
) -> dict[str, Any]:
    """Make a batch of labelled examples: the arguments of `FusionReader.forward`."""
    packed = pack_segments([row.segments for row in rows], pad_token_id=pad_token_id, cost=cost)
    targets = [row.target for row in rows if row.target is not None]
    return {"packed": packed, "labels": pad_rows(targets, IGNORED)}
