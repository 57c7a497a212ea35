"""Which commit of a hub model is loaded: one that holds safetensors, the only kind that is read.

Older models, OPT among them, have them in an open pull request of the hub's own bot. A client that
follows the main branch looks there by itself; one that pins a commit, as ours, must do so first.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from pgra.data.hubfile import hub_errors, hub_reason
from pgra.errors import ModelError

logger = logging.getLogger(__name__)

_WEIGHTS = ("model.safetensors", "model.safetensors.index.json")
_MAIN = "main"
_PULL_REQUESTS = "refs/pr/"
_BOT = "SFconvertbot"  # only its requests are read: anyone may open one
_CONFIG = "config.json"
_SHORTEST_COMMIT = 7


@dataclass(frozen=True)
class HubCommit:
    """One state of a hub model.

    Attributes:
        commit: Its hash.
        is_only_cached: Whether the hub could not be asked, and better is not asked again: its
            client tries for half a minute at each optional file.
    """

    commit: str
    is_only_cached: bool


@lru_cache(maxsize=32)
def find_commit(repo: str, revision: str | None) -> HubCommit:
    """Find the commit to load, and fetch its configuration; the same all through a process.

    Where the hub cannot be asked, it is the commit in the local cache that was found before.

    Args:
        repo: Hub id.
        revision: Branch, tag, commit or refs/pr/N; None for the main branch, or else the pull
            request that adds safetensors to it.

    Raises:
        ModelError: If there is no such model, it is not ours to read, or it has no safetensors.
    """
    try:
        return HubCommit(_ask_hub(repo, revision), is_only_cached=False)
    except hub_errors() as error:
        reason, is_offline = hub_reason(error), _is_offline(error)
    commit = _find_cached(repo, revision)
    name = f"{repo}@{revision}" if revision else repo
    if commit is None:
        raise ModelError(
            f"cannot find model '{name}': it is no folder here, and the hub says: {reason} "
            "Give a local folder, a hub id that you can reach, or a bundled: name "
            "(pgra models lists them)."
        )
    level = logging.INFO if is_offline else logging.WARNING
    why = "offline mode" if is_offline else reason.rstrip(".")
    logger.log(level, "model %s: commit %s from the cache (%s)", name, commit, why)
    return HubCommit(commit, is_only_cached=True)


def _ask_hub(repo: str, revision: str | None) -> str:
    commit, files = _inspect(repo, revision or _MAIN)
    reference = revision or _MAIN
    if not _has_weights(files):
        number = None if revision else _find_pull_request(repo)
        if number is None:
            raise ModelError(_no_weights(repo, revision))
        reference = f"{_PULL_REQUESTS}{number}"
        commit, _ = _inspect(repo, reference)
        logger.info(
            "model %s: its main branch has no safetensors; those of the hub's bot are loaded (%s)",
            repo,
            reference,
        )
    _remember(repo, reference, commit)
    return commit


def _inspect(repo: str, revision: str) -> tuple[str, list[str]]:
    from huggingface_hub import HfApi, constants

    info = HfApi().model_info(repo, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT)
    return str(info.sha), [sibling.rfilename for sibling in info.siblings or []]


def _find_pull_request(repo: str) -> int | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        asked = list(
            HfApi().get_repo_discussions(repo, author=_BOT, discussion_type="pull_request")
        )
    except HfHubHTTPError as error:  # a model may have its discussions closed
        logger.debug("%s: no pull requests to read (%s)", repo, hub_reason(error))
        return None
    for request in asked:
        is_open = request.is_pull_request and request.status != "closed"
        if is_open and request.author == _BOT:
            _, files = _inspect(repo, f"{_PULL_REQUESTS}{request.num}")
            if _has_weights(files):
                return request.num
    return None


def _remember(repo: str, reference: str, commit: str) -> None:
    """Fetch the configuration by its branch: the cache then knows which commit that is."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    known = try_to_load_from_cache(repo, _CONFIG, revision=reference)
    if not isinstance(known, str) or Path(known).parent.name != commit:
        logger.info("model %s: commit %s is new here; its weights come when needed", repo, commit)
        hf_hub_download(repo, _CONFIG, revision=reference)


def _find_cached(repo: str, revision: str | None) -> str | None:
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cached = scan_cache_dir().repos
    except CacheNotFound:
        return None
    commits = [
        commit
        for entry in cached
        if entry.repo_type == "model" and entry.repo_id == repo
        for commit in entry.revisions
        if _has_weights(str(f.file_path.relative_to(commit.snapshot_path)) for f in commit.files)
    ]
    if revision:
        commits = [commit for commit in commits if _is_named(commit, revision)]
    return max(commits, key=_preference).commit_hash if commits else None


def _is_named(commit: Any, revision: str) -> bool:
    is_start = len(revision) >= _SHORTEST_COMMIT and commit.commit_hash.startswith(revision)
    return revision in commit.refs or is_start


def _preference(commit: Any) -> tuple[bool, bool, float]:
    """Rank cached commits as the hub would be read: main, a pull request, the latest other one."""
    has_request = any(reference.startswith(_PULL_REQUESTS) for reference in commit.refs)
    return _MAIN in commit.refs, has_request, commit.last_modified


def _has_weights(files: Iterable[str]) -> bool:
    return any(file in _WEIGHTS for file in files)


def _is_offline(error: Exception) -> bool:
    from huggingface_hub.errors import OfflineModeIsEnabled

    return isinstance(error, OfflineModeIsEnabled)


def _no_weights(repo: str, revision: str | None) -> str:
    name = f"{repo}@{revision}" if revision else repo
    beside = "" if revision else f", nor has an open pull request of {_BOT}"
    return (
        f"model '{name}' has no safetensors, the only kind that is loaded{beside}: name a commit "
        f"or pull request that has them ({repo}@{_PULL_REQUESTS}N), or load it once with "
        "transformers and write it to a folder with save_pretrained"
    )
