"""First stage by meaning: an encoder's vectors, built into a FAISS index and searched.

Building writes float16 shards first, then `index.faiss`, and the manifest last.
"""

import hashlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from pgra.artifacts import (
    MANIFEST,
    Manifest,
    artifact_dir,
    check_fingerprint,
    find_damage,
    is_finished,
    load_manifest,
    lock_folder,
    read_manifest,
    record_files,
    set_aside,
    write_manifest,
)
from pgra.core import Candidates, Context, Json
from pgra.data.corpus import Corpus, CorpusArguments, open_corpus
from pgra.encoders.encoder import Encoder
from pgra.errors import ArtifactError, ConfigError, DamageError
from pgra.lm.load import choose_device
from pgra.retrieval.base import (
    BuiltIndex,
    IndexRequest,
    Recipe,
    Retriever,
    RetrieverArguments,
    check_num_candidates,
    refuse_strangers,
    whole_path,
    write_recipe,
)
from pgra.retrieval.faiss import (
    EXACT,
    INDEX_FILE,
    BlockSearch,
    Rescored,
    Vectors,
    build_faiss,
    empty_index,
    find_faiss,
    is_lossy,
    map_faiss,
    nearest_in_index,
)
from pgra.retrieval.ray_engine import encode_by_ray
from pgra.retrieval.shards import (
    encode_shards,
    find_shards,
    plan_shards,
    take_over_shards,
    vector_source,
    vectors_digest,
)

logger = logging.getLogger(__name__)

STAGE = "dense_index"
# A fingerprint's field: the first rows, on which a trained index was built before it grew.
TRAINED = "trained_rows"
_FILES = ("vectors-*.npy", "vectors-*.json", "index*.faiss")
_HASHED_ROWS = 1 << 14
_KEPT = ("trained_on", "training_seconds")  # counts of an index that grows
_QUERY_BATCH = 4096  # all vectors are read once for each, where they are searched on disk


class DenseRetriever(Retriever):
    """Finds the passages whose vectors have the largest inner product with a query's."""

    encodes = True

    def __init__(self, index: Any, encoder: Encoder, fingerprint: Mapping[str, Json]) -> None:
        self.fingerprint = fingerprint
        self._index = index
        self._encoder = encoder
        self.inputs = [encoder.inputs]

    @classmethod
    def folders(cls, request: IndexRequest) -> list[Path]:
        return [_locate(request, Encoder(request.args, device=request.context.device))[1]]

    @classmethod
    def prepare(cls, request: IndexRequest) -> list[BuiltIndex]:
        """Find or build the index; see `find_or_build`."""
        encoder = Encoder(request.args, device=request.context.device)
        return [find_or_build(request, encoder)]

    @classmethod
    def open(cls, request: IndexRequest) -> Self:
        encoder = Encoder(request.args, device=request.context.device)
        return cls.load(request, encoder, find_or_build(request, encoder))

    @classmethod
    def load(cls, request: IndexRequest, encoder: Encoder, built: BuiltIndex) -> Self:
        """Load an index that was found or built, to be searched with this encoder."""
        fields = built.manifest.fingerprint
        return cls(
            _open_index(built, request.args, request.context.device),
            encoder,
            _with_search(fields, encoder, request.args),
        )

    def retrieve(self, queries: Sequence[str], k: int) -> Candidates:
        """Return each query's best k passages, (B, k); scores are inner products.

        They are cosines with a normalizing encoder. Only an approximate index leaves entries
        missing.
        """
        check_num_candidates(k, self._index.ntotal)
        rows = np.empty((len(queries), k), dtype=np.int64)
        scores = np.empty((len(queries), k), dtype=np.float32)
        for start in range(0, len(queries), _QUERY_BATCH):
            batch = slice(start, start + _QUERY_BATCH)
            found = self.search(self._encoder.encode(queries[batch], is_query=True), k)
            rows[batch], scores[batch] = found.rows, found.scores
        return Candidates(rows, scores)

    def search(self, vectors: Vectors, k: int) -> Candidates:
        return nearest_in_index(self._index, vectors, k)


def dense_fingerprint(corpus: Corpus, encoder: Encoder, factory: str) -> dict[str, Json]:
    return {**corpus.fingerprint, **encoder.fingerprint, "factory": factory, "metric": "ip"}


def _with_history(folder: Path, fields: Mapping[str, Json]) -> dict[str, Json]:
    """Add what an index that grew in this folder was trained on."""
    try:
        made = load_manifest(folder, stage=STAGE).fingerprint
    except ArtifactError:  # reported when it is read
        return dict(fields)
    return {**fields, **{name: made[name] for name in [TRAINED] if name in made}}


def _with_search(
    fields: Mapping[str, Json], encoder: Encoder, args: RetrieverArguments
) -> dict[str, Json]:
    """Add to an index's fields what else decides candidates: query prompt, rescoring."""
    factor = _rescore_factor(args, fields)
    rescored = {"rescore_factor": factor} if factor else {}
    return {**fields, **encoder.query_fields, **rescored}


def _rescore_factor(args: RetrieverArguments, fields: Mapping[str, Json]) -> int:
    return args.rescore_factor if is_lossy(str(fields["factory"])) else 0


def _open_index(built: BuiltIndex, args: RetrieverArguments, device: str) -> Any:
    """Open an index for FAISS, or from shards: an exact one on a GPU or beyond the memory."""
    source = vector_source(find_shards(built.folder), built.manifest.counts["dim"])
    fields, where = built.manifest.fingerprint, choose_device(device)
    file = find_faiss(built.folder)
    if file is None or (
        fields["factory"] == EXACT and (where.type == "cuda" or not source.fits_in_memory)
    ):
        return BlockSearch(source, str(where))
    index = map_faiss(file)
    factor = _rescore_factor(args, fields)
    return Rescored(index, source.read, factor=factor) if factor else index


def _locate(request: IndexRequest, encoder: Encoder) -> tuple[dict[str, Json], Path]:
    """Return an index's fields and folder; refuse a factory that cannot work, before building."""
    args, corpus = request.args, request.corpus
    fields = dense_fingerprint(corpus, encoder, args.index_factory)
    name = Path(args.encoder.removeprefix("bundled:").partition("@")[0]).name
    folder = request.output_dir or artifact_dir(request.home, name, fields)
    if args.index_dir is not None:
        folder = Path(args.index_dir)
    elif not is_finished(folder):
        empty_index(args.index_factory, encoder.width, len(corpus))
    return _with_history(folder, fields), folder


def find_or_build(request: IndexRequest, encoder: Encoder) -> BuiltIndex:
    """Find a finished index, or build it.

    A killed job run again computes only the shards that are missing, foreign or damaged, and its
    files are byte for byte those of an unbroken run (the manifest's times aside). For factories
    with a graph (HNSW) that holds with one thread only, as FAISS inserts in parallel. Of two jobs
    that build one index the second waits for the first.

    Raises:
        ArtifactError: If the folder is another index's, or damaged.
        ConfigError: If FAISS does not know the factory, or the corpus is too small for it.
        OSError: If the folder cannot be written, before anything is encoded, or the disk is full.
    """
    args, corpus, context = request.args, request.corpus, request.context
    fields, folder = _locate(request, encoder)
    manifest = _find_whole(folder, fields, is_given=args.index_dir is not None)
    is_waiting = manifest is None and context.is_main
    with lock_folder(folder, wait=True) if is_waiting else nullcontext():
        context.barrier()  # the main process has the folder: what all see now is the same
        manifest = manifest or _find_whole(folder, fields)
        if manifest is None:
            return build_index(request, encoder, folder, fields)
        return BuiltIndex(folder, manifest, len(corpus))


def _find_whole(
    folder: Path, fields: Mapping[str, Json], *, is_given: bool = False
) -> Manifest | None:
    """Return a finished index's manifest; None where it must be built, at least in part."""
    if not is_given and not is_finished(folder):
        return None
    wanted = _with_history(folder, fields)
    try:
        return read_manifest(folder, stage=STAGE, fingerprint=wanted)
    except DamageError:
        if is_given or TRAINED in wanted:  # a build would train it on all rows
            raise
        return None


def _reopen(folder: Path) -> None:
    """Set damaged files of a finished index and its manifest aside; the rest is reused."""
    if is_finished(folder):
        with suppress(DamageError):  # of the manifest: shards have records of their own
            for name, what in find_damage(folder, load_manifest(folder).files):
                if (folder / name).exists():
                    set_aside(folder / name, f"{folder / name} {what}")
        set_aside(folder / MANIFEST, f"{folder} is not whole")


def build_index(
    request: IndexRequest,
    encoder: Encoder,
    folder: Path,
    fields: Mapping[str, Json],
    *,
    old: Manifest | None = None,
    counts: Mapping[str, Json] = MappingProxyType({}),
) -> BuiltIndex:
    """Encode what is missing, write the FAISS index, and the manifest last.

    Processes share the shards; the main one makes the FAISS index. This job holds the folder's
    lock. `old` is the manifest of an index there that grows: its shards stay, a trained FAISS index
    is not trained again, and new files have names that the old manifest does not have. `counts` are
    more fields of the new one.

    Raises:
        ConfigError: If the corpus is too small for the factory.
        OSError: If the disk is full.
    """
    args, corpus, context, began = request.args, request.corpus, request.context, time.monotonic()
    had = [] if old is None else find_shards(folder)
    shards = plan_shards(folder, len(corpus), args.shard_rows, after=had)
    parts = [part for shard in shards for part in (shard.path, shard.record_path)]
    made_of = vectors_digest(corpus.fingerprint, encoder)
    own = context.worker.share(shards)
    if context.is_main:
        if old is None:
            _reopen(folder)
            refuse_strangers(folder, (*_FILES, "*.damaged"))
            remove_strays(folder, parts)
            take_over_shards(shards, made_of, request.home)
        missing = {shard for shard in shards if not shard.is_done(made_of)}
        if len(missing) < len(shards):
            logger.info("%s of %s shards already there", len(shards) - len(missing), len(shards))
        context.barrier()  # tidied, and counted before others write
    else:
        context.barrier()
        missing = {shard for shard in own if not shard.is_done(made_of)}
    mine = [shard for shard in own if shard in missing]
    if request.engine == "ray":
        encode_by_ray(mine, request, encoder, made_of)
        remove_strays(folder, parts)  # what lost workers left
    else:
        encode_shards(mine, corpus, encoder, made_of=made_of, progress=context.shows_progress)
    context.barrier()  # all encoded
    num_missing, seconds = sum(map(len, missing)), time.monotonic() - began
    if context.is_main:
        every = [*had, *shards]
        cut = sum(shard.read_record()["cut"] for shard in every)
        path = folder / (INDEX_FILE if old is None else f"index-{len(corpus)}.faiss")
        path.unlink(missing_ok=True)  # of a job stopped before its manifest
        about = build_faiss(
            vector_source(every, encoder.width),
            str(fields["factory"]),
            path,
            rescore_factor=_rescore_factor(args, fields),
            begun=None if old is None else find_faiss(folder),
        )
        speed = round(num_missing / max(seconds, 1e-6), 1) if num_missing else None
        files = {} if old is None else dict(old.files)
        files = {name: record for name, record in files.items() if not name.endswith(".faiss")}
        files |= record_files(folder, [part.name for part in [*parts, path] if part.exists()])
        about |= {"cut": cut, "texts_per_second": speed, **write_recipe(args, corpus), **counts}
        about["bytes"] = sum(int(record["bytes"]) for record in files.values())
        write_manifest(
            folder,
            stage=STAGE,
            fingerprint=fields,
            counts=about,
            seconds=time.monotonic() - began,
            files=dict(sorted(files.items())),
        )
    context.barrier()  # finished
    return BuiltIndex(folder, load_manifest(folder, stage=STAGE), len(corpus) - num_missing)


def remove_strays(folder: Path, kept: Collection[Path]) -> None:
    """Remove what killed jobs left: half-written files, and shards of another plan."""
    for pattern in (".*.partial*", *_FILES):
        for path in folder.glob(pattern):
            if path not in kept:
                path.unlink(missing_ok=True)


# An index over time. The old shards and rows stay as they are. Everything new is written under
# names that the old manifest does not have, and the manifest is replaced last: a job killed before
# that leaves the old index whole, and the same command encodes only what is missing.


def add_passages(
    folder: Path,
    more: Sequence[str],
    context: Context,
    *,
    recipe: Recipe | None = None,
    encoder: Encoder | None = None,
) -> BuiltIndex:
    """Append the passages of further files to an index; passages that it has are not added again.

    Its corpus is then the old files and these, in this order (`--corpus OLD MORE`), by the same
    rules. A trained FAISS index is not trained again: the number of rows it was trained on becomes
    part of its fingerprint. Recall is measured again. A folder named by its fingerprint is renamed.

    Args:
        folder: The index.
        more: Files, as `--corpus` takes them. Files that it ends with already add nothing, so a
            stopped job's command can be repeated.
        context: Folders; the corpus is read into its artifacts. One process does it all.
        recipe: What it was made from, if that has moved; None: as its manifest has it.
        encoder: Its encoder, if loaded; it is checked as any.

    Returns:
        The index; `num_reused` rows were there, or were encoded before a stop.

    Raises:
        ArtifactError: If the folder is no finished dense index, is damaged, locked by another job,
            or has no recipe; or if its corpus has changed since.
        ConfigError: If its corpus was cut by `max_passages`, or the grown index is there already.
        DataError: If a file cannot be read.
        ModelError: If the encoder cannot be used.
        OSError: If the disk is full; the old index stays.
    """
    load_manifest(folder, stage=STAGE)  # before a lock is left where there is no index
    with lock_folder(folder):
        manifest = load_manifest(folder, stage=STAGE)
        for name, what in find_damage(folder, manifest.files):
            raise DamageError(f"{folder / name} {what}")
        recipe, num_rows = recipe or Recipe.read(folder, manifest), manifest.counts["rows"]
        corpus = open_corpus(_grown_corpus(folder, recipe.corpus, more), context.artifacts)
        _check_beginning(folder, manifest, recipe, corpus)
        encoder = encoder or Encoder(recipe.retriever, device=context.device)
        made, was = manifest.fingerprint, manifest.counts
        built_of = {name: value for name, value in made.items() if name != TRAINED}
        factory = str(made["factory"])
        fields = dense_fingerprint(corpus, encoder, factory)
        check_fingerprint(folder, made={**built_of, **corpus.fingerprint}, asked=fields)
        home = _find_home(folder, manifest, built_of, fields)
        built = BuiltIndex(folder, manifest, num_rows)
        if len(corpus) > num_rows:
            counts = {name: was[name] for name in _KEPT if name in was}
            if not empty_index(factory, encoder.width, len(corpus)).is_trained:
                counts[TRAINED] = fields[TRAINED] = was.get(TRAINED, num_rows)
            if home != folder:
                counts["renamed"] = [folder.name, home.name]
            request = IndexRequest(args=recipe.retriever, corpus=corpus, context=context)
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
