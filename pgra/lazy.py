"""Public names that are imported from their homes when they are first used.

`pgra` and `pgra.extend` have them: a stub (`.pyi`) beside the module names each with its home, so
that type checkers see the real types and `import pgra` loads no torch.
"""

import ast
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from pgra.errors import missing_package


def read_homes(module_file: str) -> dict[str, str]:
    """Return the module that each name in a module's stub is imported from."""
    stub = Path(module_file).with_suffix(".pyi")
    homes: dict[str, str] = {}
    for node in ast.parse(stub.read_text("utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                homes[alias.name] = node.module or ""
    return homes


def import_name(module: str, name: str, homes: Mapping[str, str]) -> Any:
    """Import a name from its home, and set it in the module, so that this is done once."""
    if name not in homes:
        raise AttributeError(f"module '{module}' has no attribute '{name}'")
    try:
        value = getattr(import_module(homes[name]), name)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(missing_package(error), name=error.name) from None
    setattr(sys.modules[module], name, value)
    return value
