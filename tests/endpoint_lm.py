"""Lets an endpoint on loopback write by an LM, as servers do: `generate`, and all chances."""

import threading

import torch
from loopback_endpoint import Writer, Written

from pgra.lm.causal_lm import CausalLM


def lm_writer(lm: CausalLM) -> Writer:
    """Write greedily by the library's own `generate`, one prompt at a time, like a server."""
    turn = threading.Lock()

    @torch.inference_mode()
    def write(prompt: str, max_tokens: int, stop: str | None) -> Written:
        ids = [*lm.lead_ids, *lm.tokenize([prompt])[0]]
        with turn:
            if max_tokens == 1:
                return _with_chances(lm, ids)
            given = torch.tensor([ids])
            whole = lm.whole.generate(
                given,
                attention_mask=torch.ones_like(given),
                max_new_tokens=max_tokens,
                do_sample=False,
                pad_token_id=0,
            )[0]
        new = whole[len(ids) :]
        text = lm.tokenizer.decode(new, skip_special_tokens=True)
        return Written(text.split(stop)[0] if stop else text, len(ids), len(new))

    return write


def _with_chances(lm: CausalLM, ids: list[int]) -> Written:
    """Write one token, and give the chances of all."""
    logits = lm.whole(torch.tensor([ids])).logits[0].float()
    whole = torch.tensor([*ids, int(logits[-1].argmax())])
    chances = logits.log_softmax(-1).gather(-1, whole[1:, None])[:, 0].tolist()
    tokens = tuple(lm.tokenizer.decode([token]) for token in whole.tolist())
    return Written(tokens[-1], len(ids), 1, tokens, (None, *chances))
