"""A causal LM in training: it reads whole sequences, and learns the answers in them alone."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

from pgra.lm.load import find_model, load_pretrained
from pgra.reader.fid import IGNORED
from pgra.reader.module import ReaderModule


class CausalModule(ReaderModule):
    """A causal LM that makes the logits of answers alone: those of all tokens take most memory."""

    @classmethod
    def from_name(cls, name: str) -> Self:
        """Load an LM in float32: hub id, folder or `bundled:NAME`.

        Raises:
            ModelError: If it cannot be loaded.
        """
        load = AutoModelForCausalLM.from_pretrained
        return cls(load_pretrained(load, find_model(name), dtype=torch.float32))

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        places: Tensor,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Read sequences; there is no mask, for nothing reads the padding behind it.

        Args:
            input_ids: (B, L), padded on the right.
            labels: (B, L): the answers' tokens at their places, never the first; else `IGNORED`.
            places: (n,), rising: where any row has an answer's token.
            num_items_in_batch: Answer tokens to divide the summed loss by; None is this batch's.

        Returns:
            With `.loss`, and `.logits` (B, n, V) that predict the tokens at these places.
        """
        output = self.model(input_ids=input_ids, logits_to_keep=places - 1, use_cache=False)
        chosen = labels[:, places]
        loss = cross_entropy(
            output.logits.float().flatten(0, 1),
            chosen.flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        total = (chosen != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        output.loss = loss / total
        return output


def answer_row(prompt: Sequence[int], answer: Sequence[int]) -> dict[str, list[int]]:
    """Return the tokens of a prompt and of its answer, which alone is learned."""
    return {"input_ids": [*prompt, *answer], "labels": [IGNORED] * len(prompt) + [*answer]}


def pad(rows: Sequence[Mapping[str, Sequence[int]]]) -> dict[str, Tensor]:
    """Lay sequences side by side, as `CausalModule.forward` takes them.

    Args:
        rows: Each with `input_ids` and `labels`.

    Returns:
        Both, (B, L) int64; shorter ones are filled on the right with what is not learned. And the
        answers' `places`, which a GPU would have to be asked for.
    """
    batch = {
        name: pad_sequence(
            [torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=fill
        )
        for name, fill in (("input_ids", 0), ("labels", IGNORED))
    }
    return {**batch, "places": (batch["labels"] != IGNORED).any(dim=0).nonzero().flatten()}
