"""Batches by tokens, not by rows: texts of like length together, so that little is padding."""

from collections.abc import Sequence


def token_budget_batches(
    lengths: Sequence[int], budget: int, *, max_rows: int | None = None
) -> list[list[int]]:
    """Cut texts into batches whose padded size fits a budget.

    The longest come first, so that a batch that does not fit in memory shows at once.

    Args:
        lengths: Tokens of each text.
        budget: Most padded tokens (rows times longest) a batch; a single text over it goes alone.
        max_rows: Most texts a batch; None for no such limit.

    Returns:
        Indices into `lengths`, each exactly once, sorted by falling length (ties by index).

    Raises:
        ValueError: If `budget` or `max_rows` is below 1.
    """
    if budget < 1 or (max_rows is not None and max_rows < 1):
        raise ValueError(f"budget is {budget}, max_rows is {max_rows}: both must be at least 1")
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    batches: list[list[int]] = []
    start = 0
    while start < len(order):
        rows = max(1, budget // max(1, lengths[order[start]]))
        if max_rows is not None:
            rows = min(rows, max_rows)
        batches.append(order[start : start + rows])
        start += rows
    return batches
