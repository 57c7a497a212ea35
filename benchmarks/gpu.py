"""All that a GPU has to say, in one command: packed where the data is, measured where the GPU is.

    python benchmarks/gpu.py pack packed
    python benchmarks/gpu.py run packed --json gpu.json
    python benchmarks/gpu.py run packed --json gpu.json --only rerank search

`pack` writes texts, prompts and tokenizers (no weights, under 20 MB). `run` needs that folder and
neither network nor weights: models of the paper's shapes are made at random on the device. What
they compute means nothing; how fast they do it is how fast the real ones would.

    env        the device, its matrix products of 8192 x 8192 and its copies
    rerank     OPT-13b reads candidates after a real prompt: pgra's way, and whole prompts
    search     9,600 queries in 1,000,000 vectors of 768: pgra's way, and torch's product and top-k
    reader     T5-base trains on 16 passages a query: pgra's way, and Fusion-in-Decoder as usual

Usual ways have the dtype of pgra's. A share of the product is the operations of real tokens (no
padding) a second, over those of an 8192 x 8192 product of the same dtype in the same process.

Each figure is printed and written as it comes; a piece that fails is named, and the others follow.
`--tiny` runs all of it on a CPU, on small models, to see that it works.
"""

import argparse
import gc
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))  # pgra need not be installed there

import reader
import torch
from gpu_pieces import DEPTH, PIECES, SHARD, TINY, TOKENIZERS, Bench, Sizes
from measuring import FlagParser, parse_flags
from rerank import find_texts

from pgra.artifacts import read_manifest, write_json, write_manifest
from pgra.cli import run
from pgra.commands.common import say
from pgra.errors import ConfigError, PgraError
from pgra.lm.load import choose_device, find_model, load_tokenizer

STAGE = "pack"


def main(argv: Sequence[str] | None = None) -> int:
    """Pack, or measure."""
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="pack|run")
    packer = verbs.add_parser("pack", help="write what a GPU needs into a folder")
    packer.add_argument("folder", type=Path, metavar="DIR")
    packer.add_argument("--corpus", default="bundled:wikipedia-19k")
    runner = verbs.add_parser("run", help="measure")
    runner.add_argument("folder", type=Path, metavar="DIR", help="what pack wrote")
    runner.add_argument("--json", type=Path, required=True, help="where the figures are written")
    runner.add_argument("--only", nargs="+", choices=PIECES, default=list(PIECES))
    runner.add_argument("--device", default="cuda")
    runner.add_argument("--tiny", action="store_true", help="small models on a CPU")
    packer.set_defaults(json=None)
    args = parse_flags(parser, argv)
    if args.verb == "pack":
        return pack(args.folder, args.corpus)
    args.device = "cpu" if args.tiny else args.device
    if args.device.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} finds no GPU here: run it where there is one, or see with "
            "--tiny that it works"
        )
    return measure_pieces(args)


def pack(folder: Path, corpus: str) -> int:
    """Write texts with their prompt, labelled queries with their evidence, and tokenizers."""
    begun = time.perf_counter()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is there already: name another folder, or remove it")
    folder.mkdir(parents=True, exist_ok=True)
    candidates = find_texts(corpus, SHARD * 4)
    texts = list(dict.fromkeys(candidates.texts))
    prompt = {"template": asdict(candidates.prompt.template), "prefix": candidates.prompt.prefix}
    write_json(folder / "candidates.json", {"texts": texts, "prompt": prompt})
    words = ["--corpus", corpus, "--device", "cpu", "--max_passages", "400"]
    words += ["--steps", str(Sizes.steps), "--num_evidence", str(DEPTH), "--num_examples", "1"]
    reading = reader.read_examples(reader.parse(words))
    write_json(folder / "reading.json", asdict(reading))
    for name, lender in TOKENIZERS.items():
        load_tokenizer(find_model(lender)).save_pretrained(folder / name)
    counts = {"texts": len(texts), "examples": len(reading.examples)}
    write_manifest(
        folder,
        stage=STAGE,
        fingerprint={"corpus": corpus, "tokenizers": dict(TOKENIZERS)},
        counts=counts,
        seconds=time.perf_counter() - begun,
    )
    size = sum(file.stat().st_size for file in folder.rglob("*")) / 1e6
    say(f"{folder}: {len(texts):,} texts, {len(reading.examples)} labelled queries, {size:.1f} MB")
    return 0


def measure_pieces(args: argparse.Namespace) -> int:
    """Measure each piece; name those that fail."""
    read_manifest(args.folder, stage=STAGE)
    device = choose_device(args.device)
    figures: dict[str, float] = {}
    failed = []
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}; the weights are random: speed, not meaning")
    for piece in args.only:
        begun = time.perf_counter()
        sizes = TINY if args.tiny else Sizes()
        bench = Bench(piece, args.folder, device, sizes, args.json, figures)
        try:
            PIECES[piece](bench)
        except (PgraError, RuntimeError, OSError) as error:
            failed.append(piece)
            say(f"{piece}: failed: {error}")
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
        say(f"{piece}: {time.perf_counter() - begun:.1f} s\n")
    say(f"figures: {args.json}; " + (f"failed: {', '.join(failed)}" if failed else "all is done"))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(run(main))
