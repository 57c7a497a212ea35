"""What classes from outside are made from is importable, documented, light and enough."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pgra.extend

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extend.md").read_text()
TOYS = (ROOT / "tests/outside/toys.py").read_text()


@pytest.mark.parametrize("name", pgra.extend.__all__)
def test_every_name_is_what_its_home_defines_and_the_page_explains_it(name):
    value = getattr(pgra.extend, name)
    assert value.__name__ == name
    assert value.__module__ == pgra.extend._HOME_OF[name]
    assert value.__doc__
    assert re.search(rf"`{name}\b", PAGE)


def test_the_stub_exports_what_it_imports():
    stub = ast.parse((ROOT / "pgra/extend.pyi").read_text())
    assert ast.literal_eval(stub.body[-1].value) == pgra.extend.__all__


def test_an_unknown_name_is_not_an_attribute():
    with pytest.raises(AttributeError, match="Retreiver"):
        pgra.extend.Retreiver  # noqa: B018


def test_a_package_from_outside_needs_no_other_module():
    imported = {
        node.module
        for node in ast.walk(ast.parse(TOYS))
        if isinstance(node, ast.ImportFrom) and node.module.startswith("pgra")
    }
    assert imported == {"pgra.extend"}


LIGHT = """
import sys
from pgra.extend import Arguments, BaseReranker, Candidates, RerankRequest, Retriever, arg
assert not {"torch", "transformers", "faiss"} & {*sys.modules}
from pgra.extend import PairReranker
assert "torch" in sys.modules  # the control
"""


@pytest.mark.slow
def test_contracts_without_a_model_do_not_import_torch():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


TYPED = """
from pgra.extend import Method, Retriever, Selector
reveal_type(Retriever.retrieve)
reveal_type(Selector.rank)
reveal_type(Method.decide)
"""


@pytest.mark.slow
def test_type_checkers_see_the_real_types(tmp_path):
    program = tmp_path / "typed.py"
    program.write_text(TYPED)
    words = [sys.executable, "-m", "mypy", "--strict", str(program)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    results = re.findall(r"-> ([\w.]+)", done.stdout)
    decisions = f"{pgra.extend._HOME_OF['Decisions']}.Decisions"
    assert results == ["pgra.types.Candidates", "pgra.types.Candidates", decisions], done.stdout
