"""The figures of the project's own README, and the file of all tables: measured, and written from their file.

In README.md what stands between two markers is rewritten. The first of them names the file of results, so
that a test can see that nobody typed there. `results/NAME.md` has every table of `results/NAME.jsonl`, and a
folder beside it the picture.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from bench.arguments import SHORT_BLOCKS
from bench.machine import age
from bench.output import pictures, rows
from bench.output.figures import BASELINE, OURS
from bench.output.layout import in_markdown
from bench.output.repeated import repeated
from bench.output.rows import Results, Row
from bench.output.tables import case_tables, program_table, short_table, started, summary_tables
from bench.programs import PROGRAMS, command
from bench.programs import case as programs
from bench.run import perform, run_row
from bench.timing import starts, steady
from bench.timing.rounds import Case

BEGIN = "<!-- bench:begin: written by `python -m bench --readme {source}` -->"
END = "<!-- bench:end -->"
_BEGINS = r"<!-- bench:begin(?:: written by `python -m bench --readme (\S+)`)? -->\n"
_SECTION = re.compile(f"{_BEGINS}.*?{END}", re.S)
HEADINGS = {
    "steady": "Every loader on every workload",
    "program": "Programs with torch's loader and ours",
    starts.KIND: "The first batch, new workers in each epoch, and memory",
}
MINUTES = 25  # that all of it takes
TIE_ROUNDS = 9  # of what is level with torch's loader
PROGRAM_ROUNDS = 3  # where none are asked for: a round of all of them takes two minutes


def measure_and_write(options: argparse.Namespace, here: Row, folder: Path) -> int:
    """Measure what the README shows and the file has not, then write it. The status of the command.

    Raises:
        SystemExit: the file has rows of another package or machine, or what was measured cannot be shown.
    """
    file = options.json = options.readme
    options.resume = True
    cases = _cases(options, folder)
    try:
        found = rows.read(file) if file.exists() else Results()
        source = file.resolve().relative_to(Path.cwd()).as_posix()
        to_measure = any(tuple(case.key.values()) not in found for case in cases)
        new = [run_row(options, here)] if to_measure else []
        if why := refusal([*found.runs, *new]):
            command_line = f"rm -f {source} && python -m bench --readme {source}"
            raise ValueError(f"{why}. To measure all of it again, in {MINUTES} minutes: {command_line}")
        status = perform(options, here, cases)
        if not status:
            print(*write(file, source), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"python -m bench --readme: {error}")
    return status


def measure_and_compare(options: argparse.Namespace, here: Row, folder: Path) -> int:
    """Measure again what the file has of the README, and compare. 1 where a figure is another one now.

    The new rows go to the file of `--json`, or to none that stays; nothing else is written.

    Raises:
        SystemExit: the file has no results, or those of another machine.
    """
    try:
        stored = rows.read(options.readme)
        if why := refusal([*stored.runs, run_row(options, here)]):
            raise ValueError(why)
    except (OSError, ValueError) as error:
        sys.exit(f"python -m bench --readme: {error}")
    options.json = options.json or folder / "again.jsonl"
    cases = [case for case in _cases(options, folder) if tuple(case.key.values()) in stored]
    status = perform(options, here, cases)
    found = repeated(stored, rows.read(options.json))
    print("", in_markdown(found.table), " ".join(["In short:", *found.sentences]), sep="\n\n")
    return status or found.status


def _cases(options: argparse.Namespace, folder: Path) -> list[Case]:
    """What the README and the file of all tables show."""
    options.ties = TIE_ROUNDS
    options.rounds = PROGRAM_ROUNDS if options.blocks == SHORT_BLOCKS else options.blocks
    of_programs = command.parse(["all", "--rounds", str(options.rounds)])
    of_steady, of_starts = steady.cases(options, folder), starts.cases(options, folder)
    names = [name for name, program in PROGRAMS.items() if programs.device() or not program.on_device]
    compared = [*of_steady, *programs.cases(names, of_programs, folder)]
    return [*(case._replace(ties=options.ties) for case in compared), *of_starts]


def refusal(runs: Sequence[Row]) -> str:
    """Why the README cannot have the figures of these runs; "" where it can."""
    for name, first in _place(runs[0]).items():
        for other in (_place(run)[name] for run in runs):
            if other != first:
                return f"there are rows of two machines: {name} is {first!r}, and {other!r}"
    return ""


def _place(run: Row) -> Row:
    """What has to be the same in all runs whose figures stand side by side."""
    varying = ("date", "load_average")
    return {name: value for name, value in run["machine"].items() if name not in varying}


def source_of(readme: str) -> str | None:
    """The file that the figures were drawn from, if the marker names one; ValueError unless there is one
    section between markers."""
    found = _SECTION.findall(readme)
    if len(found) != 1:
        raise ValueError(f"it has {len(found)} sections from {BEGIN.split(':')[0]}... to {END}, not one")
    return found[0] or None


def _caption(results: Results) -> str:
    return ". ".join(filter(None, (results.caption, age(results.runs))))


def _short(results: Results, source: PurePosixPath) -> Iterator[str]:
    """What the README shows: a few workloads, the programs, and a picture."""
    for table in (short_table(results), program_table(results)):
        if table.rows:
            yield in_markdown(table)
    alone = [f"{started(case)} " for case in results.cases(starts.KIND)[-1:]]
    yield "".join(
        [
            *alone,
            f"{_caption(results)}. How to read these numbers: [bench/README.md](bench/README.md); ",
            f"every loader: [all tables]({source.with_suffix('.md')}).",
        ]
    )
    for each in pictures.pictures(results)[:1]:
        yield f"![{each.title}]({source.with_suffix('') / each.name})"


def _everything(results: Results, source: PurePosixPath) -> Iterator[str]:
    """All tables."""
    machine, file = results.machine, source.name
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    yield f"# All tables of {file}\n\nWritten by `python -m bench --readme {source}`."
    yield f"""{_caption(results)}; {machine["system"]}, {versions}. Loaders in turn, medians of their blocks;
in brackets the range over the rounds. Each block is a row of [{file}]({file})."""
    for table in summary_tables(results):
        yield in_markdown(table, "## ")
    for kind, heading in HEADINGS.items():
        tables = [table for case in results.cases(kind) for table in case_tables(case)]
        if tables:
            yield f"## {heading}\n\n{tables[0].about}"
        yield from (in_markdown(table._replace(about=""), "### ") for table in tables)
    yield "## Pictures"
    for each in pictures.pictures(results):
        yield f"![{each.title}]({source.stem}/{each.name})"


def texts(results: Results, source: str, root: Path = Path()) -> dict[Path, str]:
    """The README below `root` with the figures of these results, and the file of all tables; `source` is the
    results' file, seen from there.

    Raises:
        ValueError: the README has not exactly one section, or torch's loader or ours was not measured.
    """
    for case in results.cases("steady"):
        for name in {BASELINE, OURS} - case.peers.keys():
            raise ValueError(f"{case.name!r} was measured without {name}, and it is compared")
    file, readme = PurePosixPath(source), root / "README.md"
    before = readme.read_text()
    source_of(before)
    text = "\n\n".join([BEGIN.format(source=source), *_short(results, file), END])
    return {
        root / file.with_suffix(".md"): "\n\n".join(_everything(results, file)) + "\n",
        readme: _SECTION.sub(lambda _: text, before),
    }


def write(file: Path, source: str) -> list[Path]:
    """Write the README below the current folder and the tables of a file of results; draw the picture."""
    results = rows.read(file)
    written = texts(results, source)
    for path, text in written.items():
        path.write_text(text)
    return [*written, *pictures.write(results, file.with_suffix(""))]
