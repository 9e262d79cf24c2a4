"""Counts the lines of code of a Python tree: no blank lines, no comments, no docstrings.

    python scripts/code_lines.py [DIRECTORY]

Prints one line per subpackage, the largest first, and the sum. Default: src/segue.
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

SKIPPED = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


def count(text: str) -> int:
    """Return the number of lines of a module that hold code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            lines |= set(range(token.start[0], token.end[0] + 1))
    return len(lines - _docstrings(ast.parse(text)))


def _docstrings(tree: ast.Module) -> set[int]:
    """Return the lines of all docstrings."""
    lines: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines |= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return lines


def main() -> None:
    """Print the table."""
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "src/segue")
    packages: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        packages[path.relative_to(root).parts[0]] += count(path.read_text())
    for package, lines in packages.most_common():
        print(f"{lines:6}  {package}")
    print(f"{packages.total():6}  in all")


if __name__ == "__main__":
    main()
