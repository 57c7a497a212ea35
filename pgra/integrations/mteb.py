"""mteb: a `pgra.Reranker` by its protocol of cross-encoders, for `mteb.evaluate`."""

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Any

from mteb.models import ModelMeta

from pgra.integrations.cross_encoder import PgraCrossEncoder

if TYPE_CHECKING:
    from pgra.rerank.reranker import Reranker


class PgraReranker:
    """Scores the pairs of a reranking task.

    Args:
        reranker: A `pgra.Reranker`.
        name: OWNER/NAME, under which mteb keeps results and finds them again: one for each LM,
            prompt and way to score.
        revision: Another one where any of these changes.
    """

    def __init__(self, reranker: "Reranker", name: str, revision: str = "1") -> None:
        self._pairs = PgraCrossEncoder(reranker)
        self.mteb_model_meta = ModelMeta.create_empty({"name": name, "revision": revision})

    def predict(self, inputs1: Iterable[Any], inputs2: Iterable[Any], **options: Any) -> Any:  # noqa: ARG002
        """Return the scores of queries and documents, two loaders of batches, (n,) float32."""
        queries = chain.from_iterable(batch["text"] for batch in inputs1)
        documents = chain.from_iterable(batch["text"] for batch in inputs2)
        return self._pairs.predict(list(zip(queries, documents, strict=True)))
