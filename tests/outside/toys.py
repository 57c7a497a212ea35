"""A package as somebody outside writes it: one class each of what pgra lets users add."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from pgra.extend import (
    Arguments,
    Candidates,
    Decisions,
    Method,
    PairReranker,
    Prediction,
    Retriever,
    Selector,
    Similarity,
    StateLM,
    arg,
)


@dataclass(kw_only=True)
class StrideArguments(Arguments):
    """How far apart the stride's passages are."""

    stride: int = arg(1, "Every so many rows of the corpus.", least=1)


class Stride(Retriever):
    """Finds every n-th passage, from where a query's length says."""

    options_class = StrideArguments

    def __init__(self, size, stride):
        self.size, self.stride = size, stride

    @classmethod
    def open(cls, request):
        return cls(len(request.corpus), request.options.stride)

    @property
    def fingerprint(self):
        return {"retriever": "stride", "rows": self.size, "stride": self.stride}

    def retrieve(self, queries, k):
        steps = self.stride * np.arange(k, dtype=np.int64)
        rows = np.stack([(len(query) + steps) % self.size for query in queries])
        scores = np.broadcast_to(-np.arange(k, dtype=np.float32), rows.shape)
        return Candidates(rows, np.ascontiguousarray(scores))


@dataclass(kw_only=True)
class MonoT5Arguments(Arguments):
    """Which T5; --max_prompt_tokens says how much of a pair it reads."""

    monot5: str = arg("castorini/monot5-base-msmarco", "T5 that answers true or false.")


class MonoT5(PairReranker):
    """Scores a pair by log p("true") of {true, false} (Nogueira et al. 2020)."""

    options_class = MonoT5Arguments
    model_class = "AutoModelForSeq2SeqLM"

    def __init__(self, request):
        super().__init__(request)
        words = self.tokenizer(["true", "false"], add_special_tokens=False)["input_ids"]
        self.answers = [ids[0] for ids in words]

    @classmethod
    def models(cls, args, options=None):
        return [(options or MonoT5Arguments()).monot5]

    def text(self, query, passage):
        return f"Query: {query} Document: {passage} Relevant:"

    def score_batch(self, batch):
        start = torch.full_like(batch["input_ids"][:, :1], self.config.decoder_start_token_id)
        logits = self.model(**batch, decoder_input_ids=start).logits[:, 0, self.answers]
        return logits.float().log_softmax(dim=1)[:, 0]


class LastFirst(Selector):
    """Chooses the pool's last examples."""

    def rank(self, queries, depth):
        rows = self.pool.guard.distinct[::-1][:depth]
        rows = np.broadcast_to(rows, (len(queries), len(rows)))
        scores = np.broadcast_to(-np.arange(rows.shape[1], dtype=np.float32), rows.shape)
        return Candidates(np.ascontiguousarray(rows), np.ascontiguousarray(scores))


class Halves(Similarity):
    """Compares the first half of two states."""

    def of_passages(self, states):
        return states[:, : states.shape[1] // 2]


def positives(labels, predictions, names):
    """A metric: how many of those decided positive are so."""
    del names
    found = [a == "positive" for a, b in zip(labels, predictions, strict=True) if b == "positive"]
    return sum(found) / max(1, len(found))


@dataclass(kw_only=True)
class OneLabelArguments(Arguments):
    """Which label."""

    one_label: str = arg("positive", "The label that all examples get.")


class OneLabel(Method):
    """Gives every example the same label."""

    SECTIONS: ClassVar = {"toy": OneLabelArguments}

    def decide(self, examples):
        label = self.args["toy"].one_label
        scores = {name: float(name == label) for name in self.data.labels}
        return Decisions([Prediction(example.id, label, scores) for example in examples])


class Bytes:
    """A tokenizer whose tokens are bytes, called as those of transformers."""

    def __call__(self, texts, **options):
        del options
        return {"input_ids": [list(text.encode()) for text in texts]}


class Letters(StateLM):
    """Knows how often each byte was read, and finds those likely that it has read."""

    tokenizer = Bytes()
    window = 4096

    @property
    def fingerprint(self):
        return {"lm": "letters"}

    def states(self, prompts, *, advance=int):
        advance(len(prompts))
        return np.stack([np.bincount(ids, minlength=256) for ids in prompts]).astype(np.float32)

    def scores(self, prompts, words, *, advance=int):
        chances = self.states(prompts, advance=advance) + 1
        chances = np.log(chances / chances.sum(axis=1, keepdims=True))
        return [
            [float(line[ids].sum()) for ids in after]
            for line, after in zip(chances, words, strict=True)
        ]
