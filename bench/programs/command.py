"""`python -m bench program NAME`: a program with torch's loader and with ours, in turn.

Each run has a fresh process, so that no loader sits in another's memory. The files are written once, to a
folder that is removed at the end unless it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from bench.arguments import checked, numbers
from bench.output.layout import Table, in_markdown, worker_count
from bench.programs import PROGRAMS, Program, data, limits
from bench.programs.report import ABOUT, BASELINE, Run, agree, table

TABLES = Path("bench/results/programs.md")
#: Bytes of data beyond what a program needs: an eighth of the table of images.
HEADROOM = 100_000_000


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
    about = "memory of each process (default: for image_table what it needs without its table, measured, and"
    add("--limit", type=megabytes, metavar="MB", help=f"{about} {HEADROOM / 1e6:.0f}; 0: any number)")
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
    limit, why = int((options.limit or 0) * 1e6), ""
    if program.part and options.limit is None:
        limit, why = _limit(name, program, own)
    for number in range(options.rounds):
        for workers in options.workers or program.workers:
            for loader in reversed(loaders) if number % 2 else loaders:
                where = f"{name}, {loader}, {worker_count(workers)}"
                print(f"{where}, round {number + 1} of {options.rounds}", flush=True)
                yield run([name, loader, str(workers), str(epochs), str(own)], limit, why)


def _limit(name: str, program: Program, own: Path) -> tuple[int, str]:
    """Bytes of data for each process, and where the number comes from.

    Raises:
        SystemExit: the program fails without a limit, and has said why.
    """
    with tempfile.TemporaryDirectory(prefix="part-", dir=own.parent) as part:
        getattr(data, program.part)(own, Path(part))
        arguments = [name, BASELINE, str(max(program.workers)), "1", part, os.devnull]
        need = limits.needed(_command(arguments))
    if not need:
        sys.exit("python -m bench program: the run without a limit failed")
    table = sum(file.stat().st_size for file in own.iterdir())
    why = f"it needs {need / 1e6:,.0f} without its table of {table / 1e6:,.0f} MB"
    return need + HEADROOM, why


def run(arguments: Sequence[str], limit: int = 0, why: str = "") -> Run:
    """One run in a process of its own.

    Args:
        arguments: of `bench.programs.run`, but for the file of the result.
        limit: bytes of data that each process may have; 0: any number. `why`: where it comes from.

    Raises:
        SystemExit: it failed, and has said why.
    """
    said = f"each process may have {limit / 1e6:,.0f} MB of data (RLIMIT_DATA)" if limit else ""
    said += f": {why}" if why else ""
    with tempfile.NamedTemporaryFile(suffix=".json") as result:
        status = limits.run(_command([*arguments, result.name]), limit)
        if status:
            ended = "was killed" if status in (-9, 128 + 9) else f"ended with {status}"
            sys.exit(f"python -m bench program: the run {ended}. {said}")
        return {**json.loads(Path(result.name).read_text()), "limit": said}


def _command(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "bench.programs.run", *arguments]


def as_file(tables: Sequence[Table]) -> str:
    """The tables as a file of their own."""
    title = "# Programs with torch's loader and ours\n\nWritten by `python -m bench program all --readme`."
    return "\n\n".join([title, ABOUT, *(in_markdown(each, "## ") for each in tables)]) + "\n"
