"""A causal LM on this machine as a `Completer`: it goes on with prompts, or scores given words.

KATE's LM call: greedy, up to a stop string (Liu et al. 2022, section 3.3: temperature 0).
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Self

from pgra.core import Json
from pgra.errors import ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.completion import Advance, Completion
from pgra.lm.generate import BatchReader, GreedyDecoder, chance_alone, word_chances, write_alone
from pgra.lm.kernels import Packer, in_blocks

logger = logging.getLogger(__name__)

_SHOWN = 60

Tokens = Sequence[int]


def _nothing(_: int) -> None:
    """Tell nobody."""


class LocalCompleter:
    """An LM of transformers, in this process."""

    def __init__(self, lm: CausalLM, *, batch_tokens: int = 2048) -> None:
        """Take an LM.

        Args:
            lm: Made `with_head`; its weights are loaded when it is first asked.
            batch_tokens: Tokens it reads in one call on a CPU; a GPU takes 16 times as many.
        """
        self.lm = lm
        self.window = lm.window
        self._reader = BatchReader(lm, batch_tokens)

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device: str = "auto",
        quantization: str = "none",
        device_map: str = "none",
        batch_tokens: int = 2048,
    ) -> Self:
        """Find an LM by hub id, folder or `bundled:NAME`; see `CausalLM.from_name`.

        Raises:
            ConfigError: If the arguments contradict each other.
            ModelError: If it cannot be found, or is of another kind.
        """
        lm = CausalLM.from_name(
            name,
            dtype=dtype,
            device=device,
            quantization=quantization,
            device_map=device_map,
            with_head=True,
        )
        return cls(lm, batch_tokens=batch_tokens)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that its answers depend on, besides the prompt."""
        return {**self.lm.fingerprint, "decoding": "greedy"}

    @property
    def num_tokens(self) -> int:
        """Count the tokens of prompts that it read so far; shared beginnings count once."""
        return self._reader.num_tokens

    def count_tokens(self, texts: Sequence[str]) -> list[int]:
        """Count the tokens of texts, those that open every input included, (B,)."""
        return [len(ids) for ids in self._tokenize(texts)]

    def complete(
        self,
        prompts: Sequence[str],
        *,
        max_new_tokens: int,
        stop: str,
        advance: Advance | None = None,
    ) -> list[Completion]:
        """Go on with each prompt greedily until `stop`, the LM's own end, or `max_new_tokens`.

        The outcome is that of each prompt alone, whatever stands beside it: exactly so in float32
        but where two tokens are equally likely to the last digits; in half precision such ties are
        more.

        Args:
            prompts: B texts, none empty.
            max_new_tokens: Most tokens behind each.
            stop: Where to end; it is not part of the text.
            advance: Told how many more are done.

        Returns:
            B completions, in the order of prompts. A text may begin with a space, where the LM's
            tokenizer makes it part of the first word.

        Raises:
            ConfigError: If a prompt is empty, or does not fit the window with what is written.
            ModelError: If the LM cannot be loaded, does not fit, or gives no finite number.
        """
        if max_new_tokens < 1 or not stop:
            raise ValueError(f"max_new_tokens is {max_new_tokens}, stop is {stop!r}")
        ids = self._tokenize(prompts)
        self._check_room(prompts, ids, max_new_tokens)
        is_sound = self._reader.reader.fault is None
        unread = self._reader.count_unread(ids) if is_sound else sum(map(len, ids))
        with self._packer.packed(unread), in_blocks(self.lm.whole):
            if is_sound:
                written = GreedyDecoder(self._reader).write(
                    ids,
                    max_new_tokens=max_new_tokens,
                    is_done=lambda tokens: self._is_done(tokens, stop),
                    advance=advance or _nothing,
                )
            else:
                written = write_alone(
                    self.lm,
                    ids,
                    max_new_tokens=max_new_tokens,
                    is_done=lambda tokens: self._is_done(tokens, stop),
                    advance=advance or _nothing,
                )
        return [
            Completion(self._text(tokens).split(stop)[0], len(prompt), len(tokens))
            for prompt, tokens in zip(ids, written, strict=True)
        ]

    def score(
        self, prompts: Sequence[str], words: Sequence[str], *, advance: Advance | None = None
    ) -> list[list[float]]:
        """Give the log-probability of all tokens of each word after each prompt.

        A prompt is read once for all words; a word of several tokens costs those but its last.

        Args:
            prompts: B texts, none empty.
            words: C texts as they would follow, such as " great" with its space.
            advance: Told how many more prompts are done.

        Returns:
            B lists of C, from -inf to 0; not divided by a word's tokens.

        Raises:
            ConfigError: If a prompt is empty, or does not fit the window with a word.
            ModelError: As `complete`, or if the tokenizer joins a word to the prompt before it.
        """
        ids = self._tokenize(prompts)
        behind = [
            self._word_tokens(text, own, words) for text, own in zip(prompts, ids, strict=True)
        ]
        self._check_room(prompts, ids, max((len(w) for row in behind for w in row), default=0))
        told = advance or _nothing
        scores: list[list[float]] = [[] for _ in ids]
        with self._packer.packed(sum(map(len, ids))), in_blocks(self.lm.whole):
            if self._reader.reader.fault is not None:
                for row, own in enumerate(ids):
                    scores[row] = [chance_alone(self.lm, own, word) for word in behind[row]]
                    told(1)
                return scores
            for batch in self._reader.batches(ids):
                start = 0
                for kept in self._reader.read(ids, batch):
                    rows = batch.rows[start : start + len(kept)]
                    found = word_chances(self._reader.reader, kept, [behind[row] for row in rows])
                    for row, values in zip(rows, found, strict=True):
                        scores[row] = values
                    start += len(kept)
                    told(len(kept))
        return scores

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        lead = self.lm.lead_ids
        return [[*lead, *ids] for ids in self.lm.tokenize(texts)]

    def _check_room(
        self, prompts: Sequence[str], ids: Sequence[Tokens], max_new_tokens: int
    ) -> None:
        for number, (text, own) in enumerate(zip(prompts, ids, strict=True), 1):
            if not own:
                raise ConfigError(f"prompt {number} is empty: there is nothing to go on with")
            if len(own) + max_new_tokens > self.window:
                raise ConfigError(
                    f"prompt {number} has {len(own)} tokens ({text[-_SHOWN:]!r} at its end), and "
                    f"'{self.lm.source.name}' holds {self.window} with the {max_new_tokens} that "
                    "may follow: use fewer exemplars (--num_exemplars), or an LM with a longer "
                    "window"
                )

    def _word_tokens(self, prompt: str, ids: Tokens, words: Sequence[str]) -> list[Tokens]:
        """Cut the words as they stand behind a prompt."""
        found: list[Tokens] = []
        for word, joint in zip(words, self._tokenize([prompt + w for w in words]), strict=True):
            if list(joint[: len(ids)]) != list(ids) or len(joint) == len(ids):
                raise ModelError(
                    f"the tokenizer of '{self.lm.source.name}' joins {word!r} to the prompt before "
                    f"it ({prompt[-_SHOWN:]!r}): it cannot be scored apart. Begin the word with a "
                    "space, end the prompt without one, or use another LM"
                )
            found.append(joint[len(ids) :])
        return found

    def _is_done(self, tokens: Tokens, stop: str) -> bool:
        return tokens[-1] in self._ends or stop in self._text(tokens)

    def _text(self, tokens: Tokens) -> str:
        text: str = self.lm.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def _packer(self) -> Packer:
        return Packer(self.lm.whole)

    @cached_property
    def _ends(self) -> frozenset[int]:
        """Give the tokens with which the LM ends a text by itself."""
        told = getattr(getattr(self.lm.whole, "generation_config", None), "eos_token_id", None)
        ends = {*told} if isinstance(told, list) else {told}
        return frozenset({*ends, self.lm.tokenizer.eos_token_id} - {None})
