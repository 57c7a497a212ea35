"""What trains readers trains any model that has a loss: here causal LMs, whole and by adapters."""

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import accuracy, at_batch, make_arguments, make_inputs, signal_self, tokens
from transformers import AutoModelForCausalLM

from pgra.config import ReaderArguments
from pgra.core import Context
from pgra.errors import Stopped
from pgra.lm.load import find_model, load_tokenizer
from pgra.reader.module import ReaderModule
from pgra.reader.train import read_losses, train_reader

KINDS = ["gpt2", "llama"]


class CausalModule(ReaderModule):
    def forward(self, input_ids, labels, num_items_in_batch=None):
        output = self.model(input_ids=input_ids, labels=labels)
        if num_items_in_batch is not None:
            output.loss = output.loss * ((labels[:, 1:] != -100).sum() / num_items_in_batch)
        return output


def collate(rows):
    """Each row is its own prompt and target: as long as the shortest allows, for the test."""
    lines = [np.concatenate([row.segments[0], row.target]) % 60 for row in rows]
    ids = torch.tensor(np.stack([line[: min(map(len, lines))] for line in lines])).long()
    return {"input_ids": ids, "labels": ids.clone()}


@dataclass
class CausalClassifier:
    module: CausalModule
    tokenizer: Any
    labels: tuple[str, ...] = ("negative", "positive")

    def collator(self, device):
        return collate

    def score(self, inputs, context: Context):
        self.module.eval()
        with torch.inference_mode():
            losses = [float(self.module(**collate([row])).loss) for row in inputs]
        return np.array([[loss, -loss] for loss in losses], dtype=np.float32)

    def save(self, folder: Path):
        self.module.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)


@pytest.fixture(params=KINDS)
def lm_dir(request, lm_dirs):
    return lm_dirs[request.param]


@pytest.fixture
def rows(t5_dir):
    return tokens(t5_dir, make_inputs(18))


def classifier(lm_dir, rank=None):
    module = CausalModule(AutoModelForCausalLM.from_pretrained(lm_dir, dtype=torch.float32))
    if rank is not None:
        module.add_adapters(ReaderArguments(lora_rank=rank), seed=1)
    return CausalClassifier(module, load_tokenizer(find_model(str(lm_dir))))


@pytest.mark.parametrize("rank", [None, 2])
def test_a_stopped_lm_goes_on_to_the_same_bytes(lm_dir, rows, t5_dir, tmp_path, rank):
    dev = tokens(t5_dir, make_inputs(7, name="dev"))

    def run(folder):
        return train_reader(
            classifier(lm_dir, rank),
            rows,
            dev,
            measure=accuracy,
            metric="accuracy",
            arguments=make_arguments(folder),
        )

    whole, broken = tmp_path / "whole", tmp_path / "broken"
    result = run(whole)
    assert (result.steps, result.folder) == (6, whole / "reader")
    right = sum(label == "negative" for label in dev.labels)  # a loss is above its negative
    assert result.best_metric == right / 7
    with (
        at_batch(4, signal_self(signal.SIGTERM), kind=CausalModule),
        pytest.raises(Stopped, match="after step 4 of 6"),
    ):
        run(broken)
    assert not (broken / "reader").exists()
    run(broken)
    for name in ("losses.jsonl", "reader/model.safetensors"):
        assert (broken / name).read_bytes() == (whole / name).read_bytes()
    losses = [record.loss for record in read_losses(whole / "losses.jsonl", 9)]
    assert len(losses) == 6
    plain = AutoModelForCausalLM.from_pretrained(whole / "reader")
    start = AutoModelForCausalLM.from_pretrained(lm_dir)
    changed = [
        name
        for name, weight in plain.state_dict().items()
        if not torch.equal(weight, start.state_dict()[name])
    ]
    assert changed
    assert not any("lora" in name for name in changed)
    assert (len(changed) < len(start.state_dict()) / 2) == (rank is not None)
