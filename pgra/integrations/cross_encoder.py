"""sentence-transformers: a `pgra.Reranker` with the calls of its `CrossEncoder`."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from sentence_transformers.cross_encoder.model_card import CrossEncoderModelCardData

from pgra.arrays import Values

if TYPE_CHECKING:
    from pgra.rerank.reranker import Reranker


class PgraCrossEncoder:
    """Scores pairs by a reranker, for whatever takes a `CrossEncoder`, such as its evaluators.

    Options of theirs that a reranker has elsewhere (batch sizes, devices, bars) are passed over.
    """

    def __init__(self, reranker: "Reranker") -> None:
        self.reranker = reranker
        self.model_card_data = CrossEncoderModelCardData()  # where evaluators write

    def predict(self, sentences: Sequence[Any], **options: Any) -> Any:  # noqa: ARG002
        """Return the score of each (query, document) pair, (n,) float32; of one pair a number.

        Raises:
            PgraError: As `pgra.Reranker.rank`.
        """
        is_one = len(sentences) == 2 and isinstance(sentences[0], str)
        pairs = [sentences] if is_one else sentences
        rows: dict[str, list[int]] = defaultdict(list)
        for row, (query, _) in enumerate(pairs):
            rows[query].append(row)
        scores: Values = np.empty(len(pairs), np.float32)
        for query, of_query in rows.items():
            for hit in self.reranker.rank(query, [pairs[row][1] for row in of_query]):
                scores[of_query[hit.index]] = hit.score
        return scores[0] if is_one else scores

    def rank(
        self,
        query: str,
        documents: Sequence[str],
        top_k: int | None = None,
        return_documents: bool = False,  # noqa: FBT001, FBT002 (theirs)
        **options: Any,  # noqa: ARG002
    ) -> list[dict[str, Any]]:
        """Return the best documents first: `corpus_id`, `score` and, if asked for, `text`."""
        results = []
        for hit in self.reranker.rank(query, documents, k=top_k):
            result: dict[str, Any] = {"corpus_id": hit.index, "score": hit.score}
            if return_documents:
                result["text"] = hit.text
            results.append(result)
        return results
