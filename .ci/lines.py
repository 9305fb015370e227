"""Print the code lines of the package, room by room, and those of the tests and the bench.

Blank lines, comments and docstrings are not counted.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NO_CODE = (
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    tokenize.ENDMARKER,
)


def code_lines(source: str) -> int:
    docstrings = {
        line
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and ast.get_docstring(node) is not None
        for line in range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    code = {
        line
        for token in tokens
        if token.type not in NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def main() -> None:
    rooms: Counter[str] = Counter()
    for part in ("fastq_loader", "tests", "bench"):
        for path in (ROOT / part).rglob("*.py"):
            lines = code_lines(path.read_text())
            rooms[part] += lines
            if part == "fastq_loader":
                rooms["  " + path.relative_to(ROOT / part).parts[0]] += lines
    for room, lines in rooms.items():
        print(f"{room:20} {lines:6,}")


if __name__ == "__main__":
    main()
