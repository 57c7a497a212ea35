"""Trains small models for a memory: the LM that is corrected, and what looks feedback up.

- An LM: MemPrompt's is GPT-3, which follows a clarification by itself (Madaan et al. 2022, section
  3). A small one that does not is taught on other words and questions than those that are measured.
- GUD-IR's generator: questions to the feedback they got (App. A.3).
- A layer on a sentence encoder, so that questions are as near as what is said of them: the mean
  squared error of cos(f(x_i), f(x_j)) to a target. "feedback": cos(fb_i, fb_j), the paper's first
  attempt (App. A.2); "type": 1 for questions of one type and 0 for others, as the release trains
  its semantic memory. The encoder stays as it is and its vectors are made once, so that this takes
  seconds on a CPU; the paper and the release train the encoder too.
"""

import contextlib
import logging
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DataCollatorForSeq2Seq,
    PrinterCallback,
    Trainer,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from pgra.artifacts import digest, lock_folder, sync_folder, write_json
from pgra.config import Arguments, arg
from pgra.core import Context, Json
from pgra.encoders.encoder import DenseLayer, Encoder
from pgra.errors import ArtifactError, ConfigError, DataError, ModelError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import (
    choose_device,
    find_model,
    load_pretrained,
    load_tokenizer,
    ready_device,
)
from pgra.memory.experiment import claim_folder
from pgra.memory.lessons import (
    IGNORED,
    FinetuneArguments,
    Lessons,
    Pack,
    Seen,
    draw_packs,
    read_seen,
)
from pgra.memory.lookup import MAX_FEEDBACK_TOKENS, MAX_QUESTION_TOKENS, plain_input, strip_slot
from pgra.memory.prompts import load_few_shot
from pgra.memory.stream import Step
from pgra.reader.resume import last_checkpoint
from pgra.reader.train import TrainingBar

logger = logging.getLogger(__name__)

LM_FOLDER = "lm"
ABOUT_FILE = "trained_on.json"
"""In the folder of a trained model: what it was trained on, and how."""
_LEAST_PAIRS = 4  # questions that a layer can be trained on
_POOLINGS = {
    "cls": "pooling_mode_cls_token",
    "cls_before_pooler": "pooling_mode_cls_token",
    "last": "pooling_mode_lasttoken",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
}


def run_trainer(trainer: Trainer, title: str, folder: Path) -> Any:
    """Train with our bar, going on from the folder's last checkpoint; what the Trainer returns."""
    bar = TrainingBar(title)
    trainer.add_callback(bar)
    trainer.remove_callback(PrinterCallback)
    checkpoint = last_checkpoint(folder, num_processes=1)
    if checkpoint is not None:
        logger.info("going on from %s", checkpoint)
    try:
        return trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    finally:
        bar.close()


@contextlib.contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """Yield a folder aside, renamed when all is written in it."""
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # of a job that was killed here
    aside.mkdir(parents=True)
    yield aside
    aside.rename(folder)
    sync_folder(folder.parent)


# An LM that can be corrected.


class AnswersTrainer(Trainer):  # type: ignore[misc]  # transformers is not followed by mypy
    """Learns answers alone, and asks the LM for no other logits."""

    def compute_loss(
        self,
        model: Any,
        inputs: dict[str, Any],
        return_outputs: bool = False,  # noqa: FBT001, FBT002  the Trainer's own signature
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Return the mean loss over the answers' tokens of all sequences of a step."""
        labels = inputs["labels"]  # (B, T)
        learned = (labels != IGNORED).any(dim=0).nonzero().squeeze(1)  # (n,), none the first
        outputs = model(input_ids=inputs["input_ids"], logits_to_keep=learned - 1, use_cache=False)
        total = cross_entropy(
            outputs.logits.float().flatten(0, 1),
            labels[:, learned].flatten(),
            ignore_index=IGNORED,
            reduction="sum",
        )
        count = (labels != IGNORED).sum() if num_items_in_batch is None else num_items_in_batch
        loss = total / count
        return (loss, outputs) if return_outputs else loss


def train_lm(courses: Sequence[Lessons], args: FinetuneArguments) -> Seen:
    """Draw lessons, each course's in every so many sequences, and fine-tune an LM with them.

    One that is done is left as it is; one that was stopped goes on from its last checkpoint, with
    the same sequences. The LM goes to `lm/` in the output folder, with the record of what it
    learned with.

    Args:
        courses: What is taught.
        args: Which LM, and how long.

    Returns:
        What it learned with.

    Raises:
        ArtifactError: If the folder is of another run.
        ConfigError: If the LM holds no such sequence or has not so many layers, or a lesson does
            not fit a sequence.
        ModelError: If the LM cannot be loaded, or its layers are not found.
    """
    lm = CausalLM.from_name(args.lm, device="cpu")  # its weights are not loaded for this
    if args.pack_tokens > lm.window:
        raise ConfigError(
            f"pack_tokens is {args.pack_tokens}, and '{args.lm}' holds {lm.window}: lower it"
        )
    depth = lm.config.num_hidden_layers
    if args.frozen_layers >= depth:
        raise ConfigError(
            f"frozen_layers is {args.frozen_layers}, and '{args.lm}' has {depth}: leave one to "
            "train"
        )
    prompts = [asdict(load_few_shot(course.family.prompt)) for course in courses]
    settings = args.deciding()
    for name in ("lessons", "words", "held_out"):  # their content stands in the courses
        del settings[name]
    taught: Json = [[asdict(c), prompt] for c, prompt in zip(courses, prompts, strict=True)]
    identity = {**settings, "lm": lm.source.identity, "courses": digest(taught)[:12]}
    folder = Path(args.output_dir)
    done = read_seen(str(folder / LM_FOLDER))
    packs, seen = draw_packs(
        courses,
        lm.tokenizer,
        count=args.max_steps * args.packs_per_step,
        pack_tokens=args.pack_tokens,
        seed=args.seed,
        lead_ids=lm.lead_ids,
    )
    with lock_folder(folder):
        claim_folder(folder, identity)
        if done is None:
            _finetune(lm, packs, args, seen, folder)
    return seen


def _finetune(
    lm: CausalLM, packs: Sequence[Pack], args: FinetuneArguments, seen: Seen, folder: Path
) -> None:
    model = load_pretrained(AutoModelForCausalLM.from_pretrained, lm.source, dtype=torch.float32)
    freeze_layers(model, args.frozen_layers)
    trainer = AnswersTrainer(
        model=model,
        args=training_arguments(args),
        train_dataset=[asdict(pack) for pack in packs],
        data_collator=collate,
    )
    run_trainer(trainer, "finetune", folder)
    with new_folder(folder / LM_FOLDER) as aside:
        model.save_pretrained(aside)
        lm.tokenizer.save_pretrained(aside)
        seen.write(aside)
    for path in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
        shutil.rmtree(path)


def training_arguments(args: FinetuneArguments) -> TrainingArguments:
    """Return the Trainer's arguments for an LM; its device is ready then."""
    arguments = TrainingArguments(
        output_dir=args.output_dir,
        max_steps=args.max_steps,
        per_device_train_batch_size=1,  # sequences are full: more at once bring nothing on a CPU
        gradient_accumulation_steps=args.packs_per_step,
        learning_rate=args.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=max(1, args.max_steps // 20),
        weight_decay=0.0,
        max_grad_norm=1.0,
        bf16=args.bf16,
        logging_steps=10,
        save_strategy="steps",
        save_steps=args.save_steps,
        save_total_limit=1,
        seed=args.seed,
        report_to=["none"],
        remove_unused_columns=False,
        disable_tqdm=True,  # for ours
        train_sampling_strategy="sequential",
        use_cpu=args.device == "cpu" or not torch.accelerator.is_available(),
        dataloader_pin_memory=torch.accelerator.is_available(),
    )
    ready_device(arguments.device)
    return arguments


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
    depth = model.config.num_hidden_layers
    lists = (part for part in model.modules() if isinstance(part, torch.nn.ModuleList))
    layers = next((part for part in lists if len(part) == depth), None)
    if layers is None:
        raise ModelError("the LM's layers do not stand in one list: leave --frozen_layers out")
    for part in (model.get_input_embeddings(), model.get_output_embeddings(), *layers[:count]):
        part.requires_grad_(False)


# What looks feedback up.


@dataclass(kw_only=True)
class GeneratorArguments(Arguments):
    """How the generator is trained."""

    model: str = arg("google-t5/t5-small", "Seq2seq model to start from: hub id, folder, bundled.")
    num_train_epochs: int = arg(20, "How often each pair is seen.", least=1)
    per_device_train_batch_size: int = arg(16, "Pairs a step.", least=1)
    learning_rate: float = arg(1e-3, "Adafactor's, constant, as T5's authors fine-tune.", above=0)
    save_steps: int = arg(
        200, "Steps between checkpoints that a killed training goes on from.", least=1
    )
    seed: int = arg(0, "Of the order of the pairs, and of dropout.")


@dataclass(kw_only=True)
class SimilarityArguments(Arguments):
    """How the layer is trained."""

    target: str = arg(
        "feedback",
        "What the cosine of two questions is to be: feedback (that of their feedback: the paper's "
        "A.2), or type (1 for one type, 0 for others: the release's semantic memory).",
        choices=("feedback", "type"),
    )
    encoder: str = arg(
        "sentence-transformers/all-MiniLM-L6-v2",
        "Encoder below the layer: hub id, folder or bundled:NAME. It stays as it is.",
    )
    key_form: str = arg(
        "slotless",
        "What is read of a question: slotless (without <...>), or whole.",
        choices=("slotless", "whole"),
    )
    width: int = arg(256, "Of the layer, tanh behind it (the release: 256).", least=1)
    num_steps: int = arg(500, "Steps, each over all pairs of a batch.", least=1)
    batch_size: int = arg(128, "Questions a step.", least=2)
    learning_rate: float = arg(1e-3, "Adam's.", above=0)
    seed: int = arg(0, "Of the layer's first weights and of the batches.")


@dataclass(frozen=True)
class Trained:
    """What a training gave.

    Attributes:
        folder: The model's.
        steps: Steps done, those before a resume included.
        loss: Mean over the steps of this call (generator), or over the last tenth (layer).
        seconds: Of this call.
    """

    folder: Path
    steps: int
    loss: float
    seconds: float


def _about(pairs: Sequence[Step], arguments: Arguments, **model: str) -> dict[str, Json]:
    contents: Json = [[pair.question, pair.feedback, pair.kind] for pair in pairs]
    pairs_digest = digest(contents)[:12]
    return {**arguments.deciding(), **model, "pairs": pairs_digest, "num_pairs": len(pairs)}


def _check_new(folder: Path) -> None:
    if folder.exists():
        raise ArtifactError(f"{folder} is there already: name another --output_dir, or delete it")


def train_generator(
    pairs: Sequence[Step], folder: Path, arguments: GeneratorArguments, context: Context
) -> Trained:
    """Train a model to write a question's feedback, and write its folder when it is done.

    A training that was stopped goes on from its last checkpoint when the same one is asked for.

    Args:
        pairs: Questions and feedback, at least one.
        folder: New; a plain model folder, with `trained_on.json` beside the weights.
        arguments: How.
        context: Where.

    Raises:
        ArtifactError: If the folder is there already.
        ModelError: If the model cannot be loaded, or its loss stops being a number.
    """
    _check_new(folder)
    source, start = find_model(arguments.model), time.monotonic()
    about = _about(pairs, arguments, model=source.identity)
    tokenizer = load_tokenizer(source)
    model = load_pretrained(AutoModelForSeq2SeqLM.from_pretrained, source, dtype=torch.float32)
    work = folder.with_name(f".{folder.name}-{digest(about)[:12]}.training")
    questions = tokenizer(
        [plain_input(pair.question) for pair in pairs],
        truncation=True,
        max_length=MAX_QUESTION_TOKENS,
    )
    feedback = tokenizer(
        text_target=[pair.feedback for pair in pairs],
        truncation=True,
        max_length=MAX_FEEDBACK_TOKENS,
    )
    columns = {**questions, "labels": feedback["input_ids"]}
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
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
            use_cpu=choose_device(context.device).type == "cpu",
            seed=arguments.seed,
        ),
        train_dataset=[
            dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
        ],
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
    )
    done = run_trainer(trainer, "training", work)
    if not math.isfinite(done.training_loss):
        raise ModelError(
            f"the loss of '{arguments.model}' is no number: lower the learning rate "
            f"({arguments.learning_rate:g})"
        )
    with new_folder(folder) as aside:
        trainer.model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        write_json(aside / ABOUT_FILE, about)
    shutil.rmtree(work, ignore_errors=True)
    return Trained(folder, done.global_step, done.training_loss, time.monotonic() - start)


def train_encoder(
    pairs: Sequence[Step], folder: Path, arguments: SimilarityArguments, context: Context
) -> Trained:
    """Train the layer, and write the encoder with it.

    Args:
        pairs: Questions with feedback; with a type for the target "type".
        folder: New; any --encoder may name it.
        arguments: How.
        context: Where.

    Raises:
        ArtifactError: If the folder is there already.
        ConfigError: If the encoder's pooling cannot be written.
        DataError: If the pairs are too few, all the same, or lack their types.
        ModelError: If the encoder cannot be loaded, or the loss stops being a number.
    """
    _check_new(folder)
    if len(pairs) < _LEAST_PAIRS:
        raise DataError(
            f"there are {len(pairs)} questions to learn from: give at least {_LEAST_PAIRS}"
        )
    if arguments.target == "type":
        _check_kinds(pairs)
    start = time.monotonic()
    encoder = Encoder.from_name(arguments.encoder, dtype="float32", device=context.device)
    _check_pooling(encoder)
    texts = [pair.question for pair in pairs]
    if arguments.key_form == "slotless":  # as `KeyEncoder` reads them
        texts = [strip_slot(text) or text for text in texts]
    vectors = torch.from_numpy(encoder.encode(texts))
    if arguments.target == "type":
        wanted = same_kind([pair.kind for pair in pairs])
    else:
        wanted = cosines(torch.from_numpy(encoder.encode([pair.feedback for pair in pairs])))
    head, loss = fit_head(vectors, wanted, arguments)
    with new_folder(folder) as aside:
        save_with_head(encoder, head, aside)
        identity = str(encoder.fingerprint["encoder"])
        write_json(aside / ABOUT_FILE, _about(pairs, arguments, encoder=identity))
    return Trained(folder, arguments.num_steps, loss, time.monotonic() - start)


def _check_kinds(pairs: Sequence[Step]) -> None:
    kinds = [pair.kind for pair in pairs]
    if "" in kinds:
        question = pairs[kinds.index("")].question
        raise DataError(
            f"the question '{question[:80]}' has no type: give each line one, or --target feedback"
        )
    if len(set(kinds)) < 2:
        raise DataError(f"all {len(kinds)} questions are of type '{kinds[0]}': give some of others")


def same_kind(kinds: Sequence[str]) -> Tensor:
    """Return 1 where two are of one type and 0 elsewhere, (n, n) float32."""
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    row = torch.tensor([numbers[kind] for kind in kinds])
    return (row[:, None] == row[None, :]).float()


def cosines(vectors: Tensor) -> Tensor:
    """Return the cosine of every two of (n, D), (n, n)."""
    unit = normalize(vectors, dim=-1)
    return unit @ unit.T


def fit_head(
    vectors: Tensor, wanted: Tensor, arguments: SimilarityArguments
) -> tuple[DenseLayer, float]:
    """Fit a layer whose vectors' cosines are those wanted: mean squared error (App. A.2).

    Args:
        vectors: Of the questions (n, D).
        wanted: Cosine of every two of them (n, n).
        arguments: How.

    Returns:
        The layer, with tanh behind it, and the mean loss of the last tenth of the steps.

    Raises:
        ModelError: If the loss stops being a number.
    """
    draw = torch.Generator().manual_seed(arguments.seed)
    width = vectors.shape[1]
    bound = width**-0.5  # as torch.nn.Linear begins
    weight = torch.empty(arguments.width, width).uniform_(-bound, bound, generator=draw)
    bias = torch.zeros(arguments.width, requires_grad=True)
    head = DenseLayer(weight.requires_grad_(), bias, "Tanh", "")
    optimizer = torch.optim.Adam([weight, bias], lr=arguments.learning_rate)
    size = min(arguments.batch_size, len(vectors))
    others = ~torch.eye(size, dtype=torch.bool)  # a question beside itself teaches nothing
    losses = []
    for _ in tqdm(range(arguments.num_steps), desc="training", unit="step"):
        rows = torch.randperm(len(vectors), generator=draw)[:size]
        gaps = cosines(head.apply(vectors[rows])) - wanted[rows][:, rows]
        loss = gaps[others].square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, len(losses) // 10) :]).mean().item()
    if not torch.isfinite(torch.stack(losses)).all():
        raise ModelError(
            f"the loss is no number: lower the learning rate ({arguments.learning_rate:g})"
        )
    return DenseLayer(weight.detach(), bias.detach(), "Tanh", ""), last


def _check_pooling(encoder: Encoder) -> str:
    pooling = str(encoder.fingerprint["pooling"])
    if pooling not in _POOLINGS:
        raise ConfigError(
            f"a sentence-transformers folder cannot say pooling '{pooling}': choose an encoder "
            f"with {', '.join(_POOLINGS)}"
        )
    return _POOLINGS[pooling]


def save_with_head(encoder: Encoder, head: DenseLayer, folder: Path) -> None:
    """Write an encoder whose vectors are a head's, at unit length: a sentence-transformers folder.

    Args:
        encoder: What it has behind its pooling comes before the head.
        head: As wide as the encoder.
        folder: Where.

    Raises:
        ConfigError: If such a folder cannot say the encoder's pooling.
    """
    pooling = _check_pooling(encoder)
    encoder.model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    width = encoder.model.config.hidden_size
    pooled: dict[str, Json] = {"word_embedding_dimension": width, pooling: True}
    write_json(folder / "1_Pooling" / "config.json", pooled)
    limits: dict[str, Json] = {
        "max_seq_length": encoder.fingerprint["max_tokens"],
        "do_lower_case": encoder.sentence.is_lower,
    }
    write_json(folder / "sentence_bert_config.json", limits)
    prompts: dict[str, Json] = {
        "query": encoder.query_prompt,
        "document": str(encoder.fingerprint.get("passage_prompt", "")),
    }
    write_json(folder / "config_sentence_transformers.json", {"prompts": prompts})
    layers = [*encoder.sentence.layers]  # None is to unit length
    if encoder.fingerprint["normalize"] and not encoder.sentence.is_normalized:
        layers.append(None)  # as `Encoder` gives it, whatever its folder says
    names = ["Transformer", "Pooling"]
    for layer in (*layers, head, None):
        names.append("Normalize" if layer is None else "Dense")
        if layer is not None:
            _write_dense(layer, folder / f"{len(names) - 1}_Dense")
    modules: list[Json] = [
        {
            "idx": number,
            "name": str(number),
            "path": f"{number}_{name}" if number else "",
            "type": f"sentence_transformers.models.{name}",
        }
        for number, name in enumerate(names)
    ]
    write_json(folder / "modules.json", modules)


def _write_dense(layer: DenseLayer, folder: Path) -> None:
    config: dict[str, Json] = {
        "in_features": layer.weight.shape[1],
        "out_features": layer.weight.shape[0],
        "bias": layer.bias is not None,
        "activation_function": f"torch.nn.{layer.activation}",
    }
    write_json(folder / "config.json", config)
    weights = {"linear.weight": layer.weight, "linear.bias": layer.bias}
    tensors = {name: part.cpu().contiguous() for name, part in weights.items() if part is not None}
    save_file(tensors, folder / "model.safetensors")
