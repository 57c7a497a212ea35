"""An LM under a task's prompt, and the bank of its states of queries."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from pgra.artifacts import artifact_dir
from pgra.config import RerankArguments
from pgra.core import Context, Example, Json, Rows
from pgra.lm.causal_lm import CausalLM
from pgra.lm.prefix import PromptedEncoder, Prompts
from pgra.prompts.fewshot import FewShotPrompt
from pgra.rerank.bank import Bank, query_key


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


def open_query_bank(
    encoder: PromptedEncoder,
    context: Context,
    name: str,
    made_of: Mapping[str, Json] = MappingProxyType({}),
) -> Bank:
    """Open the bank of an LM's states of queries, whatever the corpus.

    Args:
        encoder: Gives the states.
        context: Where banks are kept.
        name: How the folders of the LM's banks begin.
        made_of: What else a query's prompt depends on, besides its fields.

    Raises:
        ArtifactError: If it is damaged.
    """
    fields = {**encoder.fingerprint, **made_of, "bank_dtype": "auto"}
    return Bank(artifact_dir(context.artifacts / "banks", f"{name}-queries", fields), fields)


def fill_queries(
    bank: Bank,
    encoder: PromptedEncoder,
    examples: Sequence[Example],
    context: Context,
    *,
    shard_rows: int,
    tokenize: Callable[[Sequence[Example]], Prompts] | None = None,
) -> int:
    """Let the LM read the queries that it has not read yet.

    Args:
        bank: As `open_query_bank` returns it.
        encoder: Gives the states.
        examples: The queries; equal ones are read once.
        context: Who shares the work.
        shard_rows: Texts in one shard.
        tokenize: Writes the queries' prompts; None has the encoder's prefix before each.

    Returns:
        How many were read.
    """
    by_key = {query_key(example): example for example in examples}

    def read(keys: Rows) -> Prompts:
        requested = [by_key[int(key)] for key in keys]
        if tokenize is None:
            return encoder.tokenize([example.fields for example in requested])
        return tokenize(requested)

    return bank.fill(
        np.array(list(by_key), np.int64),
        read,
        lambda prompts, advance: encoder.encode_prompts(prompts, advance=advance),
        shard_rows=shard_rows,
        context=context,
        title="LM reads queries",
    )
