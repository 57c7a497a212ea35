"""From an LM's last state to the probabilities of next tokens, and of label words.

The states are those of `pgra.lm.prefix`; so whoever has a text's state in a bank knows what the
LM would write after it, without another forward.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder

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


# The words that answer a prompt, as an LM's tokens.


Tokens = tuple[int, ...]


@dataclass(frozen=True)
class AnswerWords:
    """The words that may follow a prompt, as an LM's tokens.

    Attributes:
        tokens: By label, in the task's order of labels; all of a word's tokens, its space included.
    """

    tokens: Mapping[str, Tokens]

    @classmethod
    def of(cls, encoder: PromptedEncoder, words: Mapping[str, str]) -> Self:
        """Cut the words as they stand in the exemplars: behind the answer's line and a space.

        Args:
            encoder: LM and prompt.
            words: Word by label.

        Raises:
            ConfigError: If one word begins another, which would then always win.
            ModelError: If the tokenizer cuts a prompt otherwise when a word follows it.
        """
        prompt = encoder.prompt
        suffix = prompt.suffix(prompt.template.passage_fields("The film"))
        bare, *full = encoder.lm.tokenize([suffix, *(f"{suffix} {w}" for w in words.values())])
        tokens: dict[str, Tokens] = {}
        for (label, word), ids in zip(words.items(), full, strict=True):
            if ids[: len(bare)] != bare or len(ids) == len(bare):
                raise ModelError(
                    f"the tokenizer of '{encoder.lm.source.name}' joins '{word}' to the prompt "
                    "before it: it cannot be scored apart. Use another LM"
                )
            tokens[label] = tuple(ids[len(bare) :])
        for label, mine in tokens.items():
            for other, longer in tokens.items():
                if label != other and longer[: len(mine)] == mine:
                    raise ConfigError(
                        f"prompt word '{words[label]}' ({label}) begins '{words[other]}' ({other}) "
                        "to the LM, so it would always win: choose another in the task's "
                        "prompt_words"
                    )
        return cls(tokens)

    @property
    def firsts(self) -> list[int]:
        """Give the tokens that words begin with, in the order of labels, each once."""
        return list(dict.fromkeys(ids[0] for ids in self.tokens.values()))

    @property
    def beginnings(self) -> list[Tokens]:
        """Give what may be written before a word's next token, the empty beginning first."""
        found = {ids[:end] for ids in self.tokens.values() for end in range(len(ids))}
        return sorted(found, key=lambda ids: (len(ids), ids))

    def nexts(self, beginning: Tokens) -> dict[str, int]:
        """Give the token that follows a beginning, of the labels whose word has it."""
        end = len(beginning)
        return {
            label: ids[end]
            for label, ids in self.tokens.items()
            if ids[:end] == beginning and len(ids) > end
        }
