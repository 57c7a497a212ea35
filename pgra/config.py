"""Arguments: dataclasses with Hugging Face's flat names, and how they are read.

A value comes from, lowest first: the dataclass, `--profile`, `--config FILE.yaml`, the command
line.
"""

import argparse
import dataclasses
import logging
import math
import os
import re
import sys
import typing
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, TypeVar

import msgspec
import yaml

from pgra.errors import ConfigError, cut, missing_package, reading, show, unknown_name

logger = logging.getLogger(__name__)


def config_root() -> Path:
    """Return the folder of shipped YAMLs: the checkout's `configs/`, or the installed copy."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parents[1] / "configs"


def list_yamls(folder: str) -> list[str]:
    """Return the names of the YAMLs in a folder of configs/, less those that others extend."""
    return sorted(path.stem for path in (config_root() / folder).glob("[!_]*.yaml"))


def find_yaml(kind: str, folder: str, name: str) -> Path:
    """Find a YAML of a folder of configs/ by its name; a path that ends in .yaml is itself.

    Raises:
        ConfigError: If none has that name; `kind` is what it would hold.
    """
    if Path(name).suffix in (".yaml", ".yml"):
        return Path(name)
    names = list_yamls(folder)
    if name not in names:
        message = unknown_name(kind, name, names)
        raise ConfigError(f"{message} A new {kind} is one YAML: give its path.")
    return config_root() / folder / f"{name}.yaml"


def choose(kind: str, name: str, known: Collection[str]) -> None:
    """Raise a ConfigError, with the nearest known name, if a name is unknown."""
    if name not in known:
        raise ConfigError(unknown_name(kind, name, known))


_MOST_YAML_BYTES = 1 << 20


class _Loader(yaml.SafeLoader):
    """Refuses a duplicate key, whose first value would be lost."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 (PyYAML's)
        seen = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                problem = f"duplicate key {show(key.value)}"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML mapping; a ConfigError if it is missing, too large or has a duplicate key."""
    if not os.path.exists(path):  # noqa: PTH110 (Path's own raises for too long a name)
        raise ConfigError(f"{cut(str(path))} does not exist")
    with reading(path, ConfigError):
        if path.stat().st_size > _MOST_YAML_BYTES:
            raise ConfigError(f"{path} is larger than a YAML may be ({_MOST_YAML_BYTES:,} bytes)")
        values = yaml.load(path.read_text(encoding="utf-8-sig"), Loader=_Loader)
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must be a mapping of names to values")
    return values


@dataclass(frozen=True)
class Rule:
    """What an argument declares besides its default.

    `least` and `most` are allowed values, `above` and `below` are not.

    Attributes:
        choices: The names it may have; with `is_open` also `module:Class` of the user's own.
        needs: Other arguments without which it means nothing: by name the value that is needed, a
            tuple of such values, or True for any value but None and False.
        decides: Whether results depend on it.
        is_open: Whether the user's own class may be named; a text is its kind for `find_class`,
            where that is not the argument's name.
        is_common: Whether the short help shows it; flags of one command are always shown.
        group: Its group in the help, if not its class's.
        off: What `--no_NAME` does, for a switch that is on by default.
        writes: Whether it names a file to write, which no other argument may name.
        is_distinct: Whether no item of a list may stand in it twice.
    """

    choices: Collection[str] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    needs: Mapping[str, object] = field(default_factory=dict)
    decides: bool = True
    is_open: bool | str = False
    must_be_given: bool = False
    is_common: bool = False
    group: str = ""
    off: str = ""
    writes: bool = False
    is_distinct: bool = False
    help: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise a ConfigError if a value, or an item of a list, breaks the rule."""
        if self.must_be_given and not value:
            raise ConfigError(f"--{name} is missing: give it ({self.help.rstrip('.')})")
        if isinstance(value, list):
            if self.is_distinct and len({*value}) < len(value):
                raise ConfigError(f"{name} {' '.join(map(str, value))}: give each value once")
            for item in value:
                self.check(name, item)
        if value is None or isinstance(value, list):
            return
        if isinstance(value, float) and not math.isfinite(value):
            raise ConfigError(f"{name} is {value}: it must be a finite number")
        if value == "" and name.endswith(("_dir", "_file")):
            raise ConfigError(f"{name} is empty: give a path, or leave it out")
        is_path = self.is_open and ":" in str(value)
        if self.choices is not None and value not in self.choices and not is_path:
            kind = self.is_open if isinstance(self.is_open, str) else name
            choose(name, value, [*self.choices, *(_installed(kind) if self.is_open else ())])
        limits = {"ge": self.least, "gt": self.above, "le": self.most, "lt": self.below}
        bounds: Any = {word: bound for word, bound in limits.items() if bound is not None}
        if bounds:
            typed_value(name, value, Annotated[type(value), msgspec.Meta(**bounds)])


@dataclass(frozen=True)
class Entry:
    """A class of ours in a table by name, and the class of its own arguments, if it has any.

    Both are "module:Class". The second is imported for the help, so its module has no torch.
    """

    path: str
    arguments: str | None = None


def find_class(kind: str, name: str, table: Mapping[str, Any], contract: type | None = None) -> Any:
    """Import what a name stands for; a ConfigError if it is unknown or cannot be imported.

    Known are the names of `table` ("module:Class" by name, or an entry with that as its `path`),
    the entry points that packages have in the group of the kind (`pgra.retrievers`,
    `pgra.similarities`), and any `module:Class`. What is from outside derives from the contract.
    """
    if name in table:
        try:
            return import_named(getattr(table[name], "path", table[name]))
        except ModuleNotFoundError as error:
            raise ConfigError(f"{kind} '{name}': {missing_package(error)}") from None
    path = name
    if ":" not in name:
        others = _installed(kind)
        choose(kind, name, [*table, *others])
        path = others[name]
    try:
        cls = import_named(path)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{kind} '{name}' cannot be imported: {error}") from None
    if contract and not (isinstance(cls, type) and issubclass(cls, contract)):
        raise ConfigError(f"{kind} '{name}' is not a subclass of {contract.__name__}")
    return cls


def import_named(path: str) -> Any:
    """Import what "module:Name" names."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)


def _installed(kind: str) -> dict[str, str]:
    """Return what installed packages offer of a kind: "module:Class" by name."""
    from importlib.metadata import entry_points  # a tenth of a second

    plural = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return {entry.name: entry.value for entry in entry_points(group=f"pgra.{plural}")}


def arg(default: Any, help: str, **rule: Any) -> Any:
    """Declare a field of an `Arguments` class; `rule` holds the fields of its `Rule`."""
    metadata = {"rule": Rule(help=help, **rule)}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def rules(cls: type) -> dict[str, Rule]:
    return {f.name: f.metadata.get("rule", Rule()) for f in dataclasses.fields(cls)}


@dataclass(kw_only=True)
class Arguments:
    """A group of arguments, checked when it is made; `GROUP` is its place in the help."""

    GROUP: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        """Check types, rules, `needs` and contradictions; a `Path` becomes text."""
        kinds = typing.get_type_hints(type(self))
        for f in dataclasses.fields(self):
            rule = f.metadata.get("rule", Rule())
            value = getattr(self, f.name)
            if isinstance(value, Path):
                value = str(value)
            value = typed_value(f.name, value, kinds[f.name], is_exact=True)
            setattr(self, f.name, value)
            rule.check(f.name, value)
            if value is not None and value != f.default:
                self._check_needs(f.name, rule)
        self.check()

    def check(self) -> None:
        """Raise a ConfigError if values contradict each other; for subclasses."""

    def deciding(self) -> dict[str, Any]:
        """Return the values that results depend on, by name."""
        declared = rules(type(self)).items()
        return {name: getattr(self, name) for name, rule in declared if rule.decides}

    def _check_needs(self, name: str, rule: Rule) -> None:
        for other, wanted in rule.needs.items():
            value = getattr(self, other)
            if wanted is True:
                is_enough = value is not None and value is not False
                way = f"--{other}"
            else:
                enough = wanted if isinstance(wanted, tuple) else (wanted,)
                is_enough = value in enough
                way = f"--{other} {enough[0]}"
            if not is_enough:
                raise ConfigError(
                    f"{name} needs {other}, which is {value}: add {way}, or leave {name} "
                    f"{getattr(self, name)} out"
                )


# What `--help` shows: a command's flags in argparse's groups, the usual ones or all.


# Groups in the help's order; "Options" are flags that only one command has.
GROUPS = (
    "Options",
    "Task",
    "Method",
    "Corpus",
    "Retriever",
    "Reranker",
    "LM",
    "Exemplars",
    "Reader",
    "Memory",
    "Training",
    "Output",
    "General",
)
HELP = ("-h", "--help", "--help_all")


def same_spelling(words: Sequence[str]) -> list[str]:
    """Write flags as arguments are named: `--dry-run` with underscores, and `--reader` in full."""
    respelled = []
    for word in words:
        if word.startswith("--"):
            name, sign, value = word[2:].partition("=")
            name = "model_name_or_path" if name == "reader" else name.replace("-", "_")
            word = f"--{name}{sign}{value}"
        respelled.append(word)
    return respelled


def wants_help(words: Sequence[str]) -> bool:
    return not {*words}.isdisjoint(HELP)


def add_general(parser: "argparse._ActionsContainer") -> None:
    """Add the flags of every command, which are taken off before it reads its own."""
    for flags, level, about in (
        (("-q", "--quiet"), "error", "Print errors and results only."),
        (("-v", "--verbose"), "debug", "Print more: also what libraries report."),
    ):
        parser.add_argument(
            *flags, dest="log_level", action="store_const", const=level, default="info", help=about
        )


class HelpParser(argparse.ArgumentParser):
    """A parser with flags in `GROUPS`."""

    def __init__(
        self,
        prog: str = "pgra",
        description: str = "",
        epilog: str = "",
        words: Mapping[str, str] | None = None,
    ) -> None:
        """Make a parser; `words` are subcommands, each with what it does."""
        super().__init__(
            prog,
            f"{prog}{' COMMAND' if words else ''} [FLAGS]",
            description,
            epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            conflict_handler="resolve",  # a command's own --output_dir is shown, not a run's
            add_help=False,
            allow_abbrev=False,
        )
        if words:
            below = self.add_subparsers(title="Commands", metavar="COMMAND")
            for word, about in words.items():
                below.add_parser(word, help=about)
        self._groups = {title: self.add_argument_group(title) for title in GROUPS}

    def error(self, message: str) -> NoReturn:
        """Raise a one-line error, without the usage of two hundred arguments."""
        raise ConfigError(f"{message}. See --help.")

    def add_flag(self, title: str, flag: str, text: str, **options: Any) -> None:
        """Add a flag to a group, with argparse's options; without a help text it is not shown."""
        about = text.replace("%", "%%") or argparse.SUPPRESS
        self._groups[title].add_argument(flag, default=argparse.SUPPRESS, help=about, **options)

    def show(self) -> None:
        """Write the help."""
        general = self._groups["General"]
        add_general(general)
        general.add_argument("-h", "--help", action="store_true", help="Show the usual flags.")
        general.add_argument("--help-all", action="store_true", help="Show all flags.")
        sys.stdout.write(self.format_help())


# Where values come from. One YAML may serve several programs: a key of another program of ours is
# ignored, an unknown key is refused.


_T = TypeVar("_T")


@dataclass(frozen=True)
class Defaults:
    """Values beneath the command line's; `origin` says in messages where they were written.

    They are beneath `--profile` and `--config` too, unless they win.
    """

    origin: str
    values: Mapping[str, Any]
    wins: bool = False


def parse_sections(
    find: Callable[[Mapping[str, Any]], Mapping[str, type]],
    words: Sequence[str],
    *,
    prog: str,
    description: str,
    epilog: str = "",
    defaults: Sequence[Defaults] = (),
    others: Collection[str] = (),
    unused: Collection[str] = (),
) -> dict[str, Any]:
    """Read dataclasses from a command line; return one of each by its name.

    `find` returns them by name, given the values; it may look at those of `CHOOSING`. Of `defaults`
    the last win. `others` are arguments of other methods, which are ignored. The arguments in
    `unused` are left out.

    Raises:
        ConfigError: On an unknown name, a wrong type or a contradiction.
    """
    is_help = wants_help(words)
    early = _first_values(words)
    layers = [layer for layer in defaults if not layer.wins]
    for kind, folder in (("profile", "profiles"), ("config", "experiments")):
        if kind in early:
            path = find_yaml(kind, folder, early[kind])
            layers.append(Defaults(str(path), read_yaml(path)))
    layers += [layer for layer in defaults if layer.wins]
    stated = ChainMap(early, *(dict(layer.values) for layer in reversed(layers)))
    classes = find(stated)
    kinds = _field_kinds(classes.values())
    values: dict[str, Any] = {}
    for layer in layers:
        values |= check_defaults(layer, kinds, layer.values if is_help else others)
    parser = HelpParser(prog, description, epilog)
    is_whole = "--help_all" in words
    _add_flags(parser, classes.values(), values, unused, is_help=is_help, is_whole=is_whole)
    profiles = ", ".join(list_yamls("profiles"))
    about = "YAML of defaults, or the name of one in configs/experiments; the command line wins."
    parser.add_flag("General", "--config", about, metavar="NAME")
    parser.add_flag("General", "--profile", f"Defaults under --config: {profiles}.", metavar="NAME")
    if is_help:
        parser.show()
        raise SystemExit(0)
    for name in {*others} - {*kinds, "profile"}:
        parser.add_argument(f"--{name}", nargs="*", default=argparse.SUPPRESS)
    flags, rest = parser.parse_known_args(words)
    if rest:
        names = [f"--{name}" for name in kinds if name not in unused]
        raise ConfigError(_unknown("argument", rest[0].partition("=")[0], names))
    values |= _typed(flags, kinds)
    sections: dict[str, Any] = {name: _make(cls, values) for name, cls in classes.items()}
    _check_written(sections.values())
    return sections


def field_names(classes: Iterable[type]) -> set[str]:
    """Return the names of the arguments of classes."""
    return {*_field_kinds(classes)}


def _first_values(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of `--config`, `--profile` and `CHOOSING`."""
    parser = HelpParser()
    for name in ("config", "profile", *CHOOSING):
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS)
    return vars(parser.parse_known_args(words)[0])


def _typed(flags: argparse.Namespace, kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a command line's values to their arguments' types."""
    values = vars(flags).items()
    return {name: typed_value(name, value, kinds[name]) for name, value in values if name in kinds}


def _make(cls: type[_T], values: Mapping[str, Any]) -> _T:
    return cls(**{name: values[name] for name in rules(cls) if name in values})


def _check_written(groups: Iterable[Any]) -> None:
    """Refuse to write to a file that another argument names."""
    users: dict[str, tuple[str, bool]] = {}
    for group in groups:
        for name, rule in rules(type(group)).items():
            value = getattr(group, name)
            for text in value if isinstance(value, list) else [value]:
                if isinstance(text, str):
                    file = os.path.realpath(text.removeprefix("run:"))  # of --retriever
                    other, is_written = users.setdefault(file, (name, rule.writes))
                    if other != name and (is_written or rule.writes):
                        raise ConfigError(
                            f"--{name} and --{other} are one file, {text}: name another"
                        )


CHOOSING = ("method", "reranker", "retriever")  # they choose which other arguments there are


def parse_first(cls: type[_T], words: Sequence[str]) -> tuple[_T, list[str]]:
    """Read one dataclass from a command line; return it, and the words that are left."""
    parser = HelpParser()
    _add_flags(parser, [cls], {}, ())
    flags, rest = parser.parse_known_args(words)
    return _make(cls, _typed(flags, _field_kinds([cls]))), rest


def _add_flags(
    parser: HelpParser,
    classes: Iterable[type],
    values: Mapping[str, Any],
    unused: Collection[str],
    *,
    is_help: bool = False,
    is_whole: bool = True,
) -> None:
    """Add the dataclasses' flags to the help's groups; `values` replace their defaults."""
    for cls in classes:
        kinds = _field_kinds([cls])
        for f in dataclasses.fields(cls):
            if f.name in unused:
                continue
            rule = f.metadata.get("rule", Rule())
            default = f.default
            if f.default_factory is not dataclasses.MISSING:
                default = f.default_factory()
            value = values.get(f.name, default)
            title = rule.group or _group(cls, f.name)
            is_common = rule.is_common or rule.must_be_given or title == "Options"
            text = rule.help if is_whole or is_common else ""
            types = {kinds[f.name], *typing.get_args(kinds[f.name])}
            if bool in types:  # the help shows the one that changes something
                on = text
                off = ""
                if value is True and text:
                    on = ""
                    off = rule.off or f"Turn this off: {rule.help}"
                switch = {"action": "store_true"} if is_help else {"nargs": "?", "const": True}
                parser.add_flag(title, f"--{f.name}", on, **switch)
                parser.add_flag(title, f"--no_{f.name}", off, dest=f.name, action="store_false")
                continue
            word = "N" if int in types else "X" if float in types else "TEXT"
            is_list = any(typing.get_origin(kind) is list for kind in types)
            count = "+" if is_list else None
            if text and value not in (None, "", []) and not re.search(r"\bdefault\b", text):
                default = " ".join(map(str, value)) if is_list else value
                text = f"{text} (default: {default})"
            parser.add_flag(title, f"--{f.name}", text, metavar=word, nargs=count)


def _group(cls: type, name: str) -> str:
    """Return the group of the class that first declared an argument."""
    first = [base for base in cls.__mro__ if name in vars(base).get("__annotations__", {})][-1]
    return str(vars(first).get("GROUP", Arguments.GROUP))


def _field_kinds(classes: Iterable[type]) -> dict[str, Any]:
    """Return types by field name."""
    kinds: dict[str, Any] = {}
    for cls in classes:
        hints = typing.get_type_hints(cls)
        kinds |= {name: hints[name] for name in rules(cls)}
    return kinds


def _unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message without its list of two hundred names."""
    return unknown_name(kind, name, known).split(" Known:")[0] + " See --help."


def check_defaults(
    layer: Defaults, fields: Mapping[str, Any], others: Collection[str]
) -> dict[str, Any]:
    """Return a layer's values of `fields`, whose types are given by name.

    Raises:
        ConfigError: On a wrong type, or a key that is in no program of ours and not in `others`.
    """
    path = layer.origin
    names = {*fields, *others}
    if not names.issuperset(layer.values):
        names.update(import_named(_EVERY)())
    values = {}
    for name, value in layer.values.items():
        if name not in names:
            raise ConfigError(f"{path}: {_unknown('key', str(name), names)}")
        if name in fields:
            if value == []:
                raise ConfigError(f"{path}: {name} is empty: give at least one")
            values[name] = typed_value(f"{path}: {name}", value, fields[name])
    return values


# Returns the names of all arguments of a YAML; imported only for an unknown key.
_EVERY = "pgra.commands.common:all_arguments"


def from_yaml(
    cls: type[_T], path: Path, values: Mapping[Any, Any] | None = None, **others: Any
) -> _T:
    """Build a dataclass from a YAML whose keys are its fields; `others` are fields not in the file.

    `values` are what was read from it.

    Raises:
        ConfigError: On an unreadable file, an unknown or missing key, or a wrong type.
    """
    try:
        return from_values(cls, read_yaml(path) if values is None else values, **others)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def from_values(cls: type[_T], values: Mapping[Any, Any], **others: Any) -> _T:
    """Build a dataclass from a mapping; see `from_yaml`."""
    hints = typing.get_type_hints(cls)
    fields: Any = dataclasses.fields(cls)  # type: ignore[arg-type]
    keys = {f.name: f for f in fields if f.name not in others}
    for name in values:
        choose("key", str(name), keys)
    typed = {}
    for name, f in keys.items():
        if name not in values:
            if f.default is f.default_factory is dataclasses.MISSING:
                raise ConfigError(f"'{name}' is missing")
            continue
        value = values[name]
        may_be_empty = f.default in ("", ()) or f.metadata.get("may_be_empty", False)
        if value in ("", []) and not may_be_empty and hints[name] not in (Any, object):
            raise ConfigError(f"{name} is {show(value)}: it must not be empty")
        typed[name] = typed_value(name, value, hints[name])
    return cls(**others, **typed)


def typed_value(name: str, value: Any, kind: Any, *, is_exact: bool = False) -> Any:
    """Convert a value to a type, else raise a ConfigError; `is_exact` takes no number from text."""
    try:
        return msgspec.convert(value, kind, strict=is_exact, dec_hook=_as_kind)
    except msgspec.ValidationError as error:
        hint = " (put a text in quotes)" if "Expected `str`" in str(error) else ""
        raise ConfigError(f"{name} is {show(value)}: {error}{hint}".replace("`", "")) from None


def _as_kind(kind: type, value: Any) -> Any:
    """Convert to a class that msgspec does not know, such as `Path`."""
    return value if isinstance(value, kind) else kind(value)
