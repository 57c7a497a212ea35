"""Both retrieval stages for queries as they come: opened once, no candidates are stored."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from pgra.config import PgraArguments
from pgra.data.corpus import Corpus, open_corpus
from pgra.processes import Processes
from pgra.prompts.fewshot import FewShotPrompt
from pgra.rerank import NearestExemplars, Reference, Reranker, open_reranker
from pgra.rerank.exhaustive import ExhaustiveSearch, open_exhaustive
from pgra.retrieval import Retriever, open_retriever
from pgra.types import Candidates, Example


@dataclass(frozen=True)
class Ranked:
    """What the stages found for B queries.

    Attributes:
        first: The first stage's candidates, (B, K); where there is none, the same as `best`.
        best: The second stage's order of them, (B, K); of the exhaustive search, the best N.
    """

    first: Candidates
    best: Candidates


class EvidenceSearch:
    """Finds evidence for any query, with a task's prompt.

    The states of queries and of passages that the LM has not read yet are kept in the banks, as a
    run's are.

    Attributes:
        args: What to search, and how.
        corpus: What is searched.
        reranker: The second stage; its LM's weights are loaded when they are first needed.
    """

    def __init__(
        self,
        args: PgraArguments,
        prompt: FewShotPrompt,
        processes: Processes = Processes(),  # noqa: B008 (frozen)
        *,
        exemplars: NearestExemplars | None = None,
        reference: Reference = Reference(),  # noqa: B008 (frozen)
    ) -> None:
        """Open what is quick to open.

        Args:
            args: What to search, and how.
            prompt: The LM's.
            processes: Who shares the work.
            exemplars: Each query's own, where the prompt has none.
            reference: What the task, or an earlier run, gives a similarity that is fitted.

        Raises:
            PgraError: As `open_corpus` and `open_reranker`.
        """
        self.args, self._processes = args, processes
        self.corpus: Corpus = open_corpus(args.corpus, args.artifacts)
        self.reranker: Reranker = open_reranker(
            args.rerank,
            prompt,
            self.corpus,
            args.artifacts,
            exemplars=exemplars,
            device=args.runtime.device,
            reference=reference,
        )

    @cached_property
    def retriever(self) -> Retriever:
        """Open the first stage; its index is built if it is not there."""
        return open_retriever(
            self.args.retriever,
            self.corpus,
            self.args.artifacts,
            device=self.args.runtime.device,
            processes=self._processes,
            progress=self._processes.worker.is_main,
        )

    @cached_property
    def exhaustive(self) -> ExhaustiveSearch:
        """Open the search without a first stage."""
        return open_exhaustive(
            self.reranker,
            self.args.artifacts,
            factory=self.args.retriever.index_factory,
            memory_gb=self.args.retriever.index_memory_gb,
        )

    def find(self, queries: Sequence[Example], *, depth: int | None = None) -> Ranked:
        """Take queries through both stages, or through the search without a first one.

        Args:
            queries: Any; ids are not looked at.
            depth: Evidence a query of the exhaustive search; None is the run's d.

        Raises:
            PgraError: As each stage says.
        """
        progress = self._processes.worker.is_main
        if self.args.is_exhaustive:
            search = self.exhaustive
            wanted = self.args.rerank.num_evidence if depth is None else depth
            search.prepare(queries, processes=self._processes, progress=progress)
            best = search.search(queries, min(wanted, search.num_rows))
            return Ranked(best, best)
        texts = [query.text for query in queries]
        first = self.retriever.retrieve(texts, self.args.retriever.num_candidates)
        self.reranker.prepare(queries, first.rows, processes=self._processes, progress=progress)
        return Ranked(first, self.reranker.rerank(queries, first))
