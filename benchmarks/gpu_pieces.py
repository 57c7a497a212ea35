"""The pieces of benchmarks/gpu.py: what each measures, and how its figures are told."""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import reader
import torch
from measuring import Cost, copy_rate, matrix_rate, measured, wait_for, write_figures
from quantized import kept_share
from rerank import RELEASED_BATCH, read_shared, read_whole
from subjects import (
    BERT_TOKENIZER,
    OPT_SHAPES,
    RANDOM,
    T5_TOKENIZER,
    TOKENIZER,
    open_encoder,
    open_lm,
    open_plain,
    open_reader,
)
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import TrainerCallback
from usual import Reading, batches, encode_usual, train_usual

from pgra.artifacts import package_versions
from pgra.commands.common import say
from pgra.core import Example
from pgra.errors import ConfigError, ModelError, PgraError
from pgra.lm.causal_lm import CausalLM
from pgra.lm.cost import LmShape
from pgra.lm.load import dtype_name
from pgra.lm.prefix import WAYS, PromptedEncoder
from pgra.prompts.fewshot import FewShotPrompt
from pgra.prompts.template import PromptTemplate
from pgra.retrieval.half_search import HalfSearch
from pgra.retrieval.shards import plan_shards, vector_source

TOKENIZERS = {"lm": TOKENIZER, "encoder": BERT_TOKENIZER, "t5": T5_TOKENIZER}
SHARD = 8192  # of texts, as a bank on a GPU has them
DEPTH = 16  # the paper's d
ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    Attributes:
        planned: Seconds that a piece plans for.
        limit: Seconds after which it is ended.
        product: Rows and columns of the matrices.
        copied: Bytes.
        lms: Shapes that read candidates; the first that fits.
        agreeing: Shape of the LM that ways are compared with.
        encoder: Shape.
        reader: Shape.
        candidates: Most that the LM reads.
        queries: Of the agreement.
        passages: Of the agreement, for each query.
        evidence: Kept of them.
        texts: That are encoded.
        search: Queries, vectors, width, hits.
        depth: Passages that a query is read with.
        batch: Queries of a training step.
        steps: Of training.
        profiled: Texts that the LM and the encoder read, and steps, under the profiler.
    """

    planned: int = 130
    limit: int = 180
    product: int = 8192
    copied: int = 4 << 30
    lms: Sequence[str] = ("opt-13b", "opt-6.7b", "opt-2.7b", "opt-1.3b")
    agreeing: str = "opt-1.3b"
    encoder: str = "bert-base"
    reader: str = "t5-base"
    candidates: int = 40_000
    queries: int = 16
    passages: int = 100
    evidence: int = 16
    texts: int = 200_000
    search: tuple[int, int, int, int] = (9600, 1_000_000, 768, 150)
    depth: int = DEPTH
    batch: int = 8
    steps: int = 30
    profiled: tuple[int, int, int] = (1000, 20_000, 5)


TINY = Sizes(
    planned=1300,  # a CPU may be busy otherwise
    limit=1800,
    product=256,
    copied=1 << 20,
    lms=("opt-tiny",),
    agreeing="opt-tiny",
    encoder="bert-tiny",
    reader="t5-tiny",
    candidates=32,
    queries=4,
    passages=12,
    evidence=4,
    texts=64,
    search=(96, 2000, 32, 10),
    depth=2,
    batch=2,
    steps=2,
    profiled=(8, 16, 2),
)


@dataclass
class Record:
    """What is measured, as it stands in a file.

    Attributes:
        path: The file.
        machine: What all of it was measured with.
        figures: By name, the piece's before it.
        pieces: The state of each, its seconds and what it has to say beside figures.
    """

    path: Path
    machine: Mapping[str, Any]
    figures: dict[str, float] = field(default_factory=dict)
    pieces: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, machine: Mapping[str, Any] | None) -> "Record":
        """Go on with a file, or begin one.

        Raises:
            ConfigError: If it is of something else.
        """
        machine = machine and {**machine, "torch": torch.__version__}
        if not path.is_file():
            return cls(path, machine or {})
        try:
            told = json.loads(path.read_text())
            found = cls(path, told["machine"], told["figures"], told["pieces"])
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} holds no figures of this benchmark: name another") from None
        if machine is not None and found.machine != machine:
            raise ConfigError(
                f"{path} was measured with {dict(found.machine)}, this is {machine}: name another"
            )
        return found

    def is_done(self, piece: str) -> bool:
        """Say whether a piece is measured, or was skipped."""
        return not self.pieces.get(piece, {"state": "failed"})["state"].startswith("failed")

    def end(self, piece: str, state: str) -> None:
        """Note how a piece ended."""
        self.pieces.setdefault(piece, {})["state"] = state
        self.write()

    def write(self) -> None:
        """Write the file anew."""
        write_figures(self.path, self.figures, machine=dict(self.machine), pieces=self.pieces)


@dataclass
class Bench:
    """What a piece measures with.

    Attributes:
        name: The piece.
        folder: What was packed.
        device: Where.
        sizes: How much.
        record: Where the figures go.
    """

    name: str
    folder: Path
    device: torch.device
    sizes: Sizes
    record: Record

    def __post_init__(self) -> None:
        self._begun = time.perf_counter()
        self.record.pieces[self.name] = {"state": "failed: stopped", "notes": []}

    @property
    def left(self) -> float:
        """The seconds that this piece may still plan."""
        return self.sizes.planned - (time.perf_counter() - self._begun)

    def tell(self, prefix: str = "", **figures: float) -> None:
        """Write and print figures, named after the piece and what they have in common."""
        named = {f"{self.name}/{prefix}{end}": float(value) for end, value in figures.items()}
        self.record.figures |= named
        self.record.write()  # what is printed stays
        for name, value in named.items():
            say(f"{name:<56}{value:>14.6g}")

    def note(self, text: str) -> None:
        """Print and write what no number says."""
        self.record.pieces[self.name]["notes"].append(text)
        say(f"{self.name}: {text}")
        self.record.write()

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
        seconds = max(0.0, min(seconds, self.left))
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
        told = self._candidates["prompt"]
        inputs = tuple(told["template"].pop("inputs"))
        return FewShotPrompt(PromptTemplate(**told["template"], inputs=inputs), told["prefix"])

    @cached_property
    def _candidates(self) -> dict[str, Any]:
        return json.loads((self.folder / "candidates.json").read_text())  # type: ignore[no-any-return]

    @cached_property
    def reading(self) -> Reading:
        """Labelled queries with their evidence."""
        told = json.loads((self.folder / "reading.json").read_text())
        told["examples"] = [Example(**example) for example in told["examples"]]
        return Reading(**told)

    def many_texts(self, count: int) -> list[str]:
        """Give so many sentences; they come again where there are fewer."""
        return list(itertools.islice(itertools.cycle(self.texts), count))

    def model(self, shape: str, tokenizer: str) -> str:
        """Name a random model with packed tokens."""
        return f"{RANDOM}{shape}@{self.folder / tokenizer}"

    def open_lm(self) -> CausalLM:
        """Make the largest LM that fits, in the precision of OPT's own weights."""
        dtype = "float16" if self.device.type == "cuda" else "float32"
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else 1 << 60
        for shape in self.sizes.lms:
            layers, width, _ = OPT_SHAPES[shape]
            if 1.25 * 2 * 12 * layers * width**2 + (3 << 30) < free:  # weights, and room to work
                break
            self.note(f"{shape} does not fit the {free / 1e9:.0f} GB that are free: a smaller one")
        else:
            raise ModelError(f"no LM fits the {free / 1e9:.1f} GB that are free on {self.device}")
        lm = open_lm(self.model(shape, "lm"), dtype=dtype, device=str(self.device))
        self.note(f"{shape}, {dtype}, {sum(p.numel() for p in lm.model.parameters()):,} weights")
        return lm


def measure_env(bench: Bench) -> None:
    """Measure what the machine can do."""
    device, size = bench.device, bench.sizes.product
    facts = {**package_versions(), "threads": torch.get_num_threads(), "cores": os.cpu_count()}
    if device.type == "cuda":
        about = torch.cuda.get_device_properties(device)
        facts |= {"cuda": torch.version.cuda, "processors": about.multi_processor_count}
        facts |= {"capability": f"{about.major}.{about.minor}"}
        bench.tell(memory_gb=about.total_memory / 1e9)
    bench.note(", ".join(f"{name} {value}" for name, value in facts.items()))
    bench.tell("idle_", **read_clocks(device))
    bench.tell(product_size=size)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        bench.tell("product_tflops_", **{dtype_name(dtype): bench.product_rate(dtype) / 1e12})
    if device.type == "cuda":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        bench.tell("product_tflops_", tf32=bench.product_rate(torch.float32) / 1e12)
        torch.set_float32_matmul_precision(before)
    bench.tell("busy_", **read_clocks(device))
    bench.tell(copy_gb_per_second=copy_rate(device, num_bytes=bench.sizes.copied) / 1e9)


def read_clocks(device: torch.device) -> dict[str, float]:
    """Give a GPU's clocks, power and temperature, as far as they can be read."""
    names = {
        "clocks.sm": "sm_mhz",
        "clocks.max.sm": "highest_sm_mhz",
        "clocks.mem": "memory_mhz",
        "power.draw": "watts",
        "power.limit": "watts_limit",
        "temperature.gpu": "celsius",
    }
    tool = shutil.which("nvidia-smi")
    if device.type != "cuda" or tool is None:
        return {}
    place = device.index if device.index is not None else torch.cuda.current_device()
    uuid = torch.cuda.get_device_properties(place).uuid
    words = [f"--id=GPU-{uuid}", f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits"]
    done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=30, check=False)
    found = {}
    for name, value in zip(names.values(), done.stdout.split(","), strict=False):
        with contextlib.suppress(ValueError):  # "[N/A]"
            found[name] = float(value)
    return found


def run_tests(bench: Bench) -> str | None:
    """Run the tests marked gpu; on a CPU a file of others."""
    missing = [name for name in ("pytest", "hypothesis") if find_spec(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    marked = sorted(p for p in ROOT.glob("tests/*/test_*.py") if "pytest.mark.gpu" in p.read_text())
    files = marked if bench.device.type == "cuda" else [ROOT / "tests/unit/test_batching.py"]
    if not files:
        return "there are no tests beside this file"
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        subprocess.run(
            [
                *(sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "--tb=short"),
                *("-m", "gpu" if files is marked else "not gpu and not slow"),
                *("-p", "no:cacheprovider", "--continue-on-collection-errors", *map(str, files)),
            ],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
            check=False,
        )
        if not report.is_file():
            raise PgraError("pytest wrote no report: its lines above say why")
        suite = ElementTree.parse(report).getroot().find("testsuite")
    counts = {} if suite is None else {name: int(suite.get(name, 0)) for name in TOLD_BY_PYTEST}
    bad = counts.get("failures", 0) + counts.get("errors", 0)
    bench.tell(**counts)
    if bad or not counts.get("tests"):
        raise PgraError(f"{bad} of {counts.get('tests', 0)} tests failed")
    return None


TOLD_BY_PYTEST = ("tests", "failures", "errors", "skipped")


def measure_agreement(bench: Bench) -> None:
    """Compare ways of sharing a prefix, and precisions."""
    sizes = bench.sizes
    queries = [example.text for example in bench.reading.examples[: sizes.queries]]
    texts = [*queries, *bench.texts[: sizes.passages]]
    name, device = bench.model(sizes.agreeing, "lm"), str(bench.device)
    exact = open_lm(name, dtype="float32", device=device)
    truth = PromptedEncoder(exact, bench.prompt, "none").encode(texts)
    own = (truth - truth.mean(dim=0)).norm(dim=1)
    for dtype in ("float32", "float16", "bfloat16"):
        kind = getattr(torch, dtype)
        lm = CausalLM(open_lm(name, device=device, dtype="float32").model.to(kind), exact.tokenizer)
        whole = PromptedEncoder(lm, bench.prompt, "none").encode(texts).float()
        for way in ("none", *WAYS):
            try:
                found = PromptedEncoder(lm, bench.prompt, way).encode(texts).float()
            except ModelError as error:
                bench.note(f"{dtype}, {way}: {error}")
                continue
            scores, exactly = (
                states[: len(queries)] @ states[len(queries) :].T for states in (found, truth)
            )
            bench.tell(
                f"{dtype}_{way}_",
                from_whole=_largest(found - whole, own),
                from_float32=_largest(found - truth, own),
                kept_of_float32=kept_share(scores, exactly, sizes.evidence),
            )


def _largest(difference: Tensor, own: Tensor) -> float:
    """Give the largest difference, relative to what sets a text apart from the mean of all."""
    return float((difference.norm(dim=1) / own).max())


def measure_rerank(bench: Bench) -> None:
    """Read candidates behind a prompt."""
    lm, sizes = bench.open_lm(), bench.sizes
    texts, encoder = bench.many_texts(sizes.candidates), PromptedEncoder(lm, bench.prompt)
    before = bench.product_rate(lm.dtype)
    fields = [bench.prompt.template.passage_fields(text) for text in texts]
    whole = [len(ids) for ids in encoder.tokenize(fields).ids]
    shared = 0 if encoder.way == "none" else len(encoder.shared_ids)
    bench.note(f"way: {encoder.way}")
    shape, rates, first = LmShape.of(lm.config), {}, min(SHARD // 4, sizes.candidates // 4)
    ways: dict[str, tuple[Callable[[int], object], int, int, float]] = {
        "pgra": (lambda n: read_shared(encoder, SHARD, texts[:n]), first, shared, 45),
        "usual": (lambda n: read_whole(encoder, texts[:n]), 4 * RELEASED_BATCH, 0, 25),
    }
    for title, (work, least, skip, seconds) in ways.items():
        count, cost = bench.timed(title, work, first=least, most=len(texts), seconds=seconds)
        lengths = [length - skip for length in whole[:count]]
        rates[title] = count / cost.seconds
        product = max(before, bench.product_rate(lm.dtype))
        bench.tell(
            f"{title}_",
            texts_per_second=rates[title],
            tokens_per_second=sum(lengths) / cost.seconds,
            share_of_product=shape.flops(lengths, behind=skip) / (cost.seconds * product),
            peak_mib=cost.peak_mib,
        )
    tokens = bench.record.figures[f"{bench.name}/pgra_tokens_per_second"]
    bench.tell(
        speedup=rates["pgra"] / rates["usual"],
        own_tokens_per_text=sum(whole) / len(whole) - shared,
        prefix_tokens=shared,
        product_tflops=before / 1e12,
        minutes_for_1m_sentences_of_45_tokens=45e6 / tokens / 60,
    )


def measure_encode(bench: Bench) -> None:
    """Encode sentences."""
    sizes = bench.sizes
    encoder = open_encoder(bench.model(sizes.encoder, "encoder"), device=str(bench.device))
    dtype = str(encoder.fingerprint["dtype"])
    bench.note(f"{sizes.encoder}, {dtype}")
    before = bench.product_rate(getattr(torch, dtype))
    texts, most = bench.many_texts(sizes.texts), int(str(encoder.fingerprint["max_tokens"]))
    distinct = texts[: len(bench.texts)]
    each = encoder.tokenizer(distinct, truncation=True, max_length=most)["input_ids"]
    lengths = list(itertools.islice(itertools.cycle(map(len, each)), len(texts)))
    usual = partial(encode_usual, encoder.model, encoder.tokenizer, max_tokens=most)
    few = texts[: min(len(texts), 256)]
    cosine = torch.cosine_similarity(
        torch.from_numpy(encoder.encode(few)).float(), usual(few, batch_size=32)
    )
    bench.tell(least_cosine=float(cosine.min()))
    shape = LmShape.of(encoder.model.config, is_causal=False)
    rates: dict[str, float] = {}
    ways: dict[str, Callable[[int], object]] = {"pgra": lambda n: encoder.encode(texts[:n])}
    for size in (32, 128, 512):  # 32 is what sentence-transformers takes by itself
        ways[f"usual_{size}"] = lambda n, size=size: usual(texts[:n], batch_size=size)
    for title, work in ways.items():
        first = min(len(texts), SHARD)
        count, cost = bench.timed(title, work, first=first, most=len(texts), seconds=30)
        rates[title] = count / cost.seconds
        product = max(before, bench.product_rate(getattr(torch, dtype)))
        bench.tell(
            f"{title}_",
            texts_per_second=rates[title],
            share_of_product=shape.flops(lengths[:count]) / (cost.seconds * product),
        )
    best = max(rate for title, rate in rates.items() if title != "pgra")
    bench.tell(
        speedup=rates["pgra"] / best,
        tokens_per_text=sum(lengths) / len(lengths),
        product_tflops=before / 1e12,
        seconds_for_1m_sentences=1e6 / rates["pgra"],
    )


@torch.inference_mode()
def measure_search(bench: Bench) -> None:
    """Search random vectors."""
    asked, rows, width, k = bench.sizes.search
    torch.manual_seed(0)
    unit = partial(torch.nn.functional.normalize, dim=1)
    queries = unit(torch.randn(asked, width, device=bench.device))
    half, full = bench.product_rate(torch.float16), bench.product_rate(torch.float32)
    with tempfile.TemporaryDirectory() as folder:
        vectors = torch.empty(rows, width, dtype=torch.float16, device=bench.device)
        for shard in plan_shards(Path(folder), rows, SHARD):
            part = unit(torch.randn(len(shard), width, device=bench.device)).half()
            vectors[shard.start : shard.stop] = part
            np.save(shard.path, part.cpu().numpy())
        source = vector_source(plan_shards(Path(folder), rows, SHARD), width)
        ours = partial(HalfSearch(source, str(bench.device)).search, queries.cpu().numpy())
        wait_for(bench.device)
        with measured(bench.device) as cost:
            found = ours(k)[1]
        bench.tell(pgra_first_seconds=cost.seconds)  # the vectors are read from the disk
        seconds = min(_seconds(bench, partial(ours, k)) for _ in range(3))
    exact = vectors.float()
    truth = top_products(queries, exact, k)
    by_torch = min(_seconds(bench, lambda: top_products(queries, exact, k)) for _ in range(3))
    same = (torch.from_numpy(found)[:, :, None] == truth.cpu()[:, None, :]).any(2).float().mean()
    copies = copy_rate(bench.device, num_bytes=bench.sizes.copied)
    operations = 2.0 * asked * rows * width
    bench.tell(
        pgra_seconds=seconds,
        torch_seconds=by_torch,
        speedup=by_torch / seconds,
        same_hits=float(same),
        share_of_copies=vectors.nbytes / seconds / (copies / 2),  # which read and write
        pgra_share_of_product=operations / seconds / half,
        torch_share_of_product=operations / by_torch / full,
        product_tflops_float16=half / 1e12,
        product_tflops_float32=full / 1e12,
    )


def _seconds(bench: Bench, work: Callable[[], object]) -> float:
    with measured(bench.device) as cost:
        work()
    return cost.seconds


def top_products(queries: Tensor, vectors: Tensor, k: int) -> Tensor:
    """Give each query's best rows as usual: a product and top-k, some queries at once."""
    return torch.cat([(part @ vectors.T).topk(k, dim=1).indices for part in queries.split(1024)])


def measure_reader(bench: Bench) -> None:
    """Train a reader."""
    for dtype in ("bfloat16", "float32"):
        args = reader_arguments(bench, dtype)
        product = bench.product_rate(getattr(torch, dtype))
        inputs = tokenized(bench, args)
        steps = list(batches(args, len(inputs)))[1:]
        t5 = open_plain(args.model, device=torch.device("meta"))
        operations = 3.0 * sum(reader.count_operations(t5, inputs, rows) for rows in steps)
        rates = {}
        for title in ("pgra", "usual"):
            if bench.left < 20:
                bench.note(f"{dtype}, {title}: left out, no time is left")
                continue
            cost = train(bench, title, args)
            rates[title] = args.steps / cost.seconds
            bench.tell(
                f"{dtype}_{title}_",
                steps_per_second=rates[title],
                minutes_for_5000_steps=reader.PAPER_STEPS / rates[title] / 60,
                share_of_product=operations / (cost.seconds * product),
                peak_mib=cost.peak_mib,
            )
        if len(rates) == 2:
            bench.tell(f"{dtype}_", speedup=rates["pgra"] / rates["usual"])


def measure_compiled(bench: Bench) -> None:
    """Train with compiled blocks, without and with CUDA graphs; the second half of steps counts.

    The first half compiles, and captures the shapes of the batches. On a CPU nothing is compiled.
    """
    on_gpu = bench.device.type == "cuda"
    for title, mode in (("bfloat16", None), ("bfloat16_graphs", "reduce-overhead")):
        if bench.left < 45:
            bench.note(f"{title}: left out, no time is left")
            continue
        args = reader_arguments(bench, "bfloat16", steps=2 * bench.sizes.steps)
        args.torch_compile = True
        args.torch_compile_backend = None if on_gpu else "eager"
        args.torch_compile_mode = mode if on_gpu else None
        clock = reader.Clock(bench.device, first=bench.sizes.steps + 1)
        try:
            train(bench, "pgra", args, [clock])
        except (RuntimeError, PgraError) as error:  # it is no way that pgra takes by itself
            bench.note(f"{title}: failed, {str(error)[:300]}")
            continue
        seconds = clock.times[-1] - clock.times[0]
        bench.tell(f"{title}_", steps_per_second=bench.sizes.steps / seconds)


def reader_arguments(bench: Bench, dtype: str, *, steps: int | None = None) -> argparse.Namespace:
    """Give what benchmarks/reader.py is asked for."""
    words = ["--model", bench.model(bench.sizes.reader, "t5"), "--device", str(bench.device)]
    words += ["--steps", str(steps or bench.sizes.steps), "--batch_size", str(bench.sizes.batch)]
    return reader.parse([*words, *(["--bf16"] if dtype == "bfloat16" else [])])


def tokenized(bench: Bench, args: argparse.Namespace) -> Any:
    """Give the reader's inputs."""
    _, tokenizer = open_reader(args.model, device=torch.device("meta"))
    return reader.tokenize(bench.reading, bench.sizes.depth, tokenizer)


def train(
    bench: Bench, title: str, args: argparse.Namespace, callbacks: Sequence[TrainerCallback] = ()
) -> Cost:
    """Train in one of two ways."""
    if title == "usual":
        return train_usual(bench.reading, bench.sizes.depth, args)
    with tempfile.TemporaryDirectory() as folder:
        return reader.train_ours(
            bench.reading, bench.sizes.depth, args, Path(folder) / "weights", callbacks
        )


def measure_profile(bench: Bench) -> None:
    """Find how long kernels run, and which."""
    candidates, texts, steps = bench.sizes.profiled
    watch = Watch(bench.device)
    args = reader_arguments(bench, "bfloat16", steps=steps)
    train(bench, "pgra", args, [_Watched(watch)])
    show_kernels(bench, "reader", watch)
    encoder = open_encoder(bench.model(bench.sizes.encoder, "encoder"), device=str(bench.device))
    profiled(bench, "encode", encoder.encode, bench.many_texts(texts))
    behind = PromptedEncoder(bench.open_lm(), bench.prompt)
    profiled(bench, "rerank", behind.encode, bench.many_texts(candidates))


def profiled(
    bench: Bench, title: str, work: Callable[[Sequence[str]], object], texts: Sequence[str]
) -> None:
    """Profile reading."""
    watch = Watch(bench.device)
    work(texts[: len(texts) // 4])
    with watch.watching():
        work(texts)
    show_kernels(bench, title, watch)


@dataclass
class Watch:
    """A profiler of what a device does.

    Attributes:
        device: The device; on a CPU operators stand for kernels.
        seconds: How long it watched.
        spans: Name, begin and end of each kernel, in microseconds.
    """

    device: torch.device
    seconds: float = 0.0
    spans: list[tuple[str, float, float]] = field(default_factory=list)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch what is done inside."""
        is_gpu = self.device.type == "cuda"
        kind = ProfilerActivity.CUDA if is_gpu else ProfilerActivity.CPU
        wait_for(self.device)
        with profile(activities=[kind], acc_events=True) as profiler:
            begun = time.perf_counter()
            yield
            wait_for(self.device)
            self.seconds = time.perf_counter() - begun
        self.spans = [
            (event.name, event.time_range.start, event.time_range.end)
            for event in profiler.events() or ()
            if (event.device_type.name == "CUDA") == is_gpu
            and not event.is_user_annotation
            and not event.name.startswith(("Memcpy", "Memset"))
            and (is_gpu or event.cpu_parent is None)
        ]

    @property
    def busy(self) -> float:
        """The share of the time in which at least one kernel runs."""
        total, last = 0.0, 0.0
        for _, start, end in sorted(self.spans, key=lambda span: span[1]):
            total += max(0.0, end - max(start, last))
            last = max(last, end)
        return total / 1e6 / self.seconds


class _Watched(TrainerCallback):  # type: ignore[misc]
    """Watches all steps but the first."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.stack = watch, contextlib.ExitStack()

    def on_step_end(self, _args: Any, state: Any, *_: Any, **__: Any) -> None:
        if state.global_step == 1:
            self.stack.enter_context(self.watch.watching())

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.stack.close()


def show_kernels(bench: Bench, title: str, watch: Watch) -> None:
    """Tell the share of the time in which kernels run, and the ten that run longest."""
    took: dict[str, float] = {}
    for name, start, end in watch.spans:
        took[name] = took.get(name, 0.0) + (end - start) / 1e6
    bench.tell(f"{title}_", busy_share=watch.busy, kernels=len(watch.spans), seconds=watch.seconds)
    for name in sorted(took, key=lambda name: -took[name])[:10]:
        share = took[name] / sum(took.values())
        bench.note(f"{title}: {share:6.1%} of the kernels' time in {name:.100}")


PIECES: dict[str, Callable[[Bench], str | None]] = {
    "env": measure_env,
    "tests": run_tests,
    "agreement": measure_agreement,
    "rerank": measure_rerank,
    "encode": measure_encode,
    "search": measure_search,
    "reader": measure_reader,
    "compiled": measure_compiled,
    "profile": measure_profile,
}
