"""`python -m bench`, from the repository root: the order of a run, what it prints, and its files."""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench import machine, run
from bench.arguments import AXES, parse
from bench.output import rows
from bench.output.layout import Table, in_markdown, size
from bench.output.rows import Results
from bench.output.tables import case_tables, summary_tables
from bench.peers import PEERS
from bench.peers.device import ARMS
from bench.timing import against
from bench.timing.device_clock import CudaDevice
from bench.timing.rounds import Case, measure
from bench.workloads import all_workloads
from bench.workloads.ready_made import SHAPES

INTERRUPTED = 130  # the shell's 128 + SIGINT
NO_GPU = "Nothing was measured, because there is no GPU to measure: torch.cuda.is_available() is False."


def main(arguments: Sequence[str] | None = None) -> int:
    if arguments is None:
        arguments = sys.argv[1:]
    if arguments[:1] == ["program"]:
        from bench.programs.command import main as run_programs  # brings pillow and rich only for those

        return run_programs(arguments[1:])
    options = parse(arguments)
    if options.list:
        return _list()
    if options.readme is not None:
        return _write_readmes(options.readme)
    if options.device is not None and not torch.cuda.is_available():
        print(NO_GPU)
        return 0
    machine.use_one_thread()
    # More workers than cores are what the axis of workers is for.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    here = machine.describe()
    if options.device is not None:
        device = CudaDevice()
        return perform(options, here | device.describe(), run.device_cases(options, device, here["cores"]))
    with tempfile.TemporaryDirectory(prefix="fastq-bench-") as folder:
        found = (run.cases if options.against is None else against.cases)(options, Path(folder))
        return perform(options, here, list(found))


def perform(options: argparse.Namespace, here: dict[str, Any], cases: Sequence[Case]) -> int:
    """Measure the cases that the file has not, and show each when it is there."""
    file = options.json
    results = rows.read(file) if file and options.resume and file.exists() else Results()
    if file and not results.runs:
        file.write_text("")

    def keep(found: list[rows.Row]) -> None:
        results.add(found)
        if file:
            rows.append(file, found)

    given = {name: value for name, value in vars(options).items() if not isinstance(value, Path)}
    keep([rows.run_row(here, given)])
    print(_machine_lines(here), end="\n\n")
    told: list[Table] = []
    todo = [case for case in cases if tuple(case.key.values()) not in results]
    status = 0
    try:
        for number, case in enumerate(todo, 1):
            if sys.stderr.isatty():
                title = f"{case.axis}, {case.name}, {case.workers} workers, {case.start_method}"
                print(f"[{number} of {len(todo)}] {title}", file=sys.stderr)
            keep(measure(case))
            told += _shown(case_tables(results.cases()[-1]))
    except KeyboardInterrupt:
        print("interrupted: what follows is what was measured until then", file=sys.stderr)
        status = INTERRUPTED
    told += _shown(summary_tables(results))
    for about in dict.fromkeys(table.about for table in told if table.about):
        print(" ".join(about.split()))
    return status


def _shown(tables: list[Table]) -> list[Table]:
    for table in tables:
        print(in_markdown(table._replace(about="")), end="\n\n", flush=True)
    return tables


def _machine_lines(here: dict[str, Any]) -> str:
    device = f"{here['device']}, driver {here['driver']}, CUDA {here['cuda']}\n" if "device" in here else ""
    versions = ", ".join(f"{name} {version}" for name, version in here["versions"].items())
    where = f"{here['cpu']}, {here['cores']} cores, {size(here['memory'], 1024)}, load {here['load_average']}"
    return f"{device}{where}, {here['system']}\n{versions}, {here['date']}"


def _write_readmes(file: Path) -> int:
    from bench.output import readme

    try:
        print(*readme.write(file), sep="\n")
    except (OSError, ValueError) as error:
        sys.exit(f"python -m bench --readme: {error}")
    return 0


def _list() -> int:
    tables = {
        "workloads": {each.name: each.description for each in all_workloads().values()},
        "peers": {name: of.label for name, of in PEERS.items()},
        "axes": AXES,
        "workloads with --device cuda": {shape.name: shape.description for shape in SHAPES.values()},
        "peers with --device cuda": ARMS,
    }
    for title, entries in tables.items():
        print(f"{title}:", *(f"  {name:19} {meaning}" for name, meaning in entries.items()), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
