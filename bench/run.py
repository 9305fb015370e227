"""A run: its cases are measured, shown and kept."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import machine
from bench.output import rows
from bench.output.layout import Table, in_markdown, say, size, worker_count
from bench.output.rows import Results
from bench.output.summary import sentences
from bench.output.tables import case_tables, summary_tables
from bench.programs import report
from bench.timing.rounds import Case, measure

INTERRUPTED = 130  # the shell's 128 + SIGINT


def perform(options: argparse.Namespace, here: dict[str, Any], cases: Sequence[Case]) -> int:
    """Measure the cases that the file has not, and show each when it is there.

    Args:
        options: `json` is the file; with `resume` it is kept, and gone on with.
        here: `machine.describe()`.

    Returns:
        The status of the command: 1 where programs did not come to the same.
    """
    file = options.json
    results = rows.read(file) if file and options.resume and file.exists() else Results()
    if file and not results.runs:
        file.write_text("")

    def keep(found: list[rows.Row]) -> None:
        results.add(found)
        if file:
            rows.append(file, found)

    if todo := [case for case in cases if tuple(case.key.values()) not in results]:
        keep([run_row(options, here)])
    print(_machine_lines(here), end="\n\n")
    told: list[Table] = []
    began = time.monotonic()
    status = 0
    try:
        for number, case in enumerate(todo, 1):
            title = f"{case.kind} {case.name}, {worker_count(case.workers)} ({case.start_method})"
            say(f"[{number} of {len(todo)}, {time.monotonic() - began:.0f} s] measuring {title}")
            keep(measure(case))
            told += _shown(case_tables(results.cases()[-1]))
    except KeyboardInterrupt:
        say("interrupted: what follows is what was measured until then")
        status = INTERRUPTED
    told += _shown(summary_tables(results))
    for about in dict.fromkeys(table.about for table in told if table.about):
        print(" ".join(about.split()))
    if older := machine.age(results.runs):
        print(f"\n{older}.")
    print("\nIn short:", *sentences(results))
    return status or int(not all(map(report.agree, results.cases("program"))))


def run_row(options: argparse.Namespace, here: dict[str, Any]) -> rows.Row:
    """The line that a run begins with."""
    given = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    return rows.run_row(here, machine.revision(), given)


def _shown(tables: list[Table]) -> list[Table]:
    for table in tables:
        print(in_markdown(table._replace(about="")), end="\n\n", flush=True)
    return tables


def _machine_lines(here: dict[str, Any]) -> str:
    device = f"{here['device']}, driver {here['driver']}, CUDA {here['cuda']}\n" if "device" in here else ""
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    where = f"{here['cpu']}, {here['cores']} cores, {size(here['memory'], 1024)}, load {here['load_average']}"
    return f"{device}{where}, {here['system']}\n{versions}, {here['date']}"
