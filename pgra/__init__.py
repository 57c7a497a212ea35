"""Prompt-guided retrieval augmentation: let a language model read the right sentences first.

The API's names stand in `__init__.pyi`, and are imported when they are first used.
"""

import ast
import logging
from importlib import import_module
from pathlib import Path
from typing import Any

from pgra.errors import missing_package

__version__ = "0.2.0"

_HOME_OF: dict[str, str] = {}
for _node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body:
    if isinstance(_node, ast.ImportFrom):
        _HOME_OF |= dict.fromkeys([alias.name for alias in _node.names], _node.module or "")
__all__ = sorted(_HOME_OF)

# Transformers imports torchao wherever it is installed. It warns of what it lacks on a CPU, and
# makes torch warn of what it deprecates.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    """Import a public name from its home, once."""
    if name not in _HOME_OF:
        raise AttributeError(f"module 'pgra' has no attribute '{name}'")
    try:
        value = getattr(import_module(_HOME_OF[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_package(error), name=error.name) from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
