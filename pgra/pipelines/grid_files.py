"""The YAMLs of grids: where they are, which keys they have, and how one stands on another."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pgra.config import choose, config_root, read_yaml
from pgra.errors import ConfigError, unknown_name

_KEYS = (
    *("about", "base", "baseline", "by_task", "command", "demo", "extends", "grid", "labels"),
    *("points", "reference", "seeds", "share", "show", "tasks", "title"),
)
_MERGED = ("base", "by_task", "labels")  # the other keys are replaced
_MAPPINGS = ("base", "by_task", "demo", "grid", "labels")
_LISTS = ("points", "seeds", "tasks")


def grid_names() -> list[str]:
    """Name the shipped grids."""
    paths = (config_root() / "ablations").glob("*.yaml")
    return sorted(path.stem for path in paths if not path.stem.startswith("_"))


COMMANDS = ("train", "icl")
"""What makes a grid's runs: `train.py`, or `pgra icl`."""


def find_grid(name: str) -> Path:
    """Give the YAML of a shipped grid, or the path as it is.

    Raises:
        ConfigError: If there is no such grid, with the nearest.
    """
    if name.endswith((".yaml", ".yml")):
        return Path(name)
    choose("grid", name, grid_names())
    return config_root() / "ablations" / f"{name}.yaml"


def read_layers(path: Path) -> dict[str, Any]:
    """Read a YAML over the one it extends, which lies beside it or is one of ours.

    Raises:
        ConfigError: On an unknown key, or one of the wrong kind.
    """
    values = _read_keys(path)
    below = values.pop("extends", None)
    if below is None:
        return values
    beside = path.parent / f"{below}.yaml"
    ours = config_root() / "ablations" / f"{below}.yaml"
    lower = _read_keys(beside if beside.is_file() else ours)
    if "extends" in lower:
        raise ConfigError(f"{path}: extends {below}, which extends another: one step is all")
    merged = merge(lower, values)
    if "demo" in lower and "demo" in values:
        merged["demo"] = merge(lower["demo"], values["demo"])
    return merged


def _read_keys(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    for part, where in ((values, ""), (values.get("demo") or {}, "demo: ")):
        if not isinstance(part, dict):
            raise ConfigError(f"{path}: demo must be a mapping of names to values")
        for key, value in part.items():
            if key not in _KEYS:
                raise ConfigError(f"{path}: {where}{unknown_name('key', str(key), _KEYS)}")
            _check_kind(f"{path}: {where}{key}", key, value)
    return values


def _check_kind(where: str, key: str, value: object) -> None:
    if key == "command" and value not in COMMANDS:
        raise ConfigError(f"{where}: {unknown_name('command', str(value), COMMANDS)}")
    if key in _MAPPINGS and not isinstance(value, dict):
        raise ConfigError(f"{where} must be a mapping of names to values")
    if key in _LISTS and not isinstance(value, list):
        raise ConfigError(f"{where} must be a list")


def merge(lower: Mapping[str, Any], upper: Mapping[str, Any]) -> dict[str, Any]:
    """Lay one YAML's keys over another's."""
    merged = {**lower, **upper}
    for key in _MERGED:
        if key in lower and key in upper:
            merged[key] = {**lower[key], **upper[key]}
    return merged
