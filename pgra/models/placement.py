"""Where an LM's weights go, one device or many, and in how many bits they are kept."""

import importlib
import logging
import os
from typing import Any

import torch

from pgra.errors import ConfigError, ModelError
from pgra.models.loading import ModelSource, choose_device

logger = logging.getLogger(__name__)

_LIBRARIES = {"8bit": "torchao", "4bit": "bitsandbytes"}
_4BIT_BLOCK = 64  # weights that share a scale


def first_device(name: str, device_map: str) -> torch.device:
    """Give the device that token ids go to: with a device map, the first of all GPUs.

    Raises:
        ConfigError: If a map is asked for together with one GPU, or in one of several processes.
        ModelError: If there is no such device.
    """
    device = choose_device(name)
    if device_map == "none":
        return device
    count = os.environ.get("WORLD_SIZE", "1")
    if int(count) > 1:
        raise ConfigError(
            f"lm_device_map is '{device_map}' and there are {count} processes: one process spreads "
            "the LM over all GPUs. Start one process, or use --lm_device_map none"
        )
    if ":" in name:
        raise ConfigError(
            f"device '{name}' is one GPU and lm_device_map '{device_map}' takes all of them: use "
            "--device auto, or --lm_device_map none"
        )
    return torch.device("cuda", 0) if device.type == "cuda" else device


def placement(device: torch.device, device_map: str) -> Any:
    """Give `from_pretrained`'s device_map; weights go to their place without a copy elsewhere."""
    # Asked for the CPU, accelerate would still take the GPUs that it sees.
    spreads = device_map != "none" and (device.type == "cuda" or not torch.cuda.is_available())
    return device_map if spreads else {"": device}


def check_placement(model: Any, source: ModelSource, device: torch.device) -> None:
    """Refuse a model that a device map put where it cannot work, or not well.

    Raises:
        ModelError: If a part would be read from disk at each batch, or ids cannot go to `device`.
    """
    places: dict[str, Any] = getattr(model, "hf_device_map", None) or {}
    kinds = [str(place) for place in places.values()]
    if "disk" in kinds:
        raise ModelError(
            f"'{source.name}' does not fit the memory here: {kinds.count('disk')} of its "
            f"{len(kinds)} parts would be read from disk for each batch. Use --lm_quantization, a "
            "smaller LM, or more GPUs"
        )
    if len(set(kinds)) > 1:  # its hooks take ids to where they are needed
        if "cpu" in kinds:
            part = f"{kinds.count('cpu')} of {len(kinds)} parts"
            logger.warning("%s of '%s' stay on the CPU: each batch waits", part, source.name)
        return
    found = model.get_input_embeddings().weight.device
    if found != device:
        raise ModelError(
            f"'{source.name}' was put on {found} and {device} is too full for it: name the GPUs to "
            "use in CUDA_VISIBLE_DEVICES"
        )


def check_quantization(quantization: str, dtype: torch.dtype) -> None:
    """Refuse 8- or 4-bit weights that would not work here; "none" passes.

    Raises:
        ConfigError: If the dtype cannot hold what 8-bit weights give.
        ModelError: If their library cannot be imported.
    """
    if quantization == "none":
        return
    if quantization == "8bit" and dtype == torch.float16:
        # torchao multiplies by the whole numbers up to 127 and scales after that: above 65504 is
        # infinity, and SmolLM2-135M gets there in each sentence.
        raise ConfigError(
            "lm_quantization '8bit' overflows in float16: use --lm_dtype bfloat16 or float32, or "
            "--lm_quantization 4bit"
        )
    library = _LIBRARIES[quantization]
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise ModelError(
            f"lm_quantization '{quantization}' needs {library} ({error}): "
            "pip install 'pgra[int8]', or use --lm_quantization none"
        ) from None


def quantization_kwargs(quantization: str, dtype: torch.dtype) -> dict[str, Any]:
    """Give `from_pretrained`'s arguments for 8-bit, 4-bit or ("none") plain weights.

    Both round weights only, and make them `dtype` again for each product, so that a state depends
    on its own text alone. 8bit gives each row of a matrix a scale; 4bit is NF4 (Dettmers et al.
    2023). LLM.int8 (Dettmers et al. 2022) rounds activations too, by what else is in the batch, and
    loses several times as much of the evidence.
    """
    if quantization == "none":
        return {}
    if quantization == "8bit":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        # Its compiler settings are for the whole process, and nothing is compiled here.
        weights = Int8WeightOnlyConfig(set_inductor_config=False)
        return {"quantization_config": TorchAoConfig(weights)}
    from transformers import BitsAndBytesConfig

    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    return {"quantization_config": config}


def check_8bit(model: Any, source: ModelSource) -> None:
    """Refuse an LM most of whose weights torchao passed over without a word, such as GPT-2.

    Raises:
        ModelError: If less than half of the weights in layers are in 8 bits.
    """
    from torchao.quantization import Int8Tensor

    small, total, kinds = 0, 0, set()
    for layer in model.modules():
        if isinstance(layer, torch.nn.Embedding):  # looked up, and left as they are on purpose
            continue
        for weight in layer.parameters(recurse=False):
            if weight.dim() < 2:
                continue
            total += weight.numel()
            if isinstance(weight, Int8Tensor):
                small += weight.numel()
            else:
                kinds.add(type(layer).__name__)
    if 2 * small < total:
        raise ModelError(
            f"lm_quantization '8bit' leaves {1 - small / total:.0%} of the weights of "
            f"'{source.name}' as they are: torchao does not know its {', '.join(sorted(kinds))} "
            "layers. Use --lm_quantization 4bit or none"
        )


def settle_4bit(model: Any, source: ModelSource) -> None:
    """Let 4-bit layers on a CPU give what they give on a GPU; other models stay as they are.

    Raises:
        ModelError: If bitsandbytes would read a layer's weights wrongly.
    """
    for layer in model.modules():
        # Only 4-bit layers have it: where a CPU has bfloat16 instructions they would compute in
        # bfloat16, whatever dtype was asked for.
        if not hasattr(layer, "support_avx512bf16_for_cpu"):
            continue
        layer.support_avx512bf16_for_cpu = False
        # Its CPU code takes each row to begin a new block, which is so only for such widths.
        if layer.weight.device.type == "cpu" and layer.in_features % _4BIT_BLOCK:
            raise ModelError(
                f"'{source.name}' has a layer of width {layer.in_features}, no multiple of "
                f"{_4BIT_BLOCK}: in 4 bits its weights would be wrong on a CPU. "
                "Use --lm_quantization 8bit or none, or a GPU"
            )
