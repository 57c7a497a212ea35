"""Prompts read one at a time by stock calls: as truth, and for LMs that read none side by side.

Such are those that keep something else than a key and a value for each token (Mamba and its kin).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pgra.models.causal_lm import CausalLM


@torch.inference_mode()
def next_logits(lm: CausalLM, ids: Sequence[int]) -> Tensor:
    """Give what follows each of a text's tokens, (L, V) float32, without a cache."""
    whole = torch.tensor([list(ids)], device=lm.device)
    logits: Tensor = lm.whole(input_ids=whole, use_cache=False).logits
    return logits[0].float()


def chance_alone(lm: CausalLM, ids: Sequence[int], word: Sequence[int]) -> float:
    """Give the log-probability of a word's tokens behind a prompt."""
    logits = next_logits(lm, [*ids, *word[:-1]])[-len(word) :]
    chances = logits.log_softmax(dim=1).cpu()
    return sum(float(chances[place, token]) for place, token in enumerate(word))


def write_alone(
    lm: CausalLM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    is_done: Callable[[Sequence[int]], bool],
    advance: Callable[[int], object] = int,
) -> list[list[int]]:
    """Write the likeliest tokens behind each prompt; see `GreedyDecoder.write`.

    With the cache of the LM's own kind, which `generate` knows how to use.
    """
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    class Stop(StoppingCriteria):  # type: ignore[misc]
        def __init__(self, start: int) -> None:
            self.start = start

        def __call__(self, input_ids: Tensor, *_: object, **__: object) -> Tensor:
            is_over = is_done(input_ids[0, self.start :].tolist())
            return torch.tensor([is_over], device=input_ids.device)

    config = GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=False,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        pad_token_id=0,
    )
    written = []
    for ids in prompts:
        whole = torch.tensor([list(ids)], device=lm.device)
        with torch.inference_mode():
            out = lm.whole.generate(
                input_ids=whole,
                attention_mask=torch.ones_like(whole),
                generation_config=config,
                stopping_criteria=StoppingCriteriaList([Stop(len(ids))]),
            )
        written.append(out[0, len(ids) :].tolist())
        advance(1)
    return written
