"""Trains small models for a memory: the LM that is corrected, and GUD-IR's generator.

MemPrompt's LM is GPT-3, which follows a clarification by itself (Madaan et al. 2022, section 3). A
small one that does not is taught on other words and other questions than those that are measured.
"""

import json
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.artifacts import check_fingerprint, digest, lock_folder, sync_folder, write_json
from pgra.config import argument as _arg
from pgra.config import at_least
from pgra.core import Json
from pgra.errors import ArtifactError, ConfigError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import (
    ModelSource,
    choose_device,
    find_model,
    load_pretrained,
    load_tokenizer,
    ready_device,
)
from pgra.memory.generator import MAX_FEEDBACK_TOKENS, MAX_QUESTION_TOKENS, plain_input
from pgra.memory.lessons import (
    IGNORED,
    Lesson,
    Lessons,
    Pack,
    Packer,
    Seen,
    draw_lessons,
    read_seen,
)
from pgra.memory.prompts import load_few_shot
from pgra.memory.stream import Pair, Words
from pgra.reader.resume import last_checkpoint
from pgra.reader.train import TrainingBar

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
    checkpoint = last_checkpoint(folder, num_processes=1)
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


# Trains GUD-IR's generator: questions to the feedback they got (Madaan et al. 2022, App. A.3).


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


# An LM that can be corrected: lessons of one or several families, drawn, packed and learned.


RUN_FILE = "run.json"


@dataclass(frozen=True)
class Course:
    """Lessons and the words they are about."""

    lessons: Lessons
    words: Words


@dataclass(frozen=True)
class TrainedLM:
    """An LM that was fine-tuned.

    Attributes:
        folder: For --lm.
        num_words: That it learned with.
        num_questions: Questions without their words.
    """

    folder: Path
    num_words: int
    num_questions: int


def train_lm(
    lm: str,
    courses: Sequence[Course],
    *,
    pack_tokens: int,
    settings: FinetuneSettings,
    folder: Path,
) -> TrainedLM:
    """Draw lessons, each course's in every so many sequences, and fine-tune an LM with them.

    Args:
        lm: By hub id, folder or `bundled:NAME`.
        courses: What is taught.
        pack_tokens: Most tokens of a sequence.
        settings: How.
        folder: Of the run. One that is done is given as it is, one that was stopped goes on.

    Raises:
        ArtifactError: If the folder is of another run.
        ConfigError: If the LM holds no such sequence or has not so many layers, or a lesson does
            not fit a sequence.
        ModelError: If the LM cannot be loaded.
    """
    opened = CausalLM.from_name(lm, device="cpu")  # its weights are not loaded for this
    if pack_tokens > opened.window:
        raise ConfigError(
            f"pack_tokens is {pack_tokens}, and '{lm}' holds {opened.window}: lower it"
        )
    depth = opened.config.num_hidden_layers
    if settings.frozen_layers >= depth:
        raise ConfigError(
            f"frozen_layers is {settings.frozen_layers}, and '{lm}' has {depth}: leave one to train"
        )
    asked: dict[str, Json] = {
        "lm": opened.source.identity,
        "courses": digest([_told(course) for course in courses])[:12],
        "pack_tokens": pack_tokens,
        **asdict(settings),
    }
    done = read_seen(str(folder / LM_FOLDER))
    drawn = _draw(courses, opened, pack_tokens=pack_tokens, settings=settings)
    with lock_folder(folder):
        _check_run(folder, asked)
        if done is None:
            finetune(
                opened.source,
                opened.tokenizer,
                drawn.packs,
                settings=settings,
                seen=drawn.seen,
                folder=folder,
            )
    return TrainedLM(folder / LM_FOLDER, len(drawn.seen.words), len(drawn.seen.forms))


def _told(course: Course) -> Json:
    few_shot = load_few_shot(course.lessons.family.prompt)
    return [asdict(course.lessons), {k: dict(v) for k, v in course.words.items()}, asdict(few_shot)]


def _check_run(folder: Path, asked: dict[str, Json]) -> None:
    """Refuse the folder of another run; a new one says whose it is."""
    path = folder / RUN_FILE
    if not path.is_file():
        write_json(path, asked)
        return
    try:
        made: Any = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path} is damaged ({error}): use another --output_dir") from None
    check_fingerprint(folder, made=made, asked=asked)


@dataclass(frozen=True)
class _Drawn:
    packs: list[Pack]
    seen: Seen


def _draw(
    courses: Sequence[Course], lm: CausalLM, *, pack_tokens: int, settings: FinetuneSettings
) -> _Drawn:
    """Draw as many sequences as are learned, the courses' in turn."""
    words: set[str] = set()
    forms: set[str] = set()

    def packs_of(course: Course) -> Iterator[Pack]:
        few_shot = load_few_shot(course.lessons.family.prompt)
        packer = Packer(
            lm.tokenizer,
            few_shot,
            pack_tokens=pack_tokens,
            seed=settings.seed,
            lead_ids=lm.lead_ids,
        )
        draw = draw_lessons(course.lessons, course.words, seed=settings.seed)

        def next_lesson() -> Lesson:
            lesson = draw()
            words.add(lesson.word)
            forms.add(lesson.form)
            return lesson

        while True:
            yield packer.pack(next_lesson)

    turns = cycle([packs_of(course) for course in courses])
    count = settings.max_steps * settings.packs_per_step
    return _Drawn([next(turn) for turn in islice(turns, count)], Seen(words, forms))
