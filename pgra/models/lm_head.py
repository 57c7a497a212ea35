"""The last step of a causal LM: from a state to the log-probabilities of the next token.

The states are those of `pgra.models.prefix`; so whoever has a text's state in a bank knows what the
LM would write after it, without another forward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pgra.errors import ModelError
from pgra.models.causal_lm import CausalLM

_PROBE = "The answer is"
_VOCABULARY_ROWS = 1 << 14  # logits of so many tokens at a time, in float32
_STATE_ROWS = 1 << 10


@dataclass(frozen=True)
class LMHead:
    """The layer that turns states into logits.

    Attributes:
        layer: Its weight is (V, H), in the LM's dtype.
    """

    layer: torch.nn.Linear

    @classmethod
    def of(cls, lm: CausalLM) -> Self:
        """Take an LM's head, and see that its logits come from its states by it alone.

        Args:
            lm: Made `with_head`.

        Raises:
            ModelError: If there is no plain head, or the LM does more with its logits (some cap or
                scale them).
        """
        layer = lm.whole.get_output_embeddings()
        name = lm.source.name
        if not isinstance(layer, torch.nn.Linear):
            raise ModelError(
                f"'{name}' has no plain head ({type(layer).__name__}): its words cannot be scored"
            )
        head = cls(layer)
        ids = lm.tokenize([_PROBE])[0]
        with torch.inference_mode():
            told = lm.whole(input_ids=torch.tensor([ids], device=lm.device)).logits[0, -1].float()
            own = head.logits(lm.states_of([ids]))[0]
        slack = lm.tolerance * float(told.abs().max())
        if not torch.allclose(own.to(told.device), told, rtol=0, atol=slack):
            raise ModelError(
                f"'{name}' does more to its logits than its head does: its words cannot be scored. "
                "Give a GPT-2, OPT, Llama, Qwen, ..."
            )
        return head

    def logits(self, states: Tensor, tokens: Tensor | slice | None = None) -> Tensor:
        """Give logits of some tokens.

        Args:
            states: (n, H).
            tokens: (t,) int64, or a slice of the vocabulary; None for all of it.

        Returns:
            (n, t) float32, on the head's device. In half precision a logit would be rounded by
            more than labels differ.
        """
        weight, bias = self.layer.weight, self.layer.bias
        states = states.to(weight.device).float()
        if tokens is None and weight.dtype is torch.float32:
            logits: Tensor = self.layer(states)  # it may hold a packed copy
            return logits
        chosen = slice(None) if tokens is None else tokens
        shift = None if bias is None else bias[chosen].float()
        return F.linear(states, weight[chosen].float(), shift)

    @torch.inference_mode()
    def log_chances(self, states: Tensor, tokens: Sequence[int]) -> Tensor:
        """Give the log-probability of some next tokens, among all of the vocabulary.

        Args:
            states: (n, H).
            tokens: t token ids.

        Returns:
            (n, t) float32, on the CPU.
        """
        chosen = torch.tensor(tokens, device=self.layer.weight.device)
        found = [
            (self.logits(part, chosen) - self._total(part)).cpu()
            for part in torch.split(states, _STATE_ROWS)
        ]
        return torch.cat(found) if found else torch.empty(0, len(tokens))

    def _total(self, states: Tensor) -> Tensor:
        """Give the log of the sum of all tokens' exponentials, (n, 1)."""
        parts = [
            self.logits(states, slice(start, start + _VOCABULARY_ROWS)).logsumexp(1, keepdim=True)
            for start in range(0, len(self.layer.weight), _VOCABULARY_ROWS)
        ]
        return torch.cat(parts, dim=1).logsumexp(1, keepdim=True)
