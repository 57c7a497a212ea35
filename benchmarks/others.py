"""What others use, called as its users do, in processes that know nothing of pgra.

Started by benchmarks/index.py; each prints its figures as one line of JSON:

    python benchmarks/others.py encode FOLDER POOLING DTYPE DEVICE MAX_TOKENS TEXTS OUT REPEATS
    python benchmarks/others.py flat SHARDS QUERIES K
    python benchmarks/others.py words TEXTS QUERIES K
"""

import json
import re
import resource
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = (16, 32, 64, 128, 256)  # of sentence-transformers, whose own default is 32
_WORD = re.compile(r"\w+")


def peak_mb() -> float:
    """Give this process's peak of resident memory; mapped pages of files count too."""
    status = Path("/proc/self/status")
    if not status.is_file():  # not Linux: the system's own figure, which may hold the parent's
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    lines = status.read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


def seconds_of(work: Callable[[], object]) -> float:
    """Time one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def encode(words: list[str]) -> dict[str, Any]:
    """Time `encode` of sentence-transformers at each batch size; write the vectors."""
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

    folder, pooling, dtype, device, max_tokens, texts_file, out, repeats = words
    body = Transformer(folder, max_seq_length=int(max_tokens))
    head = Pooling(body.get_embedding_dimension(), pooling_mode=pooling)
    model = SentenceTransformer(modules=[body, head], device=device).to(getattr(torch, dtype))
    texts = json.loads(Path(texts_file).read_text())

    def work(size: int) -> Any:
        return model.encode(
            texts, batch_size=size, normalize_embeddings=True, show_progress_bar=False
        )

    model.encode(texts[:8])
    before = peak_mb()
    rates: dict[int, float] = {}
    for _ in range(int(repeats)):
        for size in BATCHES:
            rate = len(texts) / seconds_of(partial(work, size))
            rates[size] = max(rates.get(size, 0.0), rate)
    best = max(rates, key=lambda size: rates[size])
    np.save(out, work(best).astype(np.float32), allow_pickle=False)
    return {"rate": rates[best], "batch": best, "grown_mb": peak_mb() - before}


def flat(words: list[str]) -> dict[str, Any]:
    """Build FAISS' flat index in memory from the shards, write it, and search it once."""
    import faiss

    shards, queries, k = Path(words[0]), np.load(words[1]), int(words[2])
    before = peak_mb()
    start = time.perf_counter()
    index = faiss.IndexFlatIP(queries.shape[1])
    for path in sorted(shards.glob("vectors-*.npy")):
        index.add(np.load(path, mmap_mode="r").astype(np.float32))
    target = shards / "other.faiss"
    faiss.write_index(index, str(target))
    seconds = time.perf_counter() - start
    built_mb = peak_mb() - before
    index.search(queries[:64], k)
    target.unlink()
    return {"build_seconds": seconds, "build_mb": built_mb, "grown_mb": peak_mb() - before}


def words(words: list[str]) -> dict[str, Any]:
    """Build rank-bm25's index and give each query its best k."""
    from rank_bm25 import BM25Okapi

    texts, queries = (json.loads(Path(name).read_text()) for name in words[:2])
    k = int(words[2])
    before = peak_mb()
    start = time.perf_counter()
    index = BM25Okapi([_WORD.findall(text.lower()) for text in texts])
    build_seconds = time.perf_counter() - start

    def ask() -> None:
        for query in queries:
            scores = index.get_scores(_WORD.findall(query.lower()))
            top = np.argpartition(-scores, k - 1)[:k]
            top[np.argsort(-scores[top])]

    rate = len(queries) / seconds_of(ask)
    return {"rate": rate, "build_seconds": build_seconds, "grown_mb": peak_mb() - before}


if __name__ == "__main__":
    try:
        found = {"encode": encode, "flat": flat, "words": words}[sys.argv[1]](sys.argv[2:])
    except ModuleNotFoundError as error:
        found = {"missing": error.name}
    print(json.dumps(found))  # noqa: T201 (a process that knows no pgra)
