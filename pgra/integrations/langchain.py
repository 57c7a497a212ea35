"""LangChain: a reranker of retrieved documents, and KATE's choice of few-shot examples."""

from collections.abc import Sequence
from typing import Any

from pgra.exemplars.selector import ExemplarSelector

try:
    from langchain_core.callbacks import Callbacks
    from langchain_core.documents import BaseDocumentCompressor, Document
    from langchain_core.example_selectors import BaseExampleSelector
    from pydantic import ConfigDict, Field
except ImportError:
    raise ImportError("this needs langchain-core: pip install '.[integrations]'") from None


class PgraReranker(BaseDocumentCompressor):
    """Orders documents by a `pgra.Reranker`, such as in a `ContextualCompressionRetriever`.

    Attributes:
        reranker: A `pgra.Reranker`: the LM under a task's prompt.
        top_n: How many of the best to keep; None: all.
    """

    reranker: Any  # its class brings torch, which a selector does without
    top_n: int | None = Field(default=None, ge=1)
    model_config = ConfigDict(arbitrary_types_allowed=True, extra="forbid")

    def compress_documents(
        self,
        documents: Sequence[Document],
        query: str,
        callbacks: Callbacks | None = None,  # noqa: ARG002 (the contract's)
    ) -> list[Document]:
        """Return copies of the best documents, best first, with `metadata["relevance_score"]`.

        Raises:
            PgraError: As `pgra.Reranker.rank`.
        """
        texts = [document.page_content for document in documents]
        compressed = []
        for hit in self.reranker.rank(query, texts, k=self.top_n):
            document = documents[hit.index]
            metadata = {**document.metadata, "relevance_score": hit.score}
            compressed.append(document.model_copy(update={"metadata": metadata}))
        return compressed


class KateSelector(BaseExampleSelector):
    """Chooses the examples of a `FewShotPromptTemplate` by a `pgra.ExemplarSelector`.

    Args:
        selector: Of a pool of dicts, whose text columns are variables of the prompt.
        k: How many examples, the nearest first.
    """

    def __init__(self, selector: ExemplarSelector, k: int = 8) -> None:
        self.selector = selector
        self.k = k

    def add_example(self, example: dict[str, str]) -> None:
        """Add an example to the pool; a DataError if it lacks a column."""
        self.selector.add(example)

    def select_examples(self, input_variables: dict[str, str]) -> list[dict[str, Any]]:
        """Return the examples nearest to the text columns among a prompt's variables.

        A DataError if a column is not among them.
        """
        return self.selector.select(input_variables, self.k)
