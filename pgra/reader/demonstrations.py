"""Inputs with demonstrations: a query, then one answered example of each label (LM-BFF).

Gao et al. 2021, section 6 and eq. 5: T(x) and then, for each label, the template of a training
example with its word in the slot. Several sets are drawn for an example, from those of a label's
examples that are nearest to it (section 6.2: the nearer half, by a sentence encoder's cosine); its
scores are averaged over the sets.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.errors import ConfigError
from pgra.models.segments import TokenIds
from pgra.prompts.verbalizer import SLOT, Verbalizer
from pgra.reader.inputs import SegmentLayout, fit_queries, tokenize_parts
from pgra.reader.tokens import TokenizedInputs
from pgra.types import Example

Vectors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Support:
    """What demonstrations are drawn from.

    Attributes:
        examples: The training examples.
        vectors: Theirs, of unit length, (n, D); None to draw from all of a label's.
        share: How many of a label's examples are drawn from, the nearest ones, rounded down, at
            least one.
        num_sets: Sets drawn for each query.
        seed: Of the draws.
    """

    examples: Sequence[Example]
    vectors: Vectors | None
    share: float
    num_sets: int
    seed: int

    def draw(
        self, queries: Sequence[Example], vectors: Vectors | None, labels: Sequence[str]
    ) -> npt.NDArray[np.int64]:
        """Draw the demonstrations of each query; a query is never its own.

        A query's draws depend on its id and the seed, not on the queries beside it.

        Args:
            queries: The examples to show something with.
            vectors: Theirs, of unit length, (B, D); None where the support has none.
            labels: The task's, each of which has two examples at least.

        Returns:
            Places among the support's examples, (B, num_sets, C), the labels in order.
        """
        near = [self._near(query, vectors, row, labels) for row, query in enumerate(queries)]
        drawn = np.empty((len(queries), self.num_sets, len(labels)), dtype=np.int64)
        for row, query in enumerate(queries):
            draw = random.Random(f"{self.seed}/{query.id}")
            for number in range(self.num_sets):
                drawn[row, number] = [draw.choice(places) for places in near[row]]
        return drawn

    def _near(
        self, query: Example, vectors: Vectors | None, row: int, labels: Sequence[str]
    ) -> list[list[int]]:
        """Give the places of each label's nearest examples, ties by place."""
        found = []
        for label in labels:
            places = [
                place
                for place, example in enumerate(self.examples)
                if example.label == label and example.id != query.id
            ]
            if self.vectors is not None and vectors is not None:
                nearness = self.vectors[places] @ vectors[row]
                places = [places[i] for i in np.argsort(-nearness, kind="stable")]
            found.append(places[: max(1, int(len(places) * self.share))])
        return found


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

    The query gets `layout.max_tokens`, and all demonstrations as many again, each an equal share
    (the original doubles its limit likewise); what is too long is cut in the example's own text,
    never in the template, so that no demonstration loses its word.

    Args:
        queries: The examples to decide.
        drawn: As `Support.draw` gives them.
        support: What they are places of.
        tokenizer: The reader's.
        verbalizer: Gives each label its word and target.
        layout: The template and the limit.

    Raises:
        ConfigError: If the limit leaves a template no room.
        DataError: If a query has a label that the verbalizer does not know.
    """
    texts, _ = fit_queries(queries, tokenizer, layout)
    asked = tokenize_parts(texts, tokenizer, is_first=True)
    room = layout.max_tokens // len(verbalizer.words) + 1  # the end is the query's
    try:
        shown = _demonstrations(support, tokenizer, verbalizer, room=room, template=layout.template)
    except ConfigError:
        raise ConfigError(
            f"max_segment_tokens ({layout.max_tokens}) leaves each of {len(verbalizer.words)} "
            f"demonstrations {room - 1} tokens, too few for the template itself "
            f"({layout.template!r}): raise it"
        ) from None
    end = np.array([tokenizer.eos_token_id], dtype=np.int32)
    segments = [
        [np.concatenate([query, *(shown[place] for place in places), end]) for places in sets]
        for query, sets in zip(asked, drawn.tolist(), strict=True)
    ]
    return TokenizedInputs.of(queries, segments, tokenizer, verbalizer)


def _demonstrations(
    support: Sequence[Example],
    tokenizer: Any,
    verbalizer: Verbalizer,
    *,
    room: int,
    template: str,
) -> list[TokenIds]:
    """Tokenise each support example with its word in the slot, as it follows other text."""
    shown: dict[str, TokenIds] = {}
    for label, word in verbalizer.words.items():
        mine = [example for example in support if example.label == label]
        filled = SegmentLayout(_fill(template, word), max_tokens=room)
        texts, _ = fit_queries(mine, tokenizer, filled)
        ids = tokenize_parts(texts, tokenizer, is_first=False)
        shown |= {example.id: tokens for example, tokens in zip(mine, ids, strict=True)}
    return [shown[example.id] for example in support]


def _fill(template: str, word: str) -> str:
    """Put a word into a template's slot, or behind a template without one."""
    plain = word.replace("{", "{{").replace("}", "}}")  # it stays a template for the fields
    return template.replace(SLOT, plain) if SLOT in template else f"{template} {plain}"


def repeat_sets(inputs: TokenizedInputs) -> TokenizedInputs:
    """Give each set as an example to train on, all examples' first sets first.

    Its name tells the set: "train-7/2".
    """
    num_sets = len(inputs.segment_ends) // max(len(inputs), 1)
    order = np.arange(len(inputs.segment_ends)).reshape(len(inputs), num_sets).T.ravel()
    rows = [(place // num_sets, place % num_sets) for place in order.tolist()]
    segments = [inputs[row].segments[number] for row, number in rows]
    return TokenizedInputs(
        [f"{inputs.example_ids[row]}/{number}" for row, number in rows],
        [inputs.labels[row] for row, _ in rows],
        inputs.targets,
        np.concatenate(segments),
        np.cumsum([len(segment) for segment in segments], dtype=np.int64),
        np.arange(1, len(segments) + 1),
    )
