"""The Python API: light to import, every name documented and typed."""

import json
import subprocess
import sys

import pytest

import pgra


def modules_after(code):
    """Run code in a fresh interpreter and return what it imported."""
    told = f"{code}\nimport sys, json; print(json.dumps([*sys.modules]))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout))


@pytest.mark.slow
def test_a_name_imports_its_own_module_only():
    heavy = {"torch", "transformers", "datasets", "faiss"}
    assert not modules_after("import pgra") & {*heavy, "numpy", "pgra.core"}
    loaded = modules_after("from pgra import Candidates")
    assert "pgra.core" in loaded
    assert not loaded & heavy


@pytest.mark.parametrize("name", pgra.__all__)
def test_every_public_name_is_what_its_home_defines(name):
    value = getattr(pgra, name)
    assert value.__name__ == name
    assert value.__module__.startswith("pgra.")
    assert value.__doc__
