"""`python -m bench program NAME`: a program with torch's loader and with ours, in turn.

The files are written once, to a folder that is removed at the end unless it is named.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from bench import machine, run
from bench.arguments import checked, numbers, positive, results_file
from bench.programs import PROGRAMS
from bench.programs.case import HEADROOM, cases


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of a command line.

    Raises:
        SystemExit: argparse's, when the line is wrong.
    """
    parser = argparse.ArgumentParser(
        prog="python -m bench program", description="Complete programs, with torch's loader and ours in turn."
    )
    add = parser.add_argument
    megabytes = checked("a number of megabytes", float, lambda value: 0 <= value < math.inf)
    folder = checked("a folder that exists", Path, Path.is_dir)
    add("name", choices=[*PROGRAMS, "all"], metavar="NAME", help=f"{', '.join(PROGRAMS)}, or all")
    loaders = sorted({loader for program in PROGRAMS.values() for loader in program.loaders})
    add("--loader", choices=loaders, help="only this one (default: all in turn)")
    add("--workers", type=numbers, metavar="N,M", help="worker processes (default: 2; csv_table: 0,2)")
    add("--epochs", type=positive, help="(default: 3; csv_table: 10)")
    add("--rounds", type=positive, default=1, help="runs of each loader, in turn (1; csv_table: thrice)")
    add("--few", action="store_true", help="few and small files: to try it")
    add("--data", type=folder, metavar="FOLDER", help="keep the files here, and use those that are")
    about = "memory of each process (default: for image_table what it needs without its table, measured, and"
    add("--limit", type=megabytes, metavar="MB", help=f"{about} {HEADROOM / 1e6:.0f}; 0: any number)")
    add("--json", type=results_file, metavar="FILE", help="write every run to this file, as a line of JSON")
    add("--resume", action="store_true", help="keep what FILE holds already, and run only the rest")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Run what the command line asks for; 1 where a loss or a prediction differs, or a run failed."""
    options = parse(arguments)
    names = [
        name
        for name, program in PROGRAMS.items()
        if options.name in (name, "all") and options.loader in (None, *program.loaders)
    ]
    with ExitStack() as stack:
        folder = options.data or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fastq-bench-")))
        return run.perform(options, machine.describe(), list(cases(names, options, folder)))
