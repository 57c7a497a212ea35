"""Fusion-in-Decoder as it is usually written, and what a reader reads.

Each segment is padded to 128 tokens, the encoder's outputs are put side by side with their
padding; `torch.optim.AdamW`, autocast for bfloat16; labels by `generate`.
"""

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from measuring import Cost, measured, wait_for
from safetensors.torch import load_model
from subjects import open_plain, open_reader
from transformers.modeling_outputs import BaseModelOutput

from pgra.prompts import Verbalizer
from pgra.types import Example

PADDED = 128  # the released text_maxlength


@dataclass(frozen=True)
class Reading:
    """What is read: labelled queries, with their evidence, best first.

    Attributes:
        metric: The task's.
        labels: The task's.
        template: How the reader sees a query.
        words: The word of each label.
        examples: The queries.
        evidence: Texts of the most evidence asked for, by example.
    """

    metric: str
    labels: Sequence[str]
    template: str
    words: dict[str, str]
    examples: Sequence[Example]
    evidence: list[list[str]]

    @property
    def verbalizer(self) -> Verbalizer:
        """Give the reader's words."""
        return Verbalizer(self.words, self.template)

    def first(self, count: int) -> "Reading":
        """Keep the first examples."""
        return replace(self, examples=self.examples[:count], evidence=self.evidence[:count])

    def whole_segments(self, depth: int) -> list[list[str]]:
        """Write each example's segments out."""
        return [
            [f"{self.template.format_map(e.fields)} {text}" for text in texts[:depth]]
            for e, texts in zip(self.examples, self.evidence, strict=True)
        ]


def batches(args: argparse.Namespace, count: int) -> Iterator[list[int]]:
    """Give the examples of each training step, the first included: both ways' are as many."""
    places = itertools.cycle(range(count))
    for _ in range(args.steps + 1):
        yield list(itertools.islice(places, args.batch_size))


def open_usual(args: argparse.Namespace) -> tuple[Any, Any]:
    """Open the T5 as usual code has it, without what `FusionReader` changes, and its tokenizer."""
    _, tokenizer = open_reader(args.model, device=torch.device("cpu"))
    return open_plain(args.model, device=args.device), tokenizer


def read_usual(t5: Any, tokenizer: Any, segments: Sequence[Sequence[str]]) -> Any:
    """Encode segments padded to 128 tokens, and put the outputs side by side."""
    flat = list(itertools.chain.from_iterable(segments))
    tokens = tokenizer(
        flat, padding="max_length", truncation=True, max_length=PADDED, return_tensors="pt"
    ).to(t5.device)
    hidden = t5.get_encoder()(
        input_ids=tokens.input_ids, attention_mask=tokens.attention_mask
    ).last_hidden_state
    fused = hidden.view(len(segments), -1, hidden.shape[-1])
    mask = tokens.attention_mask.view(len(segments), -1)
    return {"encoder_outputs": BaseModelOutput(last_hidden_state=fused), "attention_mask": mask}


def train_usual(reading: Reading, depth: int, args: argparse.Namespace) -> Cost:
    """Train as usual: a loop over padded batches."""
    t5, tokenizer = open_usual(args)
    segments = reading.whole_segments(depth)
    t5.train()
    optimizer = torch.optim.AdamW(t5.parameters(), lr=args.learning_rate, weight_decay=0.01)
    targets = [reading.verbalizer.target_text(str(e.label)) for e in reading.examples]
    steps = batches(args, len(segments))

    def step(places: list[int]) -> None:
        labels = tokenizer(
            [targets[i] for i in places], padding=True, return_tensors="pt"
        ).input_ids
        labels[labels == tokenizer.pad_token_id] = -100
        with torch.autocast(t5.device.type, torch.bfloat16, enabled=args.bf16):
            read = read_usual(t5, tokenizer, [segments[i] for i in places])
            loss = t5(**read, labels=labels.to(t5.device), use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(t5.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    with measured(args.device) as cost:
        step(next(steps))
        wait_for(args.device)
        begun = time.perf_counter()
        for places in steps:
            step(places)
        wait_for(args.device)
        seconds = time.perf_counter() - begun
    return replace(cost, seconds=seconds)


@torch.inference_mode()
def decide_usual(
    reading: Reading, depth: int, args: argparse.Namespace, weights: Path
) -> tuple[Cost, list[str | None]]:
    """Decide as usual: generate the word, and look whose it is."""
    t5, tokenizer = open_usual(args)
    load_model(t5, weights)
    verbalizer = reading.verbalizer
    longest = max(len(ids) for ids in verbalizer.target_ids(tokenizer))
    segments = reading.whole_segments(depth)[: args.num_examples]

    def decide(start: int) -> list[str | None]:
        read = read_usual(t5, tokenizer, segments[start : start + args.batch_size])
        written = t5.generate(**read, max_new_tokens=longest, do_sample=False)
        texts = tokenizer.batch_decode(written, skip_special_tokens=True)
        return [verbalizer.label_of_word(text) for text in texts]

    decide(0)
    with measured(args.device) as cost:
        parts = [decide(start) for start in range(0, len(segments), args.batch_size)]
    return cost, list(itertools.chain.from_iterable(parts))
