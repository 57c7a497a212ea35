"""A causal LM, in this process or at an endpoint.

Light: nothing heavy is imported until an LM is opened, and an endpoint needs no torch.
"""

from pgra.context import Context
from pgra.errors import ConfigError
from pgra.lm.base import CompleterArguments, LanguageModel


def open_lm(args: CompleterArguments, context: Context) -> LanguageModel:
    """Open an LM by its name; its answers are kept in `context.artifacts / "answers"` and reused.

    Several processes share the prompts, each with its own LM.

    Raises:
        ConfigError: If an endpoint's address or key is invalid, its client is not installed, or
            several processes would ask it.
        ModelError: If an LM or tokenizer cannot be found or loaded.
    """
    args.check_named()
    from pgra.lm.cache import AnswersCache, CachedLM

    answers = AnswersCache(context.artifacts / "answers")
    if not args.is_remote:
        from pgra.lm.generate import LocalLM

        lm = LocalLM(args, device=context.device)
        lm.window = min(args.lm_window or lm.window, lm.window)
        return CachedLM(lm, answers, context)
    if context.worker.world > 1:
        raise ConfigError(
            f"--lm {args.lm} is at an endpoint: start one process, with --max_parallel_calls"
        )
    from pgra.lm.remote import RemoteLM

    return RemoteLM(args, answers)
