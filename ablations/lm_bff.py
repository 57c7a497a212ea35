"""LM-BFF (Gao et al. 2021): a T5 tuned on a few examples, each read with answered ones beside it.

    train, dev  = K examples of each label, other K                     (section 3)
    input       = T(query), then a demonstration of each label          (section 6, eq. 5)
    label       = best by the mean score over sets of demonstrations    (section 6.1)

Demonstrations are drawn from the half of a label's examples that is nearest to the query, by a
sentence encoder's cosine (section 6.2). The seed decides the few-shot split and the order of
examples. Template and words are the task's, as for every reader here; there is no evidence.

    PYTHONPATH=. pgra train --config ablations/lm-bff.yaml --task sst2 --seeds 13 21 42 87 100
"""

import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

import numpy as np

from ablations.separate import SeparateClassifier, SeparateInputs
from pgra.arrays import Rows, Vectors
from pgra.config import Arguments, arg
from pgra.encoders import as_encoder
from pgra.encoders.encoder import Encoder
from pgra.errors import DataError
from pgra.methods.arguments import RunArguments
from pgra.methods.base import TaskData
from pgra.methods.pgra import Pgra
from pgra.methods.stages import Stages
from pgra.prompts import SLOT, FewShotPrompt, Verbalizer, prompt_template
from pgra.reader.inputs import (
    Join,
    SegmentLayout,
    TokenizedInputs,
    fit_queries,
    tokenize_parts,
)
from pgra.types import Example


@dataclass(kw_only=True)
class LmBffArguments(Arguments):
    """The few examples, and what stands beside each."""

    GROUP = "Reader"

    num_shots: int = arg(
        16,
        "Examples of each label that lm-bff trains on; as many others choose the checkpoint.",
        least=2,  # an example's label needs another one to show
        is_common=True,
    )
    exemplar_sets: int = arg(
        16, "Sets of demonstrations, one of each label, that lm-bff reads an example with.", least=1
    )


class LmBff(Pgra):
    """Tunes a T5 on a few examples with demonstrations beside each."""

    SECTIONS: ClassVar[Mapping[str, type]] = {**Pgra.SECTIONS, "shots": LmBffArguments}
    DECIDED: ClassVar[Mapping[str, Any]] = {"num_evidence": 0, "reranker": "none"}
    CLASSIFIER = SeparateClassifier
    HAS_OWN_INPUTS = True

    @classmethod
    def name(cls, args: RunArguments) -> str:  # noqa: ARG003 (the contract's)
        return "lm-bff"

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
        whole = TaskData.read(self.args, least_dev=sys.maxsize).labelled()  # none is held out
        count = self.args["shots"].num_shots
        train, dev = draw_shots(whole.train, whole.labels, count, self.seed)
        self.data = replace(whole, train=train, dev=dev)
        prompt = FewShotPrompt(prompt_template(self.data.task))
        self.stages = Stages(self.args, self.context, prompt, self.data)
        shots = self.data.fingerprints()
        self.fingerprints["test"] = shots.pop("test")
        self.fingerprints["shots"] = shots  # no division of the task's that others share
        self.fingerprints["demonstrations"] = {
            "sets": self.args["shots"].exemplar_sets,
            "encoder": dict(self._encoder.query_fingerprint),
        }

    def check(self) -> None:
        """Refuse batches that the few examples do not fill."""
        self.check_training(len(self.data.train) * self.args["shots"].exemplar_sets)

    def inputs(self, split: str) -> TokenizedInputs:
        """Return a split's inputs: train's set by set, others' sets together to average."""
        queries = self.data.examples(split)
        support = self.data.examples("train")
        labels = self.data.labels
        num_sets = self.args["shots"].exemplar_sets
        vectors = self._vectors(split), self._vectors("train")
        drawn = draw_demonstrations(
            queries, support, vectors, labels, num_sets=num_sets, seed=self.seed
        )
        if split == "train":  # each set is an example to train on, all examples' first sets first
            drawn = drawn.transpose(1, 0, 2).reshape(-1, 1, len(labels))
            copies = []
            for number in range(num_sets):
                copies += [replace(query, id=f"{query.id}/{number}") for query in queries]
            queries = copies
        inputs = build_demonstrated(
            queries, drawn, support, self.tokenizer, self.verbalizer, layout=self.layout
        )
        return inputs if split == "train" else SeparateInputs(**vars(inputs))

    @cached_property
    def _encoder(self) -> Encoder:
        return as_encoder(replace(self.args.retriever, normalize=True), device=self.context.device)

    def _vectors(self, split: str) -> Vectors:
        texts = [example.text for example in self.data.examples(split)]
        return self._encoder.encode(texts, is_query=True)

    @classmethod
    def sources(cls, args: RunArguments) -> list[tuple[str, str]]:
        return [*super().sources(args), ("model", args.retriever.encoder)]


# Few-shot splits: so many examples of each label to train on, as many to choose a checkpoint on.
#
# Gao et al. 2021, "Making Pre-trained Language Models Better Few-shot Learners", section 3: K
# examples a class to train on, and a development set of the same size. Their released draw is made
# again: in the files' order the same seed gives the same examples (seen for SST-2, CR and TREC; for
# CoLA only with seed 100, their first, since they shuffle what the seed before left).


def draw_shots(
    examples: Sequence[Example], labels: Sequence[str], num_shots: int, seed: int
) -> tuple[list[Example], list[Example]]:
    """Shuffle the examples, and take each label's first K to train on, the next K as dev.

    The draw depends on their order; `seed` is of numpy's old generator, as in the original.

    Raises:
        DataError: If a label has fewer than 2 K examples.
    """
    order = np.random.RandomState(seed).permutation(len(examples))
    shuffled = [examples[row] for row in order]
    train: list[Example] = []
    dev: list[Example] = []
    for label in labels:
        group = [example for example in shuffled if example.label == label]
        if len(group) < 2 * num_shots:
            raise DataError(
                f"label '{label}' has {len(group)} training examples, not twice num_shots: lower it"
            )
        train += group[:num_shots]
        dev += group[num_shots : 2 * num_shots]
    return train, dev


def draw_demonstrations(
    queries: Sequence[Example],
    support: Sequence[Example],
    vectors: tuple[Vectors, Vectors],
    labels: Sequence[str],
    *,
    num_sets: int,
    seed: int,
    share: float = 0.5,
) -> Rows:
    """Draw each query's demonstrations: rows of the support, (B, num_sets, C), labels in order.

    A query is never its own; its draws depend on its id and the seed, not on other queries. The
    support has two examples of each label at least. `vectors` are the queries' and the support's,
    of unit length, (B, D) and (n, D): drawn from are the nearest `share` of a label's
    examples, rounded down, at least one.
    """
    drawn = np.empty((len(queries), num_sets, len(labels)), dtype=np.int64)
    for number, query in enumerate(queries):
        order = np.argsort(-(vectors[1] @ vectors[0][number]), kind="stable").tolist()
        near = []
        for label in labels:
            rows = [row for row in order if support[row].label == label]
            rows = [row for row in rows if support[row].id != query.id]
            near.append(rows[: max(1, int(len(rows) * share))])
        draw = random.Random(f"{seed}/{query.id}")
        drawn[number] = [[draw.choice(rows) for rows in near] for _ in range(num_sets)]
    return drawn


def build_demonstrated(
    queries: Sequence[Example],
    drawn: Rows,
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
    """
    texts = fit_queries(queries, tokenizer, layout)
    room = layout.max_tokens // len(verbalizer.words) + 1  # the end is the query's
    template = layout.template if SLOT in layout.template else f"{layout.template} {SLOT}"
    demonstrations = []
    for example in support:
        word = verbalizer.words[str(example.label)].replace("{", "{{").replace("}", "}}")
        filled = SegmentLayout(template.replace(SLOT, word), max_tokens=room)
        text = fit_queries([example], tokenizer, filled)
        demonstrations += tokenize_parts(text, tokenizer, is_first=False)
    close = Join(tokenizer.eos_token_id, layout).close
    segments = []
    parts = tokenize_parts(texts, tokenizer, is_first=True)
    for query, sets in zip(parts, drawn.tolist(), strict=True):
        joined = [[query, *(demonstrations[row] for row in rows)] for rows in sets]
        segments.append([close(np.concatenate(tokens)) for tokens in joined])
    return TokenizedInputs.of(queries, segments, tokenizer, verbalizer)
