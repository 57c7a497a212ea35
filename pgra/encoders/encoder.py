"""Text encoders: whatever sentence-transformers loads, and any transformer with a pooling.

That library reads a model's parts (`modules.json`), prompts, lengths and truncated dimensions. The
pooling (how token states become one vector) is part of an encoder: a SimCSE pooled the wrong way
still gives plausible neighbours. So it is named, resolved once and kept in fingerprints.
"""

from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize as unit_length

from pgra.arrays import Array, Rows, Vectors
from pgra.artifacts import TemporaryFolder
from pgra.encoders import PassageEncoderArguments
from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.base import Advance
from pgra.lm.batching import BackOff, begin_fetch, pad, send, token_budget_batches
from pgra.lm.kernels import packed_for
from pgra.lm.load import ModelSource
from pgra.parallel import Turn, run_overlapped
from pgra.progress import Bar
from pgra.types import Example, Fields, Json, as_texts

DEFAULT_MAX_TOKENS = 128  # as the paper's code and SimCSE's tool, where a model does not say
_CHUNK = 8192  # texts tokenised, sorted and moved at once: bounds memory, and sorts well
_TOKENS = 32  # of a text, about
OWN = "own"  # the pooling of a sentence-transformers model: its files, in its identity, say which
# Tokens of a batch on a GPU, times those on a CPU. 8,192 Wikipedia sentences are then 9 batches,
# 12 % of them padding; at 16 times they are 17, 7 % padding, and launching them takes longer.
_GPU_TIMES = 32
_NO_LENGTH = 1 << 31  # what tokenizers say that know of none is larger still
_RAGGED = dict.fromkeys(("padding", "return_attention_mask", "return_token_type_ids"), False)
_LISTS = {"common": {"return_tensors": None}, "text": _RAGGED}  # of ids alone, not tensors


def plain_pooling(name: str) -> str:
    """Return the pooling of a transformer that does not say its own.

    For SimCSE (Gao et al. 2021) its own tool takes the pooler for supervised models, and the first
    token before the pooler for unsupervised ones. All others get the mean.
    """
    name = Path(name).name.lower()  # not the folders above it
    if "simcse" not in name:
        return "mean"
    is_supervised = "sup-simcse" in name and "unsup-simcse" not in name
    return "pooler" if is_supervised else "cls_before_pooler"


def _open_modules(path: str, *, pooling: str, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Load a `SentenceTransformer`; under another pooling, its transformer and that alone."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    weights = {"dtype": dtype, "use_safetensors": True}
    model: Any = SentenceTransformer(
        path, device="cpu", model_kwargs=weights, trust_remote_code=trust_remote_code
    )
    if pooling == OWN:
        return model
    first = model[0]
    # The pooler is BERT's tanh layer on the first token, which the paper's code uses.
    output = "pooler_output" if pooling == "pooler" else "last_hidden_state"
    first.modality_config = {"text": {"method": "forward", "method_output_name": output}}
    first.module_output_name = "token_embeddings"
    parts = [first]
    if pooling == "pooler":
        first.module_output_name = "sentence_embedding"
    else:
        mode = {"cls_before_pooler": "cls", "last": "lasttoken"}.get(pooling, pooling)
        parts.append(Pooling(first.get_embedding_dimension(), mode))
    return SentenceTransformer(modules=parts, prompts=model.prompts, device="cpu")


def _check_model(model: Any, source: ModelSource, pooling: str) -> None:
    """Refuse what would give other vectors in silence, such as random weights."""
    for folder in load.read_parts(source):
        config = load.read_model_json(source, f"{folder}/config.json", dict) or {}
        activation = str(config.get("activation_function", "torch."))
        if not activation.startswith("torch."):  # the library would take another in its place
            raise ModelError(f"'{source.name}' has the activation '{activation}': its own code")
    if not hasattr(model[0], "model"):  # no transformer
        return
    inner = model[0].model
    if pooling == "pooler" and getattr(inner, "pooler", None) is None:
        raise ModelError(f"'{source.name}' has no pooler: use --pooling cls or mean")
    unused = () if pooling == "pooler" else ("pooler",)
    load.load_pretrained(
        type(inner).from_pretrained,
        source,
        unused=unused,
        config=inner.config,
        device_map="meta",  # only the names of its weights are read
    )
    load.check_tokens(model.tokenizer, inner.config, source.name)


def _widen(_part: object, _given: object, features: dict[str, Any]) -> dict[str, Any]:
    """Have what follows a transformer in half precision count in float32."""
    return {
        name: value.float() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in features.items()
    }


def _choose_length(model: Any, asked: int | None, source: ModelSource, *, is_bare: bool) -> int:
    """Return the tokens that are read of a text: as asked, or as many as the model says it can."""
    window = load.num_positions(model[0].model.config)
    if asked is not None and asked > window:
        raise ConfigError(f"max_encoder_tokens is {asked}: '{source.name}' reads at most {window}")
    usual = DEFAULT_MAX_TOKENS if is_bare else model.max_seq_length
    length = asked or min(usual or _NO_LENGTH, window)
    return int(length) if length < _NO_LENGTH else DEFAULT_MAX_TOKENS


@dataclass(frozen=True)
class TokenChunk:
    """Tokenised texts, cut into batches of rows, the longest texts first.

    `first` is the number of the first text, for messages; of `num_cut` texts only the beginning was
    read. `features` are what else the model reads.
    """

    texts: Sequence[str]
    first: int
    ids: Any
    features: Mapping[str, Any]
    batches: Sequence[Sequence[int]]
    num_cut: int

    @property
    def order(self) -> Rows:
        """The text at each place of all batches, (n,) int64."""
        return np.concatenate([np.asarray(rows, np.int64) for rows in self.batches])


class Encoder:
    """Turns texts into vectors; independent of tasks, prompts and indexes.

    Attributes:
        copied: The folder that a loaded model was written to; None for one that has a name.
        fingerprint: All that determines a passage's vector, besides its text.
        model: A `SentenceTransformer`, whose later parts get float32.
        width: Length of a vector (D).
        pad_token_id: Fills up batches; positions are counted by it.
        query_prompt: What each query begins with; usually nothing.
        inputs: Its files, as they were when it was identified.
        busy: Held by the thread that encodes.
    """

    def __init__(
        self, encoder: Any, tokenizer: Any = None, *, device: str = "auto", **options: Any
    ) -> None:
        """Load an encoder.

        Args:
            encoder: Hub id, folder or bundled:NAME; or a loaded model, of transformers or a
                `SentenceTransformer`, which is saved to a folder and read from it. Options override
                a sentence-transformers model's own pooling, lengths and prompts; a pooling drops
                its other parts.
            tokenizer: That of a loaded model of transformers.
            device: Where it runs; with "auto" a loaded model's copy runs where that does.
            **options: Fields of `PassageEncoderArguments`, such as `pooling="cls"`.

        Raises:
            ConfigError: If the model has too few positions for the tokens asked for.
            ModelError: If the model cannot be found, loaded, or used as an encoder.
            ValueError: If `encoder` is none of these, or a loaded model has no tokenizer.
            TypeError: If an option is unknown.
        """
        self.copied: TemporaryFolder | None = None
        if not isinstance(encoder, str | Path):
            self.copied = load.save_loaded(encoder, tokenizer)
            device = str(encoder.device) if device == "auto" else device
            encoder = self.copied.path
        args = PassageEncoderArguments(encoder=str(encoder), **options)
        self.args = args
        self.device = load.choose_device(device)
        self.busy = Turn()
        source = load.fetch_parts(load.find_model(args.encoder))
        dtype = load.choose_dtype(args.encoder_dtype, self.device)
        is_bare = not load.read_parts(source)
        pooling = args.pooling
        if pooling == "auto":
            pooling = plain_pooling(source.name) if is_bare else OWN
        whole = replace(source, subfolder="")
        model = load.load_by(_open_modules, whole, "encoder", pooling=pooling, dtype=dtype)
        _check_model(model, source, pooling)
        model[0].register_forward_hook(_widen)
        for module in list(model)[1:]:
            module.float()
        self.model = model.to(self.device).eval()
        is_unit = type(model[-1]).__name__ == "Normalize" and model.truncate_dim is None
        self.width: int = model.get_embedding_dimension()
        self.pad_token_id: int = getattr(model.config, "pad_token_id", None) or 0
        self.inputs = source.inputs
        self.fingerprint: dict[str, Json] = {
            "encoder": source.identity,
            "pooling": pooling,
            "normalize": args.normalize or is_unit,
            "dtype": load.dtype_name(dtype),
        }
        if hasattr(model[0], "model"):  # else its parts keep their own lengths
            length = _choose_length(model, args.max_encoder_tokens, source, is_bare=is_bare)
            model.max_seq_length = length
            self.fingerprint["max_tokens"] = length
        self._prompts = dict(model.prompts)
        if args.query_prompt is not None:
            self._prompts["query"] = args.query_prompt
        if args.passage_prompt is not None:
            self._prompts["document"] = args.passage_prompt
        self.query_prompt: str = self._prompts["query"]
        if prompt := self._prompts["document"]:
            self.fingerprint["passage_prompt"] = prompt
        advice = f"{self.device}: lower max_encoder_tokens, or choose a smaller encoder"
        times = 1 if self.device.type == "cpu" else _GPU_TIMES
        self._back_off = BackOff(times * args.encoder_batch_tokens, advice)

    def __deepcopy__(self, memo: object) -> Self:
        """Return itself: nothing changes an encoder."""
        return self

    @property
    def query_fingerprint(self) -> Fields:
        """All that determines the vectors of queries and passages, besides their texts."""
        if not self.query_prompt:
            return self.fingerprint
        return {**self.fingerprint, "query_prompt": self.query_prompt}

    def encode(self, texts: Iterable[str], *, is_query: bool = False) -> Vectors:
        """Encode texts; return (n, D) float32, in the order given.

        `is_query` matters only for models with prompts or a part of their own for queries.

        Raises:
            DataError: If `texts` is not a list of texts; a blank one has a vector too.
            ModelError: If a vector is not finite, one text does not fit in memory, or the device
                fails.
        """
        texts = as_texts("texts", texts)
        vectors = np.empty((len(texts), self.width), dtype=np.float32)

        def prepare(start: int) -> TokenChunk:
            return self.tokenize(texts[start : start + _CHUNK], is_query=is_query, first=start)

        def keep(start: int, finish: Callable[[], Array]) -> None:
            vectors[start : start + _CHUNK] = finish()

        starts = range(0, len(texts), _CHUNK)
        # The tokenizer holds a call's lengths, the layers its packed weights.
        with self.busy, Bar(total=len(texts), desc="encode", unit="text", leave=False) as bar:
            run_overlapped(starts, prepare, partial(self.begin, advance=bar.update), keep=keep)
        return vectors

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Return the vectors of examples, (B, D), all encoded as queries. Raises as `encode`."""
        return self.encode([example.text for example in examples], is_query=True)

    def tokenize(
        self, texts: Sequence[str], *, is_query: bool = False, first: int = 0
    ) -> TokenChunk:
        """Tokenise texts for `begin`; another thread may do it ahead, one at a time.

        `first` is the number of the first one, for messages.
        """
        task = "query" if is_query else "document"
        features = self.model.preprocess(
            list(texts), prompt=self._prompts[task] or None, task=task, processing_kwargs=_LISTS
        )
        encodings = getattr(features, "encodings", None) or ()
        num_cut = sum(bool(line.overflowing) for line in encodings)
        features = dict(features)
        ids: Any = features.pop("input_ids")
        batches: list[Sequence[int]] = [range(len(texts))]
        if isinstance(ids, list):  # else of static embeddings, which need no padding
            ids = [array("i", line) for line in ids]  # four bytes a token: shards wait
            lengths = [len(line) for line in ids]
            batches = [*token_budget_batches(lengths, self._back_off.budget)]
        return TokenChunk(texts, first, ids, features, batches, num_cut)

    def begin(
        self, chunk: TokenChunk, *, in_half: bool = False, advance: Advance = int
    ) -> Callable[[], Array]:
        """Start encoding tokenised texts; return a function that waits for the vectors.

        Vectors stay on a GPU until all of a chunk are there. The function returns (n, D) float32 or
        float16, in the order of the texts; both raise ModelError as `encode`, the function also
        where a vector is too large for float16. `in_half` rounds to float16 on the device.
        """
        num_texts = len(chunk.texts)
        done = 0
        dtype = torch.float16 if in_half else torch.float32

        def size(rows: Sequence[int]) -> int:
            return len(rows) * len(chunk.ids[rows[0]]) if isinstance(chunk.ids, list) else 0

        with packed_for(self.model, _TOKENS * num_texts), torch.inference_mode():
            vectors = torch.empty((num_texts, self.width), dtype=dtype, device=self.device)
            for rows in chunk.batches:
                batch = torch.cat(self._back_off.run(rows, size, partial(self.embed, chunk)))
                vectors[done : done + len(rows)] = batch  # (B, D)
                done += len(rows)
                advance(len(rows))
            wait = begin_fetch(vectors)

        def finish() -> Array:
            by_length = wait().numpy()
            _check_finite(by_length, chunk)
            whole = np.empty_like(by_length)
            whole[chunk.order] = by_length
            return whole

        return finish

    def embed(self, chunk: TokenChunk, rows: Sequence[int]) -> Tensor:
        """Return the vectors (B, D) of a chunk's rows, a batch of it."""
        features = {"input_ids": chunk.ids, **chunk.features}
        if isinstance(chunk.ids, list):
            ids, mask = pad([chunk.ids[row] for row in rows], self.pad_token_id)
            features |= {"input_ids": ids, "attention_mask": mask.long()}
        tensors = {
            name: send(value, self.device)
            for name, value in features.items()
            if torch.is_tensor(value)
        }
        vectors: Tensor = self.model({**features, **tensors})["sentence_embedding"]
        vectors = vectors[:, : self.model.truncate_dim]
        return unit_length(vectors, dim=-1) if self.fingerprint["normalize"] else vectors


def _check_finite(vectors: Array, chunk: TokenChunk) -> None:
    is_bad = ~np.isfinite(vectors).all(axis=1)
    if is_bad.any():
        row = int(chunk.order[is_bad].min())
        raise ModelError(
            f"the vector of text {chunk.first + row} is not finite, or exceeds float16: "
            f"{chunk.texts[row][:80]!r}. Use --encoder_dtype float32, or normalize"
        )
