"""The Python API: every name documented and at home. That it is light: `tests/unit/test_cli.py`."""

import pytest

import pgra


@pytest.mark.parametrize("name", pgra.__all__)
def test_every_public_name_is_what_its_home_defines(name):
    value = getattr(pgra, name)
    assert value.__name__ == name
    assert value.__module__.startswith("pgra.")
    assert value.__doc__


@pytest.mark.parametrize("cls", [pgra.Classifier, pgra.Reranker])
def test_a_class_shows_documented_methods_alone(cls):
    names = {name for name in dir(cls) if not name.startswith("_")}
    shared = {"load", "push_to_hub", "save"}
    assert names == shared | ({"predict"} if cls is pgra.Classifier else {"fit", "rank", "score"})
    assert all(getattr(cls, name).__doc__ for name in names)
