"""The gate on sizes: `python tests/sizes.py` fails above LIMITS; `--table` shows them by package.

A code line holds code: docstrings, comments and blank lines do not count. A commit may lower a
limit, never raise one: a feature lands with its own weight in deletions.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
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


@dataclass
class Size:
    """Of some files together."""

    files: int = 0
    code: int = 0
    docstrings: int = 0

    def add(self, source: str) -> None:
        """Count one more file."""
        tree = ast.parse(source)
        self.files += 1
        self.code += len(code_lines(source))
        self.docstrings += len(docstring_lines(tree))


def code_lines(source: str) -> set[int]:
    """Return the numbers of the lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SPACE:
            found.update(range(token.start[0], token.end[0] + 1))
    return found - docstring_lines(ast.parse(source))


def docstring_lines(tree: ast.Module) -> set[int]:
    """Return the lines of docstrings, and of strings below a name that they explain."""
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            found |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def count(folder: Path) -> dict[str, Size]:
    """Count a folder's Python files by the package just below it; "." holds its own files."""
    sizes: dict[str, Size] = {}
    for path in sorted(p for kind in ("*.py", "*.pyi") for p in folder.rglob(kind)):
        parts = path.relative_to(folder).parts
        sizes.setdefault(parts[0] if len(parts) > 1 else ".", Size()).add(path.read_text())
    return sizes


def total(folder: str) -> Size:
    """Return the size of all of a folder's Python files."""
    sizes = count(ROOT / folder).values()
    return Size(*(sum(getattr(size, key) for size in sizes) for key in vars(Size())))


def measured() -> dict[str, int]:
    """Return what LIMITS limits, as it is."""
    package = total("pgra")
    return {
        "pgra: code lines": package.code,
        "pgra: files": package.files,
        "pgra: docstring lines": package.docstrings,
        "tests: code lines": total("tests").code,
        "benchmarks: code lines": total("benchmarks").code,
        "docs: words": sum(len(path.read_text().split()) for path in ROOT.glob("docs/**/*.md")),
    }


def show_table() -> None:
    """Print the sizes of each package."""
    for name in ("pgra", "tests", "benchmarks"):
        sizes = count(ROOT / name)
        sys.stdout.write(f"{name:<16}{'files':>7}{'code':>9}\n")
        for package, size in [*sizes.items(), ("together", total(name))]:
            sys.stdout.write(f"  {package:<14}{size.files:>7}{size.code:>9,}\n")


def main(words: list[str]) -> int:
    """Compare the sizes with their limits."""
    if "--table" in words:
        show_table()
    too_large = 0
    for name, value in measured().items():
        too_large += value > LIMITS[name]
        mark = "  TOO LARGE: take out as much as you add" * (value > LIMITS[name])
        sys.stdout.write(f"{name:<24}{value:>8,} of {LIMITS[name]:,}{mark}\n")
    return int(too_large > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
