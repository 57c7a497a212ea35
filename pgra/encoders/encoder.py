"""Text encoders: any transformer with a pooling, and sentence-transformers models as configured.

The pooling (how token states become one vector) is part of an encoder: a SimCSE pooled the wrong
way still gives plausible neighbours. So it is named, resolved once and kept in fingerprints. A
model's `modules.json` lists its parts: a transformer, a pooling, and further layers. An unknown
part is an error: without it the vectors would be another model's.
"""

import logging
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.functional import normalize as unit_length

from pgra.artifacts import TemporaryFolder, file_checksum
from pgra.config import choose
from pgra.core import Example, Json, check_device, run_overlapped
from pgra.encoders import POOLINGS, PassageEncoderArguments
from pgra.errors import ConfigError, ModelError, reading, show
from pgra.lm import load
from pgra.lm.base import Advance
from pgra.lm.batching import BackOff, begin_fetch, pad, send, token_budget_batches
from pgra.lm.kernels import packed_for
from pgra.lm.load import MODULES, ModelPart, ModelSource
from pgra.progress import Bar

logger = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]
DEFAULT_MAX_TOKENS = 128  # as the paper's code and SimCSE's tool, where a model does not say
_CHUNK = 8192  # texts tokenised, sorted and moved at once: bounds memory, and sorts well
_TOKENS = 32  # of a text, about
# Tokens of a batch on a GPU, times those on a CPU. 8,192 Wikipedia sentences are then 9 batches,
# 12 % of them padding; at 16 times they are 17, 7 % padding, and launching them takes longer.
_GPU_TIMES = 32
_MOST_HALF = 65504  # that float16 holds
_NO_LENGTH = 1 << 31  # what tokenizers say that know of none is larger still
_LIMITS = tuple(  # of a transformer; the first is today's, and all are still read
    f"sentence_{kind}_config.json"
    for kind in ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
)
_MODES = {
    "lasttoken": "last",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
}
_FIRST, _LATER = ["Transformer", "Pooling"], {"Dense", "Dropout", "Normalize"}
_ACTIVATIONS = ("GELU", "Identity", "ReLU", "Sigmoid", "Tanh")
# What the file of a part may say, but only this.
_TRANSFORMER_SAYS = {
    "method_output_name": "last_hidden_state",
    "query_expansion": None,
    "transformer_task": "feature-extraction",
}
_LAYER_SAYS = {
    "module_input_name": "sentence_embedding",
    "module_output_name": "sentence_embedding",
    "use_residual": False,
}


def pool(output: Any, mask: Tensor, pooling: str) -> Tensor:
    """Pool token states into (B, D) float32.

    Args:
        output: What a transformers encoder returns; its states are (B, L, D).
        mask: True on real tokens, (B, L) bool.
        pooling: "cls" or "cls_before_pooler" (two names for the first token's last hidden state),
            "last" (the last real token's), "max" and "mean" (over real tokens, special ones
            included, as sentence-transformers does), or "pooler" (BERT's tanh layer on the first
            token, which the paper's code uses).
    """
    if pooling == "pooler":
        pooled: Tensor = output.pooler_output
        return pooled.float()
    hidden: Tensor = output.last_hidden_state.float()  # (B, L, D)
    if pooling == "mean":
        weights = mask.unsqueeze(-1).to(hidden.dtype)  # (B, L, 1)
        return torch.sum(hidden * weights, dim=1) / weights.sum(dim=1)
    if pooling == "max":
        return hidden.masked_fill(~mask.unsqueeze(-1), float("-inf")).max(dim=1).values
    if pooling == "last":
        last = mask.sum(dim=1) - 1  # padding stands on the right
        return hidden[torch.arange(len(hidden), device=hidden.device), last]
    return hidden[:, 0]


def choose_pooling(
    source: ModelSource, modes: Mapping[str, Any] | None, asked: str
) -> tuple[str, bool]:
    """Return the pooling to use, and whether it is the one a model was made with.

    A sentence-transformers model has a file with its pooling (`modes`; None without one). For
    SimCSE (Gao et al. 2021) its own tool takes the pooler for supervised models, and the first
    token before the pooler for unsupervised ones. All others get the mean. Layers after the pooling
    (Dense, Normalize) are trained on its vectors, so they fit no other pooling.

    Raises:
        ModelError: If "auto" is asked of a model whose pooling is not supported.
    """
    if modes is None:
        name, own = Path(source.name).name.lower(), "mean"  # not the folders above it
        if "simcse" in name:
            is_supervised = "sup-simcse" in name and "unsup-simcse" not in name
            own = "pooler" if is_supervised else "cls_before_pooler"
    else:
        told = modes.get("pooling_mode") or [
            key for key, value in modes.items() if key.startswith("pooling_mode") and value
        ]
        names = [told] if isinstance(told, str) else told or ["mean"]  # as the library reads none
        own = _MODES.get(names[0], names[0]) if len(names) == 1 else " + ".join(names)
    if asked != "auto":
        # Two names of one vector.
        return asked, asked.removesuffix("_before_pooler") == own.removesuffix("_before_pooler")
    if modes is not None and (own not in _MODES.values() or not modes.get("include_prompt", True)):
        raise ModelError(
            f"'{source.name}' has a pooling that is not done here ({show(dict(modes))}): give "
            f"--pooling, one of {', '.join(POOLINGS[1:])}"
        )
    return own, True


@dataclass(frozen=True)
class DenseLayer:
    """A linear layer after the pooling: weight (D_out, D_in), bias (D_out,) or None, float32.

    `activation` is a name in `torch.nn`; `identity` is for fingerprints.
    """

    weight: Tensor
    bias: Tensor | None
    activation: str
    identity: str

    def apply(self, vectors: Tensor) -> Tensor:
        activate: Callable[[Tensor], Tensor] = getattr(torch.nn, self.activation)()
        return activate(torch.nn.functional.linear(vectors, self.weight, self.bias))

    def to(self, device: torch.device) -> "DenseLayer":
        bias = None if self.bias is None else self.bias.to(device)
        return DenseLayer(self.weight.to(device), bias, self.activation, self.identity)


@dataclass(frozen=True)
class SentenceModel:
    """A sentence-transformers model's configuration; a plain transformer has the defaults.

    Attributes:
        is_one: Whether it is a sentence-transformers model at all.
        max_tokens: Its longest text, or None where it does not say.
        is_lower: Whether texts are lower-cased first.
        pooling: Its pooling's file; None for a plain transformer.
        layers: Layers after the pooling, in order; None stands for unit length.
        truncate_dim: How many of a vector's first dimensions are kept; None: all.
    """

    is_one: bool = False
    max_tokens: int | None = None
    is_lower: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""
    pooling: Mapping[str, Any] | None = None
    layers: Sequence[DenseLayer | None] = ()
    truncate_dim: int | None = None

    @property
    def is_normalized(self) -> bool:
        return bool(self.layers) and self.layers[-1] is None

    def width(self, config: Any) -> int:
        """Return the length of a vector (D), of a transformer with this configuration."""
        dense = [layer for layer in self.layers if layer]
        return len(dense[-1].weight) if dense else int(config.hidden_size)


def read_sentence_model(source: ModelSource) -> SentenceModel:
    """Read a model's `modules.json` and its parts; ModelError if one is damaged or unknown."""
    parts = load.read_parts(source)
    if not parts:
        return SentenceModel()
    with reading(f"the parts of '{source.name}'", ModelError):
        layers = _read_layers(source, parts)
        found = (_read_config(source, parts[0].path, name) for name in _LIMITS)
        limits = dict(next(filter(None, found), {}))
        for place in ("tokenizer_args", "processor_kwargs"):
            if "model_max_length" in (limits.get(place) or {}):
                limits["max_seq_length"] = limits[place]["model_max_length"]
        texts = (limits.get("modality_config") or {}).get("text", {})
        _refuse_others(source, {**limits, **texts}, _TRANSFORMER_SAYS)
        about = _read_config(source, "", "config_sentence_transformers.json")
        prompts, kept = about.get("prompts") or {}, about.get("truncate_dim")
        if kept is not None and (type(kept) is not int or kept < 1):
            raise ValueError(f"truncate_dim is {show(kept)}, not a number above 0")
        pooling = _read_config(source, parts[1].path)
        if not pooling:
            raise ValueError(f"{parts[1].path}/config.json is missing, which says how to pool")
        return SentenceModel(
            is_one=True,
            max_tokens=limits.get("max_seq_length"),
            is_lower=bool(limits.get("do_lower_case")),
            query_prompt=prompts.get("query") or "",
            passage_prompt=prompts.get("document") or "",  # the library has "" where no file does
            pooling=pooling,
            layers=layers,
            truncate_dim=kept,
        )


def _read_config(source: ModelSource, folder: str, name: str = "config.json") -> dict[str, Any]:
    found = load.read_model_json(source, PurePosixPath(folder, name).as_posix(), dict)
    return dict(found or {})


def _refuse_others(
    source: ModelSource, config: Mapping[str, Any], known: Mapping[str, object]
) -> None:
    """Refuse what a part's file asks for and is not done here: vectors would be another model's."""
    for name, plain in known.items():
        if config.get(name) not in (plain, None, {}):
            raise ModelError(
                f"'{source.name}' has {name} {show(config[name])}, which is not done here: choose "
                "another encoder"
            )


def choose_max_tokens(source: ModelSource, asked: int | None) -> int:
    """Return the tokens that are read of a text: as asked, or the model's own, or 128."""
    return asked or read_sentence_model(source).max_tokens or DEFAULT_MAX_TOKENS


def _read_layers(source: ModelSource, parts: Sequence[ModelPart]) -> tuple[DenseLayer | None, ...]:
    """Read the layers after the pooling; refuse unknown parts or another order."""
    names = [part.kind for part in parts]
    kinds = [name.rpartition(".")[2] for name in names]
    is_own = all(name.startswith("sentence_transformers.") for name in names)
    if not is_own or kinds[:2] != _FIRST or {*kinds[2:]} - _LATER:
        found = show(", ".join(kinds if is_own else names))
        raise ModelError(
            f"'{source.name}' has the parts {found} (in {MODULES}), and only a Transformer, a "
            "Pooling and then Dense, Dropout, Normalize of that library are read: choose another "
            "encoder"
        )
    if source.revision is not None and parts[0].path:
        raise ModelError(
            f"'{source.name}' has its Transformer in the folder {parts[0].path} (in {MODULES}), "
            "which is read of a local folder alone: download it, and give the folder"
        )
    layers: list[DenseLayer | None] = []
    for part, kind in zip(parts[2:], kinds[2:], strict=True):
        config = _read_config(source, part.path)
        _refuse_others(source, config, _LAYER_SAYS)
        if kind == "Dense":
            layers.append(_read_dense(source, part.path, config))
        elif kind == "Normalize":
            layers.append(None)
    return tuple(layers)


def _read_dense(source: ModelSource, folder: str, config: Mapping[str, Any]) -> DenseLayer:
    weights = load.find_model_file(source, f"{folder}/model.safetensors")
    activation = str(config.get("activation_function", "torch.nn.Tanh"))
    if activation.startswith("torch."):  # another's is code of its own
        activation = activation.rpartition(".")[2]
    if not config or weights is None or activation not in _ACTIVATIONS:
        raise ModelError(
            f"{folder} of '{source.name}' needs a config.json, a model.safetensors and one of the "
            f"activations {', '.join(_ACTIVATIONS)} (it has {show(activation)})"
        )
    tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
    identity = f"{activation}:{file_checksum(weights)}"
    return DenseLayer(tensors["linear.weight"], tensors.get("linear.bias"), activation, identity)


def _count_positions(model: Any) -> int | None:
    table = getattr(getattr(model, "embeddings", None), "position_embeddings", None)
    if isinstance(table, torch.nn.Embedding):
        # RoBERTa's kind counts positions after its padding index: 514 rows read 512 tokens.
        unused = 0 if table.padding_idx is None else table.padding_idx + 1
        return table.num_embeddings - unused
    window: int | None = getattr(model.config, "max_position_embeddings", None)
    return window


@dataclass(frozen=True, kw_only=True)
class TokenChunk:
    """Tokenised texts, cut into batches of rows, the longest texts first.

    `first` is the number of the first text, for messages; of `num_cut` texts only the beginning was
    read.
    """

    texts: Sequence[str]
    first: int
    ids: Sequence[Sequence[int]]
    batches: Sequence[Sequence[int]]
    num_cut: int

    @property
    def order(self) -> npt.NDArray[np.int64]:
        """The text at each place of all batches, (n,) int64."""
        return np.concatenate([np.asarray(rows, np.int64) for rows in self.batches])


class Encoder:
    """Turns texts into vectors; independent of tasks, prompts and indexes.

    Attributes:
        copied: The folder that a loaded model was written to; None for one that has a name.
        fingerprint: All that determines a passage's vector, besides its text.
        batch_tokens: Padded tokens in one batch on a CPU; a GPU takes 32 times as many.
        width: Length of a vector (D).
        sentence: Its sentence-transformers configuration.
        query_prompt: What each query begins with; usually nothing.
        inputs: Its files, as they were when it was identified.
        num_cut: Texts longer than `max_tokens` so far; only their beginning was read.
    """

    def __init__(
        self,
        args: PassageEncoderArguments,
        source: ModelSource,
        model: Any,
        tokenizer: Any,
        *,
        fingerprint: Mapping[str, Json],
        device: torch.device,
        sentence: SentenceModel | None = None,
    ) -> None:
        """Join what was loaded; `Encoder.load` opens an encoder by name."""
        self.args, self.batch_tokens = args, args.encoder_batch_tokens
        self.model, self.tokenizer, self.device = model, tokenizer, device
        self.fingerprint, self.inputs, self.num_cut = fingerprint, source.inputs, 0
        self.copied: TemporaryFolder | None = None
        self.sentence = sentence or SentenceModel()
        asked = args.query_prompt
        self.query_prompt = self.sentence.query_prompt if asked is None else asked
        self._layers = [layer and layer.to(self.device) for layer in self.sentence.layers]
        self.width = self.sentence.width(model.config)
        advice = f"{device}: lower max_encoder_tokens, or choose a smaller encoder"
        times = 1 if device.type == "cpu" else _GPU_TIMES
        self._back_off = BackOff(times * self.batch_tokens, advice)
        self._max_tokens = int(str(fingerprint["max_tokens"]))

    @classmethod
    def load(
        cls, encoder: Any, tokenizer: Any = None, *, device: str = "auto", **options: Any
    ) -> Self:
        """Load an encoder.

        Args:
            encoder: Hub id, folder or bundled:NAME; or arguments that name one; or a loaded model,
                of transformers or a `SentenceTransformer`, which is saved to a folder and read from
                it; an `Encoder` is returned as it is. Options override a sentence-transformers
                model's own pooling, lengths and prompts; another pooling drops its layers.
            tokenizer: That of a loaded model of transformers.
            device: Where it runs; with "auto" a loaded model's copy runs where that does.
            **options: Fields of `PassageEncoderArguments`, such as `pooling="cls"`.

        Raises:
            ConfigError: If an option is unknown, or the model has too few positions for it.
            ModelError: If the model cannot be found, loaded, or used as an encoder.
            ValueError: If `encoder` is none of these, or a loaded model has no tokenizer.
        """
        check_device(device, is_used=False)
        if isinstance(encoder, cls):
            if device not in ("auto", encoder.device.type, str(encoder.device)):
                raise ConfigError(
                    f"device is '{device}', and the encoder given is on {encoder.device} and stays "
                    "there: leave device out, or open the encoder with it"
                )
            return encoder
        if isinstance(encoder, PassageEncoderArguments):
            return cls._read(encoder, device)
        copied, kept = None, None
        if not isinstance(encoder, str | Path):
            kept = getattr(encoder, "truncate_dim", None)  # before 6.2 it is not saved
            copied = load.save_loaded(encoder, tokenizer, "an encoder")
            device = str(encoder.device) if device == "auto" else device
            encoder = copied.path
        known = {each.name for each in fields(PassageEncoderArguments)} - {"encoder"}
        for option in options:
            choose("option of an encoder", option, known)
        opened = cls._read(PassageEncoderArguments(encoder=str(encoder), **options), device, kept)
        opened.copied = copied
        return opened

    @classmethod
    def _read(
        cls, args: PassageEncoderArguments, device: str, truncate_dim: int | None = None
    ) -> Self:
        place, source = load.choose_device(device), load.find_model(args.encoder)
        sentence = read_sentence_model(source)
        pooling, is_own = choose_pooling(source, sentence.pooling, args.pooling)
        dtype = load.choose_dtype(args.encoder_dtype, place)
        config = load.load_config(source)
        kept, width = sentence.truncate_dim or truncate_dim, sentence.width(config)
        if not is_own:
            sentence = replace(sentence, layers=())
        elif kept is not None and kept < width:  # a layer, saved and fingerprinted like others
            first = DenseLayer(torch.eye(kept, width), None, "Identity", f"first {kept}")
            sentence = replace(sentence, layers=(*sentence.layers, first))
        tokenizer = load.load_tokenizer(source, config)  # before weights, which take longer
        if tokenizer.pad_token_id is None:
            raise ModelError(f"'{source.name}' has no padding token: it is no text encoder")
        model = _load_model(source, config, pooling, dtype).to(place).eval()
        window = _count_positions(model)
        length = args.max_encoder_tokens or DEFAULT_MAX_TOKENS
        if args.max_encoder_tokens is None and sentence.is_one:  # what sentence-transformers reads
            own = sentence.max_tokens or tokenizer.model_max_length
            length = min(int(own), window or (own if own < _NO_LENGTH else DEFAULT_MAX_TOKENS))
        if window is not None and length > window:
            raise ConfigError(
                f"max_encoder_tokens is {length}, but '{source.name}' reads at most {window}: "
                "lower it"
            )
        fingerprint: dict[str, Json] = {
            "encoder": source.identity,
            "pooling": pooling,
            "normalize": args.normalize or sentence.is_normalized,
            "max_tokens": length,
            "dtype": load.dtype_name(dtype),
        }
        if any(sentence.layers):
            names: Json = [layer.identity if layer else "normalize" for layer in sentence.layers]
            fingerprint["layers"] = names
        prompt = sentence.passage_prompt if args.passage_prompt is None else args.passage_prompt
        # Only where there is one: indexes that were made before keep their fingerprints.
        fingerprint |= {"passage_prompt": prompt} if prompt else {}
        fingerprint |= {"lower_case": True} if sentence.is_lower else {}
        how: dict[str, Any] = {"fingerprint": fingerprint, "device": place, "sentence": sentence}
        return cls(args, source, model, tokenizer, **how)

    @property
    def query_fingerprint(self) -> Mapping[str, Json]:
        """All that determines the vectors of queries and passages, besides their texts."""
        return {**self.fingerprint, **self.query_fields}

    @property
    def query_fields(self) -> Mapping[str, Json]:
        """What a query's vector depends on and a passage's does not; usually nothing."""
        return {"query_prompt": self.query_prompt} if self.query_prompt else {}

    def prepared(self, texts: Sequence[str], *, is_query: bool) -> list[str]:
        """Return texts as they are tokenised: after their prompt, perhaps in lower case."""
        prompt = self.query_prompt if is_query else str(self.fingerprint.get("passage_prompt", ""))
        whole = [f"{prompt}{text}" for text in texts] if prompt else list(texts)
        return [text.lower() for text in whole] if self.sentence.is_lower else whole

    def encode(
        self, texts: Sequence[str], *, is_query: bool = False, advance: Advance = int
    ) -> Vectors:
        """Encode texts; return (n, D) float32, in the order given.

        `is_query` matters only for models with prompts. `advance` is called with the number of
        texts done after each batch; without it a bar is shown.

        Raises:
            ModelError: If a vector is not finite, one text does not fit in memory, or the device
                fails.
        """
        if advance is int:
            with Bar(total=len(texts), desc="encode", unit="text", leave=False) as bar:
                return self.encode(texts, is_query=is_query, advance=bar.update)
        vectors = np.empty((len(texts), self.width), dtype=np.float32)

        def prepare(start: int) -> list[TokenChunk]:
            return self.tokenize(texts[start : start + _CHUNK], is_query=is_query, first=start)

        def keep(start: int, finish: Callable[[], npt.NDArray[Any]]) -> None:
            vectors[start : start + _CHUNK] = finish()

        starts = range(0, len(texts), _CHUNK)
        run_overlapped(starts, prepare, lambda ready: self.begin(ready, advance=advance), keep=keep)
        return vectors

    def encode_examples(self, examples: Sequence[Example]) -> Vectors:
        """Return the vectors of examples, (B, D), all encoded as queries. Raises as `encode`."""
        return self.encode([example.text for example in examples], is_query=True)

    def tokenize(
        self, texts: Sequence[str], *, is_query: bool = False, first: int = 0
    ) -> list[TokenChunk]:
        """Tokenise texts for `begin`; another thread may do it ahead, one at a time.

        `first` is the number of the first one, for messages.
        """
        chunks = []
        for start in range(0, len(texts), _CHUNK):
            told = self.prepared(texts[start : start + _CHUNK], is_query=is_query)
            ids, num_cut = self._read_tokens(told)
            self.num_cut += num_cut
            batches = token_budget_batches([len(line) for line in ids], self._back_off.budget)
            chunk = TokenChunk(
                texts=told, first=first + start, ids=ids, batches=batches, num_cut=num_cut
            )
            chunks.append(chunk)
        return chunks

    def begin(
        self, chunks: Sequence[TokenChunk], *, in_half: bool = False, advance: Advance = int
    ) -> Callable[[], npt.NDArray[Any]]:
        """Start encoding tokenised texts; return a function that waits for the vectors.

        Vectors stay on a GPU until all of a chunk are there. The function returns (n, D) float32 or
        float16, in the order of the texts; both raise ModelError as `encode`, the function also
        where a vector is too large for float16. `in_half` rounds to float16 on the device.
        """
        num_texts = sum(len(chunk.texts) for chunk in chunks)
        with packed_for(self.model, _TOKENS * num_texts):
            waits = [self._launch(chunk, in_half=in_half, advance=advance) for chunk in chunks]

        def finish() -> npt.NDArray[Any]:
            dtype = np.float16 if in_half else np.float32
            whole, done = np.empty((num_texts, self.width), dtype), 0
            for chunk, (vectors, peaks) in zip(chunks, waits, strict=True):
                _check_peaks(peaks().numpy(), chunk, in_half=in_half)
                whole[done + chunk.order] = vectors().numpy()
                done += len(chunk.texts)
            return whole

        return finish

    @torch.inference_mode()
    def _launch(
        self, chunk: TokenChunk, *, in_half: bool, advance: Advance
    ) -> tuple[Callable[[], Tensor], Callable[[], Tensor]]:
        """Encode a chunk; return functions for its vectors, longest text first, and its peaks."""
        n, done = len(chunk.texts), 0
        dtype = torch.float16 if in_half else torch.float32
        vectors = torch.empty((n, self.width), dtype=dtype, device=self.device)
        peaks = torch.empty(n, device=self.device)

        def size(rows: Sequence[int]) -> int:
            return len(rows) * len(chunk.ids[rows[0]])

        def run(rows: Sequence[int]) -> Tensor:
            ids, mask = pad([chunk.ids[row] for row in rows], self.tokenizer.pad_token_id)
            return self._forward(send(ids, self.device), send(mask, self.device))

        for rows in chunk.batches:
            found = torch.cat(self._back_off.run(rows, size, run))  # (B, D)
            vectors[done : done + len(rows)] = found
            peaks[done : done + len(rows)] = found.abs().amax(dim=1)
            done += len(rows)
            advance(len(rows))
        return begin_fetch(vectors), begin_fetch(peaks)

    def _read_tokens(self, texts: list[str]) -> tuple[list[Sequence[int]], int]:
        """Return the token ids of all texts, and how many texts were cut."""
        read = partial(
            self.tokenizer,
            truncation=True,
            max_length=self._max_tokens,
            return_attention_mask=False,
            return_token_type_ids=False,
        )
        lines, encodings, first = [], None, None
        if self.tokenizer.is_fast and len(texts) > 1:
            # The call sets up the truncation. Of many texts the library itself is asked: the lists
            # that transformers makes of them take as long as the tokens.
            first = read(texts[:1])["input_ids"]
            encodings = self.tokenizer.backend_tokenizer.encode_batch_fast(texts)
            lines = [line.ids for line in encodings]
        if lines[:1] != first:  # a tokenizer with steps of its own, or a slow one, or one text
            told = read(texts)
            lines, encodings = told["input_ids"], told.encodings
        if encodings is not None:
            num_cut = sum(bool(line.overflowing) for line in encodings)
        else:  # a slow tokenizer does not report it, so texts that just fit are counted too
            num_cut = sum(len(line) >= self._max_tokens for line in lines)
        return [array("i", line) for line in lines], num_cut  # four bytes a token: shards wait

    def _forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return the vectors (B, D) of token ids (B, L); the mask is True on real ones."""
        output = self.model(input_ids=ids, attention_mask=mask.long())
        vectors = pool(output, mask, str(self.fingerprint["pooling"]))  # (B, D)
        for layer in self._layers:
            vectors = unit_length(vectors, dim=-1) if layer is None else layer.apply(vectors)
        return unit_length(vectors, dim=-1) if self.fingerprint["normalize"] else vectors


def _check_peaks(peaks: npt.NDArray[np.float32], chunk: TokenChunk, *, in_half: bool) -> None:
    """Refuse vectors by the largest magnitude in each."""
    is_finite = np.isfinite(peaks)
    is_good = is_finite & (peaks <= _MOST_HALF) if in_half else is_finite
    if is_good.all():
        return
    place = int(chunk.order[~is_good if is_finite.all() else ~is_finite].min())
    name, text = f"the vector of text {chunk.first + place}", repr(chunk.texts[place][:80])
    if not is_finite.all():
        raise ModelError(
            f"{name} is not finite: {text}. Try another encoder_dtype (float32 or bfloat16)."
        )
    raise ModelError(f"{name} exceeds {_MOST_HALF}, the most that float16 holds: use normalize")


def _load_model(source: ModelSource, config: Any, pooling: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModel

    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(
            f"'{source.name}' is an encoder-decoder ({config.model_type}), not a text encoder: "
            "choose a BERT-like model"
        )
    unused = () if pooling == "pooler" else ("pooler",)
    model = load.load_pretrained(
        AutoModel.from_pretrained, source, unused=unused, config=config, dtype=dtype
    )
    if pooling == "pooler" and getattr(model, "pooler", None) is None:
        raise ModelError(f"'{source.name}' has no pooler: use --pooling cls or mean")
    return model


# A T5's encoder as a text encoder: the k-NN baseline's in Guo et al. 2023.


def load_t5_encoder(args: PassageEncoderArguments, name: str, device: str) -> Encoder:
    """Load the encoder of a T5; a vector is the mean of its last states, </s> included.

    Pooling and float32 are fixed, whatever `args` say. ModelError if `name` is no T5 or cannot be
    loaded.
    """
    from transformers import AutoModelForTextEncoding

    place, source = load.choose_device(device), load.find_model(name)
    # float32: a T5 overflows in float16, and the texts are few.
    model = load.load_pretrained(
        AutoModelForTextEncoding.from_pretrained, source, dtype=torch.float32
    )
    if not hasattr(model.config, "relative_attention_num_buckets"):
        raise ModelError(f"'{name}' is no T5: use --neighbor_encoder encoder, or a T5")
    fingerprint = {
        "encoder": source.identity,
        "part": "encoder of a T5",
        "pooling": "mean",
        "normalize": args.normalize,
        "max_tokens": args.max_encoder_tokens or DEFAULT_MAX_TOKENS,
        "dtype": load.dtype_name(torch.float32),
    }
    model, tokenizer = model.to(place).eval(), load.load_tokenizer(source)
    args = replace(args, query_prompt=None)
    return Encoder(args, source, model, tokenizer, fingerprint=fingerprint, device=place)
