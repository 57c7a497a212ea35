"""What a memory of corrections adds to prompts: KATE with memory.

A corrected label is a labelled example whose neighborhood is known: it stands first among the
exemplars of a near query, in the place of the last one. Free feedback stands behind the query, as
MemPrompt's prompter writes it (Madaan et al. 2022, section 3.1).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tqdm import tqdm

from pgra.errors import ConfigError
from pgra.memory.labels import Correction, LabelMemory
from pgra.memory.prompter import as_data, clarify
from pgra.pipelines.icl_inputs import IclInputs, IclRun
from pgra.retrieval.leaks import text_key
from pgra.types import Example, Json


@dataclass(frozen=True)
class Recalled:
    """What a memory gave each of B queries; nothing where there is none.

    In the prompt's rows a correction is a row behind the pool's.

    Attributes:
        pool: The pool.
        matches: Corrections of each query that passed the gate, the nearest first; B lists.
        use: One of `pgra.memory.label_arguments.USES`.
        fingerprint: Of the memory; empty where there is none.
        sizes: Entries of the task and of others, as `metrics.json` tells them.
    """

    pool: Sequence[Example]
    matches: Sequence[Sequence[Correction]]
    use: str = "exemplar"
    fingerprint: Mapping[str, Json] = field(default_factory=dict)
    sizes: Mapping[str, Json] = field(default_factory=dict)

    @cached_property
    def _corrected(self) -> dict[int, Example]:
        found = {one.entry.id: one.example for line in self.matches for one in line}
        return dict(sorted(found.items()))

    @cached_property
    def _row_of(self) -> dict[int, int]:
        return {name: len(self.pool) + i for i, name in enumerate(self._corrected)}

    @cached_property
    def _all(self) -> list[Example]:
        return [*self.pool, *self._corrected.values()]

    def example(self, row: int) -> Example:
        """Give what a row stands for."""
        return self._all[row]

    def is_of_pool(self, row: int) -> bool:
        """Say whether a row is of the pool, and no correction."""
        return row < len(self.pool)

    def rows(self, place: int, chosen: Sequence[int], count: int) -> list[int]:
        """Put a query's corrections before its exemplars.

        The last exemplars make room for them, so that a prompt has as many examples as without a
        memory. Of the pool's, those of a correction's own text go: the user's word stands.

        Args:
            place: The query.
            chosen: Its exemplars' rows, in the order of choice.
            count: How many examples a prompt has.
        """
        found = self.matches[place] if self.use == "exemplar" else []
        if not found:
            return list(chosen)
        said = {text_key(one.example.text) for one in found}
        others = [row for row in chosen if text_key(self.pool[row].text) not in said]
        own = [self._row_of[one.entry.id] for one in found]
        return [*own, *others][: max(count, len(own))]

    def asked(self, place: int, query: Example) -> Example:
        """Give a query as its prompt shows it: with its clarifications, if they go there."""
        if self.use != "clarification":
            return query
        *_, last = query.fields
        asked = as_data(query.fields[last], is_question=True)
        for one in self.matches[place]:
            asked = clarify(asked, as_data(one.entry.feedback))
        return replace(query, fields={**query.fields, last: asked})

    def line(self, place: int, shown: Sequence[int]) -> dict[str, Json]:
        """Give what `predictions.jsonl` tells of a query's corrections.

        Args:
            place: The query.
            shown: The rows in its prompt: a correction may have had no room.
        """
        if not self.fingerprint:
            return {}
        told = [
            {**one.as_json(), "is_shown": self._is_shown(one, shown)} for one in self.matches[place]
        ]
        return {"memory": told}

    def counts(self, queries: Sequence[Example], shown: Sequence[Sequence[int]]) -> dict[str, Json]:
        """Give what `metrics.json` tells of the memory; nothing where there is none."""
        if not self.fingerprint:
            return {}
        used = [
            place
            for place, rows in enumerate(shown)
            if any(self._is_shown(one, rows) for one in self.matches[place])
        ]
        same = sum(
            text_key(queries[place].text) == text_key(self.matches[place][0].example.text)
            for place in used
        )
        return {
            **self.sizes,
            "queries_with_memory": len(used),
            "queries_that_were_corrected": same,
        }

    def _is_shown(self, one: Correction, shown: Sequence[int]) -> bool:
        return self.use == "clarification" or self._row_of[one.entry.id] in shown


def recall_all(run: IclRun, inputs: IclInputs) -> Recalled:
    """Look all queries up, where a memory is named.

    Raises:
        ArtifactError: If there is no such memory, or it is damaged.
        ConfigError: If nothing would be asked with it.
        DataError: If an entry of the task has no label of it.
        ModelError: If the look-up's encoder cannot be used.
    """
    args = run.memory
    if args.memory is None:
        return Recalled(inputs.pool, [[] for _ in inputs.queries])
    if run.icl.decide_by == "vote":
        raise ConfigError(
            "decide_by 'vote' asks no LM, and --memory adds to its prompts: leave one of them out"
        )
    labels = inputs.labels if args.memory_as == "exemplar" else ()
    opened = LabelMemory.open(
        args,
        task=inputs.task.name,
        inputs=inputs.task.inputs,
        labels=labels,
        device=run.icl.device,
    )
    with opened as memory:
        bar = tqdm(inputs.queries, desc="memory", unit="query", delay=1)
        matches = [memory.recall(query.fields) for query in bar]
        made = {**memory.fingerprint, "use": args.memory_as}
        sizes = {"entries": memory.num_entries, "entries_of_other_tasks": memory.num_others}
    return Recalled(inputs.pool, matches, args.memory_as, made, sizes)
