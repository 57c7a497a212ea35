"""RAG-Sequence (Lewis et al. 2020): each evidence read alone, the query encoder learning too.

Lewis et al. 2020, section 2.1: p(y|x) is the sum over the best passages z of p(z|x) p(y|x,z), with
p(z|x) in proportion to exp(d(z)'q(x)). Passages' vectors d(z) stay as the index has them (section
2.4); the query encoder q gets gradients through p(z|x).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize as unit_length
from torch.nn.utils.rnn import pad_sequence
from transformers.modeling_outputs import Seq2SeqLMOutput

from pgra.core import ALONE, MISSING_ROW, Candidates, Context, Example, Rows, Scores
from pgra.encoders.encoder import Encoder, pool
from pgra.errors import ModelError
from pgra.lm.batching import GroupCost, PackedSegments, TokenIds, pack_segments
from pgra.prompts.verbalizer import Verbalizer
from pgra.reader.fid import IGNORED, FusionReader
from pgra.reader.inputs import (
    Join,
    SegmentLayout,
    SeparateInputs,
    TokenizedInput,
    TokenizedInputs,
    build_inputs,
    fit_queries,
    pad_targets,
    tokenize_parts,
)
from pgra.reader.predict import T5Classifier

QUERY_ENCODER_FILE = "query_encoder.safetensors"


class QueryEncoder(nn.Module):
    """An encoder's model, pooled as the encoder pools, with gradients."""

    def __init__(self, encoder: Encoder) -> None:
        """Take an encoder's model; it is trained in place.

        Raises:
            ModelError: If its vectors come out of more than a pooling.
        """
        super().__init__()
        if any(encoder.sentence.layers):
            raise ModelError(
                f"the encoder {encoder.fingerprint['encoder']} has Dense parts behind its pooling, "
                "and method 'rag' trains none: choose another --encoder"
            )
        self.model = encoder.model
        self.pooling = str(encoder.fingerprint["pooling"])
        self.is_normalized = bool(encoder.fingerprint["normalize"])
        pooler = getattr(self.model, "pooler", None)
        if pooler is not None and self.pooling != "pooler":
            pooler.requires_grad_(requires_grad=False)  # it takes no part: it has no gradient

    def forward(self, input_ids: Tensor, mask: Tensor) -> Tensor:
        """Encode queries.

        Args:
            input_ids: The encoder's tokens, (B, L) int64.
            mask: True on real ones, (B, L) bool.

        Returns:
            (B, D) float32.
        """
        output = self.model(input_ids=input_ids, attention_mask=mask.long())
        vectors = pool(output, mask, self.pooling)
        return unit_length(vectors, dim=-1) if self.is_normalized else vectors


@dataclass(frozen=True)
class Pools:
    """B queries as their encoder reads them, with the candidates that evidence is chosen from.

    Attributes:
        query_ids: The encoder's tokens, (B, L) int64.
        query_mask: True on real ones, (B, L) bool.
        vectors: The candidates', (B, K, D), of any floating type.
        known: False where there are fewer than K, (B, K) bool; at least one a query is True.
    """

    query_ids: Tensor
    query_mask: Tensor
    vectors: Tensor
    known: Tensor

    def to(self, device: torch.device) -> "Pools":
        """Copy to a device."""
        return Pools(*(tensor.to(device) for tensor in vars(self).values()))


class RagReader(FusionReader):
    """A T5 and a query encoder, trained together.

    Attributes:
        query_encoder: Says which candidates are read, and how much each counts.
        num_evidence: How many are read (N).
    """

    def __init__(self, t5: Any, query_encoder: QueryEncoder, num_evidence: int) -> None:
        """Take both models."""
        super().__init__(t5)
        self.query_encoder = query_encoder
        self.num_evidence = num_evidence

    @classmethod
    def open(cls, name: str, encoder: Encoder, num_evidence: int) -> Self:
        """Load a T5, and the query encoder from beside it where a training left one.

        Args:
            name: As `FusionReader.from_name`, or a folder that `save_pretrained` wrote.
            encoder: What the query encoder is, and begins as.
            num_evidence: N.

        Raises:
            ModelError: As `FusionReader.from_name`.
        """
        reader = cls(FusionReader.from_name(name).model, QueryEncoder(encoder), num_evidence)
        path = Path(name) / QUERY_ENCODER_FILE
        if path.is_file():
            reader.query_encoder.model.load_state_dict(load_file(path))
        return reader.eval()

    def weigh(self, pools: Pools) -> tuple[Tensor, Tensor]:
        """Choose each query's evidence, and say how much each counts (section 2.1).

        Returns:
            Places among the candidates, (B, N) int64, best first, and log p(z|x) over these N,
            (B, N) float32, -inf where there are fewer.
        """
        queries = self.query_encoder(pools.query_ids, pools.query_mask)  # (B, D)
        scores = torch.einsum("bd,bkd->bk", queries, pools.vectors.to(queries.dtype))
        best = scores.masked_fill(~pools.known, -torch.inf).topk(self.num_evidence, dim=1)
        return best.indices, best.values.log_softmax(dim=1)

    def forward(  # type: ignore[override]  # another kind of batch
        self,
        query_ids: Tensor,
        query_mask: Tensor,
        vectors: Tensor,
        known: Tensor,
        read: Callable[[npt.NDArray[np.int64]], PackedSegments],
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput:
        """Read a batch with known targets.

        Args:
            query_ids: As in `Pools`, like the next three.
            query_mask: Which of these are real tokens.
            vectors: The candidates'.
            known: Which candidates there are.
            read: Packs the segments of chosen candidates, (B, N), each as an example of its own,
                query after query.
            labels: (B, T) int64, `IGNORED` where padded.
            num_items_in_batch: Target tokens to divide the summed loss by; None is this batch's.

        Returns:
            With `.loss`: -log of the sum over evidence of p(z|x) p(y|x,z), of all examples,
            a target token.
        """
        chosen, log_weights = self.weigh(Pools(query_ids, query_mask, vectors, known))
        fused = self.fuse(read(chosen.cpu().numpy()).to(chosen.device))
        scores = self.score_targets(fused, labels.repeat_interleave(self.num_evidence, dim=0))
        marginal = torch.logsumexp(log_weights + scores.view_as(log_weights), dim=1)  # (B,)
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return Seq2SeqLMOutput(loss=-marginal.sum() / count)

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain T5 folder, and the query encoder's weights in a file of their own."""
        super().save_pretrained(folder)
        weights = self.query_encoder.model.state_dict()
        save_file(
            {n: t.contiguous().cpu() for n, t in weights.items()}, folder / QUERY_ENCODER_FILE
        )


# Inputs whose evidence the reader itself chooses among an example's candidates, as RAG's does.
#
# Queries, candidates and the index's vectors are put into arrays once; a segment is joined when its
# evidence is chosen, for the choice changes with each step of the query encoder.


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
        query_tokens: Each one's tokens as they are joined with evidence.
        passage_tokens: Each passage's tokens, likewise.
        join: Puts the two together.
        passages: The candidates of all examples.
        places: Each one's candidates among them, (B, K), `MISSING_ROW` where there are fewer.
    """

    queries: Sequence[npt.NDArray[np.int64]]
    encoder_pad: int
    query_tokens: Sequence[TokenIds]
    passage_tokens: Sequence[TokenIds]
    join: Join
    passages: Passages
    places: Rows

    def __getitem__(self, row: int) -> PooledInput:
        """Return one example."""
        return PooledInput(**vars(super().__getitem__(row)), pools=self, row=row)

    def segments(
        self, rows: Sequence[int], chosen: npt.NDArray[np.int64]
    ) -> list[tuple[TokenIds, ...]]:
        """Join queries with chosen candidates, (B, N); where there is none, a query is alone."""
        places = np.take_along_axis(self.places[list(rows)], chosen, axis=1)
        return [
            tuple(
                super(PooledInputs, self).__getitem__(row).segments[0]
                if place == MISSING_ROW
                else self.join(self.query_tokens[row], self.passage_tokens[place])
                for place in line
            )
            for row, line in zip(rows, places.tolist(), strict=True)
        ]

    def pool(self, rows: Sequence[int]) -> Pools:
        """Return some examples as the reader weighs their candidates."""
        queries = [torch.from_numpy(self.queries[row]) for row in rows]
        ids = pad_sequence(queries, batch_first=True, padding_value=self.encoder_pad)
        lengths = torch.tensor([len(query) for query in queries])
        places = self.places[list(rows)]  # (B, K)
        known = places != MISSING_ROW
        known[:, 0] = True  # a query without candidates is read alone
        vectors = torch.from_numpy(self.passages.vectors[places])
        mask = torch.arange(ids.shape[1]) < lengths[:, None]
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
    alone = build_inputs(examples, [[] for _ in examples], tokenizer, verbalizer, layout=layout)
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
        queries=[np.array(ids) for ids in read],
        encoder_pad=encoder.tokenizer.pad_token_id,
        query_tokens=tokenize_parts(texts, tokenizer, is_first=is_first),
        passage_tokens=tokenize_parts(passages.texts, tokenizer, is_first=not is_first),
        join=Join(tokenizer.eos_token_id, layout),
        passages=passages,
        places=np.where(candidates == MISSING_ROW, MISSING_ROW, places),
    )


def collate_pooled(
    rows: Sequence[PooledInput], *, pad_token_id: int, cost: GroupCost
) -> dict[str, Any]:
    """Make a batch as the Trainer passes it to a `RagReader`, with the examples' ids.

    Args:
        rows: Labelled examples of one split.
        pad_token_id: Of the reader's tokenizer.
        cost: How segments are grouped.
    """
    inputs, numbers = rows[0].pools, [row.row for row in rows]
    return {
        **vars(inputs.pool(numbers)),
        "read": partial(_pack, inputs, numbers, pad_token_id, cost),  # it may be pickled
        "labels": pad_targets([row.target for row in rows if row.target is not None]),
        "example_ids": tuple(row.example_id for row in rows),
    }


def _pack(
    inputs: PooledInputs,
    rows: Sequence[int],
    pad_token_id: int,
    cost: GroupCost,
    chosen: npt.NDArray[np.int64],
) -> PackedSegments:
    """Pack the segments of chosen candidates, (B, N), each as an example of its own."""
    segments = [(segment,) for line in inputs.segments(rows, chosen) for segment in line]
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
    segments = inputs.segments(range(len(inputs)), chosen)
    joined = TokenizedInputs.pack(inputs.example_ids, inputs.labels, inputs.targets, segments)
    places = np.take_along_axis(inputs.places, chosen, axis=1)
    rows = np.where(places == MISSING_ROW, MISSING_ROW, inputs.passages.rows[places])
    evidence = Candidates(rows, np.where(rows == MISSING_ROW, -np.inf, weights).astype(np.float32))
    return Chosen(SeparateInputs.over(joined, weights.ravel()), evidence)


@dataclass(frozen=True)
class RagClassifier(T5Classifier):
    """A RAG reader that decides a task's labels."""

    module: RagReader

    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:
        """Make batches of `PooledInput`."""
        cost = GroupCost.on(device, is_training=True)
        return partial(collate_pooled, pad_token_id=self.tokenizer.pad_token_id, cost=cost)

    def score(self, inputs: TokenizedInputs, context: Context = ALONE) -> Scores:
        """Score examples; the evidence of those that have candidates is chosen first."""
        if isinstance(inputs, PooledInputs):
            inputs = choose_evidence(self.module, inputs).inputs
        return super().score(inputs, context)
