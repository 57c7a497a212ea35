"""RAG-Sequence: a T5 that reads each evidence alone, and a query encoder that learns with it.

Lewis et al. 2020, section 2.1: p(y|x) is the sum over the best passages z of p(z|x) p(y|x,z), with
p(z|x) in proportion to exp(d(z)'q(x)). Passages' vectors d(z) stay as the index has them (section
2.4); the query encoder q gets gradients through p(z|x).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.functional import normalize as unit_length
from transformers.modeling_outputs import Seq2SeqLMOutput

from pgra.errors import ModelError
from pgra.models.encoder import Encoder
from pgra.models.fid import IGNORED, FusionReader
from pgra.models.pooling import pool
from pgra.models.segments import PackedSegments

QUERY_ENCODER_FILE = "query_encoder.safetensors"
_PREFIX = "query_encoder."


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
                "and system 'rag' trains none: choose another --encoder"
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
        reader = cls(FusionReader.from_name(name).t5, QueryEncoder(encoder), num_evidence)
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
            read: Gives the segments of chosen candidates, (B, N), each packed as an example of its
                own, query after query.
            labels: (B, T) int64, `IGNORED` where padded.
            num_items_in_batch: Target tokens to divide the summed loss by; None is this batch's.

        Returns:
            With `.loss`: -log of the sum over evidence of p(z|x) p(y|x,z), of all examples,
            a target token.
        """
        chosen, log_weights = self.weigh(Pools(query_ids, query_mask, vectors, known))
        encoded, mask = self.fuse(read(chosen.cpu().numpy()).to(chosen.device))
        rows = labels.repeat_interleave(self.num_evidence, dim=0)  # (B * N, T)
        logits = self.t5(
            encoder_outputs=encoded,
            attention_mask=mask[:, None, None],
            decoder_input_ids=self.t5.prepare_decoder_input_ids_from_labels(rows),
            use_cache=False,
        ).logits.float()  # (B * N, T, V)
        losses = cross_entropy(
            logits.transpose(1, 2), rows, ignore_index=IGNORED, reduction="none"
        ).sum(dim=1)  # -log p(y|x,z), (B * N,)
        marginal = torch.logsumexp(log_weights - losses.view_as(log_weights), dim=1)  # (B,)
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        return Seq2SeqLMOutput(loss=-marginal.sum() / count)

    def state_dict(
        self, *, destination: Any = None, prefix: str = "", keep_vars: bool = False
    ) -> Any:
        """Give the T5's weights under the T5's names, and the query encoder's."""
        weights = super().state_dict(destination=destination, prefix=prefix, keep_vars=keep_vars)
        mine = self.query_encoder.model.state_dict(keep_vars=keep_vars)
        weights.update({f"{prefix}{_PREFIX}{name}": tensor for name, tensor in mine.items()})
        return weights

    def load_state_dict(
        self,
        state_dict: Mapping[str, Any],
        strict: bool = True,  # noqa: FBT001, FBT002  torch's own signature
        assign: bool = False,  # noqa: FBT001, FBT002
    ) -> Any:
        """Load both models' weights.

        Raises:
            RuntimeError: If strict and a weight is missing or unknown.
        """
        mine = {n.removeprefix(_PREFIX): t for n, t in state_dict.items() if n.startswith(_PREFIX)}
        self.query_encoder.model.load_state_dict(mine, strict=strict, assign=assign)
        theirs = {name: t for name, t in state_dict.items() if not name.startswith(_PREFIX)}
        return super().load_state_dict(theirs, strict=strict, assign=assign)

    def save_pretrained(self, folder: Path) -> None:
        """Write a plain T5 folder, and the query encoder's weights in a file of their own."""
        super().save_pretrained(folder)
        weights = self.query_encoder.model.state_dict()
        save_file(
            {n: t.contiguous().cpu() for n, t in weights.items()}, folder / QUERY_ENCODER_FILE
        )
