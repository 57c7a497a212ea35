"""A causal LM, in this process or at an endpoint.

Light: nothing heavy is imported until an LM is opened, and an endpoint needs no torch.
"""

from pgra.core import Context
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
        if args.lm_window is not None and args.lm_window > lm.window:
            raise ConfigError(
                f"lm_window is {args.lm_window}, and '{args.lm}' reads {lm.window} tokens: give "
                "less, or leave it out"
            )
        lm.window = args.lm_window or lm.window
        return CachedLM(lm, answers, context)
    if context.worker.world > 1:
        raise ConfigError(
            f"--lm {args.lm} is at an endpoint, which one process asks, and there are "
            f"{context.worker.world}: start it alone; --max_parallel_calls says how many calls "
            "are under way"
        )
    from pgra.lm.remote import RemoteLM

    return RemoteLM(args, answers)
