"""Text to vector with any BERT-like encoder: the first stage's, KATE's and MemPrompt's.

How token states become one vector (the pooling) is part of what an encoder is: a SimCSE pooled the
wrong way still gives plausible neighbours. So it is named, resolved once and kept in fingerprints.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_length
from tqdm import tqdm

from pgra.config import choose
from pgra.errors import ModelError
from pgra.models.batching import token_budget_batches
from pgra.models.loading import (
    ModelSource,
    batch_budget,
    choose_device,
    choose_dtype,
    dtype_name,
    find_model,
    load_pretrained,
    load_tokenizer,
)
from pgra.models.pooling import POOLINGS, is_own_pooling, pool, resolve_pooling
from pgra.models.prepack import packed_for
from pgra.models.sentence import SentenceModel, dense_fields, read_sentence_model
from pgra.models.window import check_window, own_length
from pgra.types import Example, Json

logger = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]

_CHUNK = 8192
"""Texts tokenised, sorted and moved at once: bounds memory, and is plenty to sort well."""
_TOKENS = 32  # of a text, about


class Encoder:
    """Turns texts into vectors; knows nothing of tasks, prompts or indexes.

    Attributes:
        width: Length of a vector (D).
        fingerprint: All that determines a passage's vector, besides its text.
        sentence: What its folder says beside the transformer.
        query_prompt: What each query begins with; usually nothing.
        num_cut: Texts longer than `max_tokens` met so far; only their beginning was read.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        *,
        fingerprint: Mapping[str, Json],
        device: torch.device,
        batch_tokens: int,
        sentence: SentenceModel = SentenceModel(),  # noqa: B008 (frozen)
        query_prompt: str = "",
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.fingerprint = fingerprint
        self.sentence = sentence
        self.query_prompt = query_prompt
        self._layers = [layer and layer.to(device) for layer in sentence.layers]
        dense = [layer for layer in sentence.layers if layer]
        self.width: int = len(dense[-1].weight) if dense else model.config.hidden_size
        self.num_cut = 0
        self._device = device
        self._batch_tokens = batch_budget(batch_tokens, device)
        self._pooling = str(fingerprint["pooling"])
        self._is_normalized = bool(fingerprint["normalize"])
        self._max_tokens = int(str(fingerprint["max_tokens"]))

    @classmethod
    def from_name(
        cls,
        name: str,
        *,
        pooling: str = "auto",
        normalize: bool = True,
        max_tokens: int | None = None,
        dtype: str = "auto",
        device: str = "auto",
        batch_tokens: int = 1024,
        query_prompt: str | None = None,
        passage_prompt: str | None = None,
    ) -> Self:
        """Load an encoder; a sentence-transformers model with its own pooling, layers and prompts.

        Args:
            name: Hub id, folder or bundled:NAME.
            pooling: One of `POOLINGS`, or "auto" (see `resolve_pooling`). With another than a
                sentence-transformers model's own, what stands behind that pooling (Dense,
                Normalize) is left out.
            normalize: Whether vectors get unit length, so that their inner product is the cosine;
                those of a sentence-transformers model with a Normalize part have it anyway, under
                its own pooling.
            max_tokens: Tokens of a text that are read, its prompt and special tokens included;
                None: what a sentence-transformers model says, else 128.
            dtype: Of the weights; vectors are float32 whatever it is.
            device: "auto", "cpu", "cuda", ...
            batch_tokens: Padded tokens a batch on a CPU; a GPU takes 16 times as many.
            query_prompt: What each query begins with, such as "query: "; None: the model's own.
            passage_prompt: What each passage begins with; None: the model's own.

        Raises:
            ConfigError: If the pooling is unknown or `max_tokens` exceeds the model's positions.
            ModelError: If the model cannot be found, loaded, or used as an encoder.
        """
        choose("pooling", pooling, ("auto", *POOLINGS))
        source = find_model(name)
        place = choose_device(device)
        sentence = read_sentence_model(source)
        if pooling == "auto":
            pooling = resolve_pooling(source)
        elif sentence.layers and not is_own_pooling(source, pooling):
            sentence = replace(sentence, layers=())
        kind = choose_dtype(dtype, place)
        model = _load_model(source, pooling, kind).to(place).eval()
        tokenizer = load_tokenizer(source, model.config)
        if tokenizer.pad_token_id is None:
            raise ModelError(f"'{name}' has no padding token: it is no text encoder")
        length = max_tokens or own_length(sentence, model, tokenizer)
        check_window(name, model, length)
        fingerprint: dict[str, Json] = {
            "encoder": source.identity,
            "pooling": pooling,
            "normalize": normalize or sentence.is_normalized,
            "max_tokens": length,
            "dtype": dtype_name(kind),
            **dense_fields(sentence),
        }
        prompt = sentence.passage_prompt if passage_prompt is None else passage_prompt
        # Only where there is one: indexes that were made before keep their fingerprints.
        fingerprint |= {"passage_prompt": prompt} if prompt else {}
        fingerprint |= {"lower_case": True} if sentence.is_lower else {}
        return cls(
            model,
            tokenizer,
            fingerprint=fingerprint,
            device=place,
            batch_tokens=batch_tokens,
            sentence=sentence,
            query_prompt=sentence.query_prompt if query_prompt is None else query_prompt,
        )

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """All that determines the vectors of queries and passages, besides their texts."""
        return {**self.fingerprint, **self.query_fields}

    @property
    def query_fields(self) -> Mapping[str, Json]:
        """What a query's vector depends on and a passage's does not; usually nothing."""
        return {"query_prompt": self.query_prompt} if self.query_prompt else {}

    def prepared(self, texts: Sequence[str], *, is_query: bool) -> list[str]:
        """Give texts as they are tokenised: behind their prompt."""
        prompt = self.query_prompt if is_query else str(self.fingerprint.get("passage_prompt", ""))
        told = [f"{prompt}{text}" for text in texts] if prompt else list(texts)
        return [text.lower() for text in told] if self.sentence.is_lower else told

    def encode(
        self,
        texts: Sequence[str],
        *,
        is_query: bool = False,
        progress: bool = False,
        advance: Callable[[int], object] | None = None,
    ) -> Vectors:
        """Encode texts.

        Args:
            texts: Any number, in any order.
            is_query: Whether they are queries; it is the same but for models with prompts.
            progress: Whether to show a bar.
            advance: Called with the number of texts done after each batch (for a caller's bar).

        Returns:
            (n, D) float32, in the order given.

        Raises:
            ModelError: If a vector is not finite, or one text alone does not fit in memory.
        """
        vectors = np.empty((len(texts), self.width), dtype=np.float32)
        with (
            packed_for(self.model, _TOKENS * len(texts)),
            tqdm(total=len(texts), unit="text", disable=not progress) as bar,
        ):
            step = advance if advance is not None else bar.update
            for start in range(0, len(texts), _CHUNK):
                chunk = texts[start : start + _CHUNK]
                told = self.prepared(chunk, is_query=is_query)
                vectors[start : start + len(chunk)] = self._encode_chunk(told, start, step)
        return vectors

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Give the vectors of a task's examples, (B, D): all are queries, being texts of one kind.

        Raises:
            ModelError: As `encode`.
        """
        return self.encode([example.text for example in examples], is_query=True)

    def _encode_chunk(
        self, texts: Sequence[str], start: int, step: Callable[[int], object]
    ) -> Vectors:
        ids = self._tokenize(texts)
        lengths = [len(line) for line in ids]
        # They stay on the device until the chunk is done: one copy, and no wait for each batch.
        vectors = torch.empty((len(texts), self.width), dtype=torch.float32, device=self._device)
        todo = token_budget_batches(lengths, self._batch_tokens)[::-1]
        while todo:
            batch = todo.pop()
            found = self._forward_if_it_fits([ids[index] for index in batch])
            if found is None:
                todo = self._smaller([*todo, batch][::-1], lengths)
                continue
            vectors[torch.tensor(batch, device=self._device)] = found
            step(len(batch))
        array: Vectors = vectors.cpu().numpy()
        _check_finite(array, texts, start)
        return array

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        encoded = self.tokenizer(
            list(texts),
            truncation=True,
            max_length=self._max_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        ids: list[list[int]] = encoded["input_ids"]
        if self.tokenizer.is_fast:
            self.num_cut += sum(bool(line.overflowing) for line in encoded.encodings)
        else:  # a slow tokenizer does not tell, so texts that just fit are counted too
            self.num_cut += sum(len(line) >= self._max_tokens for line in ids)
        return ids

    def _forward_if_it_fits(self, ids: Sequence[Sequence[int]]) -> Tensor | None:
        try:
            return self._forward(ids)
        except torch.OutOfMemoryError:
            return None  # what the attempt held goes with the handler, before the cache is emptied

    @torch.inference_mode()
    def _forward(self, ids: Sequence[Sequence[int]]) -> Tensor:
        lengths = np.array([len(line) for line in ids])
        L = max(1, int(lengths.max()))
        array = np.full((len(ids), L), self.tokenizer.pad_token_id, dtype=np.int64)
        for row, line in enumerate(ids):
            array[row, : len(line)] = line
        real = np.arange(L) < lengths[:, None]
        mask = torch.from_numpy(real).to(self._device)  # (B, L)
        output = self.model(
            input_ids=torch.from_numpy(array).to(self._device), attention_mask=mask.long()
        )
        vectors = pool(output, mask, self._pooling)  # (B, D)
        for layer in self._layers:
            vectors = unit_length(vectors, dim=-1) if layer is None else layer.apply(vectors)
        return unit_length(vectors, dim=-1) if self._is_normalized else vectors

    def _smaller(self, batches: Sequence[list[int]], lengths: Sequence[int]) -> list[list[int]]:
        """Cut the batches still to do, the one that failed first, to half the budget."""
        if len(batches[0]) == 1:
            raise ModelError(
                f"a text of {lengths[batches[0][0]]} tokens does not fit in memory on "
                f"{self._device}: lower max_encoder_tokens or choose a smaller encoder"
            )
        padded = len(batches[0]) * lengths[batches[0][0]]
        self._batch_tokens = max(1, min(padded, self._batch_tokens) // 2)
        logger.warning("out of memory: going on with %s tokens a batch", self._batch_tokens)
        torch.cuda.empty_cache()
        rest = [index for batch in batches for index in batch]
        smaller = token_budget_batches([lengths[index] for index in rest], self._batch_tokens)
        return [[rest[place] for place in batch] for batch in smaller][::-1]


def _load_model(source: ModelSource, pooling: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModel

    model, report = load_pretrained(
        AutoModel.from_pretrained, source, dtype=dtype, output_loading_info=True
    )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ModelError(
            f"'{source.name}' is an encoder-decoder ({model.config.model_type}), not a text "
            "encoder: choose a BERT-like model"
        )
    # transformers fills weights that a checkpoint lacks with random numbers, and only logs it.
    missing = sorted(report["missing_keys"])
    lost = [key for key in missing if "pooler" not in key]
    if lost:
        raise ModelError(f"'{source.name}' lacks {len(lost)} weights, such as {lost[0]}")
    if pooling == "pooler" and (missing or getattr(model, "pooler", None) is None):
        raise ModelError(
            f"'{source.name}' has no pooler weights, so pooling 'pooler' would be random: "
            "use cls or mean"
        )
    return model


def _check_finite(vectors: Vectors, texts: Sequence[str], start: int) -> None:
    is_finite = np.isfinite(vectors).all(axis=1)
    if not is_finite.all():
        index = int(np.flatnonzero(~is_finite)[0])
        raise ModelError(
            f"the vector of text {start + index} is not finite: {texts[index][:80]!r}. "
            "Try another encoder_dtype (float32 or bfloat16)."
        )
