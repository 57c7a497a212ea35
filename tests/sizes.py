"""The gate on sizes: `python tests/sizes.py` fails above LIMITS.

A code line holds code: docstrings, comments and blank lines do not count. A commit may lower a
limit, never raise one: a feature lands with its own weight in deletions.
"""

import ast
import io
import sys
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMITS = {
    "pgra: code lines": 18_500,
    "pgra: files": 105,
    "pgra: docstring lines": 5_400,
    "tests: code lines": 12_500,
    "benchmarks: code lines": 1_700,
    "docs: words": 15_000,
}
_SPACE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


def count_code(source: str) -> int:
    """Count the lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SPACE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docstring_lines(ast.parse(source)))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings, and of strings below a name that they explain."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def measured() -> dict[str, int]:
    """Return what LIMITS limits, as it is."""
    sources = {folder: read_sources(ROOT / folder) for folder in ("pgra", "tests", "benchmarks")}
    return {
        **{f"{name}: code lines": sum(map(count_code, own)) for name, own in sources.items()},
        "pgra: files": len(sources["pgra"]),
        "pgra: docstring lines": sum(len(docstring_lines(ast.parse(s))) for s in sources["pgra"]),
        "docs: words": sum(len(path.read_text().split()) for path in ROOT.glob("docs/**/*.md")),
    }


def read_sources(folder: Path) -> list[str]:
    """Return the Python files below a folder."""
    return [path.read_text() for kind in ("*.py", "*.pyi") for path in folder.rglob(kind)]


def main() -> int:
    """Compare the sizes with their limits."""
    too_large = 0
    for name, value in measured().items():
        too_large += value > LIMITS[name]
        mark = "  TOO LARGE: take out as much as you add" * (value > LIMITS[name])
        sys.stdout.write(f"{name:<24}{value:>8,} of {LIMITS[name]:,}{mark}\n")
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main())
