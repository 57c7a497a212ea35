"""Prompted states h*(x) = LM(prefix + P(x)) at the cost of x: the shared part runs once.

Guo et al. 2023, eq. 2. All prompts of a task begin with the same tokens: special tokens,
instruction, exemplars, and the template's words before the text. They run once; each text then
costs only its own tokens. Each way to do so is compared with whole prompts before it is used, so an
LM that a way does not support shows there, on a few texts, not in the results.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pgra.artifacts import Inputs
from pgra.errors import ConfigError
from pgra.lm import batching, kernels
from pgra.lm.base import Advance, StateArguments
from pgra.lm.batching import begin_fetch
from pgra.lm.causal_lm import CausalLM, EngineLM, open_causal_lm
from pgra.lm.generate import kept_layers, stock_cache
from pgra.lm.load import batch_budget
from pgra.progress import Bar
from pgra.prompts import FewShotPrompt
from pgra.types import Example, Json

logger = logging.getLogger(__name__)

# Ways to share a prefix, the best first; the last one is stock calls only.
#     cascade   attention in two parts; the prefix is stored once (`pgra.lm.kernels`)
#     expanded  a row a text, each with a copy of the prefix
WAYS = ("cascade", "expanded")
# texts that ways are compared on: of different lengths
CHECKED = ("a", "The film was not bad at all.", "It opened in 1925 with a cast of nine.")


class SharedPrefix:
    """The state of an LM after a prefix, and texts run from there."""

    def __init__(self, lm: CausalLM, ids: Sequence[int]) -> None:
        self.lm, self.ids = lm, list(ids)

    def run(self, texts: Sequence[Sequence[int]], way: str) -> Tensor:
        """Run texts after the prefix, in one of `WAYS`; best those of similar lengths.

        Returns the state at each text's last token, (n, H) in the LM's dtype, on its device.
        """
        lm = self.lm
        is_cascade = way == "cascade"
        ids, mask = batching.pad(texts)
        lengths = mask.sum(1)
        positions = torch.arange(ids.shape[1]).expand_as(ids) + len(self.ids)
        ends = torch.arange(len(ids)) * ids.shape[1] + lengths - 1
        spans = None
        if is_cascade and kernels.takes_one_row(lm.device):
            spans = kernels.Spans.of(lengths, len(self.ids), lm.device)
            ids = ids[mask][None]
            positions = positions[mask][None]
            ends = lengths.cumsum(0) - 1
        ids, positions, ends = (batching.send(part, lm.device) for part in (ids, positions, ends))
        how: dict[str, Any]
        if is_cascade:
            how = {
                # Any mask of four axes keeps transformers from making one; it is not looked at.
                "attention_mask": torch.zeros(1, 1, 1, 1, dtype=lm.dtype, device=ids.device),
                "cascade": kernels.Cascade(self._prepared_prefix, spans),
                "use_cache": False,
            }
        else:
            # The cache holds the prefix once for all rows: it is copied once, when the LM adds a
            # batch's keys, and freed with the batch. There is no mask: padding comes last, and an
            # LM looks at no later token.
            how = {
                "attention_mask": None,
                "past_key_values": stock_cache(self._prefix, len(ids)),
                "use_cache": True,
            }
        attending = kernels.attending(lm.model, kernels.NAME, kernels.attend)
        with torch.inference_mode(), attending if is_cascade else nullcontext():
            output = lm.model(input_ids=ids, position_ids=positions, **how)
        return lm.states_at(output.last_hidden_state, ends)

    def find_fault(self, way: str, prompts: Sequence[list[int]]) -> str | None:
        """Return why a way cannot be used; None if it gives the states of a few whole prompts."""
        truth = self.lm.states_of(prompts)  # before any attempt: that it does not fit is no fault
        texts = [ids[len(self.ids) :] for ids in prompts]
        noise = 0.0
        if self.lm.dtype != torch.float32:  # how far states lie apart that are read otherwise
            alone = torch.cat([self.lm.states_of([ids]) for ids in prompts])
            noise = float(torch.linalg.vector_norm(alone.float() - truth.float(), dim=1).max())

        return kernels.find_fault(
            lambda: self.run(texts, way), truth, dtype=self.lm.dtype, noise=noise
        )

    @cached_property
    def _prefix(self) -> list[tuple[Tensor, Tensor]]:
        """Each layer's keys and values of the prefix, (1, heads, S, width) each."""
        ids = torch.tensor([self.ids], device=self.lm.device)
        cache = stock_cache([], 1)
        with torch.inference_mode():
            self.lm.model(
                input_ids=ids,
                position_ids=torch.arange(len(self.ids), device=self.lm.device)[None],
                past_key_values=cache,
                use_cache=True,
            )
        return kept_layers(cache, len(self.ids))

    @cached_property
    def _prepared_prefix(self) -> list[tuple[Tensor, Tensor]]:
        return kernels.prepare_prefix(self._prefix, self.lm.config.num_attention_heads)


_PROBES = ("a", "The film", "1925", '"', "éa", "(", "-", "中", "$ 5", "'s")
_LEAST_TEXT_TOKENS = 4  # a prompt that leaves less for the text is refused


@dataclass(frozen=True)
class TokenizedPrompts:
    """Prompts as fields, in order, and as token ids, cut to the LM's window."""

    fields: Sequence[Mapping[str, str]]
    ids: list[list[int]]


@dataclass
class PromptedEncoder:
    """An encoder whose parameters are an LM, a prefix and a template.

    Attributes:
        lm: The LM.
        prompt: Prefix and template.
        sharing: "auto": the first of `WAYS` whose states equal those of "none" (the whole prompt
            for each text); a way that is named is not compared.
        batch_tokens: Own tokens in one batch on a CPU; a GPU takes 64 times as many.
        max_prompt_tokens: Longest prompt; None is the LM's window.
        chat: How prompts are written as a chat; of `pgra.prompts.CHATS`.
        num_cut: Texts that were cut so far.

    Raises:
        ConfigError: If the prefix leaves no room for a text.
    """

    lm: CausalLM
    prompt: FewShotPrompt
    sharing: str = "auto"
    batch_tokens: int = 512
    max_prompt_tokens: int | None = None
    chat: str = "off"
    num_cut: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        # the way, by this encoder or one `under` it
        self._found = [] if self.sharing == "auto" else [self.sharing]
        self._back_off = self.lm.back_off(batch_budget(self.batch_tokens, self.lm.device))
        if chat := self.lm.chat(self.chat):
            self.prompt = self.prompt.as_chat(*chat)
        self._check_room()

    @classmethod
    def open(cls, args: StateArguments, prompt: FewShotPrompt, device: str) -> Self:
        """Open an LM under a prompt; its weights are loaded when they are first needed.

        The layer must be a number, a share or "last".

        Raises:
            ConfigError: If the prompt leaves no room for a text.
            ModelError: If the LM cannot be used.
        """
        lm = open_causal_lm(args, device=device, layer=args.lm_layer)
        most = args.max_prompt_tokens
        chat = args.chat_template
        return cls(lm, prompt, "auto", args.lm_batch_tokens, most, chat)

    def under(self, prompt: FewShotPrompt) -> "PromptedEncoder":
        """Return the same LM under another prompt, with counts of its own.

        The first of these encoders that reads finds the way to share prefixes for all: for a prefix
        per query, comparing would cost more than it saves.

        Raises:
            ConfigError: If the prefix leaves no room for a text.
        """
        other = replace(self, prompt=prompt)
        other._found = self._found
        return other

    def release(self) -> None:
        vars(self).pop("_shared", None)
        self.lm.release()

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that a state depends on, besides the text."""
        return {**self.lm.fingerprint, **self.prompt.fingerprint, "max_prompt_tokens": self.limit}

    query_fingerprint = fingerprint

    @property
    def limit(self) -> int:
        return min(self.max_prompt_tokens or self.lm.window, self.lm.window)

    @cached_property
    def _prefix_ids(self) -> list[int]:
        return self.lm.with_lead(self.lm.tokenize([self.prompt.prefix])[0])

    @cached_property
    def _splits_cleanly(self) -> bool:
        fields = [self.prompt.template.passage_fields(probe) for probe in _PROBES]
        return self._tokenize_apart(fields) == self._tokenize_whole(fields)

    @cached_property
    def shared_ids(self) -> list[int]:
        """The tokens that the prompts of all ordinary texts begin with."""
        fields = [self.prompt.template.passage_fields(probe) for probe in _PROBES]
        first, *others = self._tokenize(fields)
        shared = min(batching.count_joint(first, ids) for ids in others)
        return first[: min(shared, *(len(ids) - 1 for ids in (first, *others)))]  # of its own: 1

    def _tokenize(self, fields: Sequence[Mapping[str, str]]) -> list[list[int]]:
        return (self._tokenize_apart if self._splits_cleanly else self._tokenize_whole)(fields)

    def _tokenize_apart(self, fields: Sequence[Mapping[str, str]]) -> list[list[int]]:
        own = self.lm.tokenize([self.prompt.suffix(each) for each in fields])
        return [self._prefix_ids + ids for ids in own]

    def _tokenize_whole(self, fields: Sequence[Mapping[str, str]]) -> list[list[int]]:
        texts = [self.prompt.prefix + self.prompt.suffix(each) for each in fields]
        return [self.lm.with_lead(ids) for ids in self.lm.tokenize(texts)]

    def _check_room(self) -> None:
        empty = len(self._tokenize([self.prompt.template.passage_fields("")])[0])
        if empty + _LEAST_TEXT_TOKENS > self.limit:
            raise ConfigError(
                f"the prompt has {empty} tokens before any text, and '{self.lm.source.name}' may "
                f"read {self.limit}: use fewer exemplars (--num_exemplars)"
            )

    def encode(self, texts: Sequence[str], *, advance: Advance = int) -> Tensor:
        """Return the states of passages, (n, H) in the LM's dtype, on the CPU, in the order given.

        Raises:
            ModelError: If a state is not finite; the message quotes the text.
        """
        fields = [self.prompt.template.passage_fields(text) for text in texts]
        return self.encode_prompts(self.tokenize(fields), advance=advance)

    @property
    def inputs(self) -> Inputs:
        return self.lm.source.inputs

    def encode_examples(self, examples: Sequence[Example]) -> npt.NDArray[np.float32]:
        """Return the states of a task's examples, (B, H), as KATE compares them; see `encode`."""
        prompts = self.tokenize([example.fields for example in examples])
        with Bar(total=len(examples), desc="read", unit="text", leave=False) as bar:
            states = self.encode_prompts(prompts, advance=bar.update)
        return np.asarray(states.float().numpy(), np.float32)

    def tokenize(self, fields: Sequence[Mapping[str, str]]) -> TokenizedPrompts:
        """Write and tokenise prompts; the LM is not used, so another thread may do it ahead."""
        ids = self._tokenize(fields)
        for i, prompt in enumerate(ids):
            if len(prompt) > self.limit:
                (ids[i],) = self._tokenize([self._cut(fields[i])])
                self.num_cut += 1
        return TokenizedPrompts(fields, ids)

    def encode_prompts(self, prompts: TokenizedPrompts, *, advance: Advance = int) -> Tensor:
        return self.begin(prompts, advance=advance)()

    def begin(self, prompts: TokenizedPrompts, *, advance: Advance = int) -> Callable[[], Tensor]:
        """Start reading tokenised prompts; return a function that waits for their states.

        A GPU is still busy until then: more can be started before these are waited for.
        """
        if isinstance(self.lm, EngineLM):
            given = self._check_finite(prompts, self.lm.states(prompts.ids, advance=advance))
            return lambda: given
        ids = prompts.ids
        skip = len(self.shared_ids)
        are_alike = [own[:skip] == self.shared_ids for own in ids]
        num_own = sum(len(i) - skip * alike for i, alike in zip(ids, are_alike, strict=True))
        rows: list[int] = []
        held: list[Tensor] = []
        with self.lm.busy, kernels.packed_for(self.lm.model, num_own):
            width = self.lm.width
            if not ids or self.way == "none":
                are_alike = [False] * len(ids)
            for is_alike, shared in ((True, skip), (False, 0)):
                group = [row for row, alike in enumerate(are_alike) if alike == is_alike]
                for batch, found in self._run(ids, group, shared):
                    held += found
                    rows += batch
                    advance(len(batch))
        fetched = begin_fetch(torch.cat(held)) if held else None

        def finish() -> Tensor:
            states = torch.empty(len(ids), width, dtype=self.lm.dtype)
            if fetched is not None:
                states[rows] = fetched()
            return self._check_finite(prompts, states)

        return finish

    def check_kept(self, prompts: TokenizedPrompts, kept: npt.NDArray[np.float32]) -> None:
        """Compare an engine's states with those that a bank has, (n, H); others' do not change.

        Raises:
            ModelError: If they differ by more than rounding.
        """
        if isinstance(self.lm, EngineLM):
            self.lm.check_kept(prompts.ids, kept)

    def _check_finite(self, prompts: TokenizedPrompts, states: Tensor) -> Tensor:
        broken = torch.nonzero(~torch.isfinite(states).all(1)).flatten().tolist()
        if broken:
            text = " ".join(prompts.fields[broken[0]].values())
            where = f"for {len(broken)} of {len(states)} texts, such as {text[:80]!r}"
            raise self.lm.not_finite(where)
        return states

    def _run(
        self, ids: Sequence[list[int]], group: Sequence[int], shared: int
    ) -> Iterator[tuple[list[int], list[Tensor]]]:
        """Run rows in batches; whole prompts may be longer by the prefix that is not shared."""
        spare = 0 if shared else len(self.shared_ids)

        def size(rows: Sequence[int]) -> int:
            return max(1, sum(len(ids[row]) - shared for row in rows) - spare)

        def run(rows: Sequence[int]) -> Tensor:
            if not shared:
                return self.lm.states_of([ids[row] for row in rows])
            return self._shared.run([ids[row][shared:] for row in rows], self.way)

        lengths = [len(ids[row]) - shared for row in group]
        for places in batching.token_budget_batches(lengths, self._back_off.budget + spare):
            batch = [group[place] for place in places]
            yield batch, self._back_off.run(batch, size, run)

    def _cut(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Shorten the longest field from its end until the prompt fits; the tail always stays."""
        name = max(fields, key=lambda n: len(fields[n]))

        def count_tokens(most: int) -> int:
            return len(self._tokenize([{**fields, name: fields[name][:most]}])[0])

        longest = bisect_right(range(1, len(fields[name]) + 1), self.limit, key=count_tokens)
        if longest == 0:
            raise ConfigError(f"{', '.join(fields)} do not fit {self.limit} tokens even cut")
        return {**fields, name: fields[name][:longest]}

    @cached_property
    def _shared(self) -> SharedPrefix:
        return SharedPrefix(self.lm, self.shared_ids)

    @cached_property
    def way(self) -> str:
        """How the prefix is shared, found when the LM first reads: not where the bank has all."""
        if not self.shared_ids:
            return "none"
        if not self._found:
            self._found.append(self._find_way())
        return self._found[0]

    def _find_way(self) -> str:
        cut = self.num_cut
        fields = [self.prompt.template.passage_fields(t) for t in CHECKED]
        prompts = self.tokenize(fields).ids
        self.num_cut = cut
        faults = list[str]()
        for way in WAYS if kernels.are_allowed() else WAYS[1:]:
            fault = self._shared.find_fault(way, prompts)
            if fault is None:
                break
            faults.append(f"'{way}' does not work here ({fault})")
        else:
            way = "none"
        logger.log(
            logging.WARNING if faults else logging.INFO,
            "'%s': the %d tokens of the prefix are shared by '%s'; %s",
            *(self.lm.source.name, len(self.shared_ids), way, "; ".join(faults)),
        )
        return way
