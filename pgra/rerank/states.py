"""An LM under a task's prompt, and what the folders of its banks are called."""

from pgra.config import RerankArguments
from pgra.core import Context
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt


def open_prompted_encoder(
    args: RerankArguments, prompt: FewShotPrompt, context: Context, *, with_head: bool = False
) -> PromptedEncoder:
    """Open an LM under a prompt; its weights are loaded when they are first needed.

    Args:
        args: Which LM.
        prompt: The task's prompt.
        context: Where it runs.
        with_head: Whether it shall write words too.

    Raises:
        ConfigError: If the prompt leaves no room for a text.
        ModelError: If the LM cannot be used.
    """
    lm = CausalLM.open(args, context.device, with_head=with_head)
    return PromptedEncoder(
        lm,
        prompt,
        sharing=args.prefix_sharing,
        batch_tokens=args.lm_batch_tokens,
        max_prompt_tokens=args.max_prompt_tokens,
    )


def bank_name(model: str) -> str:
    """Return how the folders of a model's banks begin."""
    return model.removeprefix("bundled:").rstrip("/").split("/")[-1]
