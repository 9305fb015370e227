"""`python -m bench`, from the repository root: the command line and the order of a run."""

from __future__ import annotations

import argparse
import math
import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench import files, machine, report
from bench.batches import nbytes
from bench.measure import measure_rates
from bench.memory import peak_memory
from bench.peers import PEERS, LoaderSettings, peer_class
from bench.results import PeerResult, Results, WorkloadResult
from bench.workloads import Workload, all_workloads

WORKLOADS = all_workloads()


def _workload(text: str) -> Workload:
    if text not in WORKLOADS:
        raise argparse.ArgumentTypeError(f"{text!r} is not a workload; choose from {', '.join(WORKLOADS)}")
    return WORKLOADS[text]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return seconds


def _new_file(text: str) -> Path:
    """Checked before the run, not after minutes of it."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"must name a file in a folder that exists, got {text!r}")
    return path


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Speed and memory of fastq_loader beside torch's DataLoader, the loaders taking turns.",
    )
    default = "(default: %(default)s)"
    methods = multiprocessing.get_all_start_methods()
    parser.add_argument("workloads", nargs="*", type=_workload, metavar="workload", help="(default: all)")
    parser.add_argument("--list", action="store_true", help="list workloads and peers, and stop")
    parser.add_argument("--workers", type=_count, default=2, help=f"worker processes {default}")
    parser.add_argument("--blocks", type=_count, default=7, help=f"timed blocks per peer {default}")
    parser.add_argument("--seconds", type=_seconds, default=0.8, help=f"length of a block {default}")
    parser.add_argument(
        "--start-method", choices=methods, default="fork", help=f"how workers are started {default}"
    )
    parser.add_argument("--json", type=_new_file, metavar="FILE", help="write every raw figure to this file")
    arguments = parser.parse_args()
    arguments.workloads = arguments.workloads or list(WORKLOADS.values())
    return arguments


def _settings(arguments: argparse.Namespace) -> LoaderSettings:
    return LoaderSettings(arguments.workers, arguments.start_method)


def run_workload(
    workload: Workload, folder: Path, arguments: argparse.Namespace, tick: Callable[[str], None]
) -> WorkloadResult:
    """Measure one workload: first the memory of each peer alone, then the speed of all in turn."""
    settings = _settings(arguments)
    workload.prepare(folder)
    memory = {}
    for name in PEERS:
        memory[name] = peak_memory(workload.name, name, folder, settings)
        tick(f"{name}, memory")
    load = workload.build(folder)
    rates = measure_rates(
        PEERS, load, workload.new_step, settings, arguments.blocks, arguments.seconds, tick=tick
    )
    peers = {name: PeerResult(name, rates[name], peak=memory[name]) for name in PEERS}
    return WorkloadResult(
        workload.name,
        workload.description,
        load.batch_size,
        nbytes(load.first_batches(1)[0]),
        workload.transport_bound,
        settings.num_workers,
        settings.start_method,
        [],
        peers,
    )


def run(arguments: argparse.Namespace, progress: Progress) -> list[WorkloadResult]:
    """Measure all workloads asked for. Their files are in a temporary folder, gone afterwards in any case."""
    steps = len(PEERS) * (arguments.blocks + 2)  # a memory run and a warm-up block besides
    task = progress.add_task("starting", total=steps * len(arguments.workloads))
    results = []
    with tempfile.TemporaryDirectory(prefix="fastq-bench-") as folder:
        for workload in arguments.workloads:

            def tick(done: str, name: str = workload.name) -> None:
                progress.update(task, advance=1, description=f"{name}: {done}", refresh=True)

            results.append(run_workload(workload, Path(folder), arguments, tick))
    return results


def main() -> int:
    arguments = parse_arguments()
    if arguments.list:
        for each in WORKLOADS.values():
            print(f"{each.name:10} {each.description}")
        print("peers:", "; ".join(PEERS))
        return 0
    try:
        packages = [package for name in PEERS for package in peer_class(name).distributions]
    except ImportError as error:
        sys.exit(f"{error}: run from the repository root, with the package's 'bench' extra installed")
    machine.use_one_thread()
    here = machine.describe(packages)
    output, terminal = report.console(), Console(stderr=True)
    output.print(report.machine_line(here), highlight=False, soft_wrap=True)
    progress = Progress(
        TextColumn("{task.description:40}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=terminal,
        transient=True,
        auto_refresh=False,  # a drawing thread would run beside the loaders: the bar moves between blocks
        disable=not terminal.is_terminal,
    )
    try:
        with progress:
            results = run(arguments, progress)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # the shell's 128 + SIGINT
    output.print(report.table(results))
    output.print(report.LEGEND, highlight=False, soft_wrap=True)
    if arguments.json:
        given = asdict(_settings(arguments)) | {"blocks": arguments.blocks, "seconds": arguments.seconds}
        files.write(arguments.json, Results(given, here, results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
