"""Arguments from the command line, a YAML and a profile; every YAML in `configs/` is loaded."""

import dataclasses
import math
import pkgutil
from dataclasses import dataclass
from importlib import import_module
from typing import get_args, get_type_hints

import method_runs
import pytest

import pgra
from pgra.commands.common import parse_run
from pgra.config import Arguments, arg, config_root, parse_sections, read_yaml, rules
from pgra.errors import ConfigError
from pgra.rerank.base import RerankArguments
from pgra.retrieval.faiss import empty_index


@dataclass(kw_only=True)
class Fruit:
    """What a stall sells."""

    kind: str = arg("apple", "Which fruit.", is_common=True)
    count: int = arg(3, "How many.", is_common=True)
    price: float | None = None


def parse(*words, cls=Fruit):
    how = {"prog": "stall", "description": "Sell fruit."}
    return parse_sections(lambda _: {"fruit": cls}, words, **how)["fruit"]


@pytest.fixture
def yaml(tmp_path):
    def write(text):
        (tmp_path / "mine.yaml").write_text(text)
        return str(tmp_path / "mine.yaml")

    return write


def test_defaults_then_profile_then_yaml_then_command_line(yaml):
    assert parse() == Fruit()
    # Keys of our other programs pass, and 2e0, which YAML reads as text, is a number.
    path = yaml("kind: pear\ncount: 5\nprice: 2e0\nnum_evidence: 2\nlearning_rate: 1e-4\n")
    assert parse("--config", path) == Fruit(kind="pear", count=5, price=2)
    assert parse("--count", "7", "--config", path) == Fruit(kind="pear", count=7, price=2)
    path, official = yaml("similarity: dot\nnum_evidence: 3\n"), ("--profile", "official")
    assert parse(*official, cls=RerankArguments).similarity == "cosine"
    over = parse(*official, "--config", path, "--num_evidence", "5", cls=RerankArguments)
    assert (over.similarity, over.num_evidence, over.exemplars) == ("dot", 5, "official")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("kinds: pear\n", "mine.yaml.*kinds"),
        ("count: yes\n", "count is True"),
        (["--kin", "pear"], "--kin"),  # nothing is guessed from a beginning
        (["--config", "papr"], "papr"),
    ],
)
def test_a_yaml_or_a_command_line_that_cannot_work_is_refused(yaml, words, message):
    with pytest.raises(ConfigError, match=message):
        parse(*(["--config", yaml(words)] if isinstance(words, str) else words))


# What an argument declares of itself.


def argument_classes():
    """Return every class of arguments in the package, sorted by its place."""
    for module in pkgutil.walk_packages(pgra.__path__, "pgra."):
        if not module.name.endswith("__main__") and "integrations" not in module.name:
            import_module(module.name)
    found, left = set(), [Arguments]
    while left:
        found |= {*(below := left.pop().__subclasses__())}
        left += below
    mine = (cls for cls in found if cls.__module__.startswith("pgra."))
    return sorted(mine, key=lambda cls: (cls.__module__, cls.__name__))


def some(kind):
    """Return some value of a type hint."""
    if "list" in str(kind):
        return [1.5 if "float" in str(kind) else 1 if "int" in str(kind) else "some"]
    return "some" if str in (kind, *get_args(kind)) else 1 if "int" in str(kind) else True


def refused(rule, name, defaults, kind):
    """Return values that break a rule, each with what its message must name beside the value."""
    cases = [("no such name", "")] if rule.choices is not None else []
    cases += [(rule.least - 1, f">= {rule.least:g}")] if rule.least is not None else []
    cases += [(rule.above, ">")] if rule.above is not None else []
    bounded = rule.below is not None and math.isfinite(rule.below)
    cases += [(rule.below, "<")] if bounded else []
    for other, wanted in rule.needs.items():
        values = (*(rule.choices or ()), rule.least, some(kind))
        value = next(value for value in values if value not in (None, defaults[name]))
        fitting = wanted if isinstance(wanted, tuple) else (wanted,)
        cases += [] if defaults[other] in fitting else [(value, f"--{other}")]
    return cases


def test_every_declared_rule_refuses_what_breaks_it_by_name_and_value():
    classes, count = argument_classes(), 0
    for cls in classes:
        defaults = {f.name: f.default for f in dataclasses.fields(cls)}
        needed = [name for name, rule in rules(cls).items() if rule.must_be_given]
        kinds = get_type_hints(cls)
        given = {name: some(kinds[name]) for name in needed}
        for name, rule in rules(cls).items():
            for value, more in refused(rule, name, defaults, kinds[name]):
                is_item = "list" in str(kinds[name]) and not isinstance(value, list)
                with pytest.raises(ConfigError) as told:
                    cls(**{**given, name: [value] if is_item else value})
                for part in (name, f"{value}", more):
                    assert part in str(told.value), (cls, name, value)
                count += 1
    assert len(classes) > 40
    assert count > 150


# Every YAML in `configs/`.


CONFIGS = {
    f"{kind}/{path.stem}": path
    for kind in ("experiments", "profiles")
    for path in sorted((config_root() / kind).glob("*.yaml"))
}


def all_of(*flags):
    """All arguments of `pgra train` but the Trainer's own, which it may change."""
    words = ["--output_dir", "x", "--device", "cpu", *flags]
    run, _ = parse_run(parse, "test", words)
    parts = [part for name, part in run.sections.items() if name != "training"]
    return {f.name: getattr(part, f.name) for part in parts for f in dataclasses.fields(part)}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_profile_and_an_experiment_give_their_values(name):
    path = CONFIGS[name]
    is_profile = name.startswith("profiles/")
    values = all_of("--profile", path.stem) if is_profile else all_of("--config", str(path))
    given = {key: value for key, value in read_yaml(path).items() if key in values}
    assert {key: values[key] for key in given} == given
    mended = {**all_of(), "similarity": "dot"}  # the profile of the defaults
    assert (values == mended) == (name == "profiles/pgra")


def test_the_papers_yaml_has_the_papers_constants():
    constants = {
        "retriever": "dense",
        "encoder": "google-bert/bert-base-uncased",
        "num_candidates": 150,
        "normalize": False,
        "reranker": "prompted",
        "lm": "facebook/opt-13b",
        "lm_dtype": "float16",
        "similarity": "dot",
        "exemplars": "random",
        "num_exemplars": 8,
        "num_evidence": 16,
        "model_name_or_path": "google-t5/t5-base",
        "learning_rate": 8e-5,
        "total_train_batch_size": 8,
        "max_steps": 5000,
    }
    run = method_runs.parse("--config", str(CONFIGS["experiments/paper"]))
    assert run.corpus.corpus.endswith("datasets-for-simcse/wiki1m_for_simcse.txt")
    given = {name: value for part in run.sections.values() for name, value in vars(part).items()}
    assert given.items() >= constants.items()


@pytest.mark.parametrize("factory", ["IVF0,Flat", "HNSW0", "HNSW1", "IVF4_HNSW1,Flat", "PQ2x0"])
def test_factories_that_end_the_process_are_refused(factory):
    with pytest.raises(ConfigError, match=factory):
        empty_index(factory, 16, 300)
    made = empty_index(factory.replace("1", "2").replace("0", "2"), 16, 300)  # the control
    assert made.d == 16
