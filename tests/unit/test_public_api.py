"""The Python API: its names, how each is made, and its types. That it is light: `test_cli.py`."""

import inspect
import re
import subprocess
import sys
from functools import cached_property
from pathlib import Path

import pytest
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

import pgra

TEXTS = ["a warm film", "a warm sea", "a dull story", "a dull town"]
SHOTS = list(zip(TEXTS, ["good", "good", "bad", "bad"], strict=True))


@pytest.mark.parametrize("name", pgra.__all__)
def test_every_public_name_is_what_its_home_defines(name):
    value = getattr(pgra, name)
    assert value.__name__ == name
    assert value.__module__.startswith("pgra.")
    assert value.__doc__


@pytest.mark.parametrize("name", sorted({*pgra.__all__} - {"train", "worth"}))
def test_a_class_shows_only_what_is_documented(name):
    """A method by its docstring, a field by its class's."""
    cls = getattr(pgra, name)
    about = " ".join(base.__doc__ or "" for base in cls.__mro__)
    undocumented = []
    for shown in {*dir(cls)} - {*dir(Exception)}:
        value = getattr(cls, shown, None)
        is_code = callable(value) or isinstance(value, property | cached_property)
        is_documented = inspect.getdoc(value) if is_code else shown in about
        if not is_documented and not shown.startswith("_"):
            undocumented.append(shown)
    assert undocumented == []


@pytest.mark.parametrize("way", ["name", "folder", "loaded"])
def test_a_model_is_a_name_a_folder_or_loaded(way, lm_dirs, encoder_dir):
    kind = str if way == "name" else Path
    lm, encoder = [kind(lm_dirs["opt"])], [kind(encoder_dir)]
    if way == "loaded":
        lm = [each.from_pretrained(*lm) for each in (AutoModelForCausalLM, AutoTokenizer)]
        encoder = [each.from_pretrained(*encoder) for each in (AutoModel, AutoTokenizer)]
    assert pgra.CausalLM(*lm, device="cpu").width == 32
    reranker = pgra.Reranker(*lm, template="{text}", device="cpu")
    assert len(reranker.rank("film", TEXTS)) == 4
    classifier = pgra.Classifier(lm[0], SHOTS, *lm[1:], device="cpu")
    assert classifier.predict("a film") in ("good", "bad")
    opened = pgra.Encoder(*encoder, device="cpu")
    assert opened.encode(TEXTS).shape == (4, 16)
    given = opened if way == "loaded" else encoder[0]
    assert pgra.ExemplarSelector(SHOTS, encoder=given, device="cpu").select("a film", 1)
    with pgra.Memory(":memory:", encoder=given) as memory:
        memory.add(*SHOTS[0])
        assert memory.search(TEXTS[0])


TYPES = {
    'CausalLM("x")': "CausalLM",
    'Encoder("x")': "Encoder",
    'Reranker("x").rank("q", ["a"])': "list[Hit]",
    'Reranker("x").rank(["q"], ["a"])': "list[list[Hit]]",
    'Classifier("x").fit(["a"], ["b"])': "Classifier",
    'Classifier("x").decide(["a"])': "list[Prediction]",
    'Index.load("x").search("a")': "list[Hit]",
    'Memory().search("a")': "list[Match]",
    'train("sst2")': "Run",
    'Run.load("x").predict("a")': "Answer",
}


@pytest.mark.slow
def test_a_type_checker_knows_what_each_call_gives(tmp_path):
    path = tmp_path / "uses.py"
    path.write_text("import pgra\n" + "".join(f"reveal_type(pgra.{use})\n" for use in TYPES))
    words = [sys.executable, "-m", "mypy", str(path)]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    types = re.findall(r'Revealed type is "(.+)"', done.stdout)
    assert [re.sub(r"\w+\.", "", kind) for kind in types] == [*TYPES.values()]
    assert done.returncode == 0, done.stdout
