"""What reading costs an LM, from its configuration alone: operations and bytes. Loads no weights.

A token that looks at c keys (its own among them) costs 2 N + 4 L W c operations: a multiplication
and an addition for each of the N weights that stand in matrices, and the same for its query with
each key and its weight with each value, in L layers whose heads are W wide together. That is
the forward third of 6 N + 12 L H Q T in Chowdhery et al. 2022 ("PaLM", appendix B), after Kaplan et
al. 2020, section 2.1. Embeddings are looked up, not multiplied, and do not count. A mixture of
experts is counted as if all experts ran, and the last layer as if it served every token.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import torch

from pgra.errors import ModelError

_BYTES_A_WEIGHT = {"8bit": 1.0, "4bit": 0.5625}  # nf4: a float32 scale for every 64 weights
_LIVE_WIDTHS = 4  # a token's residual, its normed copy, its query and its attended values
_LIVE_MIDDLES = 3  # an MLP's gate, its product and one copy


@dataclass(frozen=True)
class LmShape:
    """The sizes of an LM that decide its cost.

    Attributes:
        layers: L.
        hidden: Width of the residual stream.
        state: Width of a state; OPT-350m's is not its hidden one.
        attended: W, all heads' queries together.
        cached: Width of a token's keys, or values, in one layer.
        middle: Widest inner matrix: the MLP's, mostly.
        weights: All parameters of the base model.
        matrices: N, those that stand in matrices and are multiplied.
    """

    layers: int
    hidden: int
    state: int
    attended: int
    cached: int
    middle: int
    weights: int
    matrices: int

    @classmethod
    def of(cls, config: Any) -> Self:
        """Read the sizes off a base model's configuration.

        Raises:
            ModelError: If no model can be laid out from it.
        """
        from transformers import AutoModel

        try:
            with torch.device("meta"):  # shapes without memory
                model = AutoModel.from_config(config)
        except (ValueError, KeyError, AttributeError, RuntimeError) as error:
            kind = getattr(config, "model_type", "model")
            raise ModelError(f"cannot lay out '{kind}' from its configuration: {error}") from error
        tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
        inner = [p for p in model.parameters() if p.dim() > 1 and id(p) not in tables]
        hidden = int(config.hidden_size)
        heads = int(getattr(config, "num_attention_heads", None) or 0)  # none in a state-space LM
        head = int(getattr(config, "head_dim", None) or (hidden // heads if heads else 0))
        shared_heads = int(getattr(config, "num_key_value_heads", None) or heads)
        return cls(
            layers=int(config.num_hidden_layers),
            hidden=hidden,
            state=int(getattr(config, "word_embed_proj_dim", None) or hidden),
            attended=heads * head,
            cached=shared_heads * head,
            middle=max((max(p.shape) for p in inner), default=0),
            weights=sum(p.numel() for p in model.parameters()),
            matrices=sum(p.numel() for p in inner),
        )

    def flops(self, lengths: Iterable[int], *, behind: int = 0) -> float:
        """Count the operations of reading texts.

        Args:
            lengths: Own tokens of each text.
            behind: Tokens before them that were read already; each text's tokens look at them.
        """
        tokens, looks = 0, 0
        for length in lengths:
            tokens += length
            looks += length * behind + length * (length + 1) // 2
        return 2.0 * self.matrices * tokens + 4.0 * self.layers * self.attended * looks

    def weight_bytes(self, itemsize: int, quantization: str = "none") -> int:
        """Give the memory of the weights; quantised LMs keep their embeddings as they are."""
        each = _BYTES_A_WEIGHT.get(quantization, itemsize)
        return int(self.matrices * each) + (self.weights - self.matrices) * itemsize

    def cache_bytes(self, tokens: int, itemsize: int) -> int:
        """Give the memory of the keys and values of so many tokens."""
        return 2 * self.layers * self.cached * tokens * itemsize

    def batch_bytes(self, tokens: int, itemsize: int) -> int:
        """Estimate the memory of one batch: its keys and values, and one layer's activations."""
        live = _LIVE_WIDTHS * self.hidden + _LIVE_MIDDLES * self.middle
        return self.cache_bytes(tokens, itemsize) + live * tokens * itemsize
