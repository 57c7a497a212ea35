"""Whatever stands in a file from outside: it is read, or refused in one line."""

from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pgra.data.corpus import find_source
from pgra.data.read import read_table
from pgra.data.tasks import Task, load_any_task
from pgra.errors import PgraError
from pgra.experiments.grid import read_grid
from pgra.memory.log import read_events
from pgra.retrieval.trec import read_qrels

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
ROWS = b'{"text": "A warm film.", "label": "positive"}\n{"text": "A dull one.", "label": "n"}\n'
TABLE = b'text,label\n"A ""warm"", long film.",positive\nA dull one.,negative\n'
EVENT = b'{"question": "akin to warm ?", "feedback": "a synonym", "kind": "add"}\n'


def corpus(path):
    return [row.value("text") for row in find_source(str(path)).rows(["text"])]


READERS = {
    "t.yaml": ((CONFIGS / "tasks" / "trec.yaml").read_bytes(), Task.load),
    "w.yaml": (
        (CONFIGS / "generation" / "totto.yaml").read_bytes(),
        lambda p: load_any_task(str(p)),
    ),
    "g.yaml": ((CONFIGS / "ablations" / "k.yaml").read_bytes(), lambda p: read_grid(str(p))),
    "c.jsonl": (ROWS, corpus),
    "c.txt": (b"A film about a town.\n\nWarm and funny.\n", corpus),
    "e.csv": (TABLE, lambda p: list(read_table(p))),
    "m.jsonl": (EVENT, lambda p: list(read_events(p))),
    "qrels": (b"7 0 d1 1\n7 0 d2 -1\n8 0 d1 0\n", read_qrels),
}
PIECES = [b"[" * 3000, b"- " * 200, b"9" * 5000, b"NaN", b"-1", b"2024-13-45", b"&a [*a]", b"\0"]
PIECES += [b"{text:zz}", b"{", b"\xff\xfe", b"\xef\xbb\xbf", b"\\ud800", b"\r", b'"', b",", b"\n"]


@pytest.mark.slow
@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_or_refused(name, tmp_path_factory):
    path, (valid, read) = tmp_path_factory.mktemp("any") / name, READERS[name]
    path.write_bytes(valid)
    assert read(path)  # the control

    parts = st.tuples(
        st.integers(0, len(valid)), st.integers(0, len(valid)), st.sampled_from(PIECES)
    )
    spoilt = parts.map(lambda part: valid[: part[0]] + part[2] + valid[part[1] :])

    @given(st.binary(max_size=200) | spoilt)
    def any_bytes(data):
        path.write_bytes(data)
        with suppress(PgraError):
            read(path)

    any_bytes()
