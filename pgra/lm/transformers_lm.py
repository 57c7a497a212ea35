"""A causal LM of transformers: its files, its weights, and states of one batch."""

import copy
import gc
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from pgra.arrays import Vectors
from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.base import LMArguments, Prompts
from pgra.lm.batching import BackOff, pad, send
from pgra.lm.kernels import tolerance
from pgra.lm.state_lm import StateLM
from pgra.types import Fields

NO_LIMIT = 1 << 20


class TransformersLM(StateLM):
    """A decoder-only LM whose weights are loaded when they are first needed.

    Attributes:
        args: How it is run: its name, dtype, device map, batch size.
        source: Where it came from.
        config: The base model's configuration.
        device: With a device map, where token ids go and states come out.
        dtype: Of weights and states.
        layer: The layer that states are of, where the LM ends; None is the last.
        window: Most tokens of prompt and answer together.
        way: How a prefix is shared, of `pgra.lm.prefix.WAYS` or "none"; None until they have been
            compared, with the first prompts.
        busy: Held by the thread that uses the LM.
    """

    def __init__(
        self,
        lm: Any,
        tokenizer: Any = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        device_map: str = "none",
        layer: str = "last",
        batch_tokens: int = LMArguments.lm_batch_tokens,
    ) -> None:
        """Find an LM and load its tokenizer; no weights yet.

        Args:
            lm: Hub id, folder or `bundled:NAME`; or a loaded model of transformers, which is
                neither copied nor changed.
            tokenizer: That of a loaded model.
            device: Where it runs; a loaded model stays where it is.
            dtype: As `--lm_dtype`.
            device_map: As `--lm_device_map`.
            layer: "last"; or the number of the layer that it ends with (from 1), or a share of the
                depth. A state is then that layer's output after the LM's own final norm (and
                OPT-350m's projection).
            batch_tokens: As `--lm_batch_tokens`.

        Raises:
            ConfigError: If an option would change a loaded model, or there is no such layer.
            ModelError: If it cannot be found, or is an encoder-decoder.
            ValueError: If `lm` is none of these, or a loaded model has no tokenizer.
        """
        self.way: str | None = None
        self._reads_layers = False
        self._loaded: Any = None if isinstance(lm, str | Path) else lm
        name = str(lm)
        if self._loaded is not None:
            load.check_loaded(lm, tokenizer, "an LM")
            name = lm.name_or_path or type(lm).__name__
        args = LMArguments(
            lm=name, lm_dtype=dtype, lm_device_map=device_map, lm_batch_tokens=batch_tokens
        )
        super().__init__(args)
        if self._loaded is None:
            self.device = load.choose_device(device)
            self.source = load.find_model(name)
            self.config = load.load_config(self.source)
            self.dtype = load.choose_dtype(dtype, self.device, self.config)
        else:
            self.device = lm.device
            self.dtype = lm.dtype
            self.source = load.loaded_source(lm, name)
            self.config = copy.deepcopy(lm.config)
            self._check_unchanged(device, layer)
        if getattr(self.config, "is_encoder_decoder", False):
            raise ModelError(
                f"'{name}' is an encoder-decoder, not a causal LM: give a GPT, Llama, ..."
            )
        self._depth = int(self.config.num_hidden_layers)
        self.layer = load.cut_layers(self.config, layer, name)
        if tokenizer is None:
            tokenizer = load.load_tokenizer(self.source, self.config)
        else:
            load.check_tokens(tokenizer, self.config, self.source.name)
        self.tokenizer = tokenizer
        limit = getattr(self.config, "max_position_embeddings", None)
        self.window = int(limit or min(tokenizer.model_max_length, NO_LIMIT))

    @classmethod
    def _open(cls, args: LMArguments, device: str) -> Self:
        return cls(
            args.lm,
            device=device,
            dtype=args.lm_dtype,
            device_map=args.lm_device_map,
            layer=getattr(args, "lm_layer", "last"),
            batch_tokens=args.lm_batch_tokens,
        )

    def _check_unchanged(self, device: str, layer: str) -> None:
        """Refuse what would change a loaded LM, and its dropout."""
        wanted = self.device if device == "auto" else load.choose_device(device)
        is_same = (
            self.args.lm_dtype in ("auto", load.dtype_name(self.dtype))
            and self.args.lm_device_map == "none"
            and layer == "last"
            and wanted.type == self.device.type
        )
        if self._loaded.training or not is_same:
            raise ConfigError(
                f"a loaded LM is used as it is ({self.dtype}, on {self.device}, in evaluation "
                "mode): load it so (and call its eval()), or give its name"
            )

    def release(self) -> None:
        """Free the weights until they are needed again; a given loaded model stays its owner's."""
        for name in ("model", "whole", "head", "reader"):
            vars(self).pop(name, None)
        gc.collect()  # a model's parts know each other
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def back_off(self, most_tokens: int) -> BackOff:
        """Return what halves batches of up to so many tokens where memory runs out."""
        advice = f"{self.device} with '{self.source.name}': use a smaller LM or --lm_dtype"
        return BackOff(most_tokens, advice)

    @cached_property
    def model(self) -> Any:
        """The base model, loaded on first use, in evaluation mode.

        Its head is loaded with it only where words were scored or written before, or several
        layers are read, beside whose states the head's opinion stands.

        Raises:
            ModelError: If it cannot be loaded, does not fit, or is not causal.
        """
        if "whole" in vars(self) or (self._reads_layers and self._loaded is None):
            model = self.whole.base_model
        elif self._loaded is not None:
            model = self._loaded.base_model
        else:
            from transformers import AutoModel

            model = self._load(AutoModel)
        self._check_causal(model)
        return model

    @cached_property
    def whole(self) -> Any:
        """The base model with the head around it; raises as `model`."""
        if self._loaded is None:
            from transformers import AutoModelForCausalLM

            vars(self).pop("model", None)  # loaded without its head
            return self._load(AutoModelForCausalLM)
        if self._loaded.get_output_embeddings() is None:
            raise ModelError(
                f"'{self.source.name}' is loaded without its head: it cannot write words. Load "
                "it by AutoModelForCausalLM"
            )
        return self._loaded

    def _load(self, kind: Any) -> Any:
        spread = self.args.lm_device_map
        model = load.load_pretrained(
            kind.from_pretrained,
            self.source,
            config=self.config,
            dtype=self.dtype,
            device_map={"": self.device} if spread == "none" else spread,
        )
        # Or a GPT-2 without a mask looks for padding in each batch, and waits for a GPU's answer.
        model.base_model.config.pad_token_id = None
        return model.eval().requires_grad_(False)

    @cached_property
    def head(self) -> torch.nn.Linear | None:
        """The layer that turns states into logits, (V, H).

        None where the LM does more to its logits, such as to cap or scale them.
        """
        layer: torch.nn.Linear = self.whole.get_output_embeddings()
        ids = self.tokenize(["The answer is"])[0]
        with torch.inference_mode():
            truth = self.whole(input_ids=torch.tensor([ids], device=self.device)).logits[0, -1]
            logits = head_logits(layer, self.states_of([ids]))[0].to(truth.device)
        slack = tolerance(self.dtype) * float(truth.float().abs().max())
        return layer if torch.allclose(logits, truth.float(), rtol=0, atol=slack) else None

    @property
    def fingerprint(self) -> Fields:
        """All that states and answers depend on, besides the prompt."""
        fields = dict(load.model_fields(self.source, self.dtype))
        return fields if self.layer is None else {**fields, "lm_layer": self.layer}

    def layers_at(self, depths: Sequence[float]) -> list[int]:
        """Return the layers, rising, at shares of the depth, but for the last and later ones."""
        self._reads_layers |= len(depths) > 0
        last = self.layer or self._depth
        layers = {max(1, math.floor(self._depth * depth + 0.5)) for depth in depths}
        return sorted(layer for layer in layers if layer < last)

    def word_rows(self, words: Prompts) -> Vectors | None:
        """Return what gives each word's mean logit over its tokens for a state, (C, H + 1).

        The last column is added. None where the LM has no head.
        """
        if self._loaded is not None and self._loaded.get_output_embeddings() is None:
            return None
        head = self.whole.get_output_embeddings()
        rows = []
        for word in words:
            weights = head.weight[list(word)].float()
            bias = torch.zeros(len(word), 1) if head.bias is None else head.bias[list(word), None]
            rows.append(torch.cat([weights.cpu(), bias.float().cpu()], dim=1).mean(dim=0))
        return torch.stack(rows).detach().numpy()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments that would open an LM like this one."""
        layer = "last" if self.layer is None else str(self.layer)
        return {**super().arguments(), "lm_layer": layer}

    @torch.inference_mode()
    def forward(self, ids: Tensor, positions: Tensor, **inputs: Any) -> Any:
        """Run tokens (R, T), which are on the host; return the model's output."""
        # The model is loaded first: weights that do not fit are refused before all else.
        return self.model(
            input_ids=send(ids, self.device),
            position_ids=send(positions, self.device),
            **inputs,
        )

    @torch.inference_mode()
    def read(
        self, ids: Tensor, positions: Tensor, ends: Tensor, layers: Sequence[int], **inputs: Any
    ) -> Tensor:
        """Run tokens (R, T), on the host; return the states at some of the R * T `ends`, (n, W).

        Before the last state stand those of `layers`, each of mean 0 and variance 1 over its
        columns: what the LM's final norm does, but for factors that a head learns anyway.
        """
        output = self.forward(ids, positions, output_hidden_states=len(layers) > 0, **inputs)
        last = output.last_hidden_state
        ends = send(ends, last.device)
        blocks = []
        for layer in layers:
            states = states_at(output.hidden_states[layer], ends).float()
            normed = torch.nn.functional.layer_norm(states, states.shape[1:])
            blocks.append(normed.to(device=last.device, dtype=last.dtype))
        return torch.cat([*blocks, states_at(last, ends)], dim=1)

    @torch.inference_mode()
    def states_of(self, batch: Prompts, layers: Sequence[int] = ()) -> Tensor:
        """Return the state at each input's last token, (n, H) in the LM's dtype, on its device.

        A state is the output of `layer` after the final norm. Inputs are token ids, none empty.
        With `layers` it is (n, W), as of `read`.
        """
        ids, mask = pad(batch)
        # Right padding and causality keep real tokens from the padding; positions must be given,
        # for OPT and GPT-2 count them in other ways when they are not.
        positions = torch.arange(ids.shape[1]).repeat(len(ids), 1)
        ends = torch.arange(len(ids)) * ids.shape[1] + mask.sum(1) - 1
        with self.busy:
            mask = send(mask.long(), self.device)
            return self.read(ids, positions, ends, layers, attention_mask=mask, use_cache=False)

    def _check_causal(self, model: Any) -> None:
        ids = torch.tensor([self.tokenize(["The answer is a question of time"])[0]])
        with torch.inference_mode():
            followed = model(input_ids=ids.to(self.device)).last_hidden_state[0, -2]
            alone = model(input_ids=ids[:, :-1].to(self.device)).last_hidden_state[0, -1]
        if not (torch.isfinite(alone).all() and torch.isfinite(followed).all()):
            raise self.not_finite("even for plain English")
        slack = max(1e-3, tolerance(self.dtype)) * float(alone.abs().max())
        if not torch.allclose(alone, followed, rtol=0, atol=slack):
            raise ModelError(
                f"'{self.source.name}' is not a causal LM: a later token changes an earlier state. "
                "Give a GPT, OPT, Llama, Qwen, ..."
            )


def states_at(hidden: Tensor, ends: Tensor) -> Tensor:
    """Return the states, (n, H), at some of the R * T positions of `hidden`, (R, T, H)."""
    return hidden.reshape(-1, hidden.shape[-1])[ends.to(hidden.device)]


def head_logits(head: torch.nn.Linear, states: Tensor) -> Tensor:
    """Return the logits (..., V) of states (..., H), in float32: half precision is too coarse."""
    states = states.to(head.weight.device).float()
    if head.weight.dtype is torch.float32:
        logits: Tensor = head(states)  # it may hold a packed copy
        return logits
    bias = None if head.bias is None else head.bias.float()
    return torch.nn.functional.linear(states, head.weight.float(), bias)
