"""Trains GUD-IR's generator: questions to the feedback they got (Madaan et al. 2022, App. A.3)."""

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from pgra.checks import argument as _arg
from pgra.checks import at_least
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.io import digest, sync_folder, write_json
from pgra.memory.generator import MAX_FEEDBACK_TOKENS, MAX_QUESTION_TOKENS, plain_input
from pgra.memory.pairs import Pair
from pgra.models.loading import choose_device, find_model, load_pretrained, load_tokenizer
from pgra.reader.checkpoints import last_checkpoint
from pgra.reader.trainer import TrainingBar

ABOUT_FILE = "trained_on.json"
"""In the folder of a trained model: what it was trained on, and how."""


@dataclass(kw_only=True)
class GeneratorArguments:
    """How the generator is trained."""

    model: str = _arg("google-t5/t5-small", "Seq2seq model to start from: hub id, folder, bundled.")
    num_train_epochs: int = _arg(20, "How often each pair is seen.")
    per_device_train_batch_size: int = _arg(16, "Pairs a step.")
    learning_rate: float = _arg(1e-3, "Adafactor's, constant, as T5's authors fine-tune.")
    save_steps: int = _arg(200, "Steps between checkpoints that a killed training goes on from.")
    seed: int = _arg(0, "Of the order of the pairs, and of dropout.")

    def __post_init__(self) -> None:
        """Refuse what cannot train."""
        for name in ("num_train_epochs", "per_device_train_batch_size", "save_steps"):
            at_least(name, getattr(self, name), 1)
        if not self.learning_rate > 0:
            raise ConfigError(f"learning_rate is {self.learning_rate:g}: it must be above 0")


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        folder: The model's.
        steps: Steps done, those before a resume included.
        loss: Mean over the steps of this call.
        seconds: Of this call.
    """

    folder: Path
    steps: int
    loss: float
    seconds: float


def check_new(folder: Path) -> None:
    """Refuse to write over something.

    Raises:
        ArtifactError: If the folder is there.
    """
    if folder.exists():
        raise ArtifactError(f"{folder} is there already: name another --output_dir, or delete it")


def train_generator(
    pairs: Sequence[Pair], folder: Path, arguments: GeneratorArguments, *, device: str = "auto"
) -> Trained:
    """Train a model to write a question's feedback, and write its folder when it is done.

    A training that was stopped goes on from its last checkpoint when the same one is asked for.

    Args:
        pairs: Questions and feedback, at least one.
        folder: New; a plain model folder, with `trained_on.json` beside the weights.
        arguments: How.
        device: "auto", "cpu", "cuda", ...

    Raises:
        ArtifactError: If the folder is there already.
        ModelError: If the model cannot be loaded, or its loss stops being a number.
    """
    check_new(folder)
    from transformers import AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq, Trainer
    from transformers.trainer_callback import PrinterCallback

    source = find_model(arguments.model)
    about = {
        "model": source.identity,
        "pairs": digest([asdict(pair) for pair in pairs])[:12],
        "num_pairs": len(pairs),
        **{name: value for name, value in asdict(arguments).items() if name != "model"},
    }
    start = time.monotonic()
    tokenizer = load_tokenizer(source)
    model = load_pretrained(AutoModelForSeq2SeqLM.from_pretrained, source, dtype=torch.float32)
    work = folder.with_name(f".{folder.name}-{digest(about)[:12]}.training")
    bar = TrainingBar("training")
    trainer = Trainer(
        model=model,
        args=_training_arguments(work, arguments, device=device),
        train_dataset=_rows(tokenizer, pairs),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        callbacks=[bar],
    )
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(work)
    try:
        told = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()
    if not math.isfinite(told.training_loss):
        raise ModelError(
            f"the loss of '{arguments.model}' is no number: lower the learning rate "
            f"({arguments.learning_rate:g})"
        )
    _keep(trainer.model, tokenizer, work, folder, about=about)
    return Trained(folder, told.global_step, told.training_loss, time.monotonic() - start)


def _training_arguments(work: Path, arguments: GeneratorArguments, *, device: str) -> Any:
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(work),
        num_train_epochs=arguments.num_train_epochs,
        per_device_train_batch_size=arguments.per_device_train_batch_size,
        learning_rate=arguments.learning_rate,
        lr_scheduler_type="constant",
        optim="adafactor",
        save_steps=arguments.save_steps,
        save_total_limit=1,
        logging_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        use_cpu=choose_device(device).type == "cpu",
        seed=arguments.seed,
    )


def _rows(tokenizer: Any, pairs: Sequence[Pair]) -> list[dict[str, list[int]]]:
    asked = tokenizer(
        [plain_input(pair.question) for pair in pairs],
        truncation=True,
        max_length=MAX_QUESTION_TOKENS,
    )
    said = tokenizer(
        text_target=[pair.feedback for pair in pairs],
        truncation=True,
        max_length=MAX_FEEDBACK_TOKENS,
    )
    told = zip(asked["input_ids"], asked["attention_mask"], said["input_ids"], strict=True)
    return [{"input_ids": ids, "attention_mask": mask, "labels": lab} for ids, mask, lab in told]


def _keep(model: Any, tokenizer: Any, work: Path, folder: Path, *, about: dict[str, Any]) -> None:
    """Write the folder aside, rename it, and let the checkpoints go."""
    aside = work.with_suffix(".partial")
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    write_json(aside / ABOUT_FILE, about)
    aside.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(work, ignore_errors=True)
