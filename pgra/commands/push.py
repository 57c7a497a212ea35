"""`pgra push`: a trained reader, put on the hub."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands import common
from pgra.config import Arguments, arg


@dataclass(kw_only=True)
class PushArguments(Arguments):
    """Which run, and where to."""

    run: str = arg("", "Folder of a finished run of pgra train.", must_be_given=True)
    hub_model_id: str | None = arg(
        None, "OWNER/NAME; a name alone is your own; default: the folder's name."
    )
    hub_private_repo: bool = arg(False, "Make a new repository private; default: as the hub does.")


def main(argv: Sequence[str]) -> int:
    """Put a finished run's reader on the hub, with its model card.

    Example:
      pgra push --run runs/sst2-pgra-seed42 --hub_model_id me/sst2-pgra

    The reader's folder is uploaded with its model card (README.md); checkpoints are not. The token
    is HF_TOKEN, or your login's.
    """
    (args,) = common.parse(main, [PushArguments], argv)
    common.quiet_libraries()
    from pgra.model_card import push_run

    name = args.hub_model_id or Path(args.run).absolute().name
    common.say(f"pushed: {push_run(Path(args.run), name, private=args.hub_private_repo or None)}")
    return 0
