"""One LM under several prefixes: a candidate's score is the mean over them.

What an LM makes of few shots depends much on which shots they are (Lu et al. 2022, "Fantastically
Ordered Prompts"). Each draw of exemplars has banks of its own, so that the LM reads all texts once
a prefix; products of one prefix are computed as `PromptedReranker` does, and averaged.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from pgra.processes import Processes
from pgra.rerank.base import Work
from pgra.rerank.prompted import PromptedReranker
from pgra.types import Candidates, Example, Json, Rows


class AveragedReranker:
    """Orders candidates by the mean of their scores under several prefixes.

    Attributes:
        members: One reranker a prefix, of the same LM.
    """

    def __init__(self, members: Sequence[PromptedReranker]) -> None:
        self.members = list(members)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that the order of candidates depends on, besides the candidates."""
        return {"prefixes": [dict(member.fingerprint) for member in self.members]}

    def prepare(
        self,
        examples: Sequence[Example],
        rows: Rows,
        *,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
        progress: bool = False,
    ) -> Work:
        """Let the LM read queries and passages under each prefix, as far as it has not yet.

        Args:
            examples: The queries, of all splits at once.
            rows: Their candidates, any shape; missing ones are passed over.
            processes: Who shares the work.
            progress: Whether to show bars.

        Returns:
            Sums over prefixes; passages are counted once.
        """
        done = [
            member.prepare(examples, rows, processes=processes, progress=progress)
            for member in self.members
        ]
        return Work(
            done[0].num_passages,
            sum(work.num_new for work in done),
            sum(work.num_tokens for work in done),
            sum(work.num_cut for work in done),
            sum(work.seconds for work in done),
        )

    def rerank(self, examples: Sequence[Example], candidates: Candidates) -> Candidates:
        """Order each query's candidates by the mean score; `prepare` must have seen them.

        Args:
            examples: B queries.
            candidates: (B, K).

        Returns:
            The same rows (B, K) with the means, best first, ties by row.

        Raises:
            KeyError: If a state is missing.
        """
        rows = candidates.rows
        scores = np.mean([member.score(examples, rows) for member in self.members], axis=0)
        return Candidates.best(rows, scores, rows.shape[1])
