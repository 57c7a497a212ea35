"""The Python API: every name documented and at home. That it is light: `tests/unit/test_cli.py`."""

import pytest

import pgra


@pytest.mark.parametrize("name", pgra.__all__)
def test_every_public_name_is_what_its_home_defines(name):
    value = getattr(pgra, name)
    assert value.__name__ == name
    assert value.__module__.startswith("pgra.")
    assert value.__doc__
