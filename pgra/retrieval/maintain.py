"""A dense index over time: appending passages, removing rows, and checking every byte.

The old shards and rows stay as they are. Everything new is written under names that the old
manifest does not have, and the manifest is replaced last: a job killed before that leaves the old
index whole, and the same command encodes only what is missing.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from pgra.artifacts import (
    Manifest,
    artifact_dir,
    check_files,
    check_fingerprint,
    digest,
    find_damage,
    load_manifest,
    lock_folder,
    record_file,
    write_array,
    write_manifest,
)
from pgra.config import CorpusArguments
from pgra.core import Context, Json
from pgra.data.corpus import STAGE as CORPUS_STAGE
from pgra.data.corpus import Corpus, changed_sources, load_corpus, open_corpus
from pgra.encoders.encoder import load_encoder
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.retrieval.base import BuiltIndex, IndexRequest, Recipe, whole_path
from pgra.retrieval.dense import (
    HISTORY,
    STAGE,
    build_index,
    dense_fingerprint,
    read_removed,
    remove_strays,
)
from pgra.retrieval.faiss import empty_index, find_faiss, map_faiss
from pgra.retrieval.shards import find_shards

logger = logging.getLogger(__name__)

_HASHED_ROWS = 1 << 14
_KEPT = ("removed", "trained_on", "training_seconds")  # counts of an index that grows


def remove_rows(folder: Path, rows: Sequence[int]) -> Manifest:
    """Remove rows from a finished index: no search will return them. Its vectors stay as they are.

    The list is written under a name of its own and the manifest is replaced last, so that a killed
    job leaves the index as it was.

    Args:
        folder: The index.
        rows: Which rows; those removed before may be among them.

    Returns:
        The new manifest.

    Raises:
        ArtifactError: If the folder is no finished dense index, or in use by another job.
        ConfigError: If there is no such row, or none would be left.
        OSError: If the disk is full.
    """
    load_manifest(folder, stage=STAGE)  # before a lock is left where there is no index
    with lock_folder(folder):
        manifest = load_manifest(folder, stage=STAGE)
        num_rows = manifest.counts["rows"]
        wrong = [row for row in rows if not 0 <= row < num_rows]
        if wrong:
            raise ConfigError(f"row {wrong[0]} is not in {folder}: it has rows 0 to {num_rows - 1}")
        before = read_removed(folder, manifest)
        removed = np.union1d(before, np.asarray(rows, dtype=np.int64))
        if len(removed) == num_rows:
            raise ConfigError(f"these are all {num_rows} rows of {folder}: one must stay")
        if len(removed) == len(before):
            return manifest
        made_of = digest(removed.tolist())
        path = folder / f"removed-{made_of[:12]}.npy"
        write_array(path, removed)
        old = [name for name in manifest.files if name.startswith("removed-")]
        kept = {name: record for name, record in manifest.files.items() if name not in old}
        written = write_manifest(
            folder,
            stage=STAGE,
            fingerprint={**manifest.fingerprint, "removed": made_of},
            counts={**manifest.counts, "removed": len(removed)},
            seconds=manifest.seconds,
            files={**kept, path.name: record_file(path)},
        )
        for name in old:
            (folder / name).unlink(missing_ok=True)
        return written


def add_passages(folder: Path, more: Sequence[str], context: Context) -> BuiltIndex:
    """Append the passages of further files to an index; passages that it has are not added again.

    Its corpus is then the old files and these, in this order (`--corpus OLD MORE`), by the same
    rules. A trained FAISS index is not trained again: its training sample stays that of the rows it
    was built of, and their number becomes part of its fingerprint. Recall is measured again. A
    folder that is named by its fingerprint gets the new one's name.

    Args:
        folder: The index.
        more: Files, as `--corpus` takes them. Files that it ends with already add nothing, so that
            a stopped job's command can be given again.
        context: Where; the corpus is read into its artifacts. One process does it all.

    Returns:
        The index; `num_reused` are the rows that were there, or were encoded before a stop.

    Raises:
        ArtifactError: If the folder is no finished dense index, is damaged, in use by another job,
            or does not say what it was made from; or if its corpus has changed since.
        ConfigError: If its corpus was cut by `max_passages`, or the grown index is there already.
        DataError: If a file cannot be read.
        ModelError: If the encoder cannot be used.
        OSError: If the disk is full; the old index stays.
    """
    if load_manifest(folder).stage == "bm25_index":
        raise ConfigError(
            f"{folder} is a BM25 index, which weighs words by the whole corpus: build one of the "
            "larger corpus (python -m index_build --retriever bm25 --corpus OLD NEW)"
        )
    load_manifest(folder, stage=STAGE)
    with lock_folder(folder):
        manifest = load_manifest(folder, stage=STAGE)
        check_files(folder, manifest.files)
        recipe, num_rows = Recipe.read(folder, manifest), manifest.counts["rows"]
        corpus = open_corpus(_grown_corpus(folder, recipe.corpus, more), context.artifacts)
        _check_beginning(folder, manifest, recipe, corpus)
        encoder = load_encoder(recipe.retriever, context.device)
        made, was = manifest.fingerprint, manifest.counts
        built_of = {name: value for name, value in made.items() if name not in HISTORY}
        factory = str(made["factory"])
        fields = dense_fingerprint(corpus, encoder, factory)
        check_fingerprint(folder, made={**built_of, **corpus.fingerprint}, asked=fields)
        home = _find_home(folder, manifest, built_of, fields)
        built = BuiltIndex(folder, manifest, num_rows)
        if len(corpus) > num_rows:
            history = {name: value for name, value in made.items() if name in HISTORY}
            counts = {name: was[name] for name in _KEPT if name in was}
            if not empty_index(factory, encoder.width, len(corpus)).is_trained:
                counts["trained_rows"] = was.get("trained_rows", num_rows)
                history["trained_rows"] = counts["trained_rows"]
            if home != folder:
                counts["renamed"] = [folder.name, home.name]
            request = IndexRequest(args=recipe.retriever, corpus=corpus, context=context)
            fields |= history
            built = build_index(request, encoder, folder, fields, old=manifest, counts=counts)
        remove_strays(folder, [folder / name for name in built.manifest.files])
        if home != folder:
            folder.rename(home)
        return replace(built, folder=home)


def _grown_corpus(folder: Path, was: CorpusArguments, more: Sequence[str]) -> CorpusArguments:
    names = [whole_path(name) for name in more]
    if was.max_passages is not None:
        raise ConfigError(
            f"{folder} is of the first {was.max_passages} passages of its corpus "
            "(max_passages), and cannot grow: build an index without max_passages"
        )
    is_there = was.sources[-len(names) :] == names
    return replace(was, corpus=was.sources if is_there else [*was.sources, *names])


def _check_beginning(folder: Path, manifest: Manifest, recipe: Recipe, corpus: Corpus) -> None:
    """Refuse a corpus that does not begin with the passages of the index."""
    sha256, num_rows = hashlib.sha256(), manifest.counts["rows"]
    for start in range(0, num_rows, _HASHED_ROWS):
        texts = corpus.slice(start, min(start + _HASHED_ROWS, num_rows))
        sha256.update("".join(f"{text}\n" for text in texts).encode())
    made = manifest.fingerprint["corpus_sha256"]
    if len(corpus) < num_rows or sha256.hexdigest() != made:
        raise ArtifactError(
            f"{', '.join(recipe.corpus.sources)} changed since {folder} was made: its "
            f"first {num_rows} passages are others (corpus_sha256 {made} then). Restore it, or "
            "build the index again; new passages go into a file of another name"
        )


def _find_home(
    folder: Path, manifest: Manifest, made: Mapping[str, Json], fields: Mapping[str, Json]
) -> Path:
    """Return where the grown index belongs: where it is, unless its name is a digest."""
    renamed = manifest.counts.get("renamed")
    if renamed and renamed[0] == folder.name:  # stopped before it was
        return folder.parent / str(renamed[1])
    name, _, _ = folder.name.rpartition("-")
    if folder.is_symlink() or folder.name != artifact_dir(folder.parent, name, made).name:
        return folder
    home = artifact_dir(folder.parent, name, fields)
    if home != folder and home.exists():
        raise ConfigError(f"{home} is an index of the grown corpus already: use that one")
    return home


# Whether an index on disk is what was written, down to its corpus: `pgra index verify`.


@dataclass(frozen=True)
class Verdict:
    """What was found: damage, each with the file's name, and what is worth knowing."""

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
    manifest, notes = load_manifest(folder), []
    damage = [" ".join(found) for found in find_damage(folder, manifest.files)]
    if manifest.stage == STAGE and not damage:
        damage += _check_rows(folder, manifest)
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    if strays := sorted(names - {"manifest.json"} - set(manifest.files)):
        notes.append(
            f"{len(strays)} files are not the index's, as an unfinished 'add' leaves: {strays[0]}"
        )
    try:
        recipe = Recipe.read(folder, manifest)
    except ArtifactError:
        notes.append("it does not say which corpus it is of, so that no corpus was compared")
        return Verdict(len(manifest.files), damage, notes)
    if not recipe.corpus_folder.is_dir():
        gone = f"{recipe.corpus_folder}, the corpus as it was read, has gone"
        notes.append(f"{gone}: it is read again where it is needed")
        return Verdict(len(manifest.files), damage, notes)
    try:
        damage += [f"corpus: {what}" for what in _check_corpus(folder, manifest, recipe)]
    except ArtifactError as error:
        damage.append(f"corpus: {error}")
    except DataError as error:
        notes.append(f"a source of the corpus cannot be compared: {error}")
    return Verdict(len(manifest.files), damage, notes)


def _check_rows(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Compare rows: the shards' must follow each other, and FAISS must have as many."""
    num_rows, width = (manifest.counts[name] for name in ("rows", "dim"))
    stop = 0
    for shard in find_shards(folder):
        if shard.start != stop:
            yield f"{shard.path.name} begins at row {shard.start}, the one before ends at {stop}"
        stop = shard.stop
    if stop != num_rows:
        yield f"the shards end at row {stop}, the index has {num_rows}"
    path = find_faiss(folder)
    if path is not None:  # else it is searched from the shards
        index = map_faiss(path)
        if (index.ntotal, index.d) != (num_rows, width):
            sizes = f"{index.ntotal} rows of width {index.d}, not {num_rows} of {width}"
            yield f"{path.name} has {sizes}"


def _check_corpus(folder: Path, manifest: Manifest, recipe: Recipe) -> Iterator[str]:
    """Compare the corpus as it was read, and its sources."""
    there = recipe.corpus_folder
    made = load_manifest(there, stage=CORPUS_STAGE)
    damage = [f"{there / name} {what}" for name, what in find_damage(there, made.files)]
    yield from damage
    if damage:
        return
    own = load_corpus(there).fingerprint
    check_fingerprint(folder, made={n: manifest.fingerprint.get(n) for n in own}, asked=own)
    for name in changed_sources(recipe.corpus, there):
        yield f"{name} has changed since the index was made"
