"""Prints the largest files, functions and folders of the package: a signal where to look, not a rule.

python -m tests.size [NUMBER]
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def functions(path: Path) -> list[tuple[int, str]]:
    """The functions and methods of a file with their lines, docstrings included."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.append(((node.end_lineno or node.lineno) - node.lineno + 1, f"{path.relative_to(ROOT)}:{node.name}"))
    return found


def main(number: int) -> None:
    """Print the tables."""
    files = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / "beheld").rglob("*.py")}
    folders: Counter[str] = Counter()
    for path, lines in files.items():
        folders[str(path.parent.relative_to(ROOT))] += lines
    tables = {
        "functions": [entry for path in files for entry in functions(path)],
        "files": [(lines, str(path.relative_to(ROOT))) for path, lines in files.items()],
        "folders": [(lines, folder) for folder, lines in folders.items()],
    }
    for title, rows in tables.items():
        print(f"largest {title}")
        for lines, what in sorted(rows, reverse=True)[:number]:
            print(f"{lines:8} {what}")
    print(f"{sum(files.values())} lines in {len(files)} files")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 15)
