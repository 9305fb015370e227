"""`python -m bench program NAME`: a program with torch's loader and with ours, in turn.

Each run has a fresh process, so that no loader sits in another's memory. The files are written once, to a
folder that is removed at the end unless it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.arguments import checked, numbers
from bench.output.layout import Table, in_markdown, worker_count
from bench.programs import PROGRAMS, Program, data
from bench.programs.limits import Limited
from bench.programs.report import ABOUT, Run, agree, table

TABLES = Path("bench/results/programs.md")


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line.

    Raises:
        SystemExit: argparse's, when the line is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench program", description="Complete programs, with torch's loader and ours in turn."
    )
    add = parser.add_argument
    positive = checked("a whole number of at least 1", int, lambda value: value >= 1)
    megabytes = checked("a number of megabytes", float, lambda value: 0 <= value < math.inf)
    folder = checked("a folder that exists", Path, Path.is_dir)
    add("name", choices=[*PROGRAMS, "all"], metavar="NAME", help=f"{', '.join(PROGRAMS)}, or all")
    loaders = sorted({loader for program in PROGRAMS.values() for loader in program.loaders})
    add("--loader", choices=loaders, help="only this one (default: all in turn)")
    add("--workers", type=numbers, metavar="N,M", help="worker processes (default: 2; csv_table: 0,1,2,4)")
    add("--epochs", type=positive, help="(default: 3; csv_table: 10)")
    add("--rounds", type=positive, default=1, help="runs of each loader, in turn (default: 1)")
    add("--few", action="store_true", help="few and small files: to try it")
    add("--data", type=folder, metavar="FOLDER", help="keep the files here, and use those that are")
    add("--limit", type=megabytes, metavar="MB", help="memory (default: 400 for image_table; 0: any number)")
    about = "make a cgroup with that limit below this one, as root (default: RLIMIT_DATA for each process)"
    add("--cgroup", type=folder, metavar="FOLDER", help=about)
    add("--readme", action="store_true", help=f"write the tables to {TABLES}")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    options = parse(arguments)
    tables, status = [], 0
    with ExitStack() as stack:
        folder = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastq-bench-")))
        for name in PROGRAMS if options.name == "all" else (options.name,):
            if options.loader and options.loader not in PROGRAMS[name].loaders:
                continue
            runs = list(_runs(name, PROGRAMS[name], options, folder))
            status |= not agree(runs)
            tables.append(table(name, runs))
            print(in_markdown(tables[-1]), end="\n\n")
    print(" ".join(ABOUT.split()))
    if options.readme:
        TABLES.write_text(as_file(tables))
    return status


def files(folder: Path, name: str, program: Program, few: bool) -> Path:
    """Where the program's files are; they are written once."""
    own = folder / (f"{name}-few" if few else name)
    if not own.exists():
        with tempfile.TemporaryDirectory(prefix="unfinished-", dir=folder) as unfinished:
            written = Path(unfinished, name)
            written.mkdir()
            getattr(data, program.data)(written, **(program.few if few else {}))
            written.rename(own)
    return own


def _runs(name: str, program: Program, options: argparse.Namespace, folder: Path) -> Iterator[Run]:
    """To and fro: the speed of a machine drifts over minutes by more than loaders differ."""
    own = files(folder, name, program, options.few)
    epochs = options.epochs or program.epochs
    loaders = [options.loader] if options.loader else list(program.loaders)
    limit = program.limit if options.limit is None else int(options.limit * 1e6)
    for number in range(options.rounds):
        for workers in options.workers or program.workers:
            for loader in reversed(loaders) if number % 2 else loaders:
                where = f"{name}, {loader}, {worker_count(workers)}"
                print(f"{where}, round {number + 1} of {options.rounds}", flush=True)
                yield run([name, loader, str(workers), str(epochs), str(own)], Limited(limit, options.cgroup))


def run(arguments: Sequence[str], limited: Limited) -> Run:
    """One run in a process of its own.

    Raises:
        SystemExit: it failed, and has said why.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        try:
            status = limited.run([sys.executable, "-m", "bench.programs.run", *arguments, result.name])
        except ValueError as error:
            sys.exit(f"python -m bench program: {error}")
        if status:
            why = "was killed" if status in (-9, 128 + 9) else f"ended with {status}"
            sys.exit(f"python -m bench program: the run {why}. {limited.said}")
        return {**json.loads(Path(result.name).read_text()), "limit": limited.said}


def as_file(tables: Sequence[Table]) -> str:
    """The tables as a file of their own."""
    title = "# Programs with torch's loader and ours\n\nWritten by `python -m bench program all --readme`."
    return "\n\n".join([title, ABOUT, *(in_markdown(each, "## ") for each in tables)]) + "\n"
