"""The gate on sizes and shapes: `python tests/sizes.py` fails above LIMITS.

Size is counted in tokens of code, without brackets, commas, comments, docstrings and line ends; a
string is one token. So a line break, a trailing comma or a longer name costs nothing. A shape is a
way to pack code: its number may fall and never rises.
"""

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS: dict[str, float] = {
    "pgra: tokens": 132_500,
    "tests: tokens": 90_145,
    "benchmarks: tokens": 16_850,
    "ablations: tokens": 5_130,
    "prose: words": 27_000,
    "pgra: parallel assignments": 0,
    "pgra: assignments to three names": 0,
    "pgra: starred literals": 0,
    "pgra: comprehensions with two loops": 0,
    "pgra: statements over 60 nodes": 15,
    "pgra: functions over 8 parameters": 3,
    "pgra: kinds of task by isinstance": 0,
    "pgra: arguments spread from a dict": 0,
    "pgra: names in dialect, %": 1.0,
}
_CODE = {tokenize.NAME, tokenize.NUMBER, tokenize.OP, tokenize.STRING}
_DIALECT = {
    "found",
    "own",
    "part",
    "asked",
    "place",
    "kept",
    "said",
    "how",
    "one",
    "each",
    "given",
    "made",
    "known",
    "shown",
}
_KINDS_OF_TASK = {"Task", "GenerationTask"}


def count_tokens(source: str, tree: ast.Module) -> int:
    """Count the tokens of code."""
    docstrings = docstring_lines(tree)
    return sum(
        token.type in _CODE and token.string not in "()[]{}," and token.start[0] not in docstrings
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
    )


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings, and of strings below a name that they explain."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            lines |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def count_shapes(tree: ast.Module) -> Counter[str]:
    """Count the ways to pack code."""
    shapes: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                shapes["parallel assignments"] += 1
                shapes["assignments to three names"] += len(target.elts) > 2
        if isinstance(node, ast.Starred):
            shapes["starred literals"] += isinstance(node.value, ast.Tuple | ast.List)
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            shapes["comprehensions with two loops"] += len(node.generators) > 1
        if isinstance(node, ast.stmt) and not hasattr(node, "body"):
            shapes["statements over 60 nodes"] += sum(1 for _ in ast.walk(node)) > 60
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            names = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
            count = sum(argument.arg not in ("self", "cls") for argument in names)
            shapes["functions over 8 parameters"] += count > 8
            shapes["arguments spread from a dict"] += count_spreads(node)
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "isinstance":
            kinds = {name.id for name in ast.walk(node.args[1]) if isinstance(name, ast.Name)}
            shapes["kinds of task by isinstance"] += bool(kinds & _KINDS_OF_TASK)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            shapes["names"] += 1
            shapes["names in dialect"] += node.id in _DIALECT
    return shapes


def count_spreads(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count the names of type Any that hold a dict and are spread into a call."""
    held = {
        node.target.id
        for node in ast.walk(function)
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and isinstance(node.value, ast.Dict)
        and getattr(node.annotation, "id", None) == "Any"
    }
    return len(
        held
        & {
            keyword.value.id
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            for keyword in node.keywords
            if keyword.arg is None and isinstance(keyword.value, ast.Name)
        }
    )


def measured() -> dict[str, float]:
    """Return what LIMITS limits, as it is."""
    values: dict[str, float] = {}
    shapes: Counter[str] = Counter()
    for folder in ("pgra", "tests", "benchmarks", "ablations"):
        tokens = 0
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.pyi")]:
            source = path.read_text()
            tree = ast.parse(source)
            tokens += count_tokens(source, tree)
            if folder == "pgra":
                shapes += count_shapes(tree)
        values[f"{folder}: tokens"] = tokens
    pages = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("notes/**/*.md")]
    values["prose: words"] = sum(len(page.read_text().split()) for page in pages)
    for name in LIMITS:
        folder, _, shape = name.partition(": ")
        if folder == "pgra" and shape != "tokens":
            values[name] = shapes[shape]
    values["pgra: names in dialect, %"] = 100 * shapes["names in dialect"] / shapes["names"]
    return values


def main() -> int:
    """Compare the sizes with their limits."""
    too_large = 0
    for name, value in measured().items():
        is_above = round(value, 1) > LIMITS[name]
        too_large += is_above
        mark = "  TOO LARGE: take out as much as you add" if is_above else ""
        sys.stdout.write(f"{name:<38}{value:>9,.6g} of {LIMITS[name]:,}{mark}\n")
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main())
