"""Prompted states h*(x) = LM(prefix + P(x)) at the cost of x: the shared part runs once.

The ways of sharing a prefix give the same states; each is compared with whole prompts at start.

Guo et al. 2023, eq. 2. All prompts of a task begin with the same tokens: special tokens,
instruction, exemplars, and the words of the template that stand before the text. These are run
once; each text then costs only its own tokens.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pgra.core import Json
from pgra.errors import ConfigError, ModelError
from pgra.lm import kernels as cascade
from pgra.lm.batching import RowLayout, pack_rows, send, token_budget_batches
from pgra.lm.causal_lm import CausalLM, recall_budget, remember_budget
from pgra.lm.kernels import LastLayer, attending, packed_for, register
from pgra.lm.load import batch_budget
from pgra.prompts.fewshot import FewShotPrompt

# Texts behind a prefix that is run once, in one of several ways that give the same states.
#
# cascade   attention in two parts; the prefix's keys and values stand once (`pgra.lm.kernels`)
# packed    rows of many texts behind a copy of the prefix each, with a mask; stock calls only
# expanded  a row a text, a copy of the prefix behind each; stock calls only


WAYS = ("cascade", "packed", "expanded")
ROW_TOKENS = 512  # own tokens behind one copy of the prefix: more cost attention, fewer copies


class SharedPrefix:
    """The state of an LM after a prefix, and texts run from there."""

    def __init__(self, lm: CausalLM, ids: Sequence[int], *, is_short: bool = True) -> None:
        """Remember what is to be shared; nothing runs yet.

        Args:
            lm: The LM.
            ids: The prefix's tokens.
            is_short: Whether the last layer works only where its output is wanted.
        """
        self.lm, self.ids, self.is_short = lm, list(ids), is_short

    def run(self, own: Sequence[Sequence[int]], way: str) -> Tensor:
        """Run texts behind the prefix.

        Args:
            own: Token ids of n texts, without the prefix; those of like length in one call.
            way: One of `WAYS`.

        Returns:
            (n, H) in the LM's dtype, on its device: the state at each text's last token.
        """
        device, lengths = self.lm.device, [len(ids) for ids in own]
        if way == "cascade":
            rows = cascade.cascade_rows(len(own), device)
        else:
            rows = pack_rows(lengths, ROW_TOKENS if way == "packed" else 1)
        layout = RowLayout.of(lengths, rows)
        ids, positions = layout.place(own), layout.positions + len(self.ids)
        ends = send(layout.flat_ends, device)
        run = self._run_cascade if way == "cascade" else self._run_masked
        _ = self._prefix  # runs whole, before the last layer is shortened
        with torch.inference_mode(), self._last_layer.only_at(ends if self.is_short else None):
            hidden = run(send(ids, device), send(positions, device), layout)  # (R, T, H)
        states: Tensor = hidden.flatten(0, 1)[ends.to(hidden.device)]
        return states

    def cost_of(self, way: str) -> str:
        """Say what a way costs that the first of `WAYS` does not."""
        size = sum(keys.nbytes + values.nbytes for keys, values in self._prefix) / 1e6
        batch = f"{ROW_TOKENS} tokens" if way == "packed" else "text"
        return f"a mask, and a copy of the prefix's {size:.3g} MB for every {batch}"

    def _run_cascade(self, ids: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        register(cascade.NAME, cascade.attend)
        spans = cascade.find_spans(layout, len(self.ids), self.lm.device)
        with attending(self.lm.model, cascade.NAME):
            hidden: Tensor = self.lm.model(
                input_ids=ids,
                position_ids=positions,
                # Any mask of four axes keeps transformers from making one; it is not looked at.
                attention_mask=torch.zeros(1, 1, 1, 1, dtype=self.lm.dtype, device=ids.device),
                use_cache=False,
                cascade=cascade.Cascade(self._prepared_prefix, spans),
            ).last_hidden_state
        return hidden

    def _run_masked(self, ids: Tensor, positions: Tensor, layout: RowLayout) -> Tensor:
        hidden: Tensor = self.lm.model(
            input_ids=ids,
            position_ids=positions,
            attention_mask=send(layout.mask(len(self.ids), self.lm.dtype), self.lm.device),
            past_key_values=self._cache(len(ids)),  # gone with its batch
            use_cache=True,
        ).last_hidden_state
        return hidden

    def _cache(self, rows: int) -> object:
        """Give a cache that begins with the prefix for so many rows, and holds it once.

        The LM lays a batch's keys behind it, and that makes the one copy that is needed.
        """
        from transformers import DynamicCache

        cache = DynamicCache(config=self.lm.config)
        for place, (keys, values) in enumerate(self._prefix):
            cache.update(keys, values, place)
            layer = cache.layers[place]
            layer.keys = layer.keys.expand(rows, -1, -1, -1)
            layer.values = layer.values.expand(rows, -1, -1, -1)
        return cache

    @cached_property
    def _prefix(self) -> list[tuple[Tensor, Tensor]]:
        """Run the prefix: a (1, heads, S, width) key and value for each layer."""
        ids = torch.tensor([self.ids], device=self.lm.device)
        with torch.inference_mode():
            cache = self.lm.model(
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1], device=self.lm.device)[None],
                use_cache=True,
            ).past_key_values
        return [(layer.keys, layer.values) for layer in cache.layers]

    @cached_property
    def _prepared_prefix(self) -> list[tuple[Tensor, Tensor]]:
        return cascade.prepare_prefix(self._prefix, self.lm.config.num_attention_heads)

    @cached_property
    def _last_layer(self) -> LastLayer:
        return LastLayer(self.lm.model)


# Whether a way of sharing a prefix gives the states of whole prompts: looked at before it is used.
#
# Whatever an LM does that a way does not follow shows here, on a few texts, and not in the results.


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


_PROBES = ("a", "The film", "1925", '"', "éa", "(", "-", "中", "$ 5", "'s")
_LEAST_TEXT_TOKENS = 4  # a prompt that leaves less for the text is refused
_HELD = 8192  # states that wait on a GPU before they are fetched: a fetch waits for all before it


@dataclass(frozen=True)
class Prompts:
    """Prompts as the LM reads them.

    Attributes:
        fields: What was asked for, in order.
        ids: Each one's token ids, cut to the LM's window.
    """

    fields: Sequence[Mapping[str, str]]
    ids: list[list[int]]


@dataclass
class PromptedEncoder:
    """An encoder whose parameters are an LM, a prefix and a template.

    Attributes:
        lm: The LM.
        prompt: Prefix and template.
        sharing: A way of `pgra.lm.prefix.WAYS`, "none" (the whole prompt for each
            text), or "auto": the first of these whose states equal "none"'s.
        batch_tokens: Own tokens in one batch on a CPU; a GPU takes 16 times as many.
        max_prompt_tokens: Longest prompt; None is the LM's window.
        num_cut: How many texts were cut so far.
        num_tokens: How many tokens the LM read so far, padding not counted.

    Raises:
        ConfigError: If the prefix leaves no room for a text.
    """

    lm: CausalLM
    prompt: FewShotPrompt
    sharing: str = "auto"
    batch_tokens: int = 512
    max_prompt_tokens: int | None = None
    num_cut: int = field(default=0, init=False)
    num_tokens: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self._most_run = 0  # tokens of the largest batch that fitted
        asked = batch_budget(self.batch_tokens, self.lm.device)
        self._budget = min(asked, recall_budget(self.lm, self.sharing) or asked)
        self._ways: list[tuple[str, bool]] = []  # found by this encoder or one `under` it
        self._check_room()

    def under(self, prompt: FewShotPrompt) -> "PromptedEncoder":
        """Give the same LM under another prompt.

        The way in which prefixes are shared is found by the first of all these encoders that
        reads, and taken by the others: for a prefix a query, comparing would cost more than it
        saves. What one counts is its own.

        Raises:
            ConfigError: If the prefix leaves no room for a text.
        """
        other = PromptedEncoder(
            self.lm,
            prompt,
            sharing=self.sharing,
            batch_tokens=self.batch_tokens,
            max_prompt_tokens=self.max_prompt_tokens,
        )
        other._ways = self._ways
        return other

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that a state depends on, besides the text."""
        return {**self.lm.fingerprint, **self.prompt.fingerprint, "max_prompt_tokens": self.limit}

    @property
    def limit(self) -> int:
        """Give the longest prompt in tokens."""
        return min(self.max_prompt_tokens or self.lm.window, self.lm.window)

    @cached_property
    def _prefix_ids(self) -> list[int]:
        return [*self.lm.lead_ids, *self.lm.tokenize([self.prompt.prefix])[0]]

    @cached_property
    def _splits_cleanly(self) -> bool:
        """Say whether prefix and suffix can be tokenised apart."""
        suffixes = [self.prompt.suffix(self.prompt.template.passage_fields(p)) for p in _PROBES]
        joint = self.lm.tokenize([self.prompt.prefix + suffix for suffix in suffixes])
        apart = self.lm.tokenize(suffixes)
        prefix = self._prefix_ids[len(self.lm.lead_ids) :]
        return all(prefix + own == whole for own, whole in zip(apart, joint, strict=True))

    @cached_property
    def shared_ids(self) -> list[int]:
        """Give the tokens that the prompts of all ordinary texts begin with."""
        probes = [self._prompt_ids(self.prompt.template.passage_fields(p)) for p in _PROBES]
        least = min(map(len, probes)) - 1  # a text keeps a token of its own
        same = (all(ids[i] == probes[0][i] for ids in probes) for i in range(least))
        return probes[0][: next((i for i, equal in enumerate(same) if not equal), least)]

    def _prompt_ids(self, fields: Mapping[str, str]) -> list[int]:
        return self._tokenize([self.prompt.suffix(fields)])[0]

    def _tokenize(self, suffixes: Sequence[str]) -> list[list[int]]:
        if self._splits_cleanly:
            return [self._prefix_ids + own for own in self.lm.tokenize(suffixes)]
        whole = self.lm.tokenize([self.prompt.prefix + suffix for suffix in suffixes])
        return [self.lm.lead_ids + ids for ids in whole]

    def _check_room(self) -> None:
        if self.max_prompt_tokens is not None and self.max_prompt_tokens > self.lm.window:
            raise ConfigError(
                f"max_prompt_tokens is {self.max_prompt_tokens}, but '{self.lm.source.name}' reads "
                f"at most {self.lm.window} tokens"
            )
        empty = len(self._prompt_ids(self.prompt.template.passage_fields("")))
        if empty + _LEAST_TEXT_TOKENS > self.limit:
            raise ConfigError(
                f"the prompt has {empty} tokens before any text ({len(self._prefix_ids)} of them "
                f"the prefix), and '{self.lm.source.name}' may read {self.limit}: "
                "use fewer or shorter exemplars (--num_exemplars), or an LM with a longer window"
            )

    def encode(self, texts: Sequence[str], *, advance: Callable[[int], object] = int) -> Tensor:
        """Give the states of passages.

        Args:
            texts: Any number, in any order.
            advance: Told how many more are done, for a progress bar.

        Returns:
            (n, H) in the LM's dtype, on the CPU, in the order given.

        Raises:
            ModelError: If a state is not finite; the text is named.
        """
        fields = [self.prompt.template.passage_fields(text) for text in texts]
        return self.encode_fields(fields, advance=advance)

    def encode_fields(
        self, fields: Sequence[Mapping[str, str]], *, advance: Callable[[int], object] = int
    ) -> Tensor:
        """Give the states of a task's examples, by their fields; see `encode`."""
        return self.encode_prompts(self.tokenize(fields), advance=advance)

    def tokenize(self, fields: Sequence[Mapping[str, str]]) -> Prompts:
        """Write and tokenise prompts; the LM is not asked, so another thread may do it ahead."""
        ids = self._tokenize([self.prompt.suffix(f) for f in fields])
        for i, prompt in enumerate(ids):
            if len(prompt) > self.limit:
                ids[i] = self._prompt_ids(self._cut(fields[i]))
                self.num_cut += 1
        return Prompts(fields, ids)

    def continued(self, prompts: Prompts, written: Sequence[int]) -> Prompts:
        """Give prompts with the same tokens behind each, such as the beginning of an answer.

        Raises:
            ConfigError: If one is then longer than the LM's window.
        """
        ids = [[*prompt, *written] for prompt in prompts.ids]
        longest = max(map(len, ids), default=0)
        if longest > self.lm.window:
            raise ConfigError(
                f"a prompt has {longest} tokens with the beginning of its answer, and "
                f"'{self.lm.source.name}' reads {self.lm.window}: use --max_prompt_tokens "
                f"{self.lm.window - len(written)}"
            )
        return Prompts(prompts.fields, ids)

    def encode_prompts(self, prompts: Prompts, *, advance: Callable[[int], object] = int) -> Tensor:
        """Give the states of tokenised prompts; see `encode`."""
        with packed_for(self.lm.model, self._count_own(prompts)):
            return self._encode(prompts, advance)

    def _count_own(self, prompts: Prompts) -> int:
        """Count the tokens that are read for these prompts alone, if the prefix is shared."""
        shared = len(self.shared_ids) if self.sharing != "none" else 0
        return sum(max(0, len(ids) - shared) for ids in prompts.ids)

    def _encode(self, prompts: Prompts, advance: Callable[[int], object]) -> Tensor:
        states = torch.empty(len(prompts.ids), self.lm.width, dtype=self.lm.dtype)
        places: list[int] = []
        held: list[Tensor] = []
        for batch in self._batches(prompts.ids):
            held.append(self._run_backing_off(prompts.ids, batch))
            places += batch
            self.num_tokens += self._cost(prompts.ids, batch)
            advance(len(batch))
            if self.lm.device.type == "cpu" or len(places) >= _HELD:
                states[places] = torch.cat(held).cpu()
                places, held = [], []
        if held:
            states[places] = torch.cat(held).cpu()
        self._check_finite(states, prompts)
        return states

    def _check_finite(self, states: Tensor, prompts: Prompts) -> None:
        """Run texts without a finite state again, alone: one spoils its neighbours in a row."""
        broken = []
        for i in torch.nonzero(~torch.isfinite(states).all(1)).flatten().tolist():
            states[i] = self.lm.states_of([prompts.ids[i]])[0].cpu()
            if not torch.isfinite(states[i]).all():
                broken.append(i)
        if broken:
            text = " ".join(prompts.fields[broken[0]].values())
            raise ModelError(
                f"'{self.lm.source.name}' gives no finite state in {self.lm.dtype} for "
                f"{len(broken)} of {len(prompts.ids)} texts, such as {text[:80]!r}: "
                "use --lm_dtype bfloat16 or float32"
            )

    def _cut(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Shorten the longest field from its end until the prompt fits; the tail always stays."""
        name = max(fields, key=lambda n: len(fields[n]))
        low, high = 0, len(fields[name])
        while low < high:  # longest that fits
            middle = (low + high + 1) // 2
            fits = len(self._prompt_ids({**fields, name: fields[name][:middle]})) <= self.limit
            low, high = (middle, high) if fits else (low, middle - 1)
        if low == 0:
            name_all = ", ".join(fields)
            raise ConfigError(f"the inputs ({name_all}) do not fit {self.limit} tokens even cut")
        return {**fields, name: fields[name][:low]}

    def _shares(self, ids: Sequence[int]) -> bool:
        return self.way != "none" and self._begins_shared(ids)

    def _begins_shared(self, ids: Sequence[int]) -> bool:
        return list(ids[: len(self.shared_ids)]) == self.shared_ids

    def _cost(self, prompts: Sequence[Sequence[int]], batch: Sequence[int]) -> int:
        shared = len(self.shared_ids) if self._shares(prompts[batch[0]]) else 0
        return sum(len(prompts[i]) - shared for i in batch)

    def _batches(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Split texts into batches of one kind: behind the shared prefix, or whole."""
        behind = [i for i, ids in enumerate(prompts) if self._shares(ids)]
        taken = set(behind)
        whole = [i for i in range(len(prompts)) if i not in taken]
        skip = len(self.shared_ids)
        batches = []
        for group, start in ((behind, skip), (whole, 0)):
            lengths = [len(prompts[i]) - start for i in group]
            budget = self._budget + (0 if start else skip)
            batches += [[group[i] for i in b] for b in token_budget_batches(lengths, budget)]
        return batches

    def _run_backing_off(self, prompts: Sequence[list[int]], batch: list[int]) -> Tensor:
        """Run a batch; out of memory, run its halves and make later ones smaller."""
        cost = self._cost(prompts, batch)
        spare = 0 if self._shares(prompts[batch[0]]) else len(self.shared_ids)
        if len(batch) > 1 and cost > self._budget + spare:
            return self._run_halves(prompts, batch)  # cut before an earlier one did not fit
        try:
            states = self._run([prompts[i] for i in batch])
            self._most_run = max(self._most_run, cost)
            return states
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise self._no_room(prompts[batch[0]]) from error
        # Outside the handler, or the failed attempt's tensors would live on while the halves run.
        torch.cuda.empty_cache()
        longest = max(self._cost(prompts, [i]) for i in batch)
        self._lower(cost, is_full=(len(batch) + 1) * longest > self._budget + spare)
        return self._run_halves(prompts, batch)

    def _lower(self, cost: int, *, is_full: bool) -> None:
        """Learn from a batch of so many tokens that did not fit: for later runs, if it was full.

        Where as much fitted before, memory is short for a moment, or from now on: the next failure
        tells. What is left at a shard's end is small, and says little of what a GPU can hold.
        """
        if not is_full and cost <= self._most_run:
            self._most_run = 0
            return
        fits = max(1, cost // 2)
        if fits < self._budget:
            self._budget = fits
            logger.warning("out of memory: the LM now takes %s tokens at a time", fits)
            if is_full:
                remember_budget(self.lm, self.sharing, fits)

    def _run_halves(self, prompts: Sequence[list[int]], batch: list[int]) -> Tensor:
        half = len(batch) // 2
        parts = (batch[:half], batch[half:])
        return torch.cat([self._run_backing_off(prompts, part) for part in parts])

    def _no_room(self, prompt: Sequence[int]) -> ModelError:
        return ModelError(
            f"one text of {len(prompt)} tokens does not fit the memory of {self.lm.device} with "
            f"'{self.lm.source.name}': use a smaller LM or --lm_dtype"
        )

    def _run(self, prompts: Sequence[list[int]]) -> Tensor:
        if not self._shares(prompts[0]):
            return self.lm.states_of(prompts)
        return self._behind.run([ids[len(self.shared_ids) :] for ids in prompts], self.way)

    @cached_property
    def _behind(self) -> SharedPrefix:
        return SharedPrefix(self.lm, self.shared_ids)

    @cached_property
    def way(self) -> str:
        """Give the way the prefix is shared; with "auto" found by comparing with the whole prompt.

        A forced way is compared too, but like all else that needs the weights only when the LM
        first reads: where all states are in the bank already, nobody looks at it.

        Raises:
            ModelError: If a forced way fails, or gives other states than the whole prompt.
        """
        if not self.shared_ids or self.sharing == "none":
            return "none"
        if not self._ways:
            self._ways.append((self._find_way(), self._behind.is_short))
        way, self._behind.is_short = self._ways[0]
        self.num_tokens += len(self.shared_ids) if way != "none" else 0
        return way

    def _find_way(self) -> str:
        fault: str | None = None
        is_auto = self.sharing == "auto"
        for way in WAYS if is_auto else (self.sharing,):
            fault = self._fault(way)
            if fault is None:
                logger.info("the %d tokens of the prefix run once: %s", len(self.shared_ids), way)
                if is_auto and way != WAYS[0]:
                    logger.warning("'%s' costs %s", way, self._behind.cost_of(way))
                return way
            level = logging.WARNING if is_auto else logging.INFO  # else the error below tells
            logger.log(level, "prefix sharing '%s' does not work here: %s", way, fault)
        if is_auto:
            name = self.lm.source.name
            logger.warning("'%s' shares no prefix: each text costs the whole prompt", name)
            return "none"
        raise ModelError(
            f"prefix_sharing '{self.sharing}' does not work on '{self.lm.source.name}' ({fault}): "
            "use auto or none"
        )

    def _fault(self, way: str) -> str | None:
        """Say why a way cannot be used, even with the last layer whole; None if it can."""
        fault: str | None = None
        try:
            for is_short in (True, False):
                self._behind.is_short = is_short
                fault = self._whole.fault(self._behind, way)
                if fault is None:
                    break
        except torch.OutOfMemoryError as error:
            raise self._no_room(max(self._whole.prompts, key=len)) from error
        return fault

    @cached_property
    def _whole(self) -> WholePrompts:
        """Give a few prompts to compare ways with."""
        cut = self.num_cut
        prompts = self.tokenize([self.prompt.template.passage_fields(t) for t in CHECKED]).ids
        self.num_cut = cut
        return WholePrompts(self.lm, prompts, len(self.shared_ids))
