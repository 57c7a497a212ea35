"""A JSON schema of what a YAML may hold, for editors: from the dataclass that it becomes."""

import dataclasses
import inspect
import re
import types
import typing
from collections.abc import Collection, Mapping
from typing import Any

from pgra.config import may_be_empty
from pgra.core import Json
from pgra.data.tasks import GenerationTask, Task

_PLAIN: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def task_schema() -> dict[str, Json]:
    """Return the schema of a task's YAML: one with `kind` is of a task whose answer is written."""
    written, chosen = (object_schema(cls, without=["name"]) for cls in (GenerationTask, Task))
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A task of pgra",
        "type": "object",
        "if": {"required": ["kind"]},
        "then": written,
        "else": chosen,
    }


def object_schema(cls: type, *, without: Collection[str] = ()) -> dict[str, Json]:
    """Return the schema of a mapping that `pgra.config.from_yaml` makes an instance of a class of.

    Args:
        cls: A dataclass whose docstrings tell of its fields under "Attributes:".
        without: Fields that do not stand in the file.
    """
    hints, told = typing.get_type_hints(cls), _attributes(cls)
    properties: dict[str, Json] = {}
    required: list[Json] = []
    for field in dataclasses.fields(cls):
        if field.name in without:
            continue
        is_needed = field.default is field.default_factory is dataclasses.MISSING
        schema = _schema(hints[field.name], is_optional=may_be_empty(field))
        if field.name in told:
            schema["description"] = told[field.name]
        if isinstance(field.default, str | int | float | bool) and field.default != "":
            schema["default"] = field.default
        properties[field.name] = schema
        required += [field.name] if is_needed else []
    return {
        "type": "object",
        "description": (inspect.getdoc(cls) or "").partition("\n")[0],
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def _schema(kind: Any, *, is_optional: bool = False) -> dict[str, Json]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if kind in _PLAIN:
        plain: dict[str, Json] = {"type": _PLAIN[kind]}
        return plain | ({"minLength": 1} if kind is str and not is_optional else {})
    if kind is type(None):
        return {"type": "null"}
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_schema(part) for part in parts]}
    if origin is typing.Literal:
        return {"enum": list(parts)}
    if origin is tuple:
        items: dict[str, Json] = {"type": "array", "items": _schema(parts[0])}
        return items | ({} if is_optional else {"minItems": 1})
    if origin is Mapping:
        return {"type": "object", "additionalProperties": _schema(parts[1])}
    return object_schema(kind)


def _attributes(cls: type) -> dict[str, str]:
    """Return what the docstrings of a class and its bases tell of their attributes."""
    told: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        text = inspect.cleandoc(vars(base).get("__doc__") or "").partition("Attributes:\n")[2]
        entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", text, flags=re.M)
        told |= {name: " ".join(about.split()) for name, about in entries}
    return told
