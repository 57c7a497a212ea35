"""Files of a hub data set, and the ways in which asking a hub fails."""

from pathlib import Path


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
