"""What classes of your own are made from; `docs/extend.md` says what each contract needs.

These names are what is promised to code outside this package; its other modules may change. They
stand in `extend.pyi`, and are imported when they are first used.
"""

from typing import Any

from pgra.lazy import import_name, read_homes

_HOME_OF = read_homes(__file__)
__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:
    return import_name(__name__, name, _HOME_OF)


def __dir__() -> list[str]:
    return __all__
