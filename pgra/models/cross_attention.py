"""The decoder's attention to an example's encoded tokens, without making keys and values of them.

A reader's targets are a few tokens long, its evidence thousands. To project every encoded token to
keys and values, in each layer, costs T5-small a sixth of what encoding it did. The products can be
taken in another order: with q the projected queries and E the encoded tokens, (q W_k) E' is
q (E W_k')', and (p E) W_v' is p (E W_v'). Then the few queries are projected and all heads read the
encoded tokens themselves. DeepSeek-V2 (2024, section 2.1.2) absorbs its projections likewise.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn


def read_encoded_tokens(decoder: Any) -> None:
    """Let a T5 decoder's cross-attention read the encoded tokens themselves.

    It then also takes C rows of targets for each of B examples, (B * C, T, D), beside the B
    examples' encoded tokens and mask, and reads those once for all C. Modules and weights keep
    their names.

    Args:
        decoder: A `T5Stack`.
    """
    for block in decoder.block:
        attention = block.layer[1].EncDecAttention
        attention.forward = MethodType(_attend, attention)


def _attend(
    self: Any,
    hidden_states: Tensor,
    mask: Tensor | None = None,
    key_value_states: Tensor | None = None,
    position_bias: Tensor | None = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> Any:
    """Stand in for `T5Attention.forward` as `T5LayerCrossAttention` calls it.

    Args:
        self: The `T5Attention`.
        hidden_states: The decoder's, (N, T, D), N a multiple of B.
        mask: Which encoded tokens are real, (B, 1, 1 or T, S): True, or what is added to a score.
        key_value_states: Encoded tokens, (B, S, D).
        position_bias: None: there are no positions across.
        past_key_values: A cache, when text is written: its keys and values then serve every step,
            and transformers' own way is taken.
        **kwargs: For transformers' own way.

    Returns:
        Output (N, T, D), None for a bias, and the weights (N, H, T, S).
    """
    if past_key_values is not None or key_value_states is None:
        return type(self).forward(
            self, hidden_states, mask, key_value_states, position_bias, past_key_values, **kwargs
        )
    (N, T, D), (B, S, _) = hidden_states.shape, key_value_states.shape
    H, C = self.n_heads, N // B
    queries = _split_heads(self.q(hidden_states.reshape(B, C * T, D)), H)  # (B, H, C T, W)
    # An adapter around a projection may do anything (dropout, scale): then it is asked itself.
    is_plain = all(type(projection) is nn.Linear for projection in (self.k, self.v))
    if is_plain:
        to_keys = self.k.weight.view(H, -1, D)
        queries = torch.einsum("bhtw,hwd->bhtd", queries, to_keys).flatten(1, 2)  # (B, H C T, D)
        keys = values = key_value_states
    else:
        keys, values = (_split_heads(to(key_value_states), H) for to in (self.k, self.v))
    scores = (queries @ keys.transpose(-1, -2)).view(B, H, C * T, S)  # T5 does not scale them
    if mask is not None:
        mask = mask[:, :, :1]  # the same for every target token
        if mask.dtype is torch.bool:
            scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
        else:
            scores = scores + mask
    weights = scores.float().softmax(dim=-1).type_as(scores)
    weights = nn.functional.dropout(weights, p=self.dropout, training=self.training)
    if is_plain:
        read = (weights.flatten(1, 2) @ values).view(B, H, C * T, D)
        output = torch.einsum("bhtd,hwd->bthw", read, self.v.weight.view(H, -1, D))
    else:
        output = (weights @ values).transpose(1, 2)  # (B, C T, H, W)
    weights = weights.view(B, H, C, T, S).transpose(1, 2).flatten(0, 1)
    return self.o(output.reshape(N, T, -1)), None, weights


def _split_heads(states: Tensor, heads: int) -> Tensor:
    """Give (B, H, L, W) of (B, L, H W)."""
    B, L, _ = states.shape
    return states.view(B, L, heads, -1).transpose(1, 2)
