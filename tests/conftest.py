"""Fixtures, and sentences to make them of.

What imports torch or transformers does so when it is called: under xdist the process that hands out
the tests loads this file too, before the others start, and needs none of it.
"""

import gc
import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

# Tiny models gain nothing from threads, and sums differ in their last digits with the number of
# threads: subprocesses and fixtures must have as many as the tests.
os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import pytest
from hypothesis import settings, strategies

from pgra.data.corpus import CorpusArguments
from pgra.data.examples import DataArguments
from pgra.methods.arguments import RunArguments, RuntimeArguments
from pgra.reader.arguments import ReaderArguments
from pgra.rerank.base import RerankArguments
from pgra.retrieval.base import RetrieverArguments
from pgra.types import Example

# Importing torch and transformers makes many objects and next to no garbage. `quick_collections`
# turns the collector on again.
gc.disable()
# Each artefact is synced to the disk, which takes longer than making a tiny one: where there is
# memory that looks like a disk, and enough of it, the tests' folders lie there.
_MEMORY = Path("/dev/shm")
if os.access(_MEMORY, os.W_OK) and shutil.disk_usage(_MEMORY).free > 6 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_MEMORY))

SENTENCES = [
    "The film is a warm and funny portrait of a family by the sea.",
    "A dull, lifeless story that wastes its good actors.",
    "The river Main flows through the city of Frankfurt.",
    "He was born in 1925 and studied law at the university.",
    "Red apples grow in the garden behind the old house.",
    "The blue sea was calm, and the boats came home early.",
    "Critics praised the acting but found the plot terrible.",
    "It was a great success in the cinemas of Europe.",
    "The council voted against the new railway line in March.",
    "Her second album sold a million copies within a year.",
    "The temple stands on a hill and can be seen from the town.",
    "Audiences laughed at the jokes and cried at the end.",
]
LM_KINDS = ["gpt2", "llama", "opt", "opt-350m", "qwen2"]
T5_KINDS = ["t5", "flan-t5", "mt5", "byt5"]
QUICK_SECONDS, NOISE = 1.0, 2.0
"""What a test may take that is not marked slow: CPU seconds, of its subprocesses too. On a machine
with other jobs the same test takes up to twice as many."""
settings.register_profile("quick", max_examples=25, derandomize=True, deadline=None)
settings.load_profile("quick")
ENCODER_KINDS = ["bert", "roberta"]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Fail a quick test that takes too long, but for one that loads a library for all others."""
    start, num_modules = sum(os.times()[:4]), len(sys.modules)
    result = yield
    seconds = sum(os.times()[:4]) - start
    loads_library = len(sys.modules) - num_modules > 50
    is_slow = item.get_closest_marker("slow") or item.get_closest_marker("gpu")
    if seconds > QUICK_SECONDS * NOISE and not loads_library and not is_slow:
        pytest.fail(f"{seconds:.1f} s of CPU: make it smaller, or mark it slow", pytrace=False)
    return result


def one_quick(kinds, quick):
    """Give a fixture's kinds of which all but one are for the slow suite."""
    return [kind if kind == quick else pytest.param(kind, marks=pytest.mark.slow) for kind in kinds]


@pytest.fixture(scope="session", autouse=True)
def quick_collections():
    """Leave what was imported out of the collections that accelerate makes at each training.

    They look at every object of torch and transformers, which takes longer than a tiny training.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def tables_of_characters():
    """Have hypothesis make its tables of Unicode, once an installation, before a test is timed."""
    strategies.characters(codec="utf-8").validate()


@pytest.fixture(scope="session", autouse=True)
def whole_bytecode():
    """Write no .pyc from here on; those of the tests' own modules may be kept for the next time.

    Tests limit the size of files and kill processes: what compiled a module just then would leave
    half a .pyc in the environment, and break all that follow.
    """
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.dont_write_bytecode = True


@pytest.fixture(scope="session", autouse=True)
def quick_loading():
    """Draw no random weights on the device without memory, where models are made to be loaded.

    There they are no numbers at all, and not drawing them takes a fourth off loading a tiny model.
    """
    if "torch" not in sys.modules:  # no test of this session has models
        yield
        return
    from torch.nn import init

    def only_with_memory(draw):
        return lambda tensor, *args, **more: (
            tensor if tensor.is_meta else draw(tensor, *args, **more)
        )

    with pytest.MonkeyPatch.context() as patch:
        for name in ("normal_", "uniform_", "kaiming_uniform_"):
            patch.setattr(init, name, only_with_memory(getattr(init, name)))
        yield


@pytest.fixture(scope="session")
def lm_dirs(tmp_path_factory):
    from tiny_models import build_lm

    root = tmp_path_factory.mktemp("lms")
    return {kind: build_lm(root / kind, kind) for kind in LM_KINDS}


@pytest.fixture(scope="session", params=one_quick(LM_KINDS, "opt"))
def lm_dir(request, lm_dirs):
    return lm_dirs[request.param]


@pytest.fixture(scope="session")
def encoder_dirs(tmp_path_factory):
    from tiny_models import build_encoder

    root = tmp_path_factory.mktemp("encoders")
    return {kind: build_encoder(root / kind, kind) for kind in ENCODER_KINDS}


@pytest.fixture(scope="session")
def cross_encoder_dir(tmp_path_factory):
    from tiny_models import build_cross_encoder

    return build_cross_encoder(tmp_path_factory.mktemp("cross-encoders") / "one")


@pytest.fixture(scope="session")
def encoder_dir(encoder_dirs):
    return encoder_dirs["bert"]


@pytest.fixture(scope="session")
def t5_dirs(tmp_path_factory):
    from tiny_models import build_t5

    root = tmp_path_factory.mktemp("readers")
    return {kind: build_t5(root / kind, kind) for kind in T5_KINDS}


@pytest.fixture(scope="session", params=one_quick(T5_KINDS, "t5"))
def reader_dir(request, t5_dirs):
    return t5_dirs[request.param]


@pytest.fixture(scope="session")
def t5_dir(t5_dirs):
    return t5_dirs["t5"]


@pytest.fixture(scope="session")
def tokenizer(t5_dir):
    from pgra.lm.load import find_model, load_tokenizer

    return load_tokenizer(find_model(str(t5_dir)))


@pytest.fixture
def corpus_file(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("\n".join(SENTENCES) + "\n")
    return path


@pytest.fixture
def corpus(corpus_file, tmp_path):
    """The corpus of that file, read."""
    from pgra.data.corpus import open_corpus

    return open_corpus(CorpusArguments(corpus=str(corpus_file)), tmp_path / "artifacts")


@pytest.fixture
def memory(tmp_path):
    """A memory, empty."""
    from pgra.memory.memory import Memory

    with Memory(tmp_path / "memory.sqlite") as memory:
        yield memory


def reader_inputs(tokenizer, verbalizer, items):
    """Tokenise (id, whole segments, label) one segment at a time: what inputs should be."""
    from pgra.reader.inputs import TokenizedInputs

    examples = [Example(name, {"text": name}, label) for name, _, label in items]
    segments = [
        [np.array(tokenizer(text).input_ids, dtype=np.int32) for text in texts]
        for _, texts, _ in items
    ]
    return TokenizedInputs.of(examples, segments, tokenizer, verbalizer)


def contents(folder):
    """Give every file below a folder, by its path."""
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


GOOD, BAD = ["great", "warm", "funny", "good"], ["dull", "terrible", "lifeless", "wasted"]
THINGS = ["film", "story", "plot", "cast", "family", "sea", "end", "album", "town", "garden"]


def review_rows(count, *, start=0):
    """Reviews whose words tell their label, one positive and one negative in turn."""
    rows = []
    for i in range(start, start + count // 2):
        for label, words, step in (("positive", GOOD, 1), ("negative", BAD, 3)):
            text = f"A {words[i % 4]} {THINGS[i * step % 10]} number {i}."
            rows.append({"text": text, "label": label})
    return rows


@pytest.fixture
def review_files(tmp_path):
    """Forty training and twelve test reviews."""
    return {
        "train": write_jsonl(tmp_path / "train.jsonl", review_rows(40)),
        "test": write_jsonl(tmp_path / "test.jsonl", review_rows(12, start=20)),
    }


@pytest.fixture
def args(tmp_path, review_files, corpus_file, encoder_dir, lm_dirs, t5_dir):
    """A run of both stages and a reader on tiny models; nothing is run yet."""
    return RunArguments(
        {
            "runtime": RuntimeArguments(artifacts_dir=str(tmp_path / "artifacts"), device="cpu"),
            "data": DataArguments(
                task="sst2",
                train_file=str(review_files["train"]),
                test_file=str(review_files["test"]),
            ),
            "corpus": CorpusArguments(corpus=str(corpus_file)),
            "retriever": RetrieverArguments(encoder=str(encoder_dir), num_candidates=6),
            "rerank": RerankArguments(lm=str(lm_dirs["gpt2"]), num_evidence=3, num_exemplars=4),
            "reader": ReaderArguments(model_name_or_path=str(t5_dir)),
        }
    )


@pytest.fixture(scope="module")
def bench(tmp_path_factory, lm_dirs, encoder_dir, t5_dir):
    """A folder in which all tests of a file call our scripts, on tiny models."""
    from scripted import Bench

    return Bench(tmp_path_factory.mktemp("bench"), lm_dirs["gpt2"], encoder_dir, t5_dir)


@pytest.fixture
def new_bench(tmp_path, lm_dirs, encoder_dir, t5_dir):
    """Such a folder for one test alone."""
    from scripted import Bench

    return Bench(tmp_path, lm_dirs["gpt2"], encoder_dir, t5_dir)


def with_rerank(args, **changes):
    return args.having(rerank=replace(args.rerank, **changes))


def with_retriever(args, **changes):
    return args.having(retriever=replace(args.retriever, **changes))
