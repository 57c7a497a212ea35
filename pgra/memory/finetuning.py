"""Fine-tunes a small causal LM to do what clarifications ask for, with transformers' Trainer.

MemPrompt's LM is GPT-3, which follows a clarification by itself (Madaan et al. 2022, section 3). A
small one that does not is taught on other words and other questions than those that are measured.
"""

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.errors import ModelError
from pgra.io import sync_folder
from pgra.memory.lesson_packs import IGNORED, Pack
from pgra.memory.seen import Seen
from pgra.models.loading import ModelSource, load_pretrained, ready_device
from pgra.reader.checkpoints import last_checkpoint
from pgra.reader.trainer import TrainingBar

logger = logging.getLogger(__name__)

LM_FOLDER = "lm"


@dataclass(frozen=True, kw_only=True)
class FinetuneSettings:
    """How an LM is trained.

    Attributes:
        max_steps: Steps of AdamW.
        packs_per_step: Sequences a step.
        learning_rate: The highest; it rises over a twentieth of the steps, then falls to 0.
        frozen_layers: Of the LM's layers the first so many stay as they are, its embeddings too.
        bf16: Whether products are in bfloat16; weights stay float32.
        save_steps: Steps that a stop may lose.
        seed: Of dropout, where the LM has any.
        device: "cpu", or what torch finds.
    """

    max_steps: int
    packs_per_step: int
    learning_rate: float
    frozen_layers: int
    bf16: bool
    save_steps: int
    seed: int
    device: str


class AnswersTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """Learns answers alone, and asks the LM for no other logits."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002  the Trainer's own signature
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Give the mean loss over the answers' tokens of all sequences of a step."""
        labels = inputs["labels"]  # (B, T)
        learned = (labels != IGNORED).any(dim=0).nonzero().squeeze(1)  # (n,), none the first
        outputs = model(input_ids=inputs["input_ids"], logits_to_keep=learned - 1, use_cache=False)
        total = torch.nn.functional.cross_entropy(
            outputs.logits.float().flatten(0, 1),
            labels[:, learned].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total / count
        return (loss, outputs) if return_outputs else loss


def finetune(
    source: ModelSource,
    tokenizer: Any,
    packs: Sequence[Pack],
    *,
    settings: FinetuneSettings,
    seen: Seen,
    folder: Path,
) -> Path:
    """Train an LM and write it, with the record of what it learned with.

    A run that was stopped goes on from its last checkpoint, with the same sequences.

    Args:
        source: The LM.
        tokenizer: Its own, written beside it.
        packs: Sequences, in the order they are learned; as many as the steps take.
        settings: How.
        seen: What the sequences are made of.
        folder: Of the run; the LM goes to `lm` in it.

    Returns:
        The LM's folder, which --lm takes.

    Raises:
        ModelError: If the LM cannot be loaded, or its layers are not found.
    """
    model = load_pretrained(AutoModelForCausalLM.from_pretrained, source, dtype=torch.float32)
    freeze_layers(model, settings.frozen_layers)
    bar = TrainingBar("finetune")
    trainer = AnswersTrainer(
        model=model,
        args=_arguments(folder, settings),
        train_dataset=_InOrder(packs),
        data_collator=collate,
        callbacks=[bar],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(folder, processes=1)
    if checkpoint is not None:
        logger.info("going on from %s", checkpoint)
    try:
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
    _save(model, tokenizer, seen, folder / LM_FOLDER)
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(path)
    return folder / LM_FOLDER


class _InOrder(torch.utils.data.Dataset[Mapping[str, list[int]]]):
    def __init__(self, packs: Sequence[Pack]) -> None:
        self._packs = packs

    def __len__(self) -> int:
        return len(self._packs)

    def __getitem__(self, place: int) -> Mapping[str, list[int]]:
        pack = self._packs[place]
        return {"input_ids": pack.input_ids, "labels": pack.labels}


def collate(packs: Sequence[Mapping[str, list[int]]]) -> dict[str, Tensor]:
    """Lay sequences side by side; what fills a shorter one stands behind it, and is not learned.

    Returns:
        input_ids and labels, (B, T) int64 each. There is no mask: nothing reads what comes later.
    """
    longest = max(len(pack["input_ids"]) for pack in packs)
    filled = {
        name: [[*pack[name], *[fill] * (longest - len(pack[name]))] for pack in packs]
        for name, fill in (("input_ids", 0), ("labels", IGNORED))
    }
    return {name: torch.tensor(rows, dtype=torch.long) for name, rows in filled.items()}


def freeze_layers(model: Any, count: int) -> None:
    """Keep an LM's embeddings and first layers as they are, and nothing of them is differentiated.

    Args:
        model: A causal LM.
        count: Of its layers, fewer than it has; 0 trains everything, embeddings too.

    Raises:
        ModelError: If its layers do not stand in one list.
    """
    if not count:
        return
    layers = next(_stacks(model), None)
    if layers is None:
        raise ModelError("the LM's layers do not stand in one list: leave --frozen_layers out")
    for part in (model.get_input_embeddings(), model.get_output_embeddings(), *layers[:count]):
        part.requires_grad_(False)


def _stacks(model: Any) -> Iterator[Any]:
    depth = model.config.num_hidden_layers
    return (
        part
        for part in model.modules()
        if isinstance(part, torch.nn.ModuleList) and len(part) == depth
    )


def _arguments(folder: Path, settings: FinetuneSettings) -> TrainingArguments:
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.max_steps,
        per_device_train_batch_size=1,  # sequences are full: more at once bring nothing on a CPU
        gradient_accumulation_steps=settings.packs_per_step,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=max(1, settings.max_steps // 20),
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=settings.bf16,
        logging_steps=10,
        save_strategy="steps",
        save_steps=settings.save_steps,
        save_total_limit=1,
        seed=settings.seed,
        report_to=["none"],
        remove_unused_columns=False,
        disable_tqdm=True,  # for ours
        train_sampling_strategy="sequential",
        use_cpu=settings.device == "cpu" or not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    ready_device(arguments.device)
    return arguments


def _save(model: Any, tokenizer: Any, seen: Seen, folder: Path) -> None:
    """Write an LM's folder aside and rename it."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a run that was killed here
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    seen.write(aside)
    aside.rename(folder)
    sync_folder(folder.parent)
