"""Prompted states h*(x) = LM(prefix + P(x)) at the cost of x: the shared part runs once.

Guo et al. 2023, eq. 2. All prompts of a task begin with the same tokens: special tokens,
instruction, exemplars, and the template's words before the text. They run once; each text then
costs only its own tokens. Each way to do so is compared with whole prompts before it is used, so an
LM that a way does not support shows there, on a few texts, not in the results.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Vectors
from pgra.errors import ConfigError
from pgra.lm import batching, kernels, open_state_lm
from pgra.lm.base import Advance, Prompts, StateArguments, Tokens
from pgra.lm.batching import begin_fetch
from pgra.lm.generate import kept_layers, stock_cache
from pgra.lm.load import batch_budget
from pgra.lm.state_lm import BeginStates, StateLM
from pgra.lm.transformers_lm import TransformersLM
from pgra.progress import Bar
from pgra.prompts import FewShotPrompt
from pgra.types import Example, Fields

logger = logging.getLogger(__name__)

# Ways to share a prefix, the best first; the last one is stock calls only.
#     cascade   attention in two parts; the prefix is stored once (`pgra.lm.kernels`)
#     expanded  a row a text, each with a copy of the prefix
WAYS = ("cascade", "expanded")
# texts that ways are compared on: of different lengths
CHECKED = ("a", "The film was not bad at all.", "It opened in 1925 with a cast of nine.")


class SharedPrefix:
    """Reads prompts with an LM, most of which begin with the same tokens, that run once."""

    def __init__(
        self,
        lm: TransformersLM,
        ids: Tokens,
        probes: Callable[[], Prompts],
        layers: Sequence[int] = (),
    ) -> None:
        """Take the shared tokens, perhaps none; `probes` gives prompts to compare ways on.

        The states of `layers` are read with the last one's.
        """
        self.lm = lm
        self.ids = list(ids)
        self.layers = layers
        self._probes = probes
        self._back_off = lm.back_off(batch_budget(lm.args.lm_batch_tokens, lm.device))

    def begin(self, prompts: Prompts, advance: Advance) -> Callable[[], Tensor]:
        """Start reading prompts; return a function that waits for their states, on the CPU."""
        lm = self.lm
        skip = len(self.ids)
        sharing = [list(ids[:skip]) == self.ids for ids in prompts]
        num_tokens = sum(map(len, prompts)) - skip * sum(sharing)
        rows: list[int] = []
        held: list[Tensor] = []
        with lm.busy, kernels.packed_for(lm.model, num_tokens):
            if not skip or not prompts or self.find_way() == "none":
                sharing = [False] * len(prompts)
            for is_sharing, shared in ((True, skip), (False, 0)):
                group = [row for row, shares in enumerate(sharing) if shares == is_sharing]
                for batch, states in self._run_batches(prompts, group, shared):
                    held += states
                    rows += batch
                    advance(len(batch))
        if not held:
            return lambda: torch.empty(0, lm.width, dtype=lm.dtype)
        fetch = begin_fetch(torch.cat(held))
        places = np.argsort(rows)
        return lambda: fetch()[places]

    def _run_batches(
        self, prompts: Prompts, group: Sequence[int], shared: int
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Run rows in batches; whole prompts may be longer by the prefix that is not shared."""
        spare = len(self.ids) - shared

        def size(rows: Sequence[int]) -> int:
            return max(1, sum(len(prompts[row]) - shared for row in rows) - spare)

        def run(rows: Sequence[int]) -> Tensor:
            if not shared:
                return self.lm.states_of([prompts[row] for row in rows], self.layers)
            return self.run([prompts[row][shared:] for row in rows], self.find_way())

        lengths = [len(prompts[row]) - shared for row in group]
        for indices in batching.token_budget_batches(lengths, self._back_off.budget + spare):
            batch = [group[index] for index in indices]
            yield batch, self._back_off.run(batch, size, run)

    def find_way(self) -> str:
        """Return how the LM shares a prefix; for all prefixes, the first time it is asked."""
        if self.lm.way is None:
            prompts = self._probes()
            faults = list[str]()
            for way in WAYS if kernels.are_allowed() else WAYS[1:]:
                fault = self.find_fault(way, prompts)
                if fault is None:
                    break
                faults.append(f"'{way}' does not work here ({fault})")
            else:
                way = "none"
            self.lm.way = way
            logger.log(
                logging.WARNING if faults else logging.INFO,
                "'%s': the %d tokens of the prefix are shared by '%s'; %s",
                self.lm.source.name,
                len(self.ids),
                way,
                "; ".join(faults),
            )
        return self.lm.way

    def run(self, texts: Prompts, way: str) -> Tensor:
        """Run texts after the prefix, in one of `WAYS`; best those of similar lengths.

        Returns the state at each text's last token, (n, H) in the LM's dtype, on its device.
        """
        lm = self.lm
        ids, mask = batching.pad(texts)
        lengths = mask.sum(1)
        positions = torch.arange(ids.shape[1]).expand_as(ids) + len(self.ids)
        ends = torch.arange(len(ids)) * ids.shape[1] + lengths - 1
        if way == "cascade":
            prefix = self._prepared_prefix
            spans = None
            if kernels.takes_one_row(lm.device):
                spans = kernels.Spans.of(lengths, len(self.ids), lm.device)
                ids = ids[mask][None]
                positions = positions[mask][None]
                ends = lengths.cumsum(0) - 1
            with kernels.attending(lm.model, kernels.NAME, kernels.attend):
                return lm.read(
                    ids,
                    positions,
                    ends,
                    self.layers,
                    # Any mask of four axes keeps transformers from making one; nothing reads it.
                    attention_mask=torch.zeros(1, 1, 1, 1, dtype=lm.dtype, device=lm.device),
                    cascade=kernels.Cascade(prefix, spans),
                    use_cache=False,
                )
        # The cache holds the prefix once for all rows: it is copied once, when the LM adds a
        # batch's keys, and freed with the batch. There is no mask: padding comes last, and an LM
        # looks at no later token.
        cache = stock_cache(self._prefix, len(ids))
        return lm.read(ids, positions, ends, self.layers, past_key_values=cache, use_cache=True)

    def find_fault(self, way: str, prompts: Prompts) -> str | None:
        """Return why a way cannot be used; None if it gives the states of a few whole prompts."""
        # Outside: that it does not fit is not a way's fault.
        truth = self.lm.states_of(prompts, self.layers)
        texts = [ids[len(self.ids) :] for ids in prompts]
        noise = 0.0
        if self.lm.dtype != torch.float32:  # how far states lie apart that are read otherwise
            alone = torch.cat([self.lm.states_of([ids], self.layers) for ids in prompts])
            noise = float(torch.linalg.vector_norm(alone.float() - truth.float(), dim=1).max())
        return kernels.find_fault(
            lambda: self.run(texts, way), truth, dtype=self.lm.dtype, noise=noise
        )

    @cached_property
    def _prefix(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of the prefix, (1, heads, S, width) each."""
        cache = stock_cache([], 1)
        positions = torch.arange(len(self.ids))[None]
        self.lm.forward(torch.tensor([self.ids]), positions, past_key_values=cache, use_cache=True)
        return kept_layers(cache, len(self.ids))

    @cached_property
    def _prepared_prefix(self) -> list[tuple[Tensor, Tensor]]:
        return kernels.prepare_prefix(self._prefix, self.lm.config.num_attention_heads)


@dataclass(frozen=True)
class StateColumns:
    """How the columns of texts' states, (n, W), are divided into blocks.

    Attributes:
        widths: Columns of each block: of the LM's depths, the last at the end, then perhaps of an
            encoder's vectors.
        has_encoder: Whether the last block is the encoder's.
        words: What gives the logits of the label words for the LM's last state, (C, H + 1); None
            where the LM has no opinion.
    """

    widths: Sequence[int]
    has_encoder: bool = False
    words: Vectors | None = None


def depth_widths(width: int, last: int, layers: Sequence[int]) -> list[int]:
    """Divide the columns of states: those of each layer, then the `last` layer's."""
    return [*((width - last) // len(layers) for _ in layers), last]


_PROBES = ("a", "The film", "1925", '"', "éa", "(", "-", "中", "$ 5", "'s")
_LEAST_TEXT_TOKENS = 4  # a prompt that leaves less for the text is refused


@dataclass(frozen=True)
class TokenizedPrompts:
    """Prompts as fields, in order, and as token ids, cut to the LM's window."""

    fields: Sequence[Mapping[str, str]]
    ids: list[list[int]]


class PromptedEncoder:
    """An encoder whose parameters are an LM, a prefix and a template.

    Attributes:
        lm: The LM.
        prompt: Prefix and template, as they are written: a chat as such.
        max_prompt_tokens: Longest prompt; None is the LM's window.
        chat: How prompts are written as a chat; of `pgra.prompts.CHATS`.
        num_cut: Texts that were cut so far.
        layers: Those whose states are read before the last one's, in one pass.
    """

    def __init__(
        self,
        lm: StateLM,
        prompt: FewShotPrompt,
        *,
        max_prompt_tokens: int | None = None,
        chat: str = "off",
        depths: Sequence[float] = (),
    ) -> None:
        """Put an LM under a prompt; nothing is read yet.

        A state is the last layer's, after those at shares of the LM's depth, as far as it gives
        them.

        Raises:
            ConfigError: If the prefix leaves no room for a text.
        """
        self.lm = lm
        self.max_prompt_tokens = max_prompt_tokens
        self.chat = chat
        self.num_cut = 0
        self.layers = lm.layers_at(depths)
        style = lm.chat(chat)
        self.prompt = prompt if style is None else prompt.as_chat(*style)
        self._check_room()

    @classmethod
    def open(
        cls,
        args: StateArguments,
        prompt: FewShotPrompt,
        device: str,
        depths: Sequence[float] = (),
    ) -> Self:
        """Open an LM under a prompt; its weights are loaded when they are first needed.

        Raises:
            ConfigError: If the prompt leaves no room for a text.
            ModelError: If the LM cannot be used.
        """
        return cls(
            open_state_lm(args, device=device),
            prompt,
            max_prompt_tokens=args.max_prompt_tokens,
            chat=args.chat_template,
            depths=depths,
        )

    def release(self) -> None:
        """Free the LM's weights, and what was read of the prefix."""
        vars(self).pop("_begin", None)
        self.lm.release()

    @property
    def fingerprint(self) -> Fields:
        """All that a state depends on, besides the text."""
        fields = {**self.lm.fingerprint, **self.prompt.fingerprint, "max_prompt_tokens": self.limit}
        return {**fields, "lm_layers": self.layers} if self.layers else fields

    @property
    def limit(self) -> int:
        """Most tokens of a prompt."""
        return min(self.max_prompt_tokens or self.lm.window, self.lm.window)

    @cached_property
    def width(self) -> int:
        """W, the columns of a state."""
        return self.encode([_PROBES[1]]).shape[1] if self.layers else self.lm.width

    @cached_property
    def _prefix_ids(self) -> list[int]:
        return self.lm.tokenize_inputs([self.prompt.prefix])[0]

    @cached_property
    def _splits_cleanly(self) -> bool:
        fields = self._passages(_PROBES)
        return self._tokenize_apart(fields) == self._tokenize_whole(fields)

    @cached_property
    def shared_ids(self) -> list[int]:
        """The tokens that the prompts of all ordinary texts begin with."""
        return batching.share_tokens(self._tokenize(self._passages(_PROBES)))

    def _passages(self, texts: Sequence[str]) -> list[dict[str, str]]:
        return [self.prompt.template.passage_fields(text) for text in texts]

    def _tokenize(self, fields: Sequence[Mapping[str, str]]) -> list[list[int]]:
        if self._splits_cleanly:
            return self._tokenize_apart(fields)
        return self._tokenize_whole(fields)

    def _tokenize_apart(self, fields: Sequence[Mapping[str, str]]) -> list[list[int]]:
        suffixes = self.lm.tokenize([self.prompt.suffix(values) for values in fields])
        return [self._prefix_ids + ids for ids in suffixes]

    def _tokenize_whole(self, fields: Sequence[Mapping[str, str]]) -> list[list[int]]:
        return self.lm.tokenize_inputs([self.prompt.write(values) for values in fields])

    def _check_room(self) -> None:
        empty = len(self._tokenize(self._passages([""]))[0])
        if empty + _LEAST_TEXT_TOKENS > self.limit:
            raise ConfigError(
                f"the prompt has {empty} tokens before any text, and '{self.lm.source.name}' may "
                f"read {self.limit}: use fewer exemplars (--num_exemplars)"
            )

    def encode(self, texts: Sequence[str]) -> Tensor:
        """Return the states of passages, (n, H) in the LM's dtype, on the CPU, in the order given.

        Raises:
            ModelError: If a state is not finite; the message quotes the text.
        """
        return self.begin(self.tokenize(self._passages(texts)))()

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Return the states of a task's examples, (B, H), as KATE compares them; see `encode`."""
        prompts = self.tokenize([example.fields for example in examples])
        with Bar(total=len(examples), desc="read", unit="text", leave=False) as bar:
            states: Vectors = self.begin(prompts, bar.update)().float().numpy()
        return states

    def columns(self, words: Sequence[str]) -> StateColumns:
        """Return how states are divided into blocks, and what gives the logits of label words.

        Raises:
            ModelError: If the tokenizer joins a word to the prompt before it.
        """
        widths = depth_widths(self.width, self.lm.width, self.layers)
        return StateColumns(widths, words=self.lm.word_rows(self.word_ids(words)))

    def word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """Return the tokens of words after a prompt; raises as `columns`."""
        (probe,) = self._passages([_PROBES[1]])
        _, ids = self.lm.split_words(self.prompt.write(probe), [f" {word}" for word in words])
        return ids

    def score_words(self, examples: Sequence[Example], words: Sequence[str]) -> Vectors:
        """Return the log-probability of all tokens of each word after examples, (B, C)."""
        ids = self.word_ids(words)
        limit = min(self.limit, self.lm.window - max(map(len, ids)))
        prompts = self.tokenize([example.fields for example in examples], limit)
        bar = Bar(total=len(examples), desc="score words", unit="text", leave=False)
        with self.lm.busy, bar:
            scores = self.lm.scores(prompts.ids, [ids] * len(prompts.ids), advance=bar.update)
        return np.array(scores, np.float32).reshape(len(examples), len(words))

    def tokenize(
        self, fields: Sequence[Mapping[str, str]], limit: int | None = None
    ) -> TokenizedPrompts:
        """Write and tokenise prompts; the LM is not used, so another thread may do it ahead."""
        ids = self._tokenize(fields)
        limit = limit or self.limit
        for i, prompt in enumerate(ids):
            if len(prompt) > limit:
                (ids[i],) = self._tokenize([self._cut(fields[i], limit)])
                self.num_cut += 1
        return TokenizedPrompts(fields, ids)

    def begin(self, prompts: TokenizedPrompts, advance: Advance = int) -> Callable[[], Tensor]:
        """Start reading tokenised prompts; return a function that waits for their states.

        A GPU is still busy until then: more can be started before these are waited for.
        """
        wait = self._begin(prompts.ids, advance)

        def finish() -> Tensor:
            states = wait() if prompts.ids else torch.empty(0, self.width, dtype=self.lm.dtype)
            broken = torch.nonzero(~torch.isfinite(states).all(1)).flatten().tolist()
            if broken:
                text = " ".join(prompts.fields[broken[0]].values())
                where = f"for {len(broken)} of {len(states)} texts, such as {text[:80]!r}"
                raise self.lm.not_finite(where)
            return states

        return finish

    @cached_property
    def _begin(self) -> BeginStates:
        return self.lm.share_prefix(self.shared_ids, self._write_probes, self.layers)

    def _write_probes(self) -> list[list[int]]:
        return [ids[: self.limit] for ids in self._tokenize(self._passages(CHECKED))]

    def _cut(self, fields: Mapping[str, str], limit: int) -> dict[str, str]:
        """Shorten the longest field from its end until the prompt fits; the tail always stays."""
        name = max(fields, key=lambda n: len(fields[n]))

        def count_tokens(most: int) -> int:
            return len(self._tokenize([{**fields, name: fields[name][:most]}])[0])

        longest = bisect_right(range(1, len(fields[name]) + 1), limit, key=count_tokens)
        if longest == 0:
            raise ConfigError(f"{', '.join(fields)} do not fit in {limit} tokens, even truncated")
        return {**fields, name: fields[name][:longest]}


def read_once(encoders: Sequence[PromptedEncoder], fields: Mapping[str, str]) -> Vectors:
    """Read one text under several prompts of one LM, (n, W): what they begin with runs once.

    So a long text is read once for all questions that follow it.
    """
    lm = encoders[0].lm
    prompts = [encoder.tokenize([fields]).ids[0] for encoder in encoders]
    shared = batching.share_tokens(prompts)
    begin = lm.share_prefix(shared, lambda: prompts, encoders[0].layers)
    return begin(prompts, int)().float().numpy()
