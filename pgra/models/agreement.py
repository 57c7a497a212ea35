"""Whether a way of sharing a prefix gives the states of whole prompts: looked at before it is used.

Whatever an LM does that a way does not follow shows here, on a few texts, and not in the results.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from pgra.models.causal_lm import CausalLM
from pgra.models.shared_prefix import ROW_TOKENS, SharedPrefix

logger = logging.getLogger(__name__)

CHECKED = ("a", "The film was not bad at all.", "It opened in 1925 with a cast of nine.")
"""The texts that ways are compared on: of different lengths."""

OTHER_STATES = "it gives other states than the whole prompt"

# Prompted states are nearly one vector: what tells texts apart is a tenth of their length or less
# (SmolLM2-135M behind 8 exemplars: 6 to 7 %). So in half precision an error counts against that.
_OWN_SHARE = 1 / 3
_NOISE_TIMES = 2.0  # the same prompts in another batch differ too, there by up to a fifth of it


@dataclass(frozen=True)
class WholePrompts:
    """A few prompts run whole, to compare with.

    Attributes:
        lm: The LM.
        prompts: Their token ids.
        num_shared: How many tokens they begin with alike.
    """

    lm: CausalLM
    prompts: Sequence[list[int]]
    num_shared: int

    @cached_property
    def states(self) -> Tensor:
        """Give the prompts' states, (n, H)."""
        return self.lm.states_of(self.prompts)

    def fault(self, behind: SharedPrefix, way: str) -> str | None:
        """Say why a way cannot be used; None if it gives the same states."""
        truth = self.states  # before any attempt: that it does not fit is no fault of the way
        if any(ids[: self.num_shared] != behind.ids for ids in self.prompts):
            return "its prompts do not begin alike"
        own = [ids[self.num_shared :] for ids in self.prompts]
        # A full row of them: an attention that looks back only so far would lose the prefix from
        # its end.
        copies = -(-ROW_TOKENS // sum(map(len, own))) if way == "packed" else 1
        try:
            states = behind.run(own * copies, way)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            return f"{type(error).__name__}: {error}".splitlines()[0]
        noise = 0.0 if self.lm.dtype == torch.float32 else self._noise
        same = is_same(states, truth, copies=copies, tolerance=self.lm.tolerance, noise=noise)
        return None if same else OTHER_STATES

    @cached_property
    def _noise(self) -> float:
        """Give how far the states lie from themselves when each prompt is read alone, at most."""
        alone = torch.cat([self.lm.states_of([ids]) for ids in self.prompts])
        return float(torch.linalg.vector_norm(alone.float() - self.states.float(), dim=1).max())


def is_same(
    states: Tensor, truth: Tensor, *, tolerance: float, copies: int = 1, noise: float = 0.0
) -> bool:
    """Say whether states are the true ones, as nearly as their dtype allows.

    Args:
        states: (copies * n, H), the n texts over and over.
        truth: (n, H).
        tolerance: Most distance to the truth, relative to its length. In half precision it is
            coarse, and a third of what a text's state has of its own (the truth less the mean of
            the truths) is the limit too.
        copies: How often each text stands there.
        noise: A distance that is none of the way's doing; twice as much always passes the second.
    """
    whole = truth.float()
    own = torch.linalg.vector_norm(whole - whole.mean(0), dim=1).repeat(copies)
    length = torch.linalg.vector_norm(whole, dim=1).repeat(copies)
    distance = torch.linalg.vector_norm(states.float() - whole.repeat(copies, 1), dim=1)
    if not bool((distance <= tolerance * length).all()):
        return False
    if truth.dtype == torch.float32 or len(truth) == 1:
        return True
    return bool((distance <= (_OWN_SHARE * own).clamp(min=_NOISE_TIMES * noise)).all())
