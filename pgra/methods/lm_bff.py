"""LM-BFF (Gao et al. 2021): a T5 tuned on a few examples, each read with answered ones beside it.

    train, dev  = K examples of each label, other K                     (section 3)
    input       = T(query), then a demonstration of each label          (section 6, eq. 5)
    label       = best by the mean score over sets of demonstrations    (section 6.1)

The seed gives the few-shot split as well as the order of examples, so several seeds tell of both.
The template and the words are the task's, as for every reader here; there is no evidence.
"""

import logging
from dataclasses import replace
from functools import cached_property
from typing import Self

from pgra.config import RunArguments
from pgra.core import Json
from pgra.data.examples import draw_shots, whole_train
from pgra.encoders.encoder import Encoder, choose_max_tokens, load_encoder
from pgra.errors import ConfigError
from pgra.lm.load import find_model
from pgra.methods.base import SPLITS, TaskData
from pgra.methods.pgra import Pgra, check_training
from pgra.methods.stages import Stages, prompt_template
from pgra.prompts.fewshot import FewShotPrompt
from pgra.reader.inputs import (
    SeparateInputs,
    Support,
    TokenizedInputs,
    Vectors,
    build_demonstrated,
    repeat_sets,
)
from pgra.reader.train import check_batches

logger = logging.getLogger(__name__)


class LmBff(Pgra):
    """Tunes a T5 on a few examples with demonstrations beside each."""

    SEEDS = "seeds of the few-shot split, its demonstrations, and the reader (order, dropout)"

    def open(self) -> None:
        """Refuse labels that are one token; then as PGRA, without evidence."""
        if self.pgra.reader.decode != "verbalizer":
            raise ConfigError(
                f"decode '{self.pgra.reader.decode}' writes one token, and lm-bff averages the "
                "scores of several inputs: leave --decode out"
            )
        super().open()

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of another seed, which draws another split."""
        if args.seed == self.seed and args.folder == self.args.folder:
            return self
        other = type(self)(args, self.context)
        other.open()
        return other

    def read_data(self) -> None:
        """Read the test set, and draw K and K examples a label of the training file."""
        whole, count = TaskData.read(self.args), self.training.num_shots
        shots = draw_shots(
            whole_train(whole.train, whole.dev), whole.labels, count, self.training.seed
        )
        rule = f"{count} examples of each label to train on, as many others are dev"
        logger.info("%s: lm-bff takes %s (seed %d)", whole.task.name, rule, self.training.seed)
        notes = {**whole.notes, "rule": rule}
        self.data = TaskData(whole.task, shots.train, shots.dev, whole.test, notes)
        prompt = FewShotPrompt(prompt_template(self.task))
        self.stages = Stages(self.pgra, self.context, prompt, data=self.data)
        self.fingerprints |= {split: self.data.fingerprint(split) for split in SPLITS}
        self.fingerprints["demonstrations"] = self._demonstration_fields()

    def check(self) -> None:
        """Refuse batches that the few examples do not fill."""
        check_training(self.pgra, self.training)
        check_batches(len(self.data.train) * self.training.exemplar_sets, self.training)

    def inputs(self, split: str) -> TokenizedInputs:
        """Return what the reader reads of a split: a set after the other, or all to average."""
        queries = self.data.examples(split)
        drawn = self.support.draw(queries, self._vectors(split), self.data.labels)
        inputs = build_demonstrated(
            queries,
            drawn,
            self.support.examples,
            self.tokenizer,
            self.verbalizer,
            layout=self.layout,
        )
        return repeat_sets(inputs) if split == "train" else SeparateInputs.over(inputs)

    @cached_property
    def support(self) -> Support:
        """What demonstrations are drawn from: the few training examples."""
        training = self.training
        return Support(
            self.data.examples("train"),
            self._vectors("train"),
            training.exemplar_share,
            training.exemplar_sets,
            training.seed,
        )

    @cached_property
    def _encoder(self) -> Encoder:
        return load_encoder(replace(self.pgra.retriever, normalize=True), self.context.device)

    def _vectors(self, split: str) -> Vectors | None:
        if self.training.exemplar_share == 1:  # all of a label's examples are near enough
            return None
        texts = [example.text for example in self.data.examples(split)]
        return self._encoder.encode(texts, is_query=True)

    def models(self) -> list[str]:
        """Return the reader, and the encoder that says which examples are near."""
        return [self.pgra.reader.model_name_or_path, self.pgra.retriever.encoder]

    def _demonstration_fields(self) -> dict[str, Json]:
        """Return what decides the demonstrations, besides examples and seed."""
        retriever, share = self.pgra.retriever, self.training.exemplar_share
        fields: dict[str, Json] = {"sets": self.training.exemplar_sets, "share": share}
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
