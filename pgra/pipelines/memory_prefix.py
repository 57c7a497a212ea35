"""Opens what compares a stream's questions with the examples of a prompt (`--prefix kate`)."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from pgra.config import RetrieverArguments
from pgra.icl.arguments import BM25
from pgra.icl.likeness import Likeness, VectorLikeness, WordLikeness
from pgra.memory.nearest_examples import SlotlessLikeness, without_slots
from pgra.retrieval.dense import load_encoder
from pgra.retrieval.neighbors import Neighbors
from pgra.types import Example


def open_question_likeness(
    pool: Sequence[Example], *, encoder: str, key_form: str, device: str, root: Path
) -> Likeness:
    """Open a comparison by cosine, or by BM25.

    Args:
        pool: The examples' questions.
        encoder: Hub id, folder or bundled:NAME; or bm25.
        key_form: "slotless" compares questions without what stands in <...>, "whole" with it.
        device: Where an encoder runs.
        root: Folder of vectors, which are kept.

    Raises:
        ModelError: If the encoder cannot be found or loaded.
    """
    is_whole = key_form == "whole"
    compared = list(pool) if is_whole else without_slots(pool)
    likeness: Likeness
    if encoder == BM25:
        likeness = WordLikeness(compared)
    else:
        asked = RetrieverArguments(encoder=encoder, normalize=False)
        load = partial(load_encoder, asked, device)
        likeness = VectorLikeness(Neighbors(load, compared, root), "cosine")
    return likeness if is_whole else SlotlessLikeness(likeness)
