"""Prompt-guided retrieval augmentation: let a language model read the right sentences first.

The API's names stand in `__init__.pyi`, and are imported when they are first used.
"""

import logging
from typing import Any

from pgra.lazy import import_name, read_homes

__version__ = "0.2.0"

_HOME_OF = read_homes(__file__)
__all__ = sorted(_HOME_OF)

# Transformers imports torchao wherever it is installed. It warns of what it lacks on a CPU, and
# makes torch warn of what it deprecates.
for _name in ("torchao", "torch.utils._pytree"):
    logging.getLogger(_name).setLevel(logging.ERROR)


def __getattr__(name: str) -> Any:
    return import_name(__name__, name, _HOME_OF)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
