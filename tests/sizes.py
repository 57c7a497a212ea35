"""Counts files and code lines: `python tests/sizes.py [FOLDER ...]`.

A code line holds code: docstrings, comments and blank lines do not count.
"""

import ast
import io
import sys
import tokenize
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_SPACE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENCODING, tokenize.ENDMARKER),
}


@dataclass
class Size:
    """Of some files together."""

    files: int = 0
    code: int = 0
    lines: int = 0
    functions: int = 0

    def add(self, source: str) -> None:
        """Count one more file."""
        tree = ast.parse(source)
        self.files += 1
        self.lines += len(source.splitlines())
        self.code += len(code_lines(source))
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        self.functions += sum(isinstance(node, kinds) for node in ast.walk(tree))


def code_lines(source: str) -> set[int]:
    """Give the numbers of the lines that hold code."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _SPACE:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        # a docstring, or a string below a name that it explains
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            found -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return found


def count(folder: Path) -> dict[str, Size]:
    """Count a folder's Python files by the package just below it; "." holds its own files."""
    sizes: dict[str, Size] = {}
    for path in sorted(p for kind in ("*.py", "*.pyi") for p in folder.rglob(kind)):
        parts = path.relative_to(folder).parts
        sizes.setdefault(parts[0] if len(parts) > 1 else ".", Size()).add(path.read_text())
    return sizes


def main(folders: list[str]) -> int:
    """Print a table for each folder."""
    for name in folders or ["pgra", "tests"]:
        sizes = count(ROOT / name)
        total = Size(*(sum(getattr(s, key) for s in sizes.values()) for key in vars(Size())))
        sys.stdout.write(f"{name:<16}{'files':>7}{'code':>9}{'lines':>9}{'functions':>11}\n")
        for package, size in [*sizes.items(), ("together", total)]:
            row = f"{size.files:>7}{size.code:>9,}{size.lines:>9,}{size.functions:>11,}"
            sys.stdout.write(f"  {package:<14}{row}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
