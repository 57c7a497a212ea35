"""Inputs whose evidence the reader itself chooses among an example's candidates, as RAG's does.

Queries, candidates and the index's vectors are put into arrays once; a segment is joined when its
evidence is chosen, for the choice changes with each step of the query encoder.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.models.rag import Pools, RagReader
from pgra.models.segments import GroupCost, PackedSegments, TokenIds, pack_segments
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.collate import pad_targets
from pgra.reader.inputs import Join, SegmentLayout, build_inputs, fit_queries, tokenize_parts
from pgra.reader.separate import SeparateInputs
from pgra.reader.tokens import TokenizedInput, TokenizedInputs
from pgra.types import MISSING_ROW, Candidates, Example, Rows

_BATCH = 64
"""Queries that are weighed at once, without gradients."""


@dataclass(frozen=True)
class Passages:
    """Distinct passages, U of them.

    Attributes:
        rows: Of the corpus, rising, (U,) int64.
        texts: One each.
        vectors: As the index has them, (U, D), of any floating type.
    """

    rows: Rows
    texts: Sequence[str]
    vectors: npt.NDArray[np.floating[Any]]


@dataclass(frozen=True)
class PooledInput(TokenizedInput):
    """One example; its segments are the query alone.

    Attributes:
        pools: All examples.
        row: Which of them it is.
    """

    pools: "PooledInputs"
    row: int


@dataclass(frozen=True)
class PooledInputs(TokenizedInputs):
    """A split's examples with their candidates; as `TokenizedInputs`, the queries alone.

    Attributes:
        queries: Each one's tokens as the query encoder reads them.
        encoder_pad: The encoder's padding token.
        asked: Each one's tokens as they are joined with evidence.
        shown: Each passage's tokens, likewise.
        join: Puts the two together.
        passages: The candidates of all examples.
        places: Each one's candidates among them, (B, K), `MISSING_ROW` where there are fewer.
    """

    queries: Sequence[TokenIds]
    encoder_pad: int
    asked: Sequence[TokenIds]
    shown: Sequence[TokenIds]
    join: Join
    passages: Passages
    places: Rows

    def __getitem__(self, row: int) -> PooledInput:
        """Give one example."""
        return PooledInput(**vars(super().__getitem__(row)), pools=self, row=row)

    def segment(self, row: int, place: int) -> TokenIds:
        """Join a query and a candidate; where there is none, give the query alone.

        Args:
            row: The example.
            place: Of the passage, or `MISSING_ROW`.
        """
        if place == MISSING_ROW:
            return super().__getitem__(row).segments[0]
        return self.join(self.asked[row], self.shown[place])

    def pool(self, rows: Sequence[int]) -> Pools:
        """Give some examples as the reader weighs their candidates."""
        ids, mask = _pad([self.queries[row] for row in rows], self.encoder_pad)
        places = self.places[list(rows)]  # (B, K)
        known = places != MISSING_ROW
        known[:, 0] = True  # a query without candidates is read alone
        vectors = torch.from_numpy(self.passages.vectors[places])
        return Pools(ids, mask, vectors, torch.from_numpy(known))


def build_pooled(
    examples: Sequence[Example],
    candidates: Rows,
    passages: Passages,
    encoder: Any,
    tokenizer: Any,
    *,
    verbalizer: Verbalizer,
    layout: SegmentLayout,
) -> PooledInputs:
    """Tokenise examples and candidates.

    Args:
        examples: The queries.
        candidates: Rows of the corpus, (B, K), all among the passages' or missing.
        passages: What the rows are.
        encoder: The `Encoder` that the query encoder began as.
        tokenizer: The reader's.
        verbalizer: Gives each label its target.
        layout: How a query and an evidence become a segment.

    Raises:
        PgraError: As `build_inputs`.
    """
    alone = build_inputs(
        examples, [[] for _ in examples], tokenizer, verbalizer, layout=layout
    ).inputs
    is_first = layout.order == "query_first"
    texts, _ = fit_queries(examples, tokenizer, layout)
    places = np.searchsorted(passages.rows, candidates)
    read = encoder.tokenizer(
        encoder.prepared([example.text for example in examples], is_query=True),
        truncation=True,
        max_length=int(encoder.fingerprint["max_tokens"]),
    ).input_ids
    return PooledInputs(
        **vars(alone),
        queries=[np.array(ids, dtype=np.int32) for ids in read],
        encoder_pad=encoder.tokenizer.pad_token_id,
        asked=tokenize_parts(texts, tokenizer, is_first=is_first),
        shown=tokenize_parts(passages.texts, tokenizer, is_first=not is_first),
        join=Join(tokenizer.eos_token_id, layout),
        passages=passages,
        places=np.where(candidates == MISSING_ROW, MISSING_ROW, places),
    )


def collate_pooled(
    rows: Sequence[PooledInput], *, pad_token_id: int, cost: GroupCost
) -> dict[str, Any]:
    """Give a batch as the Trainer passes it to a `RagReader`, with the examples' ids.

    Args:
        rows: Labelled examples of one split.
        pad_token_id: Of the reader's tokenizer.
        cost: How segments are grouped.
    """
    inputs, numbers = rows[0].pools, [row.row for row in rows]
    targets = [row.target for row in rows if row.target is not None]
    return {
        **vars(inputs.pool(numbers)),
        "read": partial(_pack, inputs, numbers, pad_token_id, cost),
        "labels": pad_targets(targets),
        "example_ids": tuple(row.example_id for row in rows),
    }


def _pack(
    inputs: PooledInputs,
    numbers: Sequence[int],
    pad_token_id: int,
    cost: GroupCost,
    chosen: npt.NDArray[np.int64],
) -> PackedSegments:
    """Pack the segments of chosen candidates, (B, N), each as an example of its own."""
    places = np.take_along_axis(inputs.places[list(numbers)], chosen, axis=1)
    segments = [
        [inputs.segment(number, place)]
        for number, line in zip(numbers, places.tolist(), strict=True)
        for place in line
    ]
    return pack_segments(segments, pad_token_id=pad_token_id, cost=cost)


@dataclass(frozen=True)
class Chosen:
    """What a reader chose for a split.

    Attributes:
        inputs: Each example with its evidence, weighted.
        evidence: Rows of the corpus and log p(z|x), (B, N).
    """

    inputs: SeparateInputs
    evidence: Candidates


@torch.inference_mode()
def choose_evidence(reader: RagReader, inputs: PooledInputs) -> Chosen:
    """Let a reader's query encoder, as it is now, choose and weigh all examples' evidence.

    Args:
        reader: Without dropout meanwhile.
        inputs: The examples with their candidates.
    """
    was_training = reader.training
    reader.eval()
    N = reader.num_evidence
    chosen = np.empty((len(inputs), N), dtype=np.int64)
    weights = np.empty((len(inputs), N), dtype=np.float64)
    for start in range(0, len(inputs), _BATCH):
        batch = range(start, min(start + _BATCH, len(inputs)))
        indices, logs = reader.weigh(inputs.pool(batch).to(reader.device))
        chosen[batch.start : batch.stop] = indices.cpu().numpy()
        weights[batch.start : batch.stop] = logs.double().cpu().numpy()
    reader.train(was_training)
    places = np.take_along_axis(inputs.places, chosen, axis=1)
    segments = [
        [inputs.segment(row, place) for place in line] for row, line in enumerate(places.tolist())
    ]
    joined = TokenizedInputs(
        inputs.example_ids,
        inputs.labels,
        inputs.targets,
        np.concatenate([segment for found in segments for segment in found]),
        np.cumsum([len(s) for found in segments for s in found], dtype=np.int64),
        np.arange(1, len(inputs) + 1) * N,
    )
    rows = np.where(places == MISSING_ROW, MISSING_ROW, inputs.passages.rows[places])
    evidence = Candidates(rows, np.where(rows == MISSING_ROW, -np.inf, weights).astype(np.float32))
    return Chosen(SeparateInputs.over(joined, weights.ravel()), evidence)


def _pad(lines: Sequence[TokenIds], pad: int) -> tuple[Tensor, Tensor]:
    """Pad tokens to the longest, (B, L) int64, and say which are real, (B, L) bool."""
    lengths = np.array([len(line) for line in lines])
    ids = np.full((len(lines), lengths.max()), pad, dtype=np.int64)
    for row, line in enumerate(lines):
        ids[row, : len(line)] = line
    return torch.from_numpy(ids), torch.from_numpy(np.arange(ids.shape[1]) < lengths[:, None])
