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

from pgra.errors import ModelError, reading
from pgra.lm import load
from pgra.rerank.arguments import CrossEncoderArguments
from pgra.rerank.pairs import PairReranker, Tokens
from pgra.types import Fields, Json

logger = logging.getLogger(__name__)

_RELEVANT = ("relevant", "entailment")  # names of the class that counts, the first known one
_UNNAMED = ["label_0", "label_1"]  # what transformers calls two classes
_SAVED = "config_sentence_transformers.json"


class CrossEncoderReranker(PairReranker):
    """Orders candidates by a cross-encoder's scores; the longer text of a long pair is cut."""

    options_class = CrossEncoderArguments
    model_class = "AutoModelForSequenceClassification"

    def fields(self) -> Fields:
        fields: dict[str, Json] = {"class": self._class, "reranker": "cross-encoder"}
        if self._prompt:
            fields["prompt"] = self._prompt
        return fields

    def encode(self, queries: Sequence[str], passages: Sequence[str]) -> list[Tokens]:
        """Tokenise pairs as the model's tokenizer joins two texts."""
        return self.call_tokenizer([self._prompt + query for query in queries], passages)

    def encode_cut(self, query: str, passage: str) -> Tokens:
        """Tokenise a pair, of which the longer text is cut, or both: as "longest_first".

        A fast tokenizer would also make all that it cuts off: each pair of both texts' pieces.
        """
        texts = ([self._prompt + query], [passage])
        if not self.tokenizer.is_fast:
            return self.call_tokenizer(
                *texts, truncation="longest_first", max_length=self.max_tokens
            )[0]
        encoded = self.tokenizer(*texts, verbose=False)
        sides = encoded.sequence_ids(0)  # of each token 0 or 1; None for special ones
        shorter = int(sides.count(1) < sides.count(0))
        room = self.max_tokens - sides.count(None)
        least = min(sides.count(shorter), room // 2)
        counts = {None: len(sides), shorter: least, 1 - shorter: room - least}
        order = list(range(len(sides)))
        if self.tokenizer.truncation_side == "left":
            order.reverse()
        left = []
        for token in order:
            counts[sides[token]] -= 1
            if counts[sides[token]] >= 0:
                left.append(token)
        left.sort()
        return {name: [values[0][token] for token in left] for name, values in encoded.items()}

    def score_batch(self, batch: Mapping[str, Tensor]) -> Tensor:
        logits: Tensor = self.model(**batch).logits.float()
        if self._class is None:
            return logits[:, 0]
        return logits.log_softmax(dim=1)[:, self._class]

    @cached_property
    def _prompt(self) -> str:
        """What sentence-transformers puts before each query of this model."""
        parts = load.read_parts(self.source)
        if not parts:
            return ""
        saved = load.read_model_json(self.source, _SAVED, dict) or {}
        settings = load.read_model_json(self.source, "sentence_bert_config.json", dict) or {}
        with reading(f"{_SAVED} of '{self.source.name}'", ModelError):
            if len(parts) > 1 or "message" in settings.get("modality_config", ()):
                raise ModelError(
                    f"'{self.source.name}' is a CrossEncoder with a chat template or parts of its "
                    "own, which are not read: use --reranker causal, or a plain classifier"
                )
            name = saved.get("default_prompt_name")
            return str(saved["prompts"][name] or "") if name else ""

    @cached_property
    def _class(self) -> int | None:
        """The class whose probability is a pair's score; None for a model with one logit."""
        config = self.config
        if config.num_labels == 1:
            return None
        labels = [str(config.id2label.get(i)) for i in range(config.num_labels)]
        names = [label.lower() for label in labels]
        if names == _UNNAMED:
            names[1] = _RELEVANT[0]
        for name in _RELEVANT:
            if name in names:
                number = names.index(name)
                logger.info(
                    "%s: ranks by its class '%s' of %s",
                    self.source.name,
                    labels[number],
                    ", ".join(labels),
                )
                return number
        raise ModelError(
            f"'{self.source.name}' has the classes {', '.join(labels)}: call the one that counts "
            "'relevant' in its config.json (id2label and label2id)"
        )
