"""What several commands share."""

from typing import TYPE_CHECKING

from pgra.config import (
    CorpusArguments,
    DataArguments,
    ReaderArguments,
    RerankArguments,
    RetrieverArguments,
    RuntimeArguments,
)

if TYPE_CHECKING:
    from pgra.pipelines.run import Outcome

SECTIONS: dict[str, type] = {
    "runtime": RuntimeArguments,
    "data": DataArguments,
    "corpus": CorpusArguments,
    "retriever": RetrieverArguments,
    "rerank": RerankArguments,
    "reader": ReaderArguments,
}
"""The argument dataclasses by their name in `PgraArguments`."""


def say(text: str) -> None:
    """Print to standard output."""
    print(text, flush=True)  # noqa: T201 (the one place that prints)


def quiet_libraries() -> None:
    """Leave progress and warnings to us: one bar for each long stage, none for reading a file.

    The bars of the hub's downloads stay: a model may be 26 GB.
    """
    import logging

    import datasets
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    shows_downloads = not are_progress_bars_disabled()
    transformers_logging.disable_progress_bar()  # which hides those of the hub too
    if shows_downloads:
        enable_progress_bars()
    datasets.disable_progress_bars()
    logging.getLogger("faiss").setLevel(logging.WARNING)


def show_metrics(outcome: "Outcome") -> str:
    """Word a run's result."""
    values = outcome.metrics
    low, high = values["interval_95"]
    lines = [
        f"{outcome.folder}: {values['task']} {values['split']} {values['metric']} "
        f"{values['value']:.4f} (95 % interval {low:.4f} to {high:.4f}, n = {values['n']}, "
        f"seed {values['seed']})" + (" (reused)" if outcome.reused else "")
    ]
    lines += [f"note: {note}" for note in values["notes"]]
    return "\n".join(lines)
