"""GUD-IR: feedback is looked up by the one that a model writes for a question (App. A.3).

A seq2seq model is trained on questions and the feedback they got, by `pgra.reader.train.fit`: it
can be interrupted at any time, and resumed.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import Adafactor, AutoModelForSeq2SeqLM, DataCollatorForSeq2Seq

from pgra.artifacts import digest, lock_folder, write_checksums
from pgra.context import Context
from pgra.errors import ArtifactError, DataError
from pgra.lm.load import choose_device, find_model, load_pretrained, load_tokenizer
from pgra.memory.families import Family, read_stream
from pgra.memory.log import FeedbackLog, read_events, replay
from pgra.memory.lookup import (
    EncoderLookup,
    GeneratorArguments,
    Lookup,
    LookupArguments,
    Match,
    OpenLookup,
)
from pgra.reader.arguments import TrainingArguments
from pgra.reader.fid import ReaderModule
from pgra.reader.train import Collate, Trainable, TrainResult, fit
from pgra.types import Fields, Json

_QUESTION_TOKENS = 512  # read by the generator
_FEEDBACK_TOKENS = 64  # written by it
_MOST_WRITTEN = 65_536  # generated feedback kept by question


class GeneratingLookup(EncoderLookup):
    """By the stored feedback nearest to one written for the question."""

    name = "gud-ir"
    compared = "feedback"

    def __init__(
        self, log: FeedbackLog, write: Callable[[str], str], identity: str, **options: Any
    ) -> None:
        """Follow a log; `write` and `identity` are of `load_generator`."""
        super().__init__(log, **options)
        self._write = write
        self._identity = identity

    @classmethod
    def load(
        cls, args: LookupArguments, user: str, context: Context, encoder: Any = None
    ) -> OpenLookup:
        write, identity = load_generator(str(args.generator), device=context.device)
        opened: Callable[..., Lookup] = super().load(args, user, context, encoder)
        return partial(opened, write=write, identity=identity)

    @property
    def fingerprint(self) -> Fields:
        generator = {"generator": self._identity, "max_new_tokens": _FEEDBACK_TOKENS}
        return {**super().fingerprint, **generator}

    def find(self, question: str, k: int = 1) -> list[Match]:
        feedback = self._write(question)
        return super().find(feedback, k) if feedback else []


def load_generator(name: str, *, device: str = "auto") -> tuple[Callable[[str], str], str]:
    """Load the generator (hub id, folder or bundled:NAME) in float32.

    Returns a cached function that writes a question's feedback on one line, greedily ("" if the
    model writes nothing), and the model's identity. A ModelError if it cannot be loaded.
    """
    source = find_model(name)
    load = AutoModelForSeq2SeqLM.from_pretrained
    model = load_pretrained(load, source, dtype=torch.float32).to(choose_device(device)).eval()
    tokenizer = load_tokenizer(source)

    @lru_cache(_MOST_WRITTEN)
    def write(question: str) -> str:
        inputs = _tokenize(tokenizer, [question], "pt")
        (tokens,) = model.generate(  # which keeps no gradients
            input_ids=inputs["input_ids"].to(model.device),
            attention_mask=inputs["attention_mask"].to(model.device),
            max_new_tokens=_FEEDBACK_TOKENS,
            do_sample=False,
            num_beams=1,
        )
        return " ".join(tokenizer.decode(tokens, skip_special_tokens=True).split())

    return write, source.identity


def _tokenize(tokenizer: Any, questions: Sequence[str], tensors: str | None = None) -> Any:
    """Read each question on one line, with () for <>, which T5 does not know."""
    texts = [" ".join(text.replace("<", "(").replace(">", ")").split()) for text in questions]
    return tokenizer(texts, truncation=True, max_length=_QUESTION_TOKENS, return_tensors=tensors)


# Its training.


def read_pairs(path: Path, family: Family | None = None) -> list[tuple[str, str]]:
    """Read questions with their feedback: from a memory, its log, or a family's stream.

    Raises:
        DataError: If there are no pairs, or a line lacks question or feedback.
    """
    pairs: Sequence[Any] = (
        replay(read_events(path)) if family is None else read_stream(path, family)
    )
    if not pairs:
        raise DataError(f"{path} holds no question with a feedback: there is nothing to learn")
    return [(pair.question, pair.feedback) for pair in pairs]


class FeedbackModule(ReaderModule):
    """An encoder-decoder that writes feedback; its loss is the mean over the batch."""

    def forward(self, num_items_in_batch: Any = None, **batch: Tensor) -> Any:  # noqa: ARG002
        return self.model(**batch)


@dataclass(frozen=True)
class _Trainable(Trainable):
    """What `fit` trains."""

    def collator(self, device: torch.device) -> Collate:  # noqa: ARG002
        collate: Collate = DataCollatorForSeq2Seq(self.tokenizer, model=self.module.model)
        return collate

    def optimizer(self, arguments: TrainingArguments) -> torch.optim.Optimizer:
        """Return Adafactor, with which T5 was trained."""
        weights = self.module.parameters()
        rate = arguments.learning_rate
        optimizer: torch.optim.Optimizer = Adafactor(
            weights, lr=rate, scale_parameter=False, relative_step=False
        )
        return optimizer

    def save(self, folder: Path) -> None:
        super().save(folder)
        write_checksums(folder)


def train_generator(
    pairs: Sequence[tuple[str, str]],
    folder: Path,
    arguments: GeneratorArguments,
    context: Context,
) -> TrainResult:
    """Train a model to write a question's feedback; write a plain model folder at the end.

    An interrupted training resumes from its last checkpoint when the same one is asked for.

    Raises:
        ArtifactError: If the folder exists, or another job makes it.
        ModelError: If the model cannot be loaded, or its loss is no longer finite.
        Stopped: If a signal asked for it.
    """
    with lock_folder(folder, is_new=True):
        if folder.exists():
            raise ArtifactError(f"{folder} is there already: name another --output_dir")
        values = asdict(arguments)
        source = find_model(values.pop("model"))
        tokenizer = load_tokenizer(source)
        model = load_pretrained(AutoModelForSeq2SeqLM.from_pretrained, source, dtype=torch.float32)
        questions, feedback = zip(*pairs, strict=True)
        targets = tokenizer(
            text_target=list(feedback), truncation=True, max_length=_FEEDBACK_TOKENS
        )
        columns = {**_tokenize(tokenizer, questions), "labels": targets["input_ids"]}
        contents: Json = [values, source.identity, [list(pair) for pair in pairs]]
        work = folder.with_name(f".{folder.name}-{digest(contents)[:12]}.training")
        result = fit(
            _Trainable(FeedbackModule(model), tokenizer),
            Dataset.from_dict(columns),
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
        return result
