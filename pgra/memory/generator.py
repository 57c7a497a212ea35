"""GUD-IR's generator: a seq2seq model that writes the feedback a question may need (App. A.3)."""

from collections.abc import Mapping
from typing import Any, Self

import torch

from pgra.core import Json
from pgra.lm.load import choose_device, find_model, load_pretrained, load_tokenizer

MAX_QUESTION_TOKENS = 512
"""Of a question so many are read, its beginning."""
MAX_FEEDBACK_TOKENS = 64
"""Most tokens of a feedback that is written."""
_MOST_KEPT = 65_536  # feedback kept by question


class FeedbackGenerator:
    """Writes a rough feedback for a question, the likeliest token at a time.

    A question that is asked again costs nothing.
    """

    def __init__(self, model: Any, tokenizer: Any, *, identity: str) -> None:
        """Take a model.

        Args:
            model: Any encoder-decoder of transformers.
            tokenizer: Its own.
            identity: Of its files, for fingerprints.
        """
        self._model, self._tokenizer, self._identity = model.eval(), tokenizer, identity
        self._written: dict[str, str] = {}

    @classmethod
    def from_name(cls, name: str, *, device: str = "auto") -> Self:
        """Load one: hub id, folder or bundled:NAME; in float32, as it was trained.

        Raises:
            ModelError: If it cannot be found or loaded, or is no encoder-decoder.
        """
        from transformers import AutoModelForSeq2SeqLM

        place = choose_device(device)
        source = find_model(name)
        model = load_pretrained(
            AutoModelForSeq2SeqLM.from_pretrained, source, dtype=torch.float32
        ).to(place)
        return cls(model, load_tokenizer(source), identity=source.identity)

    @property
    def fingerprint(self) -> Mapping[str, Json]:
        """Give all that its texts depend on, besides the question."""
        return {"generator": self._identity, "max_new_tokens": MAX_FEEDBACK_TOKENS}

    def write(self, question: str) -> str:
        """Write the feedback for a question, on one line; "" if the model has nothing to say."""
        if question not in self._written:
            if len(self._written) >= _MOST_KEPT:
                self._written.clear()
            self._written[question] = self._generate(question)
        return self._written[question]

    @torch.inference_mode()
    def _generate(self, question: str) -> str:
        inputs = self._tokenizer(
            [plain_input(question)],
            truncation=True,
            max_length=MAX_QUESTION_TOKENS,
            return_tensors="pt",
        ).to(self._model.device)
        (tokens,) = self._model.generate(
            input_ids=inputs["input_ids"],
            attention_mask=inputs["attention_mask"],
            max_new_tokens=MAX_FEEDBACK_TOKENS,
            do_sample=False,
            num_beams=1,
        )
        return " ".join(self._tokenizer.decode(tokens, skip_special_tokens=True).split())


def plain_input(question: str) -> str:
    """Give a question as the generator reads it, in training too: on one line.

    "<" and ">" are not in T5's vocabulary, and would all be one unknown token.
    """
    return " ".join(question.replace("<", "(").replace(">", ")").split())
