"""A causal LM in this process: states that share a prefix, word scores and greedy text."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from pgra.arrays import Scores
from pgra.lm import kernels
from pgra.lm.base import Advance, Completion, Prompts, Tokens
from pgra.lm.generate import KVCache, PromptReader, join
from pgra.lm.prefix import SharedPrefix
from pgra.lm.state_lm import BeginStates
from pgra.lm.transformers_lm import TransformersLM

_TIMES_STATES = 4  # tokens of a batch, times those of a batch of states


class CausalLM(TransformersLM):
    """A decoder-only LM of transformers: OPT, GPT-2, Llama, Qwen and similar."""

    def share_prefix(
        self,
        ids: Tokens,
        probes: Callable[[], Prompts],
        layers: Sequence[int] = (),
    ) -> BeginStates:
        """Return a function that starts to read prompts; those that begin with `ids` share it."""
        return SharedPrefix(self, ids, probes, layers).begin

    def states(self, prompts: Prompts, *, advance: Advance = int) -> Scores:
        """Return the state at the last token of each prompt, (n, H) float32; errors of `model`."""
        return self.share_prefix((), list)(prompts, advance)().float().numpy()

    def scores(
        self,
        prompts: Prompts,
        words: Sequence[Prompts],
        *,
        advance: Advance = int,
    ) -> list[list[float]]:
        """Return the log-probability of all tokens of each word after its prompt.

        A prompt is read once for all its words; a word of several tokens costs those but its last.
        `words` has a list for each prompt.

        Raises:
            ModelError: If the LM cannot be loaded, does not fit, or gives NaN or infinity.
        """
        self.reader.check()
        scores: list[list[float]] = [[] for _ in prompts]
        with kernels.packed_for(self.whole, sum(map(len, prompts))):
            for rows, cache in self.reader.read(prompts):
                lines = list[int]()
                read_words = list[Tokens]()
                for line, row in enumerate(rows):
                    lines += [line] * len(words[row])
                    read_words += words[row]
                chances = self._score_words(cache, lines, read_words)
                for line, chance in zip(lines, chances, strict=True):
                    scores[rows[line]].append(chance)
                advance(len(rows))
        if not all(map(math.isfinite, chain.from_iterable(scores))):
            raise self.not_finite("for a prompt", "number")
        return scores

    def _score_words(self, cache: KVCache, lines: Sequence[int], words: Prompts) -> list[float]:
        """Return the log-probabilities of words, each after the prompt on its line."""
        firsts = cache.logits.log_softmax(dim=1)[lines, [word[0] for word in words]]
        chances: list[float] = firsts.tolist()
        longer = [number for number, word in enumerate(words) if len(word) > 1]
        joined = join([cache]) if longer else cache
        for start in range(0, len(longer), len(cache)):  # each copies the keys of its prompt
            numbers = longer[start : start + len(cache)]
            prompts = joined.take([lines[number] for number in numbers])
            logits, _ = self.reader.extend(prompts, [words[number][:-1] for number in numbers])
            later = logits.log_softmax(dim=2)  # (n, T, V)
            for row, number in enumerate(numbers):
                rest = words[number][1:]
                chances[number] += sum(later[row, range(len(rest)), rest].tolist())
        return chances

    def complete(
        self, prompts: Sequence[str], *, max_new_tokens: int, stop: str, advance: Advance = int
    ) -> list[Completion]:
        """Continue each prompt greedily until `stop`, the LM's own end, or `max_new_tokens`.

        This is KATE's LM call (Liu et al. 2022, section 3.3: temperature 0). The result is that of
        each prompt alone, whatever else is in the batch: in float32 exactly, except where two
        tokens are equally likely to the last digits; half precision has more such ties. A text may
        begin with a space, where the tokenizer makes it part of the first word.

        Raises:
            ConfigError: If a prompt is empty, or does not fit the window with what is written.
            ModelError: If the LM cannot be loaded, does not fit, or gives NaN or infinity.
        """
        ids = self.tokenize_inputs(prompts)
        self._check_prompts(prompts, ids, max_new_tokens)
        self.reader.check()
        written: list[list[int]] = [[] for _ in ids]

        def is_done(tokens: Tokens) -> bool:
            is_ended = tokens[-1] in self.ends or stop in self._text(tokens)
            return is_ended or len(tokens) >= max_new_tokens

        with kernels.packed_for(self.whole, sum(map(len, ids))):
            for rows, cache in self.reader.read_joined(ids, max_new_tokens):
                while rows:
                    for row, token in zip(rows, self._likeliest(cache.logits), strict=True):
                        written[row].append(token)
                    left = [line for line, row in enumerate(rows) if not is_done(written[row])]
                    advance(len(rows) - len(left))
                    rows = [rows[line] for line in left]
                    if rows:
                        newest = [written[row][-1] for row in rows]
                        cache = self.reader.step(cache.take(left), newest)
        return [
            Completion(self._text(tokens).split(stop)[0], len(prompt), len(tokens))
            for prompt, tokens in zip(ids, written, strict=True)
        ]

    def _likeliest(self, logits: Tensor) -> list[int]:
        best, tokens = logits.max(dim=1)
        likeliest: list[int] = torch.where(torch.isfinite(best), tokens, -1).tolist()
        if -1 in likeliest:
            raise self.not_finite("for a prompt", "number")
        return likeliest

    def _text(self, tokens: Tokens) -> str:
        text: str = self.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    @cached_property
    def reader(self) -> PromptReader:
        """Reads prompts and continues them, by the LM's head."""
        return PromptReader(self, _TIMES_STATES * self.args.lm_batch_tokens)

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens with which the LM ends a text by itself."""
        ids = getattr(getattr(self.whole, "generation_config", None), "eos_token_id", None)
        ends = {*ids} if isinstance(ids, list) else {ids}
        return frozenset({*ends, self.tokenizer.eos_token_id} - {None})
