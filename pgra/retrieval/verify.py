"""Whether an index on disk is what was written, down to its corpus: `pgra index verify`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pgra.data.corpus import STAGE as CORPUS_STAGE
from pgra.data.corpus import changed_sources, load_corpus
from pgra.errors import ArtifactError, DataError
from pgra.io import Manifest, check_fingerprint, file_checksum, find_stage, load_manifest
from pgra.retrieval.factory import find_faiss, map_faiss
from pgra.retrieval.recipe import Recipe
from pgra.retrieval.shards import Shard
from pgra.retrieval.tombstones import STAGE


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        num_files: Files of the index whose every byte was compared.
        damage: What is wrong, each with the file's name; empty where all is well.
        notes: What is worth knowing and no damage.
    """

    num_files: int
    damage: list[str]
    notes: list[str]


def verify_index(folder: Path) -> Verdict:
    """Read every byte of an index and of its corpus, and compare them with what was written.

    Args:
        folder: The index, dense or BM25.

    Raises:
        ArtifactError: If it is missing or unfinished, or its manifest is damaged or of another
            format.
    """
    manifest = load_manifest(folder, stage=find_stage(folder))
    damage = find_damage(folder, manifest.files)
    if manifest.stage == STAGE and not damage:
        damage += _check_rows(folder, manifest)
    notes = _find_strays(folder, manifest)
    try:
        recipe = Recipe.read(folder, manifest)
    except ArtifactError:
        notes.append("it does not say which corpus it is of, so that no corpus was compared")
    else:
        of_corpus, more = _check_corpus(folder, manifest, recipe)
        damage, notes = damage + of_corpus, notes + more
    return Verdict(len(manifest.files), damage, notes)


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Name each file that is not what was written, and say how; every byte is read."""
    damage = []
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            damage.append(f"{name} is missing")
        elif path.stat().st_size != record.get("bytes"):
            damage.append(
                f"{name} has {path.stat().st_size:,} bytes, {record.get('bytes'):,} were written"
            )
        elif file_checksum(path) != record.get("checksum"):
            damage.append(f"{name} has other content than was written")
    return damage


def _check_rows(folder: Path, manifest: Manifest) -> list[str]:
    """Compare rows: the shards' must follow each other, and FAISS must have as many."""
    num_rows, width = (int(str(manifest.counts[name])) for name in ("rows", "dim"))
    damage, stop = [], 0
    for number in range(sum(name.startswith("vectors-") for name in manifest.files) // 2):
        shard = Shard(folder, number, 0, 0)
        rows = (shard.read_record() or {}).get("rows", [None, stop])
        if rows[0] != stop:
            damage.append(
                f"{shard.path.name} begins at row {rows[0]}, the one before ends at {stop}"
            )
        stop = rows[1]
    if stop != num_rows:
        damage.append(f"the shards end at row {stop}, the index has {num_rows}")
    path = find_faiss(folder)
    if path is None:  # searched from the shards
        return damage
    index = map_faiss(path)
    if (index.ntotal, index.d) != (num_rows, width):
        damage.append(
            f"{path.name} has {index.ntotal} rows of width {index.d}, not {num_rows} of {width}"
        )
    return damage


def _find_strays(folder: Path, manifest: Manifest) -> list[str]:
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    strays = sorted(names - {"manifest.json"} - set(manifest.files))
    if not strays:
        return []
    return [f"{len(strays)} files are not the index's, as an unfinished 'add' leaves: {strays[0]}"]


def _check_corpus(folder: Path, manifest: Manifest, recipe: Recipe) -> tuple[list[str], list[str]]:
    """Compare the corpus as it was read, and its sources; give the damage and the notes."""
    there = recipe.corpus_folder
    if not there.is_dir():
        note = f"{there}, the corpus as it was read, has gone: it is read again where it is needed"
        return [], [note]
    try:
        made = load_manifest(there, stage=CORPUS_STAGE)
        damage = [f"corpus: {there / told}" for told in find_damage(there, made.files)]
        if damage:
            return damage, []
        own = load_corpus(there).fingerprint
        asked = {name: manifest.fingerprint.get(name) for name in own}
        check_fingerprint(folder, made=asked, asked=own)
        changed = changed_sources(recipe.corpus, there)
    except ArtifactError as error:
        return [f"corpus: {error}"], []
    except DataError as error:
        return [], [f"a source of the corpus cannot be compared: {error}"]
    return [f"corpus: {name} has changed since the index was made" for name in changed], []
