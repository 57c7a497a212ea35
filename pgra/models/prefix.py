"""Prompted states h*(x) = LM(prefix + P(x)) at the cost of x: the shared part runs once.

Guo et al. 2023, eq. 2. All prompts of a task begin with the same tokens: special tokens,
instruction, exemplars, and the words of the template that stand before the text. Their keys and
values are computed once and kept; each text then costs only its own tokens. Texts are laid side by
side in rows behind one copy of the prefix, with a mask that keeps each text to the prefix and
itself, and positions that start again for each text.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from pgra.errors import ConfigError, ModelError
from pgra.models.batching import token_budget_batches
from pgra.models.causal_lm import CausalLM
from pgra.models.loading import batch_budget
from pgra.models.packing import RowLayout, pack_rows
from pgra.prompts.fewshot import FewShotPrompt
from pgra.types import Json

logger = logging.getLogger(__name__)

SHARINGS = ("packed", "expanded", "none")
_PROBES = ("a", "The film", "1925", '"', "éa", "(", "-", "中", "$ 5", "'s")
_LEAST_TEXT_TOKENS = 4  # a prompt that leaves less for the text is refused
_ROW_TOKENS = 512  # own tokens behind one copy of the prefix: more cost attention, fewer copies


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
        sharing: "packed" (texts share a row), "expanded" (a row each), "none" (the whole prompt
            for each text), or "auto": the first of these whose states equal "none"'s.
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
        self._caches: dict[int, object] = {}
        self._budget = batch_budget(self.batch_tokens, self.lm.device)
        self._check_room()

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

    def encode_prompts(self, prompts: Prompts, *, advance: Callable[[int], object] = int) -> Tensor:
        """Give the states of tokenised prompts; see `encode`."""
        states = torch.empty(len(prompts.ids), self.lm.width, dtype=self.lm.dtype)
        for batch in self._batches(prompts.ids):
            states[batch] = self._run_backing_off(prompts.ids, batch).cpu()
            self.num_tokens += self._cost(prompts.ids, batch)
            advance(len(batch))
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
        try:
            return self._run([prompts[i] for i in batch])
        except torch.OutOfMemoryError as error:
            if len(batch) == 1:
                raise ModelError(
                    f"one text of {len(prompts[batch[0]])} tokens does not fit the memory of "
                    f"{self.lm.device} with '{self.lm.source.name}': use a smaller LM or --lm_dtype"
                ) from error
        # Outside the handler, or the failed attempt's tensors would live on while the halves run.
        self._caches.clear()
        torch.cuda.empty_cache()
        self._budget = min(self._budget, max(1, self._cost(prompts, batch) // 2))
        logger.warning("out of memory: the LM now takes %s tokens at a time", self._budget)
        half = len(batch) // 2
        parts = (batch[:half], batch[half:])
        return torch.cat([self._run_backing_off(prompts, part) for part in parts])

    def _run(self, prompts: Sequence[list[int]]) -> Tensor:
        if not self._shares(prompts[0]):
            return self.lm.states_of(prompts)
        return self._run_behind(prompts, self.way)

    def _run_behind(self, prompts: Sequence[list[int]], way: str) -> Tensor:
        """Run prompts behind the shared prefix, many a row or one a row."""
        own = [ids[len(self.shared_ids) :] for ids in prompts]
        row_tokens = _ROW_TOKENS if way == "packed" else 1
        return self._run_rows(own, pack_rows([len(ids) for ids in own], row_tokens))

    @torch.inference_mode()
    def _run_rows(self, own: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> Tensor:
        """Run texts laid side by side behind the shared prefix.

        Args:
            own: Token ids of n texts, without the shared ones.
            rows: Which texts stand in each of R rows, each text once.

        Returns:
            (n, H): the state at each text's last token.
        """
        layout = RowLayout.of([len(ids) for ids in own], rows)
        ids = torch.zeros(layout.segments.shape, dtype=torch.long)
        for row, members in enumerate(rows):
            line = [token for i in members for token in own[i]]
            ids[row, : len(line)] = torch.tensor(line)
        shared, device = len(self.shared_ids), self.lm.device
        cache = self._cache(len(rows))
        hidden = self.lm.model(
            input_ids=ids.to(device),
            position_ids=(layout.positions + shared).to(device),
            attention_mask=layout.mask(shared, self.lm.dtype).to(device),
            past_key_values=cache,
            use_cache=True,
        ).last_hidden_state  # (R, T, H)
        cache.crop(-ids.shape[1])  # type: ignore[attr-defined]
        self._caches = {len(rows): cache}  # kept for the next batch, which mostly has as many rows
        states: Tensor = hidden[layout.rows.to(device), layout.ends.to(device)]
        return states

    def _cache(self, rows: int) -> object:
        """Give a cache that holds the shared prefix for so many rows."""
        if rows in self._caches:
            return self._caches.pop(rows)
        from transformers import DynamicCache

        cache = DynamicCache(config=self.lm.config)
        for layer, (keys, values) in enumerate(self._prefix_state):
            shape = (rows, *keys.shape[1:])
            cache.update(keys.expand(shape), values.expand(shape), layer)
        return cache

    @cached_property
    def _prefix_state(self) -> list[tuple[Tensor, Tensor]]:
        """Run the shared prefix: a (1, heads, S, width) key and value for each layer."""
        ids = torch.tensor([self.shared_ids], device=self.lm.device)
        with torch.inference_mode():
            cache = self.lm.model(
                input_ids=ids,
                position_ids=torch.arange(ids.shape[1], device=self.lm.device)[None],
                use_cache=True,
            ).past_key_values
        self.num_tokens += ids.shape[1]
        return [(layer.keys, layer.values) for layer in cache.layers]

    @cached_property
    def way(self) -> str:
        """Give the way the prefix is shared; with "auto" found by comparing with the whole prompt.

        Raises:
            ModelError: If a forced way gives other states than the whole prompt.
        """
        ways = SHARINGS if self.sharing == "auto" else (self.sharing,)
        for way in ways:
            if way == "none" or not self.shared_ids or self._agrees(way):
                return way if self.shared_ids else "none"
            self._caches.clear()
        raise ModelError(
            f"prefix_sharing '{self.sharing}' gives other states than the whole prompt on "
            f"'{self.lm.source.name}': use auto or none"
        )

    def _agrees(self, way: str) -> bool:
        """Compare with the whole prompt, on a few texts of different lengths."""
        texts = ["a", "The film was not bad at all.", "It opened in 1925 with a cast of nine."]
        cut = self.num_cut
        prompts = self.tokenize([self.prompt.template.passage_fields(text) for text in texts]).ids
        self.num_cut = cut
        if not all(self._begins_shared(ids) for ids in prompts):
            return False
        try:
            fast = self._run_behind(prompts, way)
        except (AttributeError, TypeError, ValueError, RuntimeError, IndexError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            logger.info("prefix sharing '%s' does not work here: %s", way, error)
            return False
        slow = self.lm.states_of(prompts)
        distance = torch.linalg.vector_norm(fast.float() - slow.float(), dim=1)
        ratio = distance / torch.linalg.vector_norm(slow.float(), dim=1)
        tolerance = 1e-4 if self.lm.dtype == torch.float32 else 0.05
        return bool((ratio <= tolerance).all())
