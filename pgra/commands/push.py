"""Puts a finished run's reader on the hub: `pgra push`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import about, quiet_libraries, say
from pgra.config import Arguments, arg, parse_arguments


@dataclass(kw_only=True)
class PushArguments(Arguments):
    """Which run, and where to."""

    run: str = arg("", "Folder of a finished run of pgra train.", must_be_given=True)
    hub_model_id: str | None = arg(
        None, "OWNER/NAME; a name alone is your own; default: the folder's name."
    )
    hub_token: str | None = arg(None, "What to sign with; default: HF_TOKEN, or your login's.")
    hub_private_repo: bool = arg(False, "Make a new repository private; default: as the hub does.")
    hub_revision: str | None = arg(None, "Branch; default: main.")


def main(argv: Sequence[str] | None = None) -> int:
    """Put a finished run's reader on the hub, with its model card.

    Example:
      pgra push --run runs/sst2-pgra-seed42 --hub_model_id me/sst2-pgra

    The reader's folder is uploaded with its model card (README.md); checkpoints are not.
    """
    (args,) = parse_arguments([PushArguments], argv, prog="pgra push", **about(main))
    quiet_libraries()
    from pgra.publish import push_run

    run = Path(args.run)
    repo, private = args.hub_model_id or run.absolute().name, args.hub_private_repo or None
    how = {"token": args.hub_token, "private": private, "revision": args.hub_revision}
    say(f"pushed: {push_run(run, repo, **how)}")
    return 0
