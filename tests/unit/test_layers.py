"""Imports point one way: a module may use its own layer and those before it."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = [
    *("errors", "lazy", "progress", "arrays", "types", "parallel", "context"),
    *("artifacts", "run_folder", "config", "data", "prompts"),
    *("lm", "encoders", "retrieval", "exemplars", "rerank", "reader", "report"),
    *("model_card", "memory", "methods", "experiments", "runs"),
    *("extend", "integrations", "commands", "cli", "__main__"),
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


@pytest.fixture(scope="module")
def imports():
    """Give each module's imports, by the parts of its name."""
    own = [path.relative_to(ROOT).with_suffix("").parts for path in MODULES]
    trees = (ast.parse(path.read_text()) for path in MODULES)
    return {n: {*imported_names(t, list(n[:-1]))} for n, t in zip(own, trees, strict=True)}


def test_no_module_imports_a_later_layer_or_a_program(imports):
    found = []
    for own, names in imports.items():
        for name in names:
            top, layer, *_ = [*name.split("."), ""]
            is_later = top == "pgra" and layer in LAYERS[LAYERS.index(own[1]) + 1 :]
            if is_later or (top in PROGRAMS and own[1] not in ("commands", "cli")):
                found.append(f"{'.'.join(own)} imports {name}")
    assert found == []


def test_no_import_goes_in_a_circle(imports):
    graph = {}
    for own, names in imports.items():
        module = ".".join(own).removesuffix(".__init__")
        graph[module] = names - {module, module.rpartition(".")[0]}
    TopologicalSorter(graph).prepare()  # raises a CycleError with the modules
