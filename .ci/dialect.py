"""Count the lines of prose that have to be decoded: clauses used as nouns, sentences without a subject.

Reads comments, docstrings and texts of the package, and its Markdown pages. A few such lines are good English
("say what is slow"), so there is a limit, and no rule for each line. `python .ci/dialect.py --list` shows
them.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMIT = 40
PATTERN = re.compile(
    r"""\b(
        what\ (it|is|the)
        | those\ (that|of|who)
        | who\ (may|asks|says|reads|waits|knows|calls)
        | (is|are)\ (?-i:none) | none\ of\ (this|the|them)
        | of\ (no\ )?use
        | (come|comes|came|coming)\ to\b(?!\ an\ end)
        | as\ far\ as
        | (is|are|was|were)\ (known|said|told|seen)\ of
        | in\ words
        | and\ no\ more
    )\b""",
    re.VERBOSE | re.IGNORECASE,
)
PROSE = {tokenize.STRING, tokenize.COMMENT, getattr(tokenize, "FSTRING_MIDDLE", tokenize.COMMENT)}


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the lines that people read; of a module its comments and strings."""
    text = path.read_text()
    if path.suffix not in {".py", ".pyi"}:
        yield from enumerate(text.splitlines(), 1)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in PROSE:
            yield from enumerate(token.string.splitlines(), token.start[0])


def pages() -> Iterator[Path]:
    yield ROOT / "README.md"
    for pattern in ("*.py", "*.pyi", "*.md", "*.c"):
        yield from sorted((ROOT / "fastq_loader").rglob(pattern))


def main() -> None:
    found = {
        (str(path.relative_to(ROOT)), number): line.strip()
        for path in pages()
        for number, line in prose(path)
        if PATTERN.search(line)
    }
    if "--list" in sys.argv:
        print(*(f"{path}:{number}: {line}" for (path, number), line in found.items()), sep="\n")
    print(f"{len(found)} lines in dialect, at most {LIMIT} are wanted")
    if len(found) > LIMIT:
        sys.exit(1)


if __name__ == "__main__":
    main()
