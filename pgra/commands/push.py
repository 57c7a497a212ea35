"""Puts a finished run's reader on the hub: `pgra push`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pgra.commands.common import quiet_libraries, say
from pgra.config import parse_arguments
from pgra.errors import ConfigError

EXAMPLE = """example:
  pgra push --run runs/sst2-pgra-seed42 --hub_model_id me/sst2-pgra

The reader's folder is uploaded with its model card (README.md); checkpoints are not.
"""


def _arg(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(kw_only=True)
class PushArguments:
    """Which run, and where to."""

    run: str | None = _arg(None, "Folder of a finished run of train.py.")
    hub_model_id: str | None = _arg(
        None, "OWNER/NAME; a name alone is your own; default: the folder's name."
    )
    hub_token: str | None = _arg(None, "What to sign with; default: HF_TOKEN, or your login's.")
    hub_private_repo: bool = _arg(False, "Make a new repository private; default: as the hub does.")
    hub_revision: str | None = _arg(None, "Branch; default: main.")

    def __post_init__(self) -> None:
        """Refuse contradictions."""
        if self.run is None:
            raise ConfigError("--run is missing: give the folder of a finished run of train.py")


def main(argv: Sequence[str] | None = None) -> int:
    """Push a run."""
    (args,) = parse_arguments(
        [PushArguments],
        argv,
        prog="pgra push",
        description="Put a finished run's reader on the hub, with its model card.",
        epilog=EXAMPLE,
    )
    quiet_libraries()
    from pgra.publish import HubTarget, check_target, open_target, push_run, write_card

    run = Path(args.run)
    write_card(run)  # which refuses what is no finished run
    target = HubTarget(
        args.hub_model_id or run.absolute().name,
        args.hub_token,
        args.hub_private_repo or None,
        args.hub_revision,
    )
    check_target(target)
    say(f"pushed: {push_run(run, open_target(target))}")
    return 0
