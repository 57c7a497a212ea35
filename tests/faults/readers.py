"""Every reader of outside data, a valid file for each, and ways to spoil a file.

A new reader is one line in `READERS`; the tests and `benchmarks/faults.py` run all that stand here.
"""

import atexit
import functools
import gzip
import io
import itertools
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
from tiny_models import build_encoder

from pgra.commands.predict import read_queries_file
from pgra.config import from_yaml, read_yaml
from pgra.data.corpus import find_source
from pgra.data.examples import open_file, read_split
from pgra.data.tasks import GenerationTask, Task, load_any_task
from pgra.encoders.encoder import Encoder, read_sentence_model
from pgra.errors import LONGEST_MESSAGE, ModelError, PgraError
from pgra.experiments.grid import Grid, read_grid
from pgra.lm.load import ModelSource
from pgra.lm.replies import read_reply, show_error, without_reasoning
from pgra.memory.families import Family, load_family
from pgra.memory.log import read_events
from pgra.memory.memory import Memory
from pgra.memory.nearest_examples import read_pool
from pgra.memory.prompts import load_few_shot
from pgra.memory.stream import read_pairs, read_stream
from pgra.prompts.fewshot import FewShotPrompt, PromptTemplate
from pgra.reader import RECORD_FILE
from pgra.reader.calibrate import Calibration
from pgra.reader.inputs import SegmentLayout
from pgra.reader.record import ReaderRecord, read_record, write_record
from pgra.retrieval.trec import read_qrels, read_query_table, read_run

LONGEST_SECONDS = 20
"""Of one case. A reader of a small file takes milliseconds; this is against hangs."""
_CONFIGS = Path(__file__).parents[2] / "configs"


@dataclass(frozen=True)
class Reader:
    """A reader of outside data.

    Attributes:
        file: The name under which it finds the file.
        valid: A file that it reads.
        read: Reads the file at a path to its end.
    """

    file: str
    valid: bytes
    read: Callable[[Path], object]


def _yaml(*parts: str) -> bytes:
    return _CONFIGS.joinpath(*parts).read_bytes()


def _rows(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


def _corpus(path: Path) -> object:
    return list(find_source(str(path)).texts("text"))


def _split(path: Path) -> object:
    task = Task.load("rotten-tomatoes")
    return read_split(task, open_file(task, path), "train", is_quiet=True)


def _answers(name: str) -> Callable[[Path], object]:
    def read(path: Path) -> object:
        task = GenerationTask.load(name)
        return read_split(task, open_file(task, path), "train")

    return read


@functools.cache
def _family(name: str) -> Family:
    return load_family(name)


def _template(path: Path) -> object:
    """A task's template, and what it makes of a text."""
    task = Task.load(path)
    fields = dict.fromkeys(task.inputs, "a film")
    return PromptTemplate(task.prompt, task.answer, task.inputs).render(fields)


def _answer(path: Path) -> object:
    """The body of an answer, behind HTTP."""
    text = path.read_bytes().decode(errors="replace")
    show_error(httpx.Response(200, text=text))
    try:
        reply = read_reply(text, is_chat='"message"' in text)
    except ValueError as error:  # which the client reports with the body
        raise ModelError(str(error)) from None
    without_reasoning(reply.text)[0].encode()  # as a file has it
    return reply


def _folder(path: Path) -> object:
    pooling = path.parent / "1" / "config.json"
    pooling.parent.mkdir(exist_ok=True)
    pooling.write_text('{"pooling_mode": "mean"}')
    return read_sentence_model(ModelSource("model", str(path.parent), None, "x"))


def _memory() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.sqlite"
        with Memory(path) as memory:
            memory.add("what is akin to warm ?", "a synonym")
        return path.read_bytes()


@functools.cache
def _encoder() -> Path:
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return build_encoder(Path(folder))


def _open_encoder(path: Path) -> object:
    """A model's folder, with one file of it in place of the whole one."""
    for file in _encoder().iterdir():
        if not (path.parent / file.name).exists():
            (path.parent / file.name).symlink_to(file)
    return Encoder.load(path.parent, device="cpu")


def _record() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        layout = SegmentLayout("{text} It was <extra_id_0> .", "query_first", 128)
        record = ReaderRecord(
            task="reviews",
            inputs=("text",),
            metric="accuracy",
            words={"positive": "great", "negative": "terrible"},
            layout=layout,
            decode="verbalizer",
            calibration=Calibration(),
            num_evidence=2,
            method="pgra",
            prompt=FewShotPrompt(PromptTemplate("{text} It was"), "A warm film. It was great. "),
            base_model={"name": "t5", "identity": "x"},
            seed=1,
            arguments={"data": {"task": "reviews"}},
            fingerprints={"train": "x"},
        )
        write_record(Path(folder), record)
        return (Path(folder) / RECORD_FILE).read_bytes()


def _parquet() -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": ["a film", "a town"], "n": [1, 2]}), file)
    return file.getvalue()


_TEXTS = _rows("A film about a town.", "The plot: « dull » at best.", "", "Warm and funny.")
_LABELLED = _rows(
    '{"text": "A warm film.", "label": "positive"}',
    '{"text": "A dull one.", "label": "negative", "n": 1e3}',
)
_TABLE = _rows("text,label", '"A ""warm"", long film.",positive', "A dull one.,negative")
_MODULES = _rows(
    '[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},',
    '{"idx": 1, "name": "1", "path": "1", "type": "sentence_transformers.models.Pooling"}]',
)
_EVENT = _rows('{"question": "what is akin to warm ?", "feedback": "a synonym", "kind": "add"}')
_STEP = _rows(
    '{"type": "syn", "word": "warm", "question": "what is akin to < warm > ?", '
    '"feedback": "clarification: when I say akin to, I want a synonym", '
    '"expected_answer": "the synonym for warm is hot"}'
)
_COMPLETION = (
    b'{"choices": [{"text": " red", "finish_reason": "length", "logprobs": {"tokens": ["a", " b"], '
    b'"token_logprobs": [null, -0.5], "top_logprobs": [null, {" b": -0.5, " c": -2}]}}], '
    b'"usage": {"prompt_tokens": 3, "completion_tokens": 1}}'
)
_CHAT = (
    b'{"choices": [{"message": {"content": "red"}, "logprobs": {"content": [{"token": "a", '
    b'"top_logprobs": [{"token": "a", "logprob": -0.1}]}]}}], "usage": {"prompt_tokens": 3}}'
)

READERS = {
    "task": Reader("t.yaml", _yaml("tasks", "trec.yaml"), lambda p: load_any_task(str(p))),
    "template": Reader("t.yaml", _yaml("tasks", "mr.yaml"), _template),
    "written task": Reader(
        "t.yaml", _yaml("generation", "totto.yaml"), lambda p: load_any_task(str(p))
    ),
    "grid": Reader("g.yaml", _yaml("ablations", "k.yaml"), lambda p: read_grid(str(p))),
    "grid's keys": Reader("g.yaml", _yaml("ablations", "_base.yaml"), lambda p: from_yaml(Grid, p)),
    "config": Reader("c.yaml", _yaml("experiments", "paper.yaml"), read_yaml),
    "family": Reader("f.yaml", _yaml("memory", "lexical.yaml"), lambda p: load_family(str(p))),
    "prompt": Reader(
        "p.yaml", _yaml("memory_prompts", "lexical.yaml"), lambda p: load_few_shot(str(p))
    ),
    "corpus txt": Reader("c.txt", _TEXTS, _corpus),
    "corpus gz": Reader("c.txt.gz", gzip.compress(_TEXTS, mtime=0), _corpus),
    "corpus jsonl": Reader("c.jsonl", _LABELLED, _corpus),
    "corpus csv": Reader("c.csv", _TABLE, _corpus),
    "corpus tsv": Reader("c.tsv", _rows("text\tn", "a film\t1", "a town\t2"), _corpus),
    "corpus parquet": Reader("c.parquet", _parquet(), _corpus),
    "examples jsonl": Reader("e.jsonl", _LABELLED, _split),
    "examples csv": Reader("e.csv", _TABLE, _split),
    "answers": Reader(
        "a.jsonl", _rows('{"question": "who ?", "answers": ["he", "she"]}'), _answers("nq_open")
    ),
    "queries": Reader("q.jsonl", _LABELLED, lambda p: read_queries_file(p, ["text"])),
    "trec queries": Reader("q.jsonl", _rows('{"_id": 7, "text": "a film"}'), read_query_table),
    "trec pairs": Reader("q.tsv", _rows("7\ta film", "8\ta town"), read_query_table),
    "qrels": Reader("judged", _rows("7 0 d1 1", "7 0 d2 -1", "8 0 d1 0"), read_qrels),
    "events": Reader("m.jsonl", _EVENT, read_events),
    "stream": Reader("s.jsonl", _STEP, lambda p: read_stream(p, _family("lexical"))),
    "completion": Reader("answer", _COMPLETION, _answer),
    "chat": Reader("answer", _CHAT, _answer),
    "pairs": Reader("p.jsonl", _rows('{"question": "q ?", "feedback": "f"}'), read_pairs),
    "memory": Reader("m.sqlite", _memory(), read_pairs),
    "damaged memory": Reader("m.sqlite", _memory(), read_events),
    "run file": Reader("r.trec", _rows("7 Q0 d1 1 2.5 x", "7 Q0 d2 2 1e-3 x"), read_run),
    "pool": Reader("p.jsonl", _rows('{"question": "who ?", "answer": "he"}'), read_pool),
    "modules": Reader("modules.json", _MODULES, _folder),
    "pushed reader": Reader(RECORD_FILE, _record(), lambda p: read_record(p.parent)),
    "encoder": Reader(
        "model.safetensors", (_encoder() / "model.safetensors").read_bytes(), _open_encoder
    ),
}

_TOKENS = (
    *(b"[" * 3000, b"{" * 3000, b'{"a":' * 3000, b"- " * 200, b"? " * 200, b"\n" + b" " * 4000),
    *(b"9" * 5000, b"0x" + b"f" * 5000, b"1e999", b"NaN", b"-Infinity", b".nan", b".inf", b"-1"),
    *(b"2024-13-45", b"!!int abc", b"!!bool maybe", b"!!timestamp x", b"!!float x"),
    *(b"!!python/a x", b"&a [*a]", b"*a", b"&a ", b"<<: ", b"~", b"null", b"true", b"[]", b"{}"),
    *(b"{text:zz}", b"{text!r}", b"{text:{text}}", b"{0}", b"{", b"}", b"{{", b"''", b'""'),
    *(b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\ud800", b"\r", b"\xe2\x80\xa8"),
    *(b'"', b"'", b",", b"\t", b":", b": ", b"\n", b"#", b"|", b"%", b"@", b"text", b"label"),
    *("\N{ARABIC-INDIC DIGIT THREE}".encode(), "\N{LATIN SMALL LETTER E WITH ACUTE}".encode()),
    b"x" * 2000,
)


def spoil(valid: bytes, draw: random.Random) -> bytes:
    """Return a file with one to three spoilt places."""
    data = bytearray(valid)
    for _ in range(draw.choice((1, 1, 2, 3))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice((0, 1, 1, 4, 30)))
        way = draw.randrange(5)
        if way == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            del data[at:]
        elif way == 2:
            data[at:end] = b""
        elif way == 3:
            data[at:at] = data[at:end] * draw.choice((1, 2, 50))
        else:
            data[at:end] = draw.choice(_TOKENS)
    return bytes(data)


def check(reader: Reader, data: bytes, folder: Path) -> str:
    """Have a reader read a file; only a `PgraError` with a short message may leave it.

    Returns:
        The message; "" where the file was read.
    """
    path = folder / reader.file
    path.write_bytes(data)
    try:
        with _no_longer_than(LONGEST_SECONDS):
            reader.read(path)
    except PgraError as error:
        message = str(error)
        assert len(message) <= LONGEST_MESSAGE, message
        assert message.strip()
        return message
    return ""


def cases(reader: Reader, *, seed: int, start: int = 0) -> Iterator[bytes]:
    """Return spoilt files without end; the n-th is the same whatever number was asked first."""
    for number in itertools.count(start):
        yield spoil(reader.valid, random.Random(f"{seed}-{reader.file}-{number}"))


@contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise AssertionError(f"a small file took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
