"""Trains small models for look-ups (Madaan et al. 2022).

- GUD-IR's generator: questions to the feedback they got (App. A.3).
- A layer on a frozen sentence encoder: the mean squared error of cos(f(x_i), f(x_j)) to a target.
  "feedback": cos(fb_i, fb_j), the paper's first attempt (App. A.2); "type": 1 for questions of one
  type and 0 for others, as the release trains its semantic memory. The paper and the release train
  the encoder too.

The generator is trained by `pgra.reader.train.fit`: it can be interrupted at any time, and resumed.
"""

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import normalize
from transformers import Adafactor, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from pgra.artifacts import digest, lock_folder, replace_folder, write_checksums, write_json
from pgra.config import Arguments
from pgra.core import Context, Json
from pgra.encoders.encoder import DenseLayer, Encoder
from pgra.errors import ArtifactError, ConfigError, DataError, ModelError
from pgra.lm.load import find_model, load_pretrained, load_tokenizer
from pgra.memory import GeneratorArguments, SimilarityArguments
from pgra.memory.lookup import MAX_FEEDBACK_TOKENS, MAX_QUESTION_TOKENS, in_form, plain_input
from pgra.memory.stream import Step
from pgra.progress import Bar
from pgra.reader.arguments import TrainingArguments
from pgra.reader.fid import ReaderModule
from pgra.reader.train import Trainable, TrainResult, fit

ABOUT_FILE = "trained_on.json"  # in a trained model's folder: its data and arguments
_SHOWN_EVERY = 10  # steps, of a loss on the bar


class FeedbackModule(ReaderModule):
    """An encoder-decoder that writes feedback; its loss is the mean over the batch."""

    def forward(self, num_items_in_batch: Any = None, **batch: Tensor) -> Any:  # noqa: ARG002
        return self.model(**batch)


@dataclass(frozen=True)
class _Trainable(Trainable):
    """What `fit` trains; `record` (file, content) is written beside the weights."""

    collate: Callable[[Sequence[Any]], dict[str, Any]]
    record: tuple[str, Json]

    def collator(self, device: torch.device) -> Callable[[Sequence[Any]], dict[str, Any]]:  # noqa: ARG002
        return self.collate

    def optimizer(self, arguments: TrainingArguments) -> torch.optim.Optimizer:
        """Return Adafactor, with which T5 was trained."""
        weights, rate = self.module.parameters(), arguments.learning_rate
        made: torch.optim.Optimizer
        made = Adafactor(weights, lr=rate, scale_parameter=False, relative_step=False)
        return made

    def save(self, folder: Path) -> None:
        super().save(folder)
        name, content = self.record
        write_json(folder / name, content)
        write_checksums(folder)


def _about(pairs: Sequence[Step], arguments: Arguments, **model: str) -> dict[str, Json]:
    contents: Json = [[pair.question, pair.feedback, pair.kind] for pair in pairs]
    pairs_digest = digest(contents)[:12]
    return {**arguments.deciding(), **model, "pairs": pairs_digest, "num_pairs": len(pairs)}


@contextmanager
def _making(folder: Path) -> Iterator[None]:
    """Lock a folder that must not exist."""
    is_there = f"{folder} is there already: name another --output_dir"
    if not folder.name:  # . and /
        raise ArtifactError(is_there)
    with lock_folder(folder, is_new=True):
        if folder.exists():
            raise ArtifactError(is_there)
        yield


def train_generator(
    pairs: Sequence[Step], folder: Path, arguments: GeneratorArguments, context: Context
) -> TrainResult:
    """Train a model to write a question's feedback, and write its folder at the end.

    An interrupted training resumes from its last checkpoint when the same one is asked for. The new
    folder is a plain model folder, with `trained_on.json` beside the weights.

    Raises:
        ArtifactError: If the folder exists, or another job makes it.
        ModelError: If the model cannot be loaded, or its loss is no longer finite.
        Stopped: If a signal asked for it.
    """
    with _making(folder):
        values = asdict(arguments)
        source = find_model(values.pop("model"))
        about = _about(pairs, arguments, model=source.identity)
        tokenizer = load_tokenizer(source)
        model = load_pretrained(AutoModelForSeq2SeqLM.from_pretrained, source, dtype=torch.float32)
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
        work = folder.with_name(f".{folder.name}-{digest(about)[:12]}.training")
        done = fit(
            _Trainable(
                FeedbackModule(model),
                tokenizer,
                DataCollatorForSeq2Seq(tokenizer, model=model),
                (ABOUT_FILE, about),
            ),
            [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
            TrainingArguments(
                output_dir=str(work),
                **values,
                max_steps=-1,
                eval_steps=0,
                lr_scheduler_type="constant",
                dataloader_drop_last=False,
            ),
            context,
            folder=folder,
        )
        shutil.rmtree(work, ignore_errors=True)
        return done


def train_encoder(
    pairs: Sequence[Step], folder: Path, arguments: SimilarityArguments, context: Context
) -> TrainResult:
    """Train the layer, and write the encoder with it into a new folder, for any --encoder.

    The result's loss is the mean over the last tenth of the steps. The target "type" needs pairs
    with types.

    Raises:
        ArtifactError: If the folder exists, or another job makes it.
        ConfigError: If the encoder's pooling cannot be written.
        DataError: If the pairs are too few, all the same, or lack their types.
        ModelError: If the encoder cannot be loaded, or the loss is no longer finite.
    """
    with _making(folder):
        kinds = [pair.kind for pair in pairs]
        by_type = arguments.target == "type"
        if by_type and ("" in kinds or len(set(kinds)) < 2):
            found = ", ".join(f"'{kind}'" if kind else "none" for kind in dict.fromkeys(kinds))
            raise DataError(
                f"the types of the {len(kinds)} questions are {found}: each needs one, and there "
                "must be several; or give --target feedback"
            )
        start = time.monotonic()
        encoder = Encoder.load(arguments.encoder, encoder_dtype="float32", device=context.device)
        if encoder.fingerprint["pooling"] == "pooler":
            raise ConfigError(
                "a sentence-transformers folder cannot say pooling 'pooler': choose another encoder"
            )
        texts = [in_form(pair.question, arguments.key_form) for pair in pairs]
        vectors = torch.from_numpy(encoder.encode(texts))
        if by_type:
            wanted = torch.from_numpy(np.equal.outer(kinds, kinds)).float()
        else:
            wanted = cosines(torch.from_numpy(encoder.encode([pair.feedback for pair in pairs])))
        head, loss = fit_head(vectors, wanted, arguments)
        about = _about(pairs, arguments, encoder=str(encoder.fingerprint["encoder"]))

        def save(aside: Path) -> None:
            save_with_head(encoder, head, aside)
            write_json(aside / ABOUT_FILE, about)
            write_checksums(aside)

        replace_folder(folder, save)
        seconds = time.monotonic() - start
        return TrainResult(folder, arguments.num_steps, None, None, loss, seconds, [])


def cosines(vectors: Tensor) -> Tensor:
    """Return the cosines of all pairs of rows (n, D), (n, n)."""
    unit = normalize(vectors, dim=-1)
    return unit @ unit.T


def fit_head(
    vectors: Tensor, wanted: Tensor, arguments: SimilarityArguments
) -> tuple[DenseLayer, float]:
    """Fit a tanh layer so that cosines of `vectors` (n, D) are as `wanted` (n, n) (App. A.2).

    Returns the layer, and the mean squared error of the last tenth of the steps.

    Raises:
        ModelError: If the loss is no longer finite.
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
    bar = Bar(range(arguments.num_steps), desc="train", unit="step")
    for step in bar:
        rows = torch.randperm(len(vectors), generator=draw)[:size]
        gaps = cosines(head.apply(vectors[rows])) - wanted[rows][:, rows]
        loss = gaps[others].square().mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
        if step % _SHOWN_EVERY == 0:
            bar.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
    last = torch.stack(losses[-max(1, len(losses) // 10) :]).mean().item()
    if not torch.isfinite(torch.stack(losses)).all():
        raise ModelError(
            f"the loss is no number: lower the learning rate ({arguments.learning_rate:g})"
        )
    return DenseLayer(weight.detach(), bias.detach(), "Tanh", ""), last


def save_with_head(encoder: Encoder, head: DenseLayer, folder: Path) -> None:
    """Write an encoder, then a head, with unit-length vectors as a sentence-transformers folder."""
    encoder.model.save_pretrained(folder)
    encoder.tokenizer.save_pretrained(folder)
    sentence, told = encoder.sentence, encoder.fingerprint
    layers = [*sentence.layers]  # None is to unit length
    mode = str(told["pooling"]).removesuffix("_before_pooler")
    if told["normalize"] and not sentence.is_normalized:
        layers.append(None)  # as `Encoder` gives it, whatever its folder says
    layers += [head, None]
    kinds = ["Transformer", "Pooling", *("Dense" if layer else "Normalize" for layer in layers)]
    paths = ["", *(f"{number}_{kind}" for number, kind in enumerate(kinds) if number)]
    modules: Json = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(zip(kinds, paths, strict=True))
    ]
    texts: Json = {"query": encoder.query_prompt, "document": told.get("passage_prompt", "")}
    written: dict[str, Json] = {
        "modules.json": modules,
        "config_sentence_transformers.json": {"prompts": texts},
        "sentence_bert_config.json": {
            "max_seq_length": told["max_tokens"],
            "do_lower_case": sentence.is_lower,
        },
        f"{paths[1]}/config.json": {
            "word_embedding_dimension": encoder.model.config.hidden_size,
            "pooling_mode": "lasttoken" if mode == "last" else mode,
        },
    }
    for path, layer in zip(paths[2:], layers, strict=True):
        if layer is not None:
            written[f"{path}/config.json"] = {
                "in_features": layer.weight.shape[1],
                "out_features": layer.weight.shape[0],
                "bias": layer.bias is not None,
                "activation_function": f"torch.nn.{layer.activation}",
            }
            weights = {"linear.weight": layer.weight, "linear.bias": layer.bias}
            tensors = {
                k: part.cpu().contiguous() for k, part in weights.items() if part is not None
            }
            (folder / path).mkdir()
            save_file(tensors, folder / path / "model.safetensors")
    for name, content in written.items():
        write_json(folder / name, content)
