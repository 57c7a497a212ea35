"""LM-BFF (Gao et al. 2021): a T5 tuned on a few examples, each read with answered ones beside it.

    train, dev  = K examples of each label, other K                     (section 3)
    input       = T(query), then a demonstration of each label          (section 6, eq. 5)
    label       = best by the mean score over sets of demonstrations    (section 6.1)

The seed gives the few-shot split as well as the order of examples, so several seeds tell of both.
The template and the words are the task's, as for every reader here; there is no evidence.
"""

import logging
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from pgra.artifacts import digest
from pgra.config import PgraArguments, RetrieverArguments
from pgra.core import ALONE, Context, Json
from pgra.data.examples import Splits, draw_shots, load_splits, whole_train
from pgra.data.tasks import load_task
from pgra.encoders.encoder import Encoder, choose_max_tokens, load_encoder
from pgra.errors import ConfigError
from pgra.lm.load import find_model, load_tokenizer
from pgra.methods.base import Prepared, check_run, check_training
from pgra.methods.pgra import prompt_template, segment_layout
from pgra.prompts.fewshot import FewShotPrompt
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.inputs import (
    SeparateInputs,
    Support,
    TokenizedInputs,
    Vectors,
    build_demonstrated,
    repeat_sets,
)
from pgra.reader.module import check_adapters
from pgra.reader.train import check_batches
from pgra.retrieval.base import examples_digest
from pgra.run_folder import SPLITS, Found, check_writable, run_identity
from pgra.runs import Outcome, run_reader

logger = logging.getLogger(__name__)


def run(
    args: PgraArguments,
    training: ReaderTrainingArguments,
    context: Context = ALONE,
) -> Outcome:
    """Draw a few-shot split, tune a T5 on it with demonstrations, and measure it.

    Args:
        args: The task, the reader, the encoder that says which examples are near.
        training: The Trainer's arguments, shots and sets; `output_dir` is the run, `seed` gives the
            split.
        context: Who shares the work.

    Raises:
        ArtifactError: If the folder holds another run.
        ConfigError: If something is asked for that this method cannot do.
        DataError: If a label has too few examples.
    """
    check_method(args)
    return run_reader(_prepare(args, training, context), training)


def check_method(args: PgraArguments) -> None:
    """Refuse what tuning with demonstrations cannot do.

    Raises:
        ConfigError: If labels are to be decided by one token.
    """
    if args.reader.decode != "verbalizer":
        raise ConfigError(
            f"decode '{args.reader.decode}' writes one token, and lm-bff averages the scores of "
            "several inputs: leave --decode out"
        )


@dataclass(frozen=True)
class Demonstrated(Prepared):
    """A few-shot run's shared parts, with demonstrations beside every query.

    Attributes:
        training: Says how many shots and sets, and the seed of the draws.
    """

    training: ReaderTrainingArguments

    def inputs(self, split: str) -> TokenizedInputs:
        """Give what the reader reads of a split: a set after the other, or all sets to average."""
        queries = self.found.examples(split)
        drawn = self.support.draw(queries, self._vectors(split), self.found.task.labels)
        inputs = build_demonstrated(
            queries,
            drawn,
            self.support.examples,
            self.tokenizer,
            self.verbalizer,
            layout=segment_layout(self.found.task, self.args.reader),
        )
        return repeat_sets(inputs) if split == "train" else SeparateInputs.over(inputs)

    @cached_property
    def support(self) -> Support:
        """Give what demonstrations are drawn from: the few training examples."""
        training = self.training
        return Support(
            self.found.splits.train,
            self._vectors("train"),
            training.exemplar_share,
            training.exemplar_sets,
            training.seed,
        )

    @cached_property
    def _encoder(self) -> Encoder:
        retriever = replace(self.args.retriever, normalize=True)
        return load_encoder(retriever, self.args.runtime.device)

    def _vectors(self, split: str) -> Vectors | None:
        if self.training.exemplar_share == 1:  # all of a label's examples are near enough
            return None
        texts = [example.text for example in self.found.examples(split)]
        return self._encoder.encode(texts, is_query=True)


def _prepare(
    args: PgraArguments, training: ReaderTrainingArguments, context: Context
) -> Demonstrated:
    """Draw the split, once what can be refused was refused."""
    folder = Path(str(training.output_dir))
    check_writable(folder)
    check_training(args, training)
    source = find_model(args.reader.model_name_or_path)
    check_adapters(args.reader, source)
    tokenizer = load_tokenizer(source)
    found = read_shots(args, training)
    prepared = Demonstrated(args, found, source, tokenizer, context, training)
    prepared.verbalizer.audit(tokenizer)
    check_batches(len(found.splits.train) * training.exemplar_sets, training)
    check_run(folder, run_identity(args, training, found, source), training)
    return prepared


def read_shots(args: PgraArguments, training: ReaderTrainingArguments) -> Found:
    """Read a task's test set, and draw K and K examples a label of its training file.

    Raises:
        ConfigError: If no task is named.
        DataError: If the data cannot be read, or a label has too few examples.
    """
    if args.data.task is None:
        raise ConfigError("--task is missing: name one (pgra data lists them), or give a YAML")
    task, num_shots, seed = load_task(args.data.task), training.num_shots, training.seed
    splits = load_splits(task, args.data)
    shots = draw_shots(whole_train(splits.train, splits.dev), task.labels, num_shots, seed)
    rule = f"{num_shots} examples of each label to train on, as many others are dev"
    logger.info("%s: lm-bff takes %s (seed %d)", task.name, rule, seed)
    few = Splits(shots.train, shots.dev, splits.test, {**splits.notes, "rule": rule})
    found = Found(task, few, FewShotPrompt(prompt_template(task)))
    for split in SPLITS:
        examples = found.examples(split)
        found.fingerprints[split] = digest(
            [examples_digest(examples), [example.label for example in examples]]
        )
    found.fingerprints["demonstrations"] = _demonstration_fields(args.retriever, training)
    return found


def _demonstration_fields(
    retriever: RetrieverArguments, training: ReaderTrainingArguments
) -> dict[str, Json]:
    """Give what decides the demonstrations, besides examples and seed."""
    share = training.exemplar_share
    fields: dict[str, Json] = {"sets": training.exemplar_sets, "share": share}
    if share < 1:
        source = find_model(retriever.encoder)
        fields |= {
            "encoder": source.identity,
            "pooling": retriever.pooling,
            "max_encoder_tokens": choose_max_tokens(source, retriever.max_encoder_tokens),
            "encoder_dtype": retriever.encoder_dtype,
        }
        if retriever.query_prompt is not None:
            fields["query_prompt"] = retriever.query_prompt
    return fields
