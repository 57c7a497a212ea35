"""Imports point one way: a module may use its own layer and those before it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAYERS = [
    *("errors", "progress", "core", "artifacts", "config", "data", "prompts"),
    *("lm", "encoders", "retrieval", "exemplars", "rerank", "reader", "report"),
    *("run_folder", "memory", "methods", "runs", "experiments"),
    *("integrations", "commands", "cli", "__main__"),
]
PROGRAMS = ("index_build", "train", "evaluate")  # above all layers; the cli names them as text
MODULES = sorted(
    path for path in (ROOT / "pgra").rglob("*.py") if path != ROOT / "pgra/__init__.py"
)


def imported_names(tree, package):
    """Give the absolute names of all imports, those inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)  # some are modules


def layer_of(name):
    parts = name.split(".")
    return LAYERS.index(parts[1]) if parts[0] == "pgra" and parts[1:2] != [] else None


def violations(source, path):
    """Say which imports of a module point to a later layer, or to a program."""
    own = path.relative_to(ROOT).with_suffix("").parts
    here = LAYERS.index(own[1])
    found = []
    for name in imported_names(ast.parse(source), list(own[:-1])):
        if name.split(".")[0] in PROGRAMS and own[1] not in ("commands", "cli"):
            found.append(f"{'.'.join(own)} imports the program {name}")
        is_ours = name.startswith("pgra.") and name.split(".")[1] in LAYERS
        if is_ours and layer_of(name) > here:
            found.append(f"{'.'.join(own)} imports the later {name}")
    return found


def test_no_module_imports_a_later_layer():
    assert [line for path in MODULES for line in violations(path.read_text(), path)] == []


def test_no_import_goes_in_a_circle():
    imports = {}
    for path in MODULES:
        own = path.relative_to(ROOT).with_suffix("").parts
        module = ".".join(own).removesuffix(".__init__")
        names = imported_names(ast.parse(path.read_text()), list(own[:-1]))
        imports[module] = {*names} - {module, module.rpartition(".")[0]}
    TopologicalSorter(imports).prepare()  # raises a CycleError with the modules
