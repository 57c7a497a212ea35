"""Whether a written answer is right: exact match as open-domain question answering has it."""

import re
import string
from collections.abc import Sequence

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalize_answer(text: str) -> str:
    """Lower-case, then drop ASCII punctuation, English articles and spare spaces.

    SQuAD's official evaluation (Rajpurkar et al. 2016, section 6.1: "ignore punctuations and
    articles"), which DPR takes over; KATE (Liu et al. 2022, section 3.1) says the same.
    """
    plain = text.lower().translate(_PUNCTUATION)
    return " ".join(_ARTICLES.sub(" ", plain).split())


def is_exact_match(prediction: str, answers: Sequence[str]) -> bool:
    """Say whether a prediction is one of the answers, both normalised.

    As in the official evaluation nothing may be left of either: an empty prediction matches the
    answer "A".

    Args:
        prediction: What was written.
        answers: All that are right.
    """
    return normalize_answer(prediction) in {normalize_answer(answer) for answer in answers}


def exact_matches(predictions: Sequence[str], answers: Sequence[Sequence[str]]) -> list[float]:
    """Give 1.0 for each prediction that is right and 0.0 for the others, (B,).

    Raises:
        ValueError: If the lengths differ.
    """
    pairs = zip(predictions, answers, strict=True)
    return [float(is_exact_match(prediction, right)) for prediction, right in pairs]
