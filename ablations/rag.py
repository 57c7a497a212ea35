"""RAG (Lewis et al. 2020): each evidence is read alone, and the query encoder learns what to read.

    p(z|x)   = softmax over the best d of k candidates of d(z)'q(x)      (section 2.2)
    p(y|x)   = sum over z of p(z|x) p(y|x,z)                             (RAG-Sequence, section 2.1)
    label    = the one whose words have the largest p(y|x)
    answer   = of those that single evidence gives, the one with the largest p(y|x)

Reader and query encoder are trained (q gets gradients through p(z|x)); passages' vectors stay the
index's (section 2.4). The untrained encoder finds the k candidates once; in each step the trained
one takes its best d of them.

    PYTHONPATH=. pgra train --method ablations.rag:Rag --task sst2 --normalize false
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import normalize as unit_length
from transformers.modeling_outputs import Seq2SeqLMOutput

from ablations.separate import SeparateClassifier, SeparateInputs
from pgra.arrays import Rows, Scores
from pgra.context import ALONE, Context
from pgra.encoders import as_encoder
from pgra.encoders.encoder import Encoder
from pgra.errors import DamageError, reading
from pgra.lm.batching import GroupCost
from pgra.methods.arguments import RunArguments
from pgra.methods.pgra import Pgra
from pgra.prompts import Verbalizer
from pgra.reader.fid import IGNORED, FusionReader, PackedSegments, TokenIds, pack_segments, pad_rows
from pgra.reader.inputs import (
    Join,
    SegmentLayout,
    TokenizedInputs,
    build_inputs,
    fit_queries,
    tokenize_parts,
)
from pgra.report.results import EvidenceLine
from pgra.retrieval import open_retriever
from pgra.retrieval.dense import find_shards, read_rows
from pgra.types import MISSING_ROW, Candidates, Example

PassageVectors = npt.NDArray[np.floating[Any]]  # (U, D), as the index keeps them
QUERY_ENCODER_FILE = "query_encoder.safetensors"
_BATCH = 64  # queries at once, without gradients


class RagReader(FusionReader):
    """A T5 and a query encoder, trained together; it reads N = `num_evidence` of the candidates."""

    def __init__(self, t5: Any, encoder: Encoder, num_evidence: int) -> None:
        """Take both models; the encoder's is trained in place."""
        super().__init__(t5)
        self.query_encoder: nn.Module = encoder.model
        self.num_evidence = num_evidence
        self._is_normalized = bool(encoder.fingerprint["normalize"])
        pooler = getattr(encoder.model.transformers_model, "pooler", None)
        if pooler is not None and encoder.fingerprint["pooling"] != "pooler":
            pooler.requires_grad_(requires_grad=False)  # it takes no part: it has no gradient

    def weigh(
        self, query_ids: Tensor, query_mask: Tensor, vectors: Tensor, is_candidate: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Choose each query's evidence among its candidates, and weigh it (section 2.1).

        Args:
            query_ids: The query encoder's tokens, (B, L) int64.
            query_mask: True on real ones, (B, L) bool.
            vectors: The candidates', (B, K, D), of any floating type.
            is_candidate: False where there are fewer than K, (B, K) bool; at least one a query is
                True.

        Returns:
            Positions among the candidates, (B, N) int64, best first, and log p(z|x) over these N,
            (B, N) float32, -inf where there are fewer.
        """
        features = {"input_ids": query_ids, "attention_mask": query_mask.long()}
        queries = self.query_encoder(features)["sentence_embedding"]  # (B, D)
        queries = queries[:, : vectors.shape[-1]]
        if self._is_normalized:
            queries = unit_length(queries, dim=-1)
        scores = torch.einsum("bd,bkd->bk", queries, vectors.to(queries.dtype))
        best = scores.masked_fill(~is_candidate, -torch.inf).topk(self.num_evidence, dim=1)
        return best.indices, best.values.log_softmax(dim=1)

    def forward(  # type: ignore[override]  # another kind of batch
        self,
        pools: Mapping[str, Tensor],
        read: Callable[[Rows], PackedSegments],
        labels: Tensor,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Seq2SeqLMOutput:
        """Return `.loss`: -log of the sum over evidence of p(z|x) p(y|x,z), a target token.

        Args:
            pools: The arguments of `weigh`.
            read: Packs the segments of chosen candidates, (B, N), each as an example of its own,
                query after query.
            labels: (B, T) int64, `IGNORED` where padded.
            num_items_in_batch: Target tokens to divide the summed loss by; None is this batch's.
        """
        chosen, log_weights = self.weigh(**pools)
        fused = self.fuse(read(chosen.cpu().numpy()).to(chosen.device))
        scores = self.score_targets(fused, labels.repeat_interleave(self.num_evidence, dim=0))
        marginal = torch.logsumexp(log_weights + scores.view_as(log_weights), dim=1)  # (B,)
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return Seq2SeqLMOutput(loss=-marginal.sum() / count)

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain T5 folder, and the query encoder's weights in a file of their own."""
        super().save_pretrained(folder)
        weights = self.query_encoder.state_dict()
        save_file(
            {n: t.contiguous().cpu() for n, t in weights.items()}, folder / QUERY_ENCODER_FILE
        )

    def load_weights(self, folder: Path) -> None:
        super().load_weights(folder)
        with reading(folder / QUERY_ENCODER_FILE, DamageError):
            self.query_encoder.load_state_dict(load_file(folder / QUERY_ENCODER_FILE))


# Inputs whose evidence the reader itself chooses among an example's candidates.
#
# Queries, candidates and the index's vectors are put into arrays once; a segment is joined when its
# evidence is chosen, for the choice changes with each step of the query encoder.


@dataclass(frozen=True)
class PooledInputs(TokenizedInputs):
    """A split's examples with their candidates; as `TokenizedInputs`, the queries alone.

    Attributes:
        queries: Each one's tokens for the query encoder.
        encoder_pad: The encoder's padding token.
        query_tokens: Each one's tokens for the reader, before they are joined with evidence.
        passage_tokens: Likewise of each of the U distinct candidates of all.
        rows: The passages' rows of the corpus, rising, (U,) int64.
        vectors: Theirs in the index, (U, D), of any floating type.
        pools: Each one's candidates among them, (B, K), `MISSING_ROW` where there are fewer.
    """

    queries: Sequence[Sequence[int]]
    encoder_pad: int
    query_tokens: Sequence[TokenIds]
    passage_tokens: Sequence[TokenIds]
    join: Join
    rows: Rows
    vectors: PassageVectors
    pools: Rows

    def take(self, rows: Sequence[int]) -> Self:
        return replace(
            super().take(rows),
            queries=[self.queries[row] for row in rows],
            query_tokens=[self.query_tokens[row] for row in rows],
            pools=self.pools[list(rows)],
        )

    def __getitem__(self, row: int) -> Any:
        """Return an example as `collate_pooled` takes it."""
        return self, row

    def join_chosen(self, rows: Sequence[int], chosen: Rows) -> list[tuple[TokenIds, ...]]:
        """Join queries with chosen candidates, (B, N); where there is none, a query is alone."""
        passages = np.take_along_axis(self.pools[list(rows)], chosen, axis=1)
        joined = []
        for row, line in zip(rows, passages.tolist(), strict=True):
            segments = []
            for passage in line:
                if passage == MISSING_ROW:
                    segments.append(self.segments[row][0])
                else:
                    tokens = self.passage_tokens[passage]
                    segments.append(self.join(self.query_tokens[row], tokens))
            joined.append(tuple(segments))
        return joined

    def pool(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Return the arguments of `RagReader.weigh` for some examples."""
        queries = [self.queries[row] for row in rows]
        ids = pad_rows(queries, self.encoder_pad)
        lengths = torch.tensor(list(map(len, queries)))
        passages = self.pools[list(rows)]  # (B, K)
        is_candidate = passages != MISSING_ROW
        is_candidate[:, 0] = True  # a query without candidates is read alone
        return {
            "query_ids": ids,
            "query_mask": torch.arange(ids.shape[1]) < lengths[:, None],
            "vectors": torch.from_numpy(self.vectors[passages]),
            "is_candidate": torch.from_numpy(is_candidate),
        }


def build_pooled(
    examples: Sequence[Example],
    candidates: Rows,
    read_passages: Callable[[Rows], tuple[Sequence[str], PassageVectors]],
    encoder: Encoder,
    tokenizer: Any,
    *,
    verbalizer: Verbalizer,
    layout: SegmentLayout,
) -> PooledInputs:
    """Tokenise examples and their candidates, rows of the corpus, (B, K); errors as `build_inputs`.

    `read_passages` returns texts and vectors of distinct rows; `encoder` is the untrained one.
    """
    alone = build_inputs(examples, [[] for _ in examples], tokenizer, verbalizer, layout=layout)
    is_first = layout.order == "query_first"
    queries = fit_queries(examples, tokenizer, layout)
    rows = np.unique(candidates[candidates != MISSING_ROW])
    texts, vectors = read_passages(rows)
    chunk = encoder.tokenize([example.text for example in examples], is_query=True)
    return PooledInputs(
        **vars(alone),
        queries=chunk.ids,
        encoder_pad=encoder.pad_token_id,
        query_tokens=tokenize_parts(queries, tokenizer, is_first=is_first),
        passage_tokens=tokenize_parts(texts, tokenizer, is_first=not is_first),
        join=Join(tokenizer.eos_token_id, layout),
        rows=rows,
        vectors=vectors,
        pools=np.where(candidates == MISSING_ROW, MISSING_ROW, np.searchsorted(rows, candidates)),
    )


def collate_pooled(
    examples: Sequence[tuple[PooledInputs, int]], *, pad_token_id: int, cost: GroupCost
) -> dict[str, Any]:
    """Make a batch of labelled examples of one split, the arguments of `RagReader.forward`."""
    inputs = examples[0][0]
    rows = [row for _, row in examples]

    def read(chosen: Rows) -> PackedSegments:
        segments = chain.from_iterable(inputs.join_chosen(rows, chosen))
        return pack_segments([(s,) for s in segments], pad_token_id=pad_token_id, cost=cost)

    targets = [inputs.targets[str(inputs.labels[row])] for row in rows]
    return {"pools": inputs.pool(rows), "read": read, "labels": pad_rows(targets, IGNORED)}


@torch.inference_mode()
def choose_evidence(reader: RagReader, inputs: PooledInputs) -> tuple[SeparateInputs, Candidates]:
    """Choose and weigh all examples' evidence by the reader's current query encoder.

    Also returns the evidence: rows of the corpus and log p(z|x), (B, N).
    """
    was_training = reader.training
    reader.eval()
    batches = []
    for start in range(0, len(inputs), _BATCH):
        pools = inputs.pool(range(start, min(start + _BATCH, len(inputs))))
        on_device = {name: values.to(reader.device) for name, values in pools.items()}
        batches.append(reader.weigh(**on_device))
    reader.train(was_training)
    chosen, logs = (torch.cat(tensors).cpu().numpy() for tensors in zip(*batches, strict=True))
    passages = np.take_along_axis(inputs.pools, chosen, axis=1)
    rows = np.where(passages == MISSING_ROW, MISSING_ROW, inputs.rows[passages])
    evidence = Candidates(rows, np.where(rows == MISSING_ROW, -np.inf, logs).astype(np.float32))
    separate = SeparateInputs(
        inputs.example_ids,
        inputs.labels,
        inputs.targets,
        inputs.join_chosen(range(len(inputs)), chosen),
        log_weights=logs.astype(np.float64).ravel(),
    )
    return separate, evidence


class RagClassifier(SeparateClassifier):
    """A `RagReader` that decides a task's labels, or writes answers."""

    module: RagReader

    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:
        cost = GroupCost.on(device, is_training=True)
        return partial(collate_pooled, pad_token_id=self.tokenizer.pad_token_id, cost=cost)

    def score(self, inputs: TokenizedInputs, context: Context = ALONE) -> Scores:
        """Score examples; the evidence of those that have candidates is chosen first."""
        if isinstance(inputs, PooledInputs):
            inputs, _ = choose_evidence(self.module, inputs)
        return super().score(inputs, context)

    def write(
        self, inputs: TokenizedInputs, context: Context = ALONE, *, count: int | None = None
    ) -> list[str]:
        """Write with each evidence alone, and take the text that is likeliest with all of it.

        RAG-Sequence's thorough decoding (section 2.5), with beams of one.
        """
        if isinstance(inputs, PooledInputs):
            inputs, _ = choose_evidence(self.module, inputs)
        assert isinstance(inputs, SeparateInputs)
        drafts = super().write(inputs.alone(), context, count=count)
        texts = []
        start = 0
        was_training = self.module.training
        device = self.module.device
        pad_token_id = self.tokenizer.pad_token_id
        cost = GroupCost.on(device)
        self.module.eval()
        for segments in inputs.segments:
            rows = slice(start, start + len(segments))
            start = rows.stop
            ideas = list(dict.fromkeys(drafts[rows]))
            packed = pack_segments([(s,) for s in segments], pad_token_id=pad_token_id, cost=cost)
            targets = pad_rows(self.tokenizer(ideas).input_ids, IGNORED).to(device)
            with self.module.deciding():
                scores = self.module.score_labels(packed.to(device), targets)  # (N, ideas)
            weights = inputs.log_weights[rows, None] if inputs.log_weights is not None else 0.0
            total = np.logaddexp.reduce(scores.double().cpu().numpy() + weights, axis=0)
            texts.append(ideas[int(total.argmax())])
        self.module.train(was_training)
        return texts


class Rag(Pgra):
    """Trains a reader and a query encoder on candidates to choose among."""

    CLASSIFIER = RagClassifier
    reader: RagClassifier
    DECIDED: ClassVar[Mapping[str, Any]] = {"retriever": "dense", "reranker": "none"}
    HAS_OWN_INPUTS = True

    @classmethod
    def name(cls, args: RunArguments) -> str:  # noqa: ARG003 (the contract's)
        return "rag"

    def load_module(self, trained: Path | None = None) -> RagReader:
        """Load both models as training starts from them, or as it left them."""
        t5 = super().load_module(trained).model
        module = RagReader(t5, self._encoder, self.args.rerank.num_evidence).eval()
        if trained:
            module.load_weights(trained)
        return module

    def inputs(self, split: str) -> PooledInputs:
        """Return the examples of a split with their candidates."""

        def read_passages(rows: Rows) -> tuple[Sequence[str], PassageVectors]:
            return self.stages.corpus.texts(rows), read_rows(find_shards(self._index), rows)

        return build_pooled(
            self.data.examples(split),
            self.stages.candidates[split].candidates.rows,
            read_passages,
            self._encoder,
            self.tokenizer,
            verbalizer=self.verbalizer,
            layout=self.layout,
        )

    def read(
        self,
        examples: Sequence[Example],  # noqa: ARG002 (others have no candidates)
        split: str | None,
    ) -> tuple[SeparateInputs, list[list[EvidenceLine]]]:
        """Return a split's inputs with the evidence that the reader chose."""
        assert split is not None
        chosen, best = choose_evidence(self.reader.module, self.inputs(split))
        return chosen, self.stages.lines(self.stages.candidates[split].candidates, best)

    @cached_property
    def _encoder(self) -> Encoder:
        """Load the untrained query encoder; in float32, for it is trained."""
        retriever = replace(self.args.retriever, encoder_dtype="float32")
        return as_encoder(retriever, device=self.context.device)

    @cached_property
    def _index(self) -> Path:
        """Find the first stage's index, which is built by now."""
        quiet = replace(self.context, progress=False)
        return open_retriever(self.args.retriever, self.stages.corpus, quiet).built[0].folder
