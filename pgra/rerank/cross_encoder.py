"""A cross-encoder reads query and passage as one text and scores how relevant it is.

Nogueira and Cho 2019, "Passage Re-ranking with BERT". Any Hugging Face sequence classifier, the
folders of sentence-transformers' `CrossEncoder` among them. With one logit, that is the score; with
several, the log-probability of the class named "relevant" or "entailment"; of two without names, of
the second.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import cached_property

from torch import Tensor

from pgra.config import Arguments as _Arguments
from pgra.core import Json
from pgra.errors import ModelError
from pgra.rerank.base import CrossEncoderArguments, RerankArguments, RerankRequest
from pgra.rerank.pairs import PairReranker, Tokens

logger = logging.getLogger(__name__)

_RELEVANT = ("relevant", "entailment")  # names of the class that counts, the first known one
_UNNAMED = ["label_0", "label_1"]  # what transformers calls two classes


class CrossEncoderReranker(PairReranker):
    """Orders candidates by a cross-encoder's scores; the longer text of a long pair is cut."""

    Arguments = CrossEncoderArguments
    model_class = "AutoModelForSequenceClassification"

    def __init__(self, request: RerankRequest) -> None:
        assert isinstance(request.options, CrossEncoderArguments)  # its own
        super().__init__(request, max_tokens=request.options.cross_encoder_tokens)

    @classmethod
    def models(cls, args: RerankArguments, options: _Arguments | None = None) -> list[str]:  # noqa: ARG003
        options = options or CrossEncoderArguments()
        assert isinstance(options, CrossEncoderArguments)
        return [options.cross_encoder]

    def fields(self) -> Mapping[str, Json]:
        return {"class": self._class, "reranker": "cross-encoder"}

    def encode(
        self, queries: Sequence[str], passages: Sequence[str], max_tokens: int | None = None
    ) -> list[Tokens]:
        """Tokenise pairs as the model's tokenizer joins two texts."""
        cut = {"truncation": "longest_first", "max_length": max_tokens} if max_tokens else {}
        return self.call_tokenizer(queries, passages, **cut)

    def score_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits.float()
        if self._class is None:
            return logits[:, 0]
        return logits.log_softmax(dim=1)[:, self._class]

    @cached_property
    def _class(self) -> int | None:
        """The class whose probability is a pair's score; None for a model with one logit."""
        config = self.config
        if config.num_labels == 1:
            return None
        labels = [str(config.id2label.get(i)) for i in range(config.num_labels)]
        known = [label.lower() for label in labels]
        for name in (*_RELEVANT, *(_UNNAMED[1:] if known == _UNNAMED else ())):
            if name in known:
                said = (self.source.name, labels[known.index(name)], ", ".join(labels))
                logger.info("%s: ranks by its class '%s' of %s", *said)
                return known.index(name)
        raise ModelError(
            f"'{self.source.name}' has the classes {', '.join(labels)}: call the one that counts "
            "'relevant' in its config.json (id2label and label2id)"
        )
