"""Reads argument dataclasses from a command line, with `--profile` and `--config` underneath.

A value comes from, in rising order: the dataclass, `--profile`, `--config FILE.yaml`, the command
line. One YAML may serve several programs: a key that belongs to another program of ours is passed
over, one that belongs to none is refused.
"""

import argparse
import dataclasses
import enum
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from pgra.config import PROFILES, PgraArguments, choose, config_root, read_yaml
from pgra.errors import ConfigError, unknown_name
from pgra.series import SeriesArguments

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """Values that stand beneath the command line.

    Attributes:
        origin: Where they were written, for messages.
        values: By argument name.
    """

    origin: str
    values: Mapping[str, Any]


def parse_arguments(
    classes: Sequence[type],
    argv: Sequence[str] | None,
    *,
    prog: str,
    description: str,
    epilog: str = "",
    under: Sequence[Defaults] = (),
    over: Sequence[Defaults] = (),
) -> tuple[Any, ...]:
    """Read dataclasses from a command line, with `--profile` and `--config` underneath.

    Args:
        classes: Dataclasses whose fields do not overlap.
        argv: Arguments without the program's name; None reads the process's own.
        prog: Name shown in the help.
        description: What the program does.
        epilog: An example, shown as it is.
        under: Values beneath `--profile` and `--config`, the later over the earlier.
        over: Values above these, still beneath the command line.

    Returns:
        One instance a class, in their order.

    Raises:
        ConfigError: On an unknown name, a wrong type or a contradiction, on the command line or in
            a YAML.
    """
    from transformers import HfArgumentParser

    first = _Parser(add_help=False, allow_abbrev=False)
    first.add_argument("--config", help="YAML of defaults; the command line wins.")
    first.add_argument("--profile", help=f"Named defaults under --config: {', '.join(PROFILES)}.")
    known, rest = first.parse_known_args(argv)
    parser = HfArgumentParser(
        list(classes),
        prog=prog,
        description=description,
        epilog=epilog,
        parents=[first],
        allow_abbrev=False,
        formatter_class=_HelpFormatter,
    )
    parser.error = _refuse
    fields = _field_types(classes)
    files = [_read(path) for path in _default_files(known.profile, known.config)]
    for layer in (*under, *files, *over):
        parser.set_defaults(**check_defaults(layer, fields))
    *parsed, _, remaining = parser.parse_args_into_dataclasses(
        args=rest, return_remaining_strings=True
    )
    if remaining:
        raise ConfigError(_unknown_argument(remaining[0], sorted(fields)))
    return tuple(parsed)


def parse_first(cls: type[_T], argv: Sequence[str]) -> tuple[_T, list[str]]:
    """Read one dataclass from a command line, and leave the rest of it.

    Args:
        cls: The dataclass.
        argv: Arguments without the program's name.

    Raises:
        ConfigError: On a wrong value.
    """
    from transformers import HfArgumentParser

    parser = HfArgumentParser([cls], add_help=False, allow_abbrev=False)
    parser.error = _refuse
    first, rest = parser.parse_args_into_dataclasses(list(argv), return_remaining_strings=True)
    return first, list(rest)


class _HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Show defaults, keep the example's line breaks, and take help texts as plain text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        """Escape percent signs: argparse formats every help text with `%`."""
        text = super()._get_help_string(action)
        return text and re.sub(r"%%|%(?!\()", "%%", text)


def _field_types(classes: Sequence[type]) -> dict[str, Any]:
    """Give types by field name, from the annotations: HfArgumentParser edits its fields' types."""
    return {
        f.name: hints[f.name]
        for cls in classes
        for hints in (typing.get_type_hints(cls),)
        for f in dataclasses.fields(cls)
        if f.init
    }


class _Parser(argparse.ArgumentParser):
    """Words a mistake in one line, without the usage of two hundred arguments."""

    def error(self, message: str) -> NoReturn:
        _refuse(message)


def _refuse(message: str) -> NoReturn:
    raise ConfigError(f"{message}. See --help.")


def _unknown_argument(text: str, names: Sequence[str]) -> str:
    name = text.lstrip("-").split("=")[0]
    return _unknown("argument", f"--{name}", [f"--{n}" for n in names])


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Word it without the list of two hundred names."""
    return unknown_name(kind, name, known).split(" Known:")[0] + " See --help."


def _default_files(profile: str | None, config: str | None) -> list[Path]:
    files = []
    if profile is not None:
        choose("profile", profile, PROFILES)
        files.append(config_root() / "profiles" / f"{profile}.yaml")
    if config is not None:
        files.append(Path(config))
    return files


def read_defaults(path: Path, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Read a YAML of defaults and check names and types.

    Args:
        path: The YAML.
        fields: Type by field name, of the program that asks.

    Returns:
        The values of that program's fields. Keys of other programs of ours are left out.

    Raises:
        ConfigError: On an unknown key or a wrong type, with the value and the way out.
    """
    return check_defaults(_read(path), fields)


def _read(path: Path) -> Defaults:
    return Defaults(str(path), read_yaml(path))


def check_defaults(layer: Defaults, fields: Mapping[str, Any]) -> dict[str, Any]:
    """Check names and types of defaults.

    Args:
        layer: The defaults.
        fields: Type by field name, of the program that asks.

    Returns:
        The values of that program's fields. Keys of other programs of ours are left out.

    Raises:
        ConfigError: On an unknown key or a wrong type, with the value and the way out.
    """
    path = layer.origin
    others = _all_fields() if set(layer.values) - set(fields) else frozenset[str]()
    for name in layer.values:
        if name not in fields and name not in others:
            raise ConfigError(f"{path}: {_unknown('key', str(name), {*fields, *others})}")
    values = {name: value for name, value in layer.values.items() if name in fields}
    for name, value in values.items():
        if not _fits(value, fields[name]):
            hint = (
                " (write it as 1.0e-4: YAML reads 1e-4 as text)"
                if isinstance(value, str) and _is_number(value)
                else ""
            )
            raise ConfigError(
                f"{path}: {name} is {value!r}, a {type(value).__name__}; "
                f"it must be {_spell(fields[name])}{hint}"
            )
    return values


def _all_fields() -> frozenset[str]:
    from transformers import TrainingArguments

    ours: list[Any] = [section.type for section in dataclasses.fields(PgraArguments)]
    ours.append(SeriesArguments)
    return frozenset(f.name for cls in (*ours, TrainingArguments) for f in dataclasses.fields(cls))


def _fits(value: object, kind: Any) -> bool:
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in typing.get_args(kind))
    kind = typing.get_origin(kind) or kind
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return value in [member.value for member in kind]
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return (
        value is None
        if kind is type(None)
        else not isinstance(kind, type) or isinstance(value, kind)
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _spell(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind)).replace("NoneType", "null")
