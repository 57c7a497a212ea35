"""LlamaIndex: a postprocessor that orders retrieved nodes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgra.rerank.reranker import Reranker

try:
    from llama_index.core.bridge.pydantic import Field, PrivateAttr
    from llama_index.core.postprocessor.types import BaseNodePostprocessor
    from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle
except ImportError:
    raise ImportError("this needs llama-index-core: pip install '.[integrations]'") from None


class PgraRerank(BaseNodePostprocessor):
    """Orders nodes by a `pgra.Reranker`, such as among a query engine's `node_postprocessors`."""

    top_n: int | None = Field(default=None, ge=1, description="Nodes kept, the best first.")
    _reranker: Any = PrivateAttr()

    def __init__(self, reranker: "Reranker", top_n: int | None = None, **options: Any) -> None:
        """Take a `pgra.Reranker`; `options` are for the base class (`callback_manager`).

        Raises:
            ValueError: If `top_n` is below 1.
        """
        super().__init__(top_n=top_n, **options)
        self._reranker = reranker

    @classmethod
    def class_name(cls) -> str:
        return "PgraRerank"

    def _postprocess_nodes(
        self, nodes: list[NodeWithScore], query_bundle: QueryBundle | None = None
    ) -> list[NodeWithScore]:
        """Return copies of the best nodes, best first, with the reranker's scores."""
        if query_bundle is None:
            raise ValueError("there is no query to order nodes by: give query_str or query_bundle")
        texts = [node.node.get_content(metadata_mode=MetadataMode.EMBED) for node in nodes]
        hits = self._reranker.rank(query_bundle.query_str, texts, k=self.top_n)
        return [NodeWithScore(node=nodes[hit.index].node, score=hit.score) for hit in hits]
