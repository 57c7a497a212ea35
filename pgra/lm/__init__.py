"""A causal LM: in this process, in an engine, at an endpoint, or of a user's own class.

Light: nothing heavy is imported until an LM is opened, and an endpoint needs no torch.
"""

from typing import TYPE_CHECKING, Any

from pgra.config import find_class
from pgra.context import Context
from pgra.errors import ConfigError
from pgra.lm.base import CompleterArguments, LanguageModel, LMArguments, StateArguments
from pgra.lm.names import find_entry

if TYPE_CHECKING:
    from pgra.lm.state_lm import StateLM


def open_lm(args: CompleterArguments, context: Context) -> LanguageModel:
    """Open an LM by its name; answers are stored in `context.artifacts / "answers"` and reused.

    Several processes share the prompts, each with its own LM.

    Raises:
        ConfigError: If an endpoint's address or key is invalid, its client is not installed,
            several processes would ask it, or a class of that name cannot be used.
        ModelError: If an LM or tokenizer cannot be found or loaded.
    """
    args.check_named()
    from pgra.lm.cache import AnswersCache, CachedLM

    answers = AnswersCache(context.artifacts / "answers")
    if not args.is_remote:
        lm = _find(args, find_entry(args.lm).answers)._open(args, context.device)
        return CachedLM(lm, answers, context, window=args.lm_window)
    if context.worker.world > 1:
        raise ConfigError(
            f"--lm {args.lm} is at an endpoint: start one process, with --max_parallel_calls"
        )
    from pgra.lm.endpoint import EndpointLM

    return EndpointLM(args, answers)


def open_state_lm(args: LMArguments, *, device: str) -> "StateLM":
    """Open an LM that gives states and scores, by its name.

    Raises:
        ConfigError: If it gives none, or its class or engine cannot be used.
        ModelError: If it cannot be found or loaded.
    """
    return _find(args, find_entry(args.lm).states)._open(args, device)


def as_state_lm(
    lm: Any,
    tokenizer: Any = None,
    *,
    device: str = "auto",
    dtype: str = "auto",
    layer: str = "last",
) -> "StateLM":
    """Return the LM of a name or folder, a loaded one of transformers, or a `StateLM` as it is.

    Of an engine `tokenizer` is the name of its LM's. Raises as `open_state_lm` and `CausalLM`.
    """
    from pgra.lm.state_lm import StateLM

    if isinstance(lm, StateLM):
        if (tokenizer, layer, device, dtype) != (None, "last", "auto", "auto"):
            raise ConfigError("the LM is open already: give layer, device and dtype to it")
        return lm
    if isinstance(lm, str):
        args = StateArguments(lm=lm, lm_layer=layer, lm_tokenizer=tokenizer, lm_dtype=dtype)
        return open_state_lm(args, device=device)
    from pgra.lm.causal_lm import CausalLM

    return CausalLM(lm, tokenizer, device=device, dtype=dtype, layer=layer)


def _find(args: LMArguments, path: str | None) -> "type[StateLM]":
    if path is None:
        raise ConfigError(
            f"--lm {args.lm} answers prompts alone: give http://HOST:PORT for states, or let it "
            "decide with pgra icl"
        )
    from pgra.lm.state_lm import StateLM

    kind: type[StateLM] = find_class(
        "lm", args.lm, {} if path == args.lm else {args.lm: path}, StateLM
    )
    return kind
