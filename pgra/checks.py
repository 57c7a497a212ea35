"""Small checks of arguments, and the reading of YAMLs: what `pgra.config` is made of."""

from collections.abc import Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import yaml

from pgra.errors import ConfigError, unknown_name

# libyaml's, where PyYAML was built with it, as its wheels are: a tenth of the time.
_SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def config_root() -> Path:
    """Give the folder of shipped YAMLs: the checkout's `configs/`, or the installed copy."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"


def choose(kind: str, name: str, known: Sequence[str]) -> None:
    """Refuse a name that is not in a table.

    Raises:
        ConfigError: If it is not, with the nearest that is.
    """
    if name not in known:
        raise ConfigError(unknown_name(kind, name, known))


def at_least(name: str, value: int | None, least: int) -> None:
    """Refuse a number that is too small; None passes.

    Raises:
        ConfigError: If it is.
    """
    if value is not None and value < least:
        raise ConfigError(f"{name} is {value}: it must be at least {least}")


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML that must be a mapping.

    Raises:
        ConfigError: If it is missing, not YAML, or not a mapping.
    """
    try:
        values = yaml.load(path.read_text(encoding="utf-8"), Loader=_SAFE_LOADER)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of names to values")
    return values


def argument(default: Any, text: str) -> Any:
    """Give a field of an argument dataclass with its help."""
    return field(default=default, metadata={"help": text})
