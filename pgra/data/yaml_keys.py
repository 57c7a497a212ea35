"""A YAML of `configs/` read key by key, so that each message names the file and the key."""

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pgra.config import read_yaml
from pgra.errors import ConfigError, unknown_name

SPLITS = ("train", "validation", "test")


class YamlKeys:
    """Checks the values of one YAML; all methods raise ConfigError."""

    def __init__(self, path: Path) -> None:
        """Read a YAML file, a mapping."""
        self.path = path
        self.values = read_yaml(path)

    def check_keys(self, values: Mapping[Any, Any], known: Sequence[str]) -> None:
        """Refuse keys that are not known."""
        for key in values:
            if key not in known:
                raise ConfigError(f"{self.path}: {unknown_name('key', str(key), known)}")

    def text(self, key: str, value: object) -> str:
        """Give a value that must be text."""
        if not isinstance(value, str) or not value.strip():
            raise ConfigError(
                f"{self.path}: {key} is {value!r}; it must be text "
                "(in quotes, where YAML reads yes, no, true or a number)"
            )
        return value

    def names(self, key: str, value: object) -> tuple[str, ...]:
        """Give a list of names, each once."""
        if not isinstance(value, list) or not value:
            raise ConfigError(f"{self.path}: {key} is {value!r}; it must be a list of names")
        names = tuple(self.text(key, item).strip() for item in value)
        if len(set(names)) < len(names):
            raise ConfigError(f"{self.path}: {key} names something twice: {', '.join(names)}")
        return names

    def mapping(self, key: str, value: object) -> dict[str, Any]:
        """Give a mapping by name."""
        if not isinstance(value, dict):
            raise ConfigError(f"{self.path}: {key} is {value!r}; it must be a mapping")
        return {self.text(key, name): item for name, item in value.items()}

    def template(self, key: str, inputs: Sequence[str]) -> str:
        """Give a key's text, whose fields are all inputs."""
        text = self.text(key, self.values[key])
        try:
            names = slots(text)
        except ValueError as error:
            raise ConfigError(
                f"{self.path}: {key} has a stray brace ({error}); write {{{{ for a plain one"
            ) from None
        for name in names:
            if name not in inputs:
                message = unknown_name(f"field in {key}", name, inputs)
                raise ConfigError(f"{self.path}: {message}")
        if not names:
            raise ConfigError(f"{self.path}: {key} holds no field; put {{{inputs[0]}}} into it")
        return text

    def splits(self, key: str, value: object) -> Mapping[str, str]:
        """Give a source's split by ours; train and test must be there."""
        splits = {s: self.text(key, name) for s, name in self.mapping(key, value).items()}
        self.check_keys(splits, SPLITS)
        for split in ("train", "test"):
            if split not in splits:
                raise ConfigError(f"{self.path}: {key} does not say which is the {split} split")
        if len(set(splits.values())) < len(splits):
            raise ConfigError(f"{self.path}: {key} uses one split twice: {dict(splits)}")
        return splits

    def sizes(self) -> Mapping[str, int]:
        """Give the rows that a task's splits have."""
        sizes = self.mapping("sizes", self.values.get("sizes") or {})
        self.check_keys(sizes, SPLITS)
        for split, rows in sizes.items():
            if not isinstance(rows, int) or isinstance(rows, bool):
                raise ConfigError(f"{self.path}: sizes.{split} is {rows!r}; it must be a number")
        return sizes


def slots(template: str) -> list[str]:
    """Give the fields in braces, in order."""
    parts = string.Formatter().parse(template)
    return [field for _, field, _, _ in parts if field is not None]
