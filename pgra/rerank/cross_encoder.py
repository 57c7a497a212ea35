"""A cross-encoder reads query and passage as one text and scores how relevant it is.

Nogueira and Cho 2019, "Passage Re-ranking with BERT". Any Hugging Face sequence classifier, the
folders of sentence-transformers' `CrossEncoder` among them. With one logit, that is the score; with
several, the log-probability of the class named "relevant" or "entailment"; of two without names, of
the second.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from pgra.config import Arguments as _Arguments
from pgra.core import Example, Json
from pgra.errors import ConfigError, ModelError
from pgra.lm.batching import BackOff, begin_fetch, send, token_budget_batches
from pgra.lm.load import (
    batch_budget,
    choose_device,
    choose_dtype,
    find_model,
    load_config,
    load_pretrained,
    load_tokenizer,
    model_fields,
)
from pgra.rerank.bank import Advance
from pgra.rerank.base import CrossEncoderArguments, RerankArguments, RerankRequest
from pgra.rerank.pairs import PairReranker, Pairs

_RELEVANT = ("relevant", "entailment")  # names of the class that counts, the first known one
_UNNAMED = re.compile(r"LABEL_\d+")  # what transformers calls classes


class CrossEncoderReranker(PairReranker):
    """Orders candidates by a cross-encoder's scores; each pair is scored once.

    Its weights are loaded at the first use. A pair longer than `max_tokens` loses the end of its
    longer part.
    """

    Arguments = CrossEncoderArguments
    reads_prompt = False

    def __init__(self, request: RerankRequest) -> None:
        """Read a cross-encoder's configuration and tokenizer, and open the bank of its scores.

        Raises:
            ConfigError: If it reads fewer tokens than asked for.
            ArtifactError: If the bank is damaged.
            ModelError: If there is no such model, or it cannot be used.
        """
        args, options = request.args, request.options
        assert isinstance(options, CrossEncoderArguments)  # its own
        name, most = options.cross_encoder, options.cross_encoder_tokens
        self.source, self.device = find_model(name), choose_device(request.context.device)
        self.dtype = choose_dtype(args.lm_dtype, self.device)
        self.config = load_config(self.source)
        self._class = _find_class(self.config, name)
        self.tokenizer = load_tokenizer(self.source, self.config)
        window = int(min(self.tokenizer.model_max_length, _window(self.config)))
        if most is not None and most > window:
            raise ConfigError(
                f"cross_encoder_tokens is {most}, but '{name}' reads at most {window} tokens"
            )
        parts = self.tokenizer("a", "b").get("token_type_ids") or [0]
        if 0 < (getattr(self.config, "type_vocab_size", None) or 0) <= max(parts):
            raise ModelError(
                f"'{name}': its tokenizer counts the parts of a text up to {max(parts) + 1}, the "
                f"model {self.config.type_vocab_size}. Give the model its own tokenizer"
            )
        self.max_tokens, self.batch_tokens = most or window, args.lm_batch_tokens
        self.counter, self.num_tokens, self.num_cut = self, 0, 0
        advice = f"{self.device}: lower --cross_encoder_tokens, or choose a smaller cross-encoder"
        self._back_off = BackOff(batch_budget(self.batch_tokens, self.device), advice)
        fields = {**model_fields(self.source, self.dtype), "max_tokens": self.max_tokens}
        fields |= {} if self._class is None else {"class": self._class}
        fields["reranker"] = "cross-encoder"
        super().__init__(request, name, self.device, fields, self.source.inputs)

    @classmethod
    def models(cls, args: RerankArguments, options: _Arguments | None = None) -> list[str]:  # noqa: ARG003
        options = options or CrossEncoderArguments()
        assert isinstance(options, CrossEncoderArguments)
        return [options.cross_encoder]

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        return self.with_topic(self.bank.fingerprint)

    @cached_property
    def model(self) -> Any:
        """The weights; a model without a trained classification head is a ModelError."""
        from transformers import AutoModelForSequenceClassification

        loader = AutoModelForSequenceClassification.from_pretrained
        model = load_pretrained(loader, self.source, dtype=self.dtype)
        return model.to(self.device).eval()

    def release(self) -> None:
        vars(self).pop("model", None)

    def identify(self, example: Example) -> Mapping[str, Json]:
        return {"query": example.text}

    def read(self, pairs: Pairs, keys: Any) -> list[dict[str, Any]]:
        at = pairs.find(keys)
        queries = [pairs.examples[query].text for query in pairs.queries[at]]
        return self.tokenize(queries, self.corpus.texts(pairs.rows[at]))

    def tokenize(self, queries: Sequence[str], passages: Sequence[str]) -> list[dict[str, Any]]:
        """Tokenise pairs together, as the model's tokenizer joins two texts."""
        texts = [list(queries), list(passages)]
        rows = self._rows(texts)
        long = [i for i, row in enumerate(rows) if len(row["input_ids"]) > self.max_tokens]
        if long:
            cut = {"truncation": "longest_first", "max_length": self.max_tokens}
            short = self._rows([[text[i] for i in long] for text in texts], **cut)
            for i, row in zip(long, short, strict=True):
                rows[i] = row
        self.num_cut += len(long)
        return rows

    def _rows(self, texts: Sequence[list[str]], **how: Any) -> list[dict[str, Any]]:
        encoded = self.tokenizer(*texts, verbose=False, **how)
        lines = zip(*encoded.values(), strict=True)
        return [dict(zip(encoded, line, strict=True)) for line in lines]

    def compute(self, shard: Sequence[Mapping[str, Any]], advance: Advance) -> Callable[[], Tensor]:
        """Begin to score tokenised pairs, in batches of similar length; a GPU is not waited for.

        Returns a function that waits for the scores, (n, 1) float32, in the pairs' order.
        """
        lengths = [len(pair["input_ids"]) for pair in shard]
        order, held = list[int](), [torch.empty(0, device=self.device)]

        def size(rows: Sequence[int]) -> int:
            return len(rows) * lengths[rows[0]]

        for batch in token_budget_batches(lengths, self._back_off.budget):
            held += self._back_off.run(
                batch, size, lambda rows: self._run([shard[i] for i in rows])
            )
            order += batch
            self.num_tokens += sum(lengths[i] for i in batch)
            advance(len(batch))
        fetch = begin_fetch(torch.cat(held))

        def finish() -> Tensor:
            scores = torch.empty(len(shard), 1)
            scores[order, 0] = fetch()
            if not torch.isfinite(scores).all():
                raise ModelError(
                    f"'{self.source.name}' gave a score that is not finite: use --lm_dtype"
                )
            return scores

        return finish

    @torch.inference_mode()
    def _run(self, pairs: Sequence[Mapping[str, Any]]) -> Tensor:
        """Score pairs in one call, (n,) float32."""
        padded = self.tokenizer.pad(pairs, return_tensors="pt")
        sent = {name: send(values, self.device) for name, values in padded.items()}
        return self._relevance(self.model(**sent).logits.float())

    def _relevance(self, logits: Tensor) -> Tensor:
        if self._class is None:
            return logits[:, 0]
        return logits.log_softmax(dim=1)[:, self._class]


def _find_class(config: Any, name: str) -> int | None:
    """Return the class whose probability is a pair's score; None for a model with one logit."""
    if config.num_labels == 1:
        return None
    labels = [str(config.id2label.get(i, f"LABEL_{i}")) for i in range(config.num_labels)]
    known = [label.lower() for label in labels]
    for relevant in _RELEVANT:
        if relevant in known:
            return known.index(relevant)
    is_named = not all(_UNNAMED.fullmatch(label) for label in labels)
    if len(labels) > 2 or is_named:
        raise ModelError(
            f"'{name}' has the classes {', '.join(labels)}, and none is named relevant or "
            "entailment: call the one that counts 'relevant' in its config.json (id2label and "
            "label2id), or choose another cross-encoder"
        )
    return len(labels) - 1


def _window(config: Any) -> float:
    """Return how many positions a model has; in RoBERTa's family they begin after the padding's."""
    positions: float = getattr(config, "max_position_embeddings", None) or math.inf
    is_behind = config.model_type in ("camembert", "mpnet", "roberta", "xlm-roberta")
    return positions - (config.pad_token_id + 1 if is_behind else 0)
