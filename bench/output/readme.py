"""The figures of the READMEs, and the file of all tables, written from a file of results.

`results/NAME.md` has every table of `results/NAME.jsonl`, and a folder beside it the pictures. In the
project's own README and in `bench/README.md` it rewrites what stands between two markers: what was reached,
and which goals were missed. The first marker names the file, so that a test can see that nobody typed there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path, PurePosixPath

from bench.arguments import SHORT
from bench.output import pictures, rows
from bench.output.figures import BASELINE, OURS
from bench.output.layout import in_markdown
from bench.output.rows import Results, Row
from bench.output.tables import case_tables, missed_table, short_table, summary_tables

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


def _short(results: Results, source: PurePosixPath) -> Iterator[str]:
    """What the project's own README shows: five workloads and a picture."""
    yield in_markdown(short_table(results, SHORT))
    yield f"{pictures.caption(results)}. How to read these numbers: [bench/README.md](bench/README.md)."
    for each in pictures.pictures(results)[:1]:
        yield f"![{each.title}]({source.with_suffix('') / each.name})"


def _missed(results: Results, source: PurePosixPath) -> Iterator[str]:
    """What `bench/README.md` shows: the goals that were not reached."""
    yield in_markdown(missed_table(results))
    file = source.relative_to("bench").with_suffix(".md")
    yield f"{pictures.caption(results)}. All goals and tables: [{file}]({file})."


def _everything(results: Results, source: PurePosixPath) -> Iterator[str]:
    """All tables."""
    machine, file = results.machine, source.name
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rounds = max((len(case.part(BASELINE)) for case in results.cases("steady")), default=0)
    yield f"# All tables of {file}\n\nWritten by `python -m bench --readme {source}`."
    yield f"""{_place(machine)}, {machine["system"]}, {results.days}; {versions}. Loaders in turn in one run,
medians of {rounds} blocks; in brackets the range over the rounds. Each block is a row of [{file}]({file})."""
    for table in summary_tables(results):
        yield in_markdown(table, "## ")
    for axis, of_axis in groupby(results.cases(), key=lambda case: str(case.key[0])):
        cases, told = list(of_axis), set[str]()
        for table in (tables := [table for case in cases for table in case_tables(case)]):
            if table is tables[0]:
                yield f"## {HEADINGS[axis]}"
                if places := sorted({_place(case.machine) for case in cases} - {_place(machine)}):
                    yield f"Measured on {' and '.join(places)}."
            if table.about not in told:  # what the columns are stands before the first one of its kind
                yield table.about
            told.add(table.about)
            yield in_markdown(table._replace(about=""), "### ")
    yield "## Pictures"
    for each in pictures.pictures(results):
        yield f"![{each.title}]({source.stem}/{each.name})"


def _place(machine: Row) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores"


Section = Callable[[Results, PurePosixPath], Iterator[str]]
SECTIONS: dict[str, Section] = {"README.md": _short, "bench/README.md": _missed}


def texts(results: Results, source: str, root: Path = Path()) -> dict[Path, str]:
    """The READMEs below `root` with the figures of these results, and the file of all tables; `source` is the
    results' file, seen from there.

    Raises:
        ValueError: a README has not exactly one section, or torch's loader or ours was not measured.
    """
    for case in results.cases("steady", "start", "turns"):
        for name in {BASELINE, OURS} - case.peers.keys():
            raise ValueError(f"{case.name!r} was measured without {name}, and it is compared")
    file = PurePosixPath(source)
    found = {root / file.with_suffix(".md"): "\n\n".join(_everything(results, file)) + "\n"}
    for name, section in SECTIONS.items():
        readme = (root / name).read_text()
        source_of(readme)
        text = "\n\n".join([BEGIN.format(source=source), *section(results, file), END])
        found[root / name] = _SECTION.sub(lambda _, text=text: text, readme)  # type: ignore[misc]
    return found


def write(file: Path) -> list[Path]:
    """Write both READMEs below the current folder and the tables of a file of results; draw the pictures."""
    results = rows.read(file)
    written = texts(results, file.resolve().relative_to(Path.cwd()).as_posix())
    for path, text in written.items():
        path.write_text(text)
    return [*written, *pictures.write(results, file.with_suffix(""))]
