"""Words what an index is, and what it finds: for `pgra index`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pgra.data.corpus import Corpus
    from pgra.io import Manifest
    from pgra.types import Candidates

_STAGES = {"dense_index": "dense", "bm25_index": "bm25"}


def describe_manifest(folder: Path, manifest: "Manifest") -> str:
    """Word what an index says of itself."""
    counts: Mapping[str, Any] = manifest.counts
    made = manifest.fingerprint
    recipe: Mapping[str, Any] = counts.get("recipe") or {"corpus": {}, "retriever": {}}
    names = recipe["corpus"].get("corpus", "not told")
    bytes_ = sum(int(record["bytes"]) for record in manifest.files.values())
    told: list[tuple[str, object]] = [
        ("kind", _STAGES.get(manifest.stage, manifest.stage)),
        ("corpus", names if isinstance(names, str) else ", ".join(names)),
        ("corpus sha256", made.get("corpus_sha256")),
        ("rows", f"{counts['rows']:,}"),
        ("removed", f"{counts['removed']:,}" if "removed" in counts else None),
        ("encoder", recipe["retriever"].get("encoder") if "encoder" in made else None),
        ("weights", made.get("encoder")),
        ("pooling", made.get("pooling")),
        ("tokens read", made.get("max_tokens")),
        ("cut", f"{counts['cut']:,} passages" if "cut" in counts else None),
        ("width", counts.get("dim")),
        ("words", counts.get("words")),
        ("type", made.get("factory")),
        ("trained on", _trained(counts)),
        ("recall", _recall(counts)),
        ("bytes", f"{bytes_:,} in {len(manifest.files)} files"),
        ("made", f"{manifest.created}, in {manifest.seconds:,.1f} s"),
        ("by", ", ".join(f"{name} {number}" for name, number in manifest.versions.items())),
    ]
    lines = [f"  {name:<14} {value}" for name, value in told if value is not None]
    return "\n".join([f"index: {folder}", *lines])


def _trained(counts: Mapping[str, Any]) -> str | None:
    rows = counts.get("trained_rows")
    return None if rows is None else f"a sample of the first {rows:,} rows, before it grew"


def _recall(counts: Mapping[str, Any]) -> str | None:
    if counts.get("is_exact"):
        return "exact search of the float16 vectors"
    recall = counts.get("recall")
    return ", ".join(f"@{k} {share}" for k, share in recall.items()) if recall else None


def describe_ranks(texts: Sequence[str], candidates: "Candidates", corpus: "Corpus") -> str:
    """Word each text's candidates: rank, score, row and passage."""
    from pgra.types import MISSING_ROW

    lines = []
    for place, text in enumerate(texts):
        lines.append(text)
        pairs = zip(candidates.rows[place].tolist(), candidates.scores[place].tolist(), strict=True)
        found = [(row, score) for row, score in pairs if row != MISSING_ROW]
        lines += [
            f"  {rank:>4}  {score:9.4f}  row {row:<9} {corpus[row]}"
            for rank, (row, score) in enumerate(found, 1)
        ]
        lines += [] if found else ["  nothing found: no passage shares a word with it"]
    return "\n".join(lines)
