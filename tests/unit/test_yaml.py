"""YAMLs become dataclasses by their type hints: what fits comes back, what does not is named."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pgra.config import from_yaml
from pgra.errors import ConfigError

WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x85\u2028\u2029"), min_size=1)


@dataclass(frozen=True)
class Inner:
    word: str
    share: float = 0.5


@dataclass(frozen=True)
class Whole:
    word: str
    number: int = 0
    is_loud: bool = False
    color: Literal["red", "blue"] = "red"
    names: tuple[str, ...] = ()
    sizes: dict[str, int] = field(default_factory=dict)
    inner: Inner | None = None
    several: str | list[str] = "one"
    anything: Any = None
    folder: Path | None = None
    name: str = ""

    def __post_init__(self):
        if self.number < 0:
            raise ConfigError(f"number is {self.number}: it must be at least 0")


def read(path, values, cls=Whole, **given):
    path.write_text(yaml.safe_dump(values, allow_unicode=True), encoding="utf-8")
    return from_yaml(cls, path, **given)


VALUES = {
    "number": st.integers(0, 9),
    "is_loud": st.booleans(),
    "color": st.sampled_from(["red", "blue"]),
    "names": st.lists(WORDS, min_size=1).map(tuple),
    "sizes": st.dictionaries(WORDS, st.integers()),
    "inner": st.none() | st.fixed_dictionaries({"word": WORDS, "share": st.floats(0, 1)}),
    "several": WORDS | st.lists(WORDS, min_size=1),
    "anything": st.none() | st.integers() | WORDS,
}


@given(values=st.fixed_dictionaries({"word": WORDS}, optional=VALUES))
@settings(derandomize=True, deadline=None, max_examples=25)
def test_what_fits_comes_back(values, tmp_path_factory):
    plain = {name: list(v) if name == "names" else v for name, v in values.items()}
    made = asdict(read(tmp_path_factory.getbasetemp() / "any.yaml", plain))
    assert {name: made[name] for name in values} == values


def test_a_path_and_what_is_not_of_the_file(tmp_path):
    made = read(tmp_path / "a.yaml", {"word": "x", "folder": "b/c"}, name="mine")
    assert (made.folder, made.name) == (Path("b/c"), "mine")
    with pytest.raises(ConfigError, match="unknown key 'name'"):
        read(tmp_path / "a.yaml", {"word": "x", "name": "y"}, name="mine")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "'word' is missing"),
        ({"word": "x", "numbr": 1}, "unknown key 'numbr'. Did you mean 'number'"),
        ({"word": True}, "word is True; it must be text .in quotes"),
        ({"word": "x", "number": True}, "number is True; it must be a whole number"),
        ({"word": "x", "color": "rad"}, "unknown color 'rad'. Did you mean 'red'"),
        ({"word": "x", "names": "a"}, "names is 'a'; it must be a list"),
        ({"word": "x", "sizes": {"a": "b"}}, "sizes.a is 'b'; it must be a whole number"),
        ({"word": "x", "inner": {}}, "'inner.word' is missing"),
        ({"word": "x", "inner": {"word": "x", "share": "1e-4"}}, "inner.share is .* YAML reads 1e"),
        ({"word": "x", "number": -1}, "number is -1: it must be at least 0"),
    ],
)
def test_what_does_not_fit_is_named_with_its_file(values, message, tmp_path):
    with pytest.raises(ConfigError, match=rf"mine\.yaml: .*{message}"):
        read(tmp_path / "mine.yaml", values)
