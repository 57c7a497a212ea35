"""Whatever stands in an outside file: it is read, or refused in one short line. Nothing else."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from readers import READERS, cases, check

ANYTHING = st.binary(max_size=200) | st.text(max_size=200).map(
    lambda text: text.encode("utf-8", "surrogatepass")
)


@pytest.mark.parametrize("name", READERS)
def test_any_bytes_are_read_or_refused(name, tmp_path_factory):
    folder, reader = tmp_path_factory.mktemp("any"), READERS[name]
    assert check(reader, reader.valid, folder) == ""  # the control: it does read
    spoilt = st.integers(0, 10**6).map(lambda number: next(cases(reader, seed=0, start=number)))

    @settings(max_examples=25, deadline=None, derandomize=True, database=None)
    @given(ANYTHING | spoilt)
    def any_bytes(data):
        check(reader, data, folder)

    any_bytes()


@pytest.mark.parametrize(
    ("name", "added", "told"),
    [
        ("task", b"\nanswer: 2024-13-45\n", "month must be in 1..12"),
        ("task", b"\nmetric: accuracy\nmetric: mcc\n", "the key 'metric' is a duplicate"),
        ("config", b"\nseed: " + b"9" * 6000, "Exceeds the lim"),
        ("config", b"\n#" + b"x" * (1 << 20), "larger than a YAML may be"),
        ("template", b'\nprompt: "{text:>999999999}"\n', "write {text} alone"),
        ("corpus jsonl", b'{"text": ' + b"[" * 100_000, "line 3: not JSON (nested too deeply)"),
        ("corpus jsonl", b'{"text": "a", "text": "b"}', "the key 'text' stands there twice"),
        ("qrels", b"9 0 d1 " + b"9" * 5000, "cannot be read (ValueError: "),
    ],
)
def test_what_is_wrong_is_named(name, added, told, tmp_path):
    valid = b"labels: [a, b]" if name == "template" else READERS[name].valid
    assert told in check(READERS[name], valid + added, tmp_path)
