"""The pieces of benchmarks/gpu.py: what each measures, and how its figures are shown."""

import argparse
import itertools
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import reader
import torch
from measuring import Cost, copy_rate, matrix_rate, measured, wait_for, write_figures
from rerank import RELEASED_BATCH, read_shared, read_whole
from subjects import (
    RANDOM,
    T5_TOKENIZER,
    TOKENIZER,
    count_operations,
    open_lm,
    open_plain,
    open_reader,
)
from torch import Tensor
from usual import Reading, batches, train_usual

from pgra.artifacts import package_versions
from pgra.commands.common import say
from pgra.lm.causal_lm import CausalLM
from pgra.lm.load import dtype_name
from pgra.lm.prefix import PromptedEncoder
from pgra.prompts import FewShotPrompt, PromptTemplate
from pgra.retrieval.dense import plan_shards, vector_source
from pgra.types import Example

TOKENIZERS = {"lm": TOKENIZER, "t5": T5_TOKENIZER}
SHARD = 8192  # of texts, as a bank on a GPU has them
DEPTH = 16  # the paper's d
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        product: Rows and columns of the matrices.
        copied: Bytes.
        lm: Shape that reads candidates.
        reader: Shape.
        candidates: Most that the LM reads.
        search: Queries, vectors, width, hits.
        depth: Passages that a query is read with.
        batch: Queries of a training step.
        steps: Of training.
    """

    product: int = 8192
    copied: int = 4 << 30
    lm: str = "opt-13b"
    reader: str = "t5-base"
    candidates: int = 40_000
    search: tuple[int, int, int, int] = (9600, 1_000_000, 768, 150)
    depth: int = DEPTH
    batch: int = 8
    steps: int = 30


TINY = Sizes(
    product=256,
    copied=1 << 20,
    lm="opt-tiny",
    reader="t5-tiny",
    candidates=32,
    search=(96, 2000, 32, 10),
    depth=2,
    batch=2,
    steps=2,
)


@dataclass
class Bench:
    """What a piece measures with.

    Attributes:
        name: The piece.
        folder: What was packed.
        device: Where.
        sizes: How much.
        path: Where the figures go.
        figures: All so far, each named after its piece.
    """

    name: str
    folder: Path
    device: torch.device
    sizes: Sizes
    path: Path
    figures: dict[str, float]

    def tell(self, prefix: str = "", **figures: float) -> None:
        """Write and print figures, named after the piece and what they have in common."""
        named = {f"{self.name}/{prefix}{end}": float(value) for end, value in figures.items()}
        self.figures |= named
        write_figures(self.path, self.figures)  # what is printed stays
        for name, value in named.items():
            say(f"{name:<56}{value:>14.6g}")

    def note(self, text: str) -> None:
        """Print what no number says."""
        say(f"{self.name}: {text}")

    def timed(
        self, what: str, work: Callable[[int], object], *, first: int, most: int, seconds: float
    ) -> tuple[int, Cost]:
        """Time as much work as fits.

        Args:
            what: It is, for the line that says what was cut.
            work: Does so many.
            first: Done twice beforehand: for kernels and buffers, and for an estimate.
            most: To be done.
            seconds: For this.

        Returns:
            How many were timed, and what they took.
        """
        work(first)
        with measured(self.device) as cost:
            work(first)
        count = min(most, max(first, int(first / cost.seconds * seconds)))
        if count > first:
            with measured(self.device) as cost:
                work(count)
        if count < most:
            self.note(f"{what}: {count:,} of {most:,}, for more would take too long")
        return count, cost

    def product_rate(self, dtype: torch.dtype) -> float:
        """Give the operations a second of a product of large matrices."""
        seconds = 0.3 if self.device.type == "cuda" else 0.01
        return matrix_rate(self.device, dtype, seconds=seconds, sizes=[self.sizes.product])

    @cached_property
    def texts(self) -> list[str]:
        """Real sentences, each once."""
        texts: list[str] = self._candidates["texts"]
        return texts

    @cached_property
    def prompt(self) -> FewShotPrompt:
        """A real prompt of 8 exemplars."""
        packed = self._candidates["prompt"]
        inputs = tuple(packed["template"].pop("inputs"))
        template = PromptTemplate(**packed["template"], inputs=inputs)
        return FewShotPrompt(template, packed["prefix"])

    @cached_property
    def _candidates(self) -> dict[str, Any]:
        return json.loads((self.folder / "candidates.json").read_text())  # type: ignore[no-any-return]

    @cached_property
    def reading(self) -> Reading:
        """Labelled queries with their evidence."""
        packed = json.loads((self.folder / "reading.json").read_text())
        packed["examples"] = [Example(**example) for example in packed["examples"]]
        return Reading(**packed)

    def many_texts(self, count: int) -> list[str]:
        """Give so many sentences; they come again where there are fewer."""
        return list(itertools.islice(itertools.cycle(self.texts), count))

    def model(self, shape: str, tokenizer: str) -> str:
        """Name a random model with packed tokens."""
        return f"{RANDOM}{shape}@{self.folder / tokenizer}"

    def open_lm(self) -> CausalLM:
        """Make the LM, in the precision of OPT's own weights."""
        dtype = "float16" if self.device.type == "cuda" else "float32"
        return open_lm(self.model(self.sizes.lm, "lm"), dtype=dtype, device=str(self.device))


def measure_env(bench: Bench) -> None:
    """Measure what the machine can do."""
    bench.note(", ".join(f"{name} {value}" for name, value in package_versions().items()))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bench.tell("product_tflops_", **{dtype_name(dtype): bench.product_rate(dtype) / 1e12})
    rate = copy_rate(bench.device, num_bytes=bench.sizes.copied)
    bench.tell(copy_gb_per_second=rate / 1e9)


def measure_rerank(bench: Bench) -> None:
    """Read candidates after a prompt."""
    lm = bench.open_lm()
    sizes = bench.sizes
    texts = bench.many_texts(sizes.candidates)
    encoder = PromptedEncoder(lm, bench.prompt)
    before = bench.product_rate(lm.dtype)
    fields = [bench.prompt.template.passage_fields(text) for text in texts]
    whole = [len(ids) for ids in encoder.tokenize(fields).ids]
    encoder.encode(texts[:1])  # finds how the prefix is shared
    shared = 0 if lm.way == "none" else len(encoder.shared_ids)
    bench.note(f"way: {lm.way}")
    rates = {}
    ways: dict[str, tuple[Callable[[int], object], int, int, float]] = {
        "pgra": (
            lambda n: read_shared(encoder, SHARD, texts[:n]),
            min(SHARD // 4, sizes.candidates // 4),
            shared,
            45,
        ),
        "usual": (lambda n: read_whole(encoder, texts[:n]), 4 * RELEASED_BATCH, 0, 25),
    }
    for title, (work, least, skip, seconds) in ways.items():
        count, cost = bench.timed(title, work, first=least, most=len(texts), seconds=seconds)
        lengths = [length - skip for length in whole[:count]]
        operations = count_operations(lm.config, lengths, behind=skip)
        rates[title] = count / cost.seconds
        product = max(before, bench.product_rate(lm.dtype))
        bench.tell(
            f"{title}_",
            texts_per_second=rates[title],
            tokens_per_second=sum(lengths) / cost.seconds,
            share_of_product=operations / (cost.seconds * product),
            peak_mib=cost.peak_mib,
        )
    tokens = bench.figures[f"{bench.name}/pgra_tokens_per_second"]
    bench.tell(
        speedup=rates["pgra"] / rates["usual"],
        own_tokens_per_text=sum(whole) / len(whole) - shared,
        prefix_tokens=shared,
        minutes_for_1m_sentences_of_45_tokens=45e6 / tokens / 60,
    )


@torch.inference_mode()
def measure_search(bench: Bench) -> None:
    """Search random vectors."""
    num_queries, rows, width, k = bench.sizes.search
    torch.manual_seed(0)
    unit = partial(torch.nn.functional.normalize, dim=1)
    queries = unit(torch.randn(num_queries, width, device=bench.device))
    half = bench.product_rate(torch.float16)
    full = bench.product_rate(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        vectors = torch.empty(rows, width, dtype=torch.float16, device=bench.device)
        for shard in plan_shards(Path(folder), rows, SHARD):
            block = unit(torch.randn(len(shard), width, device=bench.device)).half()
            vectors[shard.start : shard.stop] = block
            np.save(shard.path, block.cpu().numpy())
        source = vector_source(plan_shards(Path(folder), rows, SHARD), width)
        ours = partial(replace(source, device=str(bench.device)).search, queries.cpu().numpy())
        wait_for(bench.device)
        with measured(bench.device) as cost:
            rows_found = ours(k).rows
        bench.tell(pgra_first_seconds=cost.seconds)  # the vectors are read from the disk
        seconds = min(_seconds(bench, partial(ours, k)) for _ in range(3))
    exact = vectors.float()
    truth = top_products(queries, exact, k)
    by_torch = min(_seconds(bench, lambda: top_products(queries, exact, k)) for _ in range(3))
    ours_too = torch.from_numpy(rows_found)[:, :, None] == truth.cpu()[:, None, :]
    copies = copy_rate(bench.device, num_bytes=bench.sizes.copied)
    operations = 2.0 * num_queries * rows * width
    bench.tell(
        pgra_seconds=seconds,
        torch_seconds=by_torch,
        speedup=by_torch / seconds,
        same_hits=float(ours_too.any(2).float().mean()),
        share_of_copies=vectors.nbytes / seconds / (copies / 2),  # which read and write
        pgra_share_of_product=operations / seconds / half,
        torch_share_of_product=operations / by_torch / full,
    )


def _seconds(bench: Bench, work: Callable[[], object]) -> float:
    with measured(bench.device) as cost:
        work()
    return cost.seconds


def top_products(queries: Tensor, vectors: Tensor, k: int) -> Tensor:
    """Give each query's best rows as usual: a product and top-k, some queries at once."""
    blocks = [(block @ vectors.T).topk(k, dim=1).indices for block in torch.split(queries, 1024)]
    return torch.cat(blocks)


def measure_reader(bench: Bench) -> None:
    """Train a reader."""
    for dtype in ("bfloat16", "float32"):
        args = reader_arguments(bench, dtype)
        product = bench.product_rate(getattr(torch, dtype))
        _, tokenizer = open_reader(args.model, device=torch.device("meta"))
        inputs = reader.tokenize(bench.reading, bench.sizes.depth, tokenizer)
        steps = list(batches(args, len(inputs)))[1:]
        t5 = open_plain(args.model, device=torch.device("meta"))
        operations = 3.0 * sum(reader.count_operations(t5, inputs, rows) for rows in steps)
        rates = {}
        for title in ("pgra", "compiled", "usual"):
            args.torch_compile = title == "compiled"
            cost = train(bench, title, args)
            rates[title] = args.steps / cost.seconds
            bench.tell(
                f"{dtype}_{title}_",
                steps_per_second=rates[title],
                minutes_for_5000_steps=reader.PAPER_STEPS / rates[title] / 60,
                share_of_product=operations / (cost.seconds * product),
                peak_mib=cost.peak_mib,
            )
        bench.tell(
            f"{dtype}_",
            speedup=rates["pgra"] / rates["usual"],
            compiled_speedup=rates["compiled"] / rates["usual"],
        )


def reader_arguments(bench: Bench, dtype: str) -> argparse.Namespace:
    """Return the arguments of benchmarks/reader.py."""
    words = ["--model", bench.model(bench.sizes.reader, "t5"), "--device", str(bench.device)]
    words += ["--steps", str(bench.sizes.steps), "--batch_size", str(bench.sizes.batch)]
    if dtype == "bfloat16":
        words.append("--bf16")
    return reader.parse(words)


def train(bench: Bench, title: str, args: argparse.Namespace) -> Cost:
    """Train as usual, or by pgra."""
    if title == "usual":
        return train_usual(bench.reading, bench.sizes.depth, args)
    with tempfile.TemporaryDirectory() as folder:
        return reader.train_ours(bench.reading, bench.sizes.depth, args, Path(folder) / "weights")


PIECES: dict[str, Callable[[Bench], None]] = {
    "env": measure_env,
    "rerank": measure_rerank,
    "search": measure_search,
    "reader": measure_reader,
}
