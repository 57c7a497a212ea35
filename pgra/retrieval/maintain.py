"""A dense index over time: appending passages, and checking every byte.

The old shards and rows stay as they are. Everything new is written under names that the old
manifest does not have, and the manifest is replaced last: a job killed before that leaves the old
index whole, and the same command encodes only what is missing.
"""

import hashlib
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pgra.artifacts import (
    Manifest,
    artifact_dir,
    check_files,
    check_fingerprint,
    find_damage,
    load_manifest,
    lock_folder,
    record_file,
    write_manifest,
)
from pgra.config import CorpusArguments
from pgra.core import Json
from pgra.data.corpus import STAGE as CORPUS_STAGE
from pgra.data.corpus import Corpus, changed_sources, load_corpus, open_corpus
from pgra.encoders.encoder import Encoder, load_encoder
from pgra.errors import ArtifactError, ConfigError, DataError
from pgra.retrieval.base import BuiltIndex, memory_limit
from pgra.retrieval.dense import Recipe, dense_fingerprint, settle_name, write_recipe
from pgra.retrieval.faiss import (
    IndexPlan,
    VectorSource,
    build_faiss,
    empty_index,
    find_faiss,
    map_faiss,
)
from pgra.retrieval.shards import (
    HISTORY,
    STAGE,
    Shard,
    count_cut,
    encode_shards,
    find_shards,
    plan_shards,
    read_rows,
    read_shards,
    vectors_digest,
)

logger = logging.getLogger(__name__)

_HASHED_ROWS = 1 << 14


@dataclass(frozen=True)
class _Old:
    """The index that grows."""

    folder: Path
    manifest: Manifest
    recipe: Recipe

    @property
    def num_rows(self) -> int:
        return int(str(self.manifest.counts["rows"]))

    @property
    def fields(self) -> dict[str, Json]:
        """Give the fields that a build has."""
        made = self.manifest.fingerprint
        return {name: value for name, value in made.items() if name not in HISTORY}

    @property
    def factory(self) -> str:
        return str(self.manifest.fingerprint["factory"])


def add_passages(
    folder: Path,
    more: Sequence[str],
    artifacts: Path,
    *,
    device: str = "auto",
    progress: bool = True,
) -> BuiltIndex:
    """Append the passages of further files to an index; passages that it has are not added again.

    Its corpus is then the old files and these, in this order (`--corpus OLD MORE`), by the same
    rules. A trained FAISS index is not trained again: its training sample stays that of the rows it
    was built of, and their number becomes part of its fingerprint. Recall is measured again. A
    folder that is named by its fingerprint gets the new one's name.

    Args:
        folder: The index.
        more: Files, as `--corpus` takes them. Files that it ends with already add nothing, so that
            a stopped job's command can be given again.
        artifacts: Root of all products, where the corpus is read into.
        device: What encodes.
        progress: Whether to show a bar.

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
    _check_kind(folder)
    with lock_folder(folder):
        manifest = load_manifest(folder, stage=STAGE)
        check_files(folder, manifest.files)
        old = _Old(folder, manifest, Recipe.read(folder, manifest))
        corpus = open_corpus(_grown_corpus(old, more), artifacts)
        _check_beginning(old, corpus)
        encoder = load_encoder(old.recipe.retriever, device)
        fields = dense_fingerprint(corpus, encoder, old.factory)
        check_fingerprint(folder, made={**old.fields, **corpus.fingerprint}, asked=fields)
        home = _find_home(old, fields)
        built = BuiltIndex(folder, manifest, old.num_rows)
        if len(corpus) > old.num_rows:
            built = _Growth(old, home, corpus, encoder, fields, progress).run()
        _remove_old(folder, built.manifest)
        if home != folder:
            folder.rename(home)
        return replace(built, folder=home)


def _check_kind(folder: Path) -> None:
    stage = load_manifest(folder).stage
    if stage == "bm25_index":
        raise ConfigError(
            f"{folder} is a BM25 index, which weighs words by the whole corpus: build one of the "
            "larger corpus (python -m index_build --retriever bm25 --corpus OLD NEW)"
        )
    load_manifest(folder, stage=STAGE)


def _grown_corpus(old: _Old, more: Sequence[str]) -> CorpusArguments:
    was, names = old.recipe.corpus, [settle_name(name) for name in more]
    if was.max_passages is not None:
        raise ConfigError(
            f"{old.folder} is of the first {was.max_passages} passages of its corpus "
            "(max_passages), and cannot grow: build an index without max_passages"
        )
    is_there = was.sources[-len(names) :] == names
    return replace(was, corpus=was.sources if is_there else [*was.sources, *names])


def _check_beginning(old: _Old, corpus: Corpus) -> None:
    """Refuse a corpus that does not begin with the passages of the index."""
    sha256 = hashlib.sha256()
    for start in range(0, old.num_rows, _HASHED_ROWS):
        texts = corpus.slice(start, min(start + _HASHED_ROWS, old.num_rows))
        sha256.update("".join(f"{text}\n" for text in texts).encode())
    made = old.manifest.fingerprint["corpus_sha256"]
    if len(corpus) < old.num_rows or sha256.hexdigest() != made:
        raise ArtifactError(
            f"{', '.join(old.recipe.corpus.sources)} changed since {old.folder} was made: its "
            f"first {old.num_rows} passages are others (corpus_sha256 {made} then). Restore it, or "
            "build the index again; new passages go into a file of another name"
        )


def _find_home(old: _Old, fields: Mapping[str, Json]) -> Path:
    """Give the folder where the grown index belongs: where it is, unless its name is a digest."""
    was, told = old.folder, old.manifest.counts.get("renamed")
    if isinstance(told, list) and told[0] == was.name:  # stopped before it was
        return was.parent / str(told[1])
    name, _, _ = was.name.rpartition("-")
    if was.is_symlink() or was.name != artifact_dir(was.parent, name, old.fields).name:
        return was
    home = artifact_dir(was.parent, name, fields)
    if home != was and home.exists():
        raise ConfigError(f"{home} is an index of the grown corpus already: use that one")
    return home


def _remove_old(folder: Path, manifest: Manifest) -> None:
    """Remove what only the old manifest had, and what stopped jobs left."""
    for pattern in (".*.partial*", "index*.faiss", "vectors-*"):
        for path in folder.glob(pattern):
            if path.name not in manifest.files:
                path.unlink(missing_ok=True)


@dataclass(frozen=True)
class _Growth:
    old: _Old
    home: Path
    corpus: Corpus
    encoder: Encoder
    fields: Mapping[str, Json]
    progress: bool

    def run(self) -> BuiltIndex:
        """Encode what is new, extend the FAISS index, and replace the manifest."""
        began, folder = time.monotonic(), self.old.folder
        had = find_shards(folder)
        new = self._plan(len(had))
        num_missing = self._encode(new)
        seconds = time.monotonic() - began
        path = folder / f"index-{len(self.corpus)}.faiss"
        path.unlink(missing_ok=True)  # of a job stopped before its manifest
        counts = self._extend([*had, *new], path)
        speed = round(num_missing / max(seconds, 1e-6), 1) if num_missing else None
        kept = self.old.manifest.files
        files = {name: kept[name] for name in kept if not name.endswith(".faiss")}
        parts = [part for shard in new for part in (shard.path, shard.record_path)]
        for part in [*parts, path] if path.exists() else parts:  # a large exact index has no file
            files[part.name] = record_file(part)
        if self.home != folder:
            counts["renamed"] = [folder.name, self.home.name]
        counts |= {
            "texts_per_second": speed,
            "recipe": write_recipe(self.old.recipe.retriever, self.corpus),
            "bytes": sum(int(record["bytes"]) for record in files.values()),
        }
        manifest = write_manifest(
            folder,
            stage=STAGE,
            fingerprint={**self.fields, **self._history()},
            counts=counts,
            seconds=time.monotonic() - began,
            files=dict(sorted(files.items())),
        )
        return BuiltIndex(folder, manifest, len(self.corpus) - num_missing)

    def _plan(self, first: int) -> list[Shard]:
        rows = self.old.recipe.retriever.shard_rows
        start = self.old.num_rows
        return [
            Shard(shard.folder, shard.number + first, shard.start + start, shard.stop + start)
            for shard in plan_shards(self.old.folder, len(self.corpus) - start, rows)
        ]

    def _encode(self, new: Sequence[Shard]) -> int:
        """Encode the shards that are missing; give how many passages they hold."""
        made_of = vectors_digest(self.corpus.fingerprint, self.encoder)
        missing = [shard for shard in new if not shard.is_done(made_of)]
        if len(missing) < len(new):
            logger.info("%s of %s new shards already there", len(new) - len(missing), len(new))
        encode_shards(missing, self.corpus, self.encoder, made_of=made_of, progress=self.progress)
        return sum(shard.stop - shard.start for shard in missing)

    def _extend(self, shards: Sequence[Shard], path: Path) -> dict[str, Any]:
        """Write the larger FAISS index; give the counts for the manifest."""
        source = VectorSource(
            len(self.corpus),
            self.encoder.width,
            partial(read_rows, shards),
            partial(read_shards, shards),
        )
        args, had = self.old.recipe.retriever, self.old.manifest.counts
        plan = IndexPlan(
            factory=self.old.factory,
            memory=memory_limit(args.index_memory_gb),
            rescore_factor=args.rescore_factor,
        )
        counts = build_faiss(source, plan, path, begun=find_faiss(self.old.folder))
        kept = {
            name: had[name] for name in ("removed", "trained_on", "training_seconds") if name in had
        }
        return {**counts, "cut": count_cut(shards), **self._trained(), **kept}

    def _trained(self) -> dict[str, Json]:
        """Say of how many rows a trained index had its training sample."""
        if empty_index(self.old.factory, self.encoder.width, len(self.corpus)).is_trained:
            return {}
        return {"trained_rows": self.old.manifest.counts.get("trained_rows", self.old.num_rows)}

    def _history(self) -> dict[str, Json]:
        made = self.old.manifest.fingerprint
        return {**{name: made[name] for name in HISTORY if name in made}, **self._trained()}


# Whether an index on disk is what was written, down to its corpus: `pgra index verify`.


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
    manifest = load_manifest(folder)
    damage = [" ".join(found) for found in find_damage(folder, manifest.files)]
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
        damage = [f"corpus: {there / n} {w}" for n, w in find_damage(there, made.files)]
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
