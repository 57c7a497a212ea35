"""LM-BFF (Gao et al. 2021): a T5 tuned on a few examples, each read with answered ones beside it.

    train, dev  = K examples of each label, other K                     (section 3)
    input       = T(query), then a demonstration of each label          (section 6, eq. 5)
    label       = best by the mean score over sets of demonstrations    (section 6.1)

Demonstrations are drawn from the half of a label's examples that is nearest to the query, by a
sentence encoder's cosine (section 6.2). The seed decides the few-shot split and the order of
examples. Template and words are the task's, as for every reader here; there is no evidence.
"""

import logging
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from pgra.core import Example, Json
from pgra.data.examples import draw_shots, whole_train
from pgra.encoders.encoder import Encoder
from pgra.errors import ConfigError
from pgra.lm.load import find_model
from pgra.methods.arguments import METHODS, LmBffArguments, RunArguments
from pgra.methods.base import SPLITS, TaskData
from pgra.methods.pgra import Pgra
from pgra.methods.stages import Stages
from pgra.prompts import SLOT, FewShotPrompt, Verbalizer, prompt_template
from pgra.reader.inputs import (
    Join,
    SegmentLayout,
    SeparateInputs,
    TokenizedInputs,
    fit_queries,
    tokenize_parts,
)

logger = logging.getLogger(__name__)

Vectors = npt.NDArray[np.float32]


class LmBff(Pgra):
    """Tunes a T5 on a few examples with demonstrations beside each."""

    SECTIONS = METHODS["lm-bff"].sections
    COMBINES_SCORES = True

    @classmethod
    def uses_seed(cls, args: RunArguments) -> bool:  # noqa: ARG003 (the contract's)
        return True

    def with_seed(self, args: RunArguments) -> Self:
        """Return the method of another seed, which draws another split."""
        if args.seed == self.seed and args.folder == self.args.folder:
            return self
        other = type(self)(args, self.context)
        other.open()
        return other

    def read_data(self) -> None:
        """Read the test set, and draw K and K examples a label of the training file."""
        whole, count = TaskData.read(self.args), self.args["shots"].num_shots
        shots = draw_shots(
            whole_train(whole.train, whole.dev), whole.labels, count, self.training.seed
        )
        rule = f"{count} examples of each label to train on, as many others are dev"
        logger.info("%s: lm-bff takes %s (seed %d)", whole.task.name, rule, self.training.seed)
        self.data = TaskData(whole.task, shots.train, shots.dev, whole.test, whole.notes)
        prompt = FewShotPrompt(prompt_template(self.data.choice))
        self.stages = Stages(self.pgra, self.context, prompt, self.data)
        self.fingerprints |= {split: self.data.fingerprint(split) for split in SPLITS}
        self.fingerprints["demonstrations"] = self._demonstration_fields()

    def check(self) -> None:
        """Refuse batches that the few examples do not fill."""
        self.check_training(len(self.data.train) * self.args["shots"].exemplar_sets)

    def inputs(self, split: str) -> TokenizedInputs:
        """Return a split's inputs: train's set by set, others' sets together to average."""
        queries, support = self.data.examples(split), self.data.examples("train")
        vectors = None
        if self.args["shots"].exemplar_share < 1:  # else all of a label's examples are near enough
            vectors = self._vectors(split), self._vectors("train")
        labels, seed, shots = self.data.labels, self.training.seed, self.args["shots"]
        drawn = draw_demonstrations(queries, support, vectors, labels, args=shots, seed=seed)
        if split == "train":  # each set is an example to train on, all examples' first sets first
            drawn = drawn.transpose(1, 0, 2).reshape(-1, 1, len(self.data.labels))
            sets = range(self.args["shots"].exemplar_sets)
            queries = [replace(query, id=f"{query.id}/{n}") for n in sets for query in queries]
        inputs = build_demonstrated(
            queries, drawn, support, self.tokenizer, self.verbalizer, layout=self.layout
        )
        return inputs if split == "train" else SeparateInputs(**vars(inputs))

    @cached_property
    def _encoder(self) -> Encoder:
        return Encoder.load(
            replace(self.pgra.retriever, normalize=True), device=self.context.device
        )

    def _vectors(self, split: str) -> Vectors:
        texts = [example.text for example in self.data.examples(split)]
        return self._encoder.encode(texts, is_query=True)

    def models(self) -> list[str]:
        return [self.pgra.reader.model_name_or_path, self.pgra.retriever.encoder]

    def _demonstration_fields(self) -> dict[str, Json]:
        """Return what decides the demonstrations, besides examples and seed."""
        retriever, share = self.pgra.retriever, self.args["shots"].exemplar_share
        fields: dict[str, Json] = {"sets": self.args["shots"].exemplar_sets, "share": share}
        if share < 1:
            fields |= {
                "encoder": find_model(retriever.encoder).identity,
                "pooling": retriever.pooling,
                "max_encoder_tokens": retriever.max_encoder_tokens,
                "encoder_dtype": retriever.encoder_dtype,
            }
            if retriever.query_prompt is not None:
                fields["query_prompt"] = retriever.query_prompt
        return fields


def draw_demonstrations(
    queries: Sequence[Example],
    support: Sequence[Example],
    vectors: tuple[Vectors, Vectors] | None,
    labels: Sequence[str],
    *,
    args: LmBffArguments,
    seed: int,
) -> npt.NDArray[np.int64]:
    """Draw each query's demonstrations: rows of the support, (B, num_sets, C), labels in order.

    A query is never its own; its draws depend on its id and the seed, not on other queries. The
    support has two examples of each label at least. `vectors` are the queries' and the support's,
    of unit length, (B, D) and (n, D); None to draw from all of a label's examples, else from
    the nearest `exemplar_share` of them, rounded down, at least one.
    """
    drawn = np.empty((len(queries), args.exemplar_sets, len(labels)), dtype=np.int64)
    for number, query in enumerate(queries):
        near = []
        for label in labels:
            rows = [
                row
                for row, example in enumerate(support)
                if example.label == label and example.id != query.id
            ]
            if vectors is not None:
                similarity = vectors[1][rows] @ vectors[0][number]
                rows = [rows[i] for i in np.argsort(-similarity, kind="stable")]
            near.append(rows[: max(1, int(len(rows) * args.exemplar_share))])
        draw = random.Random(f"{seed}/{query.id}")
        drawn[number] = [[draw.choice(rows) for rows in near] for _ in range(args.exemplar_sets)]
    return drawn


def build_demonstrated(
    queries: Sequence[Example],
    drawn: npt.NDArray[np.int64],
    support: Sequence[Example],
    tokenizer: Any,
    verbalizer: Verbalizer,
    *,
    layout: SegmentLayout,
) -> TokenizedInputs:
    """Put each query and its demonstrations into a segment for each set.

    `drawn` is as `draw_demonstrations` returns it. The query gets `layout.max_tokens`, and all
    demonstrations as many again, in equal shares (the original doubles its limit likewise). What is
    too long is cut in the example's own text, so that no demonstration loses its word.

    Raises:
        ConfigError: If the limit leaves a template no room.
        DataError: If a query has a label that the verbalizer does not know.
    """
    texts, _ = fit_queries(queries, tokenizer, layout)
    room = layout.max_tokens // len(verbalizer.words) + 1  # the end is the query's
    template = layout.template if SLOT in layout.template else f"{layout.template} {SLOT}"
    shown = []
    for example in support:
        word = verbalizer.words[str(example.label)].replace("{", "{{").replace("}", "}}")
        filled = SegmentLayout(template.replace(SLOT, word), max_tokens=room)
        try:
            text, _ = fit_queries([example], tokenizer, filled)
        except ConfigError:
            raise ConfigError(
                f"max_segment_tokens ({layout.max_tokens}) leaves each of {len(verbalizer.words)} "
                f"demonstrations {room - 1} tokens, too few for the template itself "
                f"({layout.template!r}): raise it"
            ) from None
        shown += tokenize_parts(text, tokenizer, is_first=False)
    close = Join(tokenizer.eos_token_id, layout).close
    segments = [
        [close(np.concatenate([query, *(shown[row] for row in rows)])) for rows in sets]
        for query, sets in zip(
            tokenize_parts(texts, tokenizer, is_first=True), drawn.tolist(), strict=True
        )
    ]
    return TokenizedInputs.of(queries, segments, tokenizer, verbalizer)
