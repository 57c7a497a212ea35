"""`pgra verify`: artifacts and runs, compared with their checksums."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pgra.commands import common
from pgra.config import Arguments, arg
from pgra.errors import ArtifactError, DamageError


@dataclass(kw_only=True)
class VerifyArguments(Arguments):
    """What is compared."""

    folders: list[str] = arg([], "Folders; they may also stand first, bare.", must_be_given=True)


def main(argv: Sequence[str]) -> int:
    """Read every byte of artifacts and runs, and compare it with the checksums that were written.

    Whatever lies below a folder is looked at: indexes, corpora, banks, runs, readers, checkpoints.
    Opening one compares all of it up to 1 GB, and the sizes of a larger one. Exit code 1 where a
    file is damaged; it is named.

    Examples:
      pgra verify artifacts runs
      pgra verify artifacts/indexes/minilm-l6-0123456789ab
    """
    words = common.name_leading("--folders", argv)
    (args,) = common.parse(main, [VerifyArguments], words)
    from pgra.artifacts import RECORDS, find_damage, read_sealed

    num_records = 0
    damage = []
    paths: list[Path] = []
    for folder in args.folders:
        paths += Path(folder).rglob("*.json")
    for path in sorted(paths):
        if not RECORDS.fullmatch(path.name):  # such as the JSON of a model
            continue
        num_records += 1
        try:
            files = read_sealed(path).get("files", {})
        except DamageError as error:
            damage.append(error.what)
        else:
            damage += [
                f"{path.parent / name} {what}" for name, what in find_damage(path.parent, files)
            ]
    where = ", ".join(args.folders)
    if not num_records:
        raise ArtifactError(f"{where} has no checksums: name a folder of artifacts or runs")
    state = f"{len(damage)} files are damaged" if damage else "all as written"
    common.say("\n".join([f"{where}: {num_records} records of files, {state}", *damage]))
    return int(bool(damage))
