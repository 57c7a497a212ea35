"""Files of a hub data set, and the ways in which asking a hub fails."""

import logging
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

PARQUET_BRANCH = "refs/convert/parquet"
"""Where the hub keeps its own copy of a data set, as Parquet."""


def hub_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Give all that a hub's client raises: refusals, odd names, no connection, nothing cached.

    Args:
        others: What to catch beside these.
    """
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The errors of its client are of the kind that its own begin with, or an OSError; the client
    # is httpx or httpx2, by version.
    client_error = HfHubHTTPError.__bases__[0]
    return (client_error, HFValidationError, OSError, *others)


def hub_reason(error: BaseException) -> str:
    """Word a hub's error in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"{type(error).__name__}."
    if hasattr(error, "response") and len(lines) > 1:  # a bare status, then what it means
        lines = [" ".join(lines[:2])]
    return lines[0] if lines[0].endswith((".", "!")) else f"{lines[0]}."


def fetch_file(repo: str, file: str) -> Path:
    """Give one file of a hub data set, from the cache where it is current.

    Raises:
        Exception: One of `hub_errors`.
    """
    from huggingface_hub import hf_hub_download

    return Path(hf_hub_download(repo, file, repo_type="dataset"))


def data_set_builder(repo: str, config: str | None, *, revision: str | None = None) -> Any:
    """Open a hub data set as plain files; no code of it is run.

    Args:
        repo: Its id, as OWNER/NAME.
        config: Which of its configurations; None is the only or default one.
        revision: Branch or commit; None is the main branch or, where that holds only a loading
            script, the hub's own conversion to Parquet, which is logged.

    Returns:
        A `datasets.DatasetBuilder`.

    Raises:
        Exception: One of `hub_errors`, a `DatasetsError`, ValueError or RuntimeError.
    """
    from datasets import load_dataset_builder

    try:
        return load_dataset_builder(repo, config, revision=revision)
    except RuntimeError as error:
        if revision is not None or "scripts are no longer supported" not in str(error):
            raise
    logger.info("%s: a loading script, which is not run; read from %s", repo, PARQUET_BRANCH)
    return load_dataset_builder(repo, config, revision=PARQUET_BRANCH)
