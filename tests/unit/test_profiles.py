"""Every YAML in `configs/` is loaded as the programs load it."""

import dataclasses

import pytest
import yaml

from pgra.commands.common import SECTIONS
from pgra.config import (
    EXEMPLARS,
    PROFILES,
    ReaderArguments,
    RerankArguments,
    RetrieverArguments,
    config_root,
    parse_arguments,
    read_yaml,
)
from pgra.data.tasks import load_task, task_names
from pgra.encoders.encoder import POOLINGS
from pgra.exemplars import SELECTORS
from pgra.prompts.template import check_template
from pgra.reader.arguments import ReaderTrainingArguments
from pgra.rerank import RERANKERS
from pgra.retrieval import RETRIEVERS

EXPERIMENTS = sorted((config_root() / "experiments").glob("*.yaml"))
CLASSES = [*SECTIONS.values(), ReaderTrainingArguments]


def parse(*flags):
    """Give all arguments of train.py as one mapping."""
    values = {}
    for section in parse_arguments(CLASSES, list(flags), prog="test", description=""):
        for field in dataclasses.fields(section):
            values[field.name] = getattr(section, field.name)
    return values


def given_in(path):
    """Give a YAML's values, without the Trainer's own, which it may change."""
    names = {f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)}
    return {name: value for name, value in read_yaml(path).items() if name in names}


def test_every_folder_of_configs_is_known_to_a_test():
    kept = {path.parent.name for path in config_root().rglob("*.yaml")}
    assert kept <= {
        *("ablations", "experiments", "generation", "memory", "memory_prompts"),
        "memory_training",
        *("profiles", "reference", "tasks"),
    }
    assert {path.stem for path in (config_root() / "profiles").glob("*.yaml")} == set(PROFILES)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_gives_its_values(name):
    path = config_root() / "profiles" / f"{name}.yaml"
    values = parse("--profile", name)
    assert {key: values[key] for key in given_in(path)} == given_in(path)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_gives_its_values(path):
    values = parse("--config", str(path))
    assert {key: values[key] for key in given_in(path)} == given_in(path)


def test_the_default_profile_is_the_defaults():
    plain, profile = parse("--output_dir", "x"), parse("--output_dir", "x", "--profile", "pgra")
    names = [f.name for cls in SECTIONS.values() for f in dataclasses.fields(cls)]
    assert {n: plain[n] for n in names} == {n: profile[n] for n in names}


def test_the_official_template_fits_every_task_with_one_text():
    template = yaml.safe_load((config_root() / "profiles/official.yaml").read_text())[
        "reader_template"
    ]
    tasks = [load_task(name) for name in task_names()]
    for task in tasks:
        if len(task.inputs) == 1:
            check_template(template, task.inputs)
    assert {task.name for task in tasks if len(task.inputs) > 1} == {"mrpc", "qnli", "rte"}


def test_what_the_arguments_allow_is_what_there_is():
    """Names are checked in config, before anything heavy is imported; the tables are later."""
    for name in RETRIEVERS:
        RetrieverArguments(retriever=name)
    for name in RERANKERS:
        RerankArguments(reranker=name)
    assert set(EXEMPLARS) <= set(SELECTORS)
    for name in POOLINGS:
        RetrieverArguments(pooling=name)
    for name in ("official", "verbalizer"):
        ReaderArguments(decode=name)
