"""Rerankers that read a passage together with its query, and keep each pair's score in a bank.

One of your own derives from `PairReranker`, as `MonoT5` in `tests/outside/toys.py` does.
"""

import math
from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from pgra.arrays import Indices, Rows, Scores
from pgra.artifacts import canonical_json
from pgra.config import Arguments
from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.batching import BackOff, begin_fetch, pad, send, token_budget_batches
from pgra.parallel import Turn
from pgra.progress import Bar
from pgra.rerank.arguments import RerankArguments
from pgra.rerank.bank import Advance, Bank, bank_folder
from pgra.rerank.base import RerankRequest, ScorerRequest, ScoringReranker
from pgra.types import MISSING_ROW, Example, Fields

Tokens = Mapping[str, list[int]]  # of one pair, by the names that its model calls them


@dataclass(frozen=True)
class Pairs:
    """Distinct pairs of queries and passages: n rising keys, and the passages' rows.

    `queries` are indices in `examples`, (n,); `texts` returns the passages of rows.
    """

    examples: Sequence[Example]
    keys: Rows
    queries: Rows
    rows: Rows
    texts: Callable[[Rows], list[str]]

    def find(self, keys: Rows) -> Indices:
        """Return the indices of keys, (n,)."""
        return np.searchsorted(self.keys, keys)

    def cut(self, keys: Rows, shard_rows: int) -> list[Rows]:
        """Make shards of keys, of whole passages, until there are `shard_rows` or more."""
        owners = self.rows[self.find(keys)]
        order = np.argsort(owners, kind="stable")
        ends = [*np.flatnonzero(np.diff(owners[order])) + 1, len(order)]
        shards = []
        begin = 0
        for end in ends:
            if end - begin >= shard_rows or end == len(order):
                shards.append(np.sort(keys[order[begin:end]]))
                begin = end
        return shards


class PairBankReranker(ScoringReranker):
    """Orders candidates by a score of query and passage read together, each pair once.

    `reads_passages` says whether a passage is read once for a shard's pairs, which are then whole.
    """

    reads_passages: ClassVar[bool] = False
    inputs = ("text",)
    bank: Bank

    def __init__(self, request: ScorerRequest, source: load.ModelSource, fields: Fields) -> None:
        """Open the bank, if there is a corpus.

        `fields` are what scores depend on, besides corpus, query and passage.
        """
        self.context = request.context
        self.counter = self
        self.num_cut = 0
        self.busy = Turn()
        if request.args.topic_weight is not None:
            self.topic_weight = request.args.topic_weight
        device = load.choose_device(self.context.device)
        self.shard_rows = load.batch_budget(request.args.bank_shard_rows, device)
        if isinstance(request, RerankRequest):
            self.corpus = request.corpus
            fields = {**fields, **self.corpus.fingerprint}
            folder = bank_folder(source, self.context, fields, "-pairs")
            self.bank = Bank(folder, fields, inputs=source.inputs)
            self.made_from = fields

    @abstractmethod
    def read(self, pairs: Pairs, keys: Rows) -> Any:
        """Tokenise a shard's pairs, in another thread."""

    @abstractmethod
    def compute(self, shard: Any, advance: Advance) -> Callable[[], Tensor]:
        """Begin to score what `read` returned; return a function that waits for (n, 1)."""

    def pairs(self, examples: Sequence[Example], rows: Rows) -> Pairs:
        """List the pairs of queries and candidates, (B, K)."""
        present = rows != MISSING_ROW
        keys, first = np.unique(self._keys(examples, rows)[present], return_index=True)
        queries = np.nonzero(present)[0].astype(np.int64)
        return Pairs(examples, keys, queries[first], rows[present][first], self.corpus.texts)

    def _keys(self, examples: Sequence[Example], rows: Rows) -> Rows:
        """Return the keys of pairs, (B, K): hashes of query and passage."""
        keys = np.empty(rows.shape, dtype=np.uint64)
        for i, example in enumerate(examples):
            seed = xxhash.xxh3_64_intdigest(canonical_json({"query": example.text}).encode())
            keys[i] = [xxhash.xxh3_64_intdigest(row.tobytes(), seed) for row in rows[i]]
        return keys.astype(np.int64)

    def compute_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        pairs = self.pairs(examples, rows)
        return self.bank.compute_missing(
            pairs.keys,
            partial(self.read, pairs),
            self.compute,
            shard_rows=self.shard_rows,
            cut=pairs.cut if self.reads_passages else None,
            context=self.context,
            title="reads candidates",
        )

    def score_rows(self, examples: Sequence[Example], rows: Rows) -> Scores:
        """Look up the pairs' scores, (B, K), -inf where a row is missing."""
        scores = np.full(rows.shape, -np.inf, dtype=np.float32)
        present = rows != MISSING_ROW
        if present.any():
            keys = self._keys(examples, rows)[present]
            scores[present] = self.bank.states(keys)[:, 0]
        return scores

    def score(self, queries: Sequence[Example], texts: Sequence[str]) -> Scores:
        """Score each text for each query, (B, n) float32; nothing is kept.

        Of several threads one at a time does so.
        """
        shape = (len(queries), len(texts))
        keys = np.arange(math.prod(shape))
        if not len(keys):
            return np.empty(shape, np.float32)
        lines, rows = np.unravel_index(keys, shape)
        pairs = Pairs(queries, keys, lines, rows, lambda rows: [texts[row] for row in rows])
        bar = Bar(total=len(keys), desc="score", unit="pair")
        with self.busy, bar, torch.inference_mode():
            scores: Scores = self.compute(self.read(pairs, keys), bar.update)().numpy()
        return scores.reshape(shape)

    def count_missing(self, examples: Sequence[Example], rows: Rows) -> int:
        """Count the pairs that are yet to be read."""
        return len(self.bank.missing(self.pairs(examples, rows).keys))


class PairReranker(PairBankReranker):
    """Orders candidates by a model of transformers that reads query and passage as one text.

    A subclass names its model (the first of `models`) and the class of transformers that loads it
    (`model_class`), writes pairs (`text`, or `encode`) and scores them (`score_batch`).
    """

    options_class: ClassVar[Any] = None
    model_class: ClassVar[str]
    add_special_tokens = True
    reads_prompt = False

    def __init__(self, request: ScorerRequest) -> None:
        """Open a model, without its weights, and the bank of its scores.

        Raises:
            ModelError: If there is no such model, or it cannot be used.
        """
        args = request.args
        self.options = request.options
        name = self.models(args, self.options)[0]
        self.source = load.find_model(name)
        self.device = load.choose_device(request.context.device)
        self.dtype = load.choose_dtype(args.lm_dtype, self.device)
        self.config = load.load_config(self.source)
        self.tokenizer = load.load_tokenizer(self.source, self.config)
        window = int(min(self.tokenizer.model_max_length, load.num_positions(self.config)))
        self.max_tokens = min(args.max_prompt_tokens or window, window)
        advice = f"{self.device}: let '{name}' read fewer tokens of a pair, or use a smaller model"
        self._back_off = BackOff(load.batch_budget(args.lm_batch_tokens, self.device), advice)
        self._filler = self._choose_filler()
        reads_last_column = getattr(self.config, "summary_type", None) == "last"  # XLNet
        if self._filler is None or reads_last_column:
            self._back_off.budget = 1  # one pair at a time, without padding
        last = max(self.encode(["a"], ["b"])[0].get("token_type_ids") or [0])
        if 0 < (getattr(self.config, "type_vocab_size", None) or 0) <= last:
            raise ModelError(
                f"'{name}': its tokenizer counts the parts of a text up to {last + 1}, the model "
                f"{self.config.type_vocab_size}. Give the model its own tokenizer"
            )
        model_fields = load.model_fields(self.source, self.dtype)
        fields = {**model_fields, "max_tokens": self.max_tokens, **self.fields()}
        super().__init__(request, self.source, fields)

    @classmethod
    def models(cls, args: RerankArguments, options: Arguments | None) -> list[str]:  # noqa: ARG003
        arguments = cls.options_class
        return [getattr(options or arguments(), arguments.FIELDS["lm"])]

    def fields(self) -> Fields:
        """Return what else scores depend on: class, options, and how a pair is written."""
        cls = type(self)
        options = self.options.deciding() if self.options else {}
        written = self.encode(["query"], ["passage"])[0]["input_ids"]
        return {**options, "reranker": f"{cls.__module__}:{cls.__qualname__}", "pair": written}

    def text(self, query: str, passage: str) -> str:
        """Write a pair as one text, for `encode`; by default one after the other."""
        return f"{query} {passage}"

    @abstractmethod
    def score_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Score pairs by `self.model`, (B,); `batch` is what `encode` gave, padded, each (B, L)."""

    @cached_property
    def model(self) -> Any:
        """The model, loaded at its first use; missing weights are a ModelError."""
        import transformers

        loader = getattr(transformers, self.model_class).from_pretrained
        model = load.load_pretrained(loader, self.source, config=self.config, dtype=self.dtype)
        return model.to(self.device).eval()

    def release(self) -> None:
        vars(self).pop("model", None)

    def read(self, pairs: Pairs, keys: Rows) -> list[Tokens]:
        at = pairs.find(keys)
        queries = [pairs.examples[query].text for query in pairs.queries[at]]
        return self.tokenize(queries, pairs.texts(pairs.rows[at]))

    def tokenize(self, queries: Sequence[str], passages: Sequence[str]) -> list[Tokens]:
        """Tokenise pairs; those longer than `max_tokens` are cut, and counted."""
        pairs = self.encode(queries, passages)
        for i, pair in enumerate(pairs):
            if len(pair["input_ids"]) > self.max_tokens:
                pairs[i] = self.encode_cut(queries[i], passages[i])
                self.num_cut += 1
        return pairs

    def encode(self, queries: Sequence[str], passages: Sequence[str]) -> list[Tokens]:
        """Tokenise whole pairs."""
        return self.call_tokenizer(list(map(self.text, queries, passages)))

    def encode_cut(self, query: str, passage: str) -> Tokens:
        """Tokenise a pair that is too long; its passage loses its end."""

        def encode(length: int) -> Tokens:
            return self.encode([query], [passage[:length]])[0]

        def count_tokens(length: int) -> int:
            return len(encode(length)["input_ids"])

        most = self.max_tokens
        length = bisect_right(range(len(passage) + 1), most, key=count_tokens) - 1
        if length < 0:
            raise ConfigError(f"a query does not fit {most} tokens: '{query[:80]}': shorten it")
        return encode(length)

    def call_tokenizer(self, *texts: Sequence[str], **options: Any) -> list[Tokens]:
        """Tokenise texts, or texts in two parts, without padding."""
        options["add_special_tokens"] = self.add_special_tokens
        encoded = self.tokenizer(*map(list, texts), verbose=False, **options)
        lines = zip(*encoded.values(), strict=True)
        return [dict(zip(encoded, line, strict=True)) for line in lines]

    def compute(self, shard: Sequence[Tokens], advance: Advance) -> Callable[[], Tensor]:
        """Begin to score pairs by length; return a function that waits for (n, 1) float32."""
        lengths = [len(pair["input_ids"]) for pair in shard]
        order = list[int]()
        held = list[Tensor]()

        def size(rows: Sequence[int]) -> int:
            return len(rows) * lengths[rows[0]]

        for batch in token_budget_batches(lengths, self._back_off.budget):
            held += self._back_off.run(batch, size, partial(self._run, shard))
            order += batch
            advance(len(batch))
        fetch = begin_fetch(torch.cat(held))
        places = np.argsort(order)
        return lambda: fetch()[places, None]

    @torch.inference_mode()
    def _run(self, shard: Sequence[Tokens], rows: Sequence[int]) -> Tensor:
        """Score some of a shard's pairs in one call, (B,) float32."""
        batch = {}
        for name in shard[rows[0]]:
            filler = (self._filler or 0) if name == "input_ids" else 0
            values, _ = pad([shard[i][name] for i in rows], filler)
            batch[name] = send(values, self.device)
        return self.score_batch(batch).float()

    def _choose_filler(self) -> Any:
        """Return the token that pads batches on the right, which the model's configuration names.

        Where that names none, it is given the tokenizer's, or the end of a text; None if a pair
        ends with it: a decoder's score is read at the last token that is not padding.
        """
        config = self.config.get_text_config()
        if config.pad_token_id in (None, -1):
            last = self.encode(["a"], ["b"])[0]["input_ids"][-1]
            tokens = (self.tokenizer.pad_token_id, self.tokenizer.eos_token_id)
            usable = (token for token in tokens if token not in (None, last))
            config.pad_token_id = next(usable, None)
        return config.pad_token_id
