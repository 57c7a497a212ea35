from dataclasses import dataclass, field

import pytest

from pgra.config import (
    RerankArguments,
    parse_arguments,
)
from pgra.errors import ConfigError


@dataclass(kw_only=True)
class Fruit:
    """What a stall sells."""

    kind: str = field(default="apple", metadata={"help": "Which fruit."})
    count: int = field(default=3, metadata={"help": "How many."})
    price: float | None = None
    ripe: bool = True
    seed: int = 0

    def __post_init__(self):
        if self.count < 0:
            raise ConfigError(f"count is {self.count}: it must be at least 0")


def parse(*words):
    (fruit,) = parse_arguments([Fruit], words, prog="stall", description="Sell fruit.")
    return fruit


@pytest.fixture
def yaml(tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_defaults_then_yaml_then_command_line(yaml):
    assert parse() == Fruit()
    path = yaml("kind: pear\ncount: 5\n")
    assert parse("--config", path) == Fruit(kind="pear", count=5)
    assert parse("--count", "7", "--config", path) == Fruit(kind="pear", count=7)


def test_a_yaml_stands_over_a_profile(yaml):
    def reranker(*words):
        found = parse_arguments([RerankArguments], words, prog="x", description="")
        return found[0]

    assert reranker("--profile", "official").similarity == "cosine"
    assert reranker("--profile", "paper").similarity == "dot"
    path = yaml("similarity: dot\n")
    assert reranker("--profile", "official", "--config", path).similarity == "dot"


def test_keys_of_our_other_programs_pass(yaml):
    path = yaml("count: 4\nnum_evidence: 2\nmax_steps: 9\nlearning_rate: 1.0e-4\n")
    assert parse("--config", path) == Fruit(count=4)


def test_whole_numbers_are_floats_too(yaml):
    assert parse("--config", yaml("price: 2\n")).price == 2
    assert parse("--config", yaml("price: null\n")).price is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kinds: pear\n", r"mine.yaml: unknown key 'kinds'. Did you mean 'kind'\? See --help"),
        ("count: 1.5\n", "count is 1.5, a float; it must be int"),
        ("count: yes\n", "count is True, a bool; it must be int"),
        ("ripe: 1\n", "ripe is 1, a int; it must be bool"),
        ("kind: 3\n", "kind is 3, a int; it must be str"),
        ("price: 1e-4\n", "price is '1e-4', a str; it must be .*write it as 1.0e-4"),
        ("- a\n", "must be a mapping of names to values"),
        ("count: -1\n", "count is -1: it must be at least 0"),
    ],
)
def test_a_yaml_that_cannot_work_is_refused(yaml, text, message):
    with pytest.raises(ConfigError, match=message):
        parse("--config", yaml(text))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--knd", "pear"], r"unknown argument '--knd'. Did you mean '--kind'\? See --help"),
        (["--kin", "pear"], "unknown argument '--kin'"),  # nothing is guessed from a beginning
        (["--count", "many"], "argument --count: invalid int value: 'many'. See --help"),
        (["--count"], "argument --count: expected one argument. See --help"),
        (["--config"], "argument --config: expected one argument. See --help"),
        (["--ripe", "perhaps"], "argument --ripe: .*perhaps"),
        (["--config", "none.yaml"], "cannot read none.yaml: No such file or directory"),
        (["--profile", "pgr"], "unknown profile 'pgr'. Did you mean 'pgra'"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*words)


def test_help_shows_defaults_and_ends_well(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    told = capsys.readouterr().out
    assert "usage: stall" in told
    assert "How many. (default: 3)" in told
