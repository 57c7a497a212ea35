"""What is finished: compared with its checksums (`pgra verify`), put on the hub (`pgra push`)."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands.common import about, quiet_libraries, say
from pgra.config import Arguments, arg, parse_arguments
from pgra.errors import ArtifactError, DamageError, reading


@dataclass(kw_only=True)
class VerifyArguments(Arguments):
    """What is compared."""

    folders: list[str] = arg([], "Folders; they may also stand first, bare.", must_be_given=True)


def verify(argv: Sequence[str] | None = None) -> int:
    """Read every byte of artifacts and runs, and compare it with the checksums that were written.

    Whatever lies below a folder is looked at: indexes, corpora, banks, runs, readers, checkpoints.
    Opening one compares all of it up to 1 GB, and the sizes of a larger one. Exit code 1 where a
    file is damaged; it is named.

    Examples:
      pgra verify artifacts runs
      pgra verify artifacts/indexes/minilm-l6-0123456789ab
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-"):
        words = ["--folders", *words]
    (args,) = parse_arguments([VerifyArguments], words, prog="pgra verify", **about(verify))
    num_records, damage = 0, list[str]()
    for folder in map(Path, args.folders):
        if not folder.is_dir():
            raise ArtifactError(
                f"{folder} is no folder: give an artifact, a run, or what holds some"
            )
        for path in sorted(folder.rglob("*.json")):
            found = _compare(path)
            num_records += found is not None
            damage += found or []
    where = ", ".join(args.folders)
    if not num_records:
        raise ArtifactError(
            f"{where} has no checksums: give an artifact, a run, or what holds some"
        )
    state = f"{len(damage)} files are damaged" if damage else "all as written"
    say("\n".join([f"{where}: {num_records} records of files, {state}", *damage]))
    return int(bool(damage))


def _compare(path: Path) -> list[str] | None:
    """Return what is wrong with the files that a record names; None if it is no such record."""
    from pgra.artifacts import CHECKSUMS_FILE, MANIFEST, find_damage

    try:
        with reading(path, DamageError):
            files = json.loads(path.read_text(encoding="utf-8"))["files"]
            return [
                f"{path.parent / name} {what}" for name, what in find_damage(path.parent, files)
            ]
    except DamageError as error:  # such as the JSON of a model, which holds no records
        is_ours = path.name in (MANIFEST, CHECKSUMS_FILE, "metrics.json", "pgra.json")
        return [error.what] if is_ours else None


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


def push(argv: Sequence[str] | None = None) -> int:
    """Put a finished run's reader on the hub, with its model card.

    Example:
      pgra push --run runs/sst2-pgra-seed42 --hub_model_id me/sst2-pgra

    The reader's folder is uploaded with its model card (README.md); checkpoints are not.
    """
    (args,) = parse_arguments([PushArguments], argv, prog="pgra push", **about(push))
    quiet_libraries()
    from pgra.publish import push_run

    commit = push_run(
        Path(args.run),
        args.hub_model_id or Path(args.run).absolute().name,
        token=args.hub_token,
        private=args.hub_private_repo or None,
        revision=args.hub_revision,
    )
    say(f"pushed: {commit}")
    return 0
