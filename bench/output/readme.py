"""The figures in `bench/README.md` and in the project's own README, written from a file of results.

Rewrites what stands between two markers, and draws the pictures that are linked to into a folder beside the
file. The first marker names the file, so that a test can see that nobody typed there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path, PurePosixPath

from bench.arguments import SHORT
from bench.output import pictures, rows
from bench.output.drawing import Picture
from bench.output.figures import BASELINE, OURS
from bench.output.layout import Table, in_markdown
from bench.output.rows import Results, Row
from bench.output.tables import STEADY, case_tables, short_table, summary_tables

BEGIN = "<!-- bench:begin: written by `python -m bench --readme {source}` -->"
END = "<!-- bench:end -->"
_BEGINS = r"<!-- bench:begin(?:: written by `python -m bench --readme (\S+)`)? -->\n"
_SECTION = re.compile(f"{_BEGINS}.*?{END}", re.S)
HEADINGS = {
    "steady": "Every loader on every workload",
    "bytes": "Every loader, by the bytes of a batch",
    "workers": "Every loader, by the number of workers",
    "schedule": "Order without the stall",
    "resume": "Exact resume",
    "insight": "What is slow, and what would help",
    "cluster": "Workers on other machines",
    "device": "Onto a device",
}


def source_of(readme: str) -> str | None:
    """The file that the figures were drawn from, if the marker names one; ValueError unless there is one
    section between markers."""
    found = _SECTION.findall(readme)
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} sections from {BEGIN.split(':')[0]}... to {END}, not one")
    return found[0] or None


def _short(results: Results, source: str) -> Iterator[str]:
    """What the project's own README shows: five workloads and one picture."""
    yield in_markdown(short_table(results, SHORT))
    yield f"{pictures.caption(results)}. All tables, and what they say: [bench/README.md](bench/README.md)."
    yield from _linked(PurePosixPath(source), pictures.pictures(results)[:1])


def _long(results: Results, source: str) -> Iterator[str]:
    """What `bench/README.md` shows: everything."""
    file = PurePosixPath(source).relative_to("bench")
    machine = results.machine
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rounds = max((len(case.part(BASELINE)) for case in results.cases("steady")), default=0)
    yield f"""{_place(machine)}, {machine["system"]}, {results.days}; {versions}. Loaders
in turn in one run, medians of {rounds} blocks; in brackets the range over the rounds. Every block is a row of
[`{file}`]({file}); `python -m bench --json FILE` writes such rows."""
    for table in summary_tables(results):
        yield in_markdown(table, "### ")
    for axis, of_axis in groupby(results.cases(), key=lambda case: str(case.key[0])):
        cases = list(of_axis)
        if tables := [table for case in cases for table in case_tables(case)]:
            yield f"### {HEADINGS[axis]}"
            if places := sorted({_place(case.machine) for case in cases} - {_place(machine)}):
                yield f"Measured on {' and '.join(places)}."
            yield from _told_once(tables, folded=axis in STEADY)
    yield "### Pictures"
    yield from _linked(file, pictures.pictures(results))


def _place(machine: Row) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores"


def _told_once(tables: Sequence[Table], folded: bool) -> Iterator[str]:
    """The tables; what the columns are stands before the first one of its kind."""
    told: set[str] = set()
    for table in tables:
        if table.about not in told:
            yield table.about
        if folded and not told:
            yield "<details><summary>tables</summary>"
        told.add(table.about)
        yield in_markdown(table._replace(about=""), "#### ")
    if folded:
        yield "</details>"


def _linked(file: PurePosixPath, several: Sequence[Picture]) -> Iterator[str]:
    for each in several:
        yield f"![{each.title}]({file.with_suffix('') / each.name})"


SECTIONS = {"README.md": _short, "bench/README.md": _long}


def texts(results: Results, source: str, root: Path = Path()) -> dict[Path, str]:
    """The READMEs below `root` with the figures of these results; `source` is their file, seen from there.

    Raises:
        ValueError: a README has not exactly one section, or torch's loader or ours was not measured.
    """
    for case in results.cases("steady", "start", "turns"):
        for name in {BASELINE, OURS} - case.peers.keys():
            raise ValueError(f"{case.name!r} was measured without {name}, and it is compared")
    found = {}
    for name, section in SECTIONS.items():
        readme = (root / name).read_text()
        source_of(readme)
        text = "\n\n".join([BEGIN.format(source=source), *section(results, source), END])
        found[root / name] = _SECTION.sub(lambda _, text=text: text, readme)  # type: ignore[misc]
    return found


def write(file: Path) -> list[Path]:
    """Write both READMEs of the current folder from a file of results, and draw the pictures."""
    results = rows.read(file)
    written = texts(results, file.resolve().relative_to(Path.cwd()).as_posix())
    for path, text in written.items():
        path.write_text(text)
    return [*written, *pictures.write(results, file.with_suffix(""))]
