"""Whether the README's figures are of this package: `python -m bench.digest`, which a release runs.

Needs Python alone. Every run of results names the digest of the package that it measured; commits that change
no file of the package keep it.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "fastq_loader"
SOURCES = (".py", ".pyi", ".c")
MARKER = re.compile(r"python -m bench --readme (\S+?\.jsonl)")


def digest(root: Path = ROOT) -> str:
    """A digest of the names and bytes of the package's sources."""
    found = hashlib.sha256()
    for path in sorted((root / PACKAGE).rglob("*")):
        if path.suffix in SOURCES:
            data = path.read_bytes()
            found.update(f"{path.relative_to(root).as_posix()} {len(data)}\n".encode() + data)
    return found.hexdigest()[:16]


def outdated(results: Path, now: str) -> list[str]:
    """Commits of the rows that were measured with another package than that of this digest."""
    rows = map(json.loads, results.read_text().splitlines())
    revisions = [row.get("revision", {}) for row in rows if row["row"] == "run"]
    other = [each.get("commit", "unknown") for each in revisions if each.get("package") != now]
    return list(dict.fromkeys(other))


def main(root: Path = ROOT) -> int:
    """1 where the README shows figures of another package, or names no file of results."""
    named = MARKER.search((root / "README.md").read_text())
    commits = outdated(root / named[1], digest(root)) if named else ["none"]
    if not commits:
        return 0
    file = named[1] if named else "bench/results/NAME.jsonl"
    print(
        f"README.md has figures of other files of {PACKAGE}/ (commits: {', '.join(commits)}). To measure "
        f"them again: rm -f {file} && python -m bench --readme {file}",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
