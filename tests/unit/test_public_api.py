import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import pgra

INIT = Path(pgra.__file__)


def run_python(code):
    """Run code in a fresh interpreter and read the JSON it prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def test_importing_pgra_imports_nothing_heavy():
    loaded = run_python("import sys, json, pgra; print(json.dumps(sorted(sys.modules)))")
    assert not {"torch", "transformers", "numpy", "datasets", "faiss"} & set(loaded)


def test_a_name_imports_its_own_module_only():
    loaded = run_python(
        "import sys, json; from pgra import Candidates; print(json.dumps(sorted(sys.modules)))"
    )
    assert "pgra.core" in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("name", pgra.__all__)
def test_every_public_name_is_what_its_home_defines(name):
    value = getattr(pgra, name)
    assert value.__name__ == name
    assert value.__module__.startswith("pgra.")
    assert value.__doc__


def test_type_checkers_see_the_names_that_users_get():
    tree = ast.parse(INIT.read_text())
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    seen = {alias.name: node.module for node in block.body for alias in node.names}
    assert seen == pgra._HOME_OF
    assert sorted(seen) == sorted(pgra.__all__)


def test_names_are_listed_before_they_are_used():
    listed = run_python("import json, pgra; print(json.dumps(dir(pgra)))")
    assert set(pgra.__all__) <= set(listed)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'pgra' has no attribute 'Encodre'"):
        _ = pgra.Encodre
