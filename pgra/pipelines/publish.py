"""Puts a finished reader on the hub: its folder with the model card, not the checkpoints."""

import logging
from dataclasses import dataclass
from pathlib import Path

from pgra.data.hubfile import hub_errors, hub_reason
from pgra.errors import ArtifactError, ConfigError
from pgra.evaluation.results import METRICS_FILE
from pgra.evaluation.run_files import read_object
from pgra.pipelines.card import write_card
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.reader.record import READER_FOLDER

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HubTarget:
    """Where a reader goes.

    Attributes:
        repo: Hub id; without a namespace it is the user's own.
        token: What to sign with; None takes HF_TOKEN, or the login's.
        is_private: Of a repository that is made; None leaves it to the hub.
        revision: A branch; None is main.
    """

    repo: str
    token: str | None = None
    is_private: bool | None = None
    revision: str | None = None

    def __repr__(self) -> str:
        """Leave the token out: what is printed may be kept."""
        return f"HubTarget({self.repo!r}, revision={self.revision!r})"


def take_target(training: ReaderTrainingArguments, repo: str) -> HubTarget | None:
    """Take the hub's arguments from the Trainer's, which would upload and store with each step.

    The token goes with them: the Trainer writes its arguments into every checkpoint.

    Args:
        training: Changed in place.
        repo: The id where none is given.

    Returns:
        The target; None if nothing is to be pushed.

    Raises:
        ConfigError: As `check_target`.
    """
    target = HubTarget(
        training.hub_model_id or repo,
        training.hub_token,
        training.hub_private_repo,
        training.hub_revision,
    )
    is_wanted, training.push_to_hub, training.hub_token = training.push_to_hub, False, None
    if not is_wanted:
        return None
    check_target(target)
    return target


def check_target(target: HubTarget) -> None:
    """Refuse what can be refused without asking the hub.

    Raises:
        ConfigError: In offline mode, without a token, or with an id that cannot be one.
    """
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(target.repo)
    except HFValidationError as error:
        raise ConfigError(
            f"hub_model_id '{target.repo}' is no hub id: {hub_reason(error)} "
            "Give --hub_model_id OWNER/NAME."
        ) from None
    if constants.is_offline_mode():
        raise ConfigError(
            f"cannot push to '{target.repo}' in offline mode: unset HF_HUB_OFFLINE, or leave "
            "--push_to_hub out and push later with pgra push --run DIR"
        )
    if not (target.token or get_token()):
        raise ConfigError(
            f"cannot push to '{target.repo}' without a token: log in with 'hf auth login', set "
            "HF_TOKEN, or give --hub_token"
        )


def open_target(target: HubTarget) -> HubTarget:
    """Make the repository and its branch if there are none, so that no training is in vain.

    Returns:
        The same with the whole id.

    Raises:
        ConfigError: If the hub refuses: the token, the id, or the right to write.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=target.token)
    try:
        made = api.create_repo(target.repo, private=target.is_private, exist_ok=True)
        if target.revision is not None:
            api.create_branch(made.repo_id, branch=target.revision, exist_ok=True)
    except hub_errors() as error:
        raise ConfigError(
            f"cannot push to '{target.repo}': the hub says: {hub_reason(error)} "
            "Check the id and that the token may write there."
        ) from None
    return HubTarget(made.repo_id, target.token, target.is_private, target.revision)


def push_run(run: Path, target: HubTarget) -> str:
    """Upload a finished run's reader with its model card.

    Args:
        run: A folder that `train_run` left; it is not changed but for the card, written again.
        target: As `open_target` gives it.

    Returns:
        The address of the commit.

    Raises:
        ArtifactError: If the run is not finished, or the upload fails; the run stays whole.
    """
    from huggingface_hub import HfApi

    write_card(run)
    metrics = read_object(run / METRICS_FILE)
    message = f"{metrics['task']}: {metrics['split']} {metrics['metric']} {metrics['value']:.4f}"
    try:
        commit = HfApi(token=target.token).upload_folder(
            repo_id=target.repo,
            folder_path=run / READER_FOLDER,
            revision=target.revision,
            commit_message=message,
        )
    except hub_errors(ValueError, RuntimeError) as error:
        # The client words a large file's failure without its reason.
        reason = error.__cause__ if isinstance(error, RuntimeError) else error
        branch = f" --hub_revision {target.revision}" if target.revision else ""
        raise ArtifactError(
            f"the run in {run} is whole, but pushing it to '{target.repo}' failed: "
            f"{hub_reason(reason or error)} Push it later: pgra push --run {run} "
            f"--hub_model_id {target.repo}{branch}"
        ) from None
    logger.info("run: %s is on the hub as %s", run, target.repo)
    return str(commit.commit_url)
