"""`python -m bench`, from the repository root: the order of a run, its progress bar and its files."""

from __future__ import annotations

import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from bench import files, gpu, machine, plots, report
from bench.arguments import AXES, Options, parse
from bench.jobs import Files, Job, Outcome, jobs
from bench.peers import PEERS, peer_class
from bench.results import Results
from bench.workloads import all_workloads


def run(options: Options, results: Results, output: Console, progress: Progress) -> None:
    """Do all jobs, show those that have a table of their own as they come, and keep the file up to date."""
    with tempfile.TemporaryDirectory(prefix="fastq-bench-") as folder:
        todo = list(jobs(options, Files(Path(folder)), results))
        task = progress.add_task("starting", total=len(todo))
        for number, job in enumerate(todo):
            for outcome in _work(job, number, progress, task):
                if (table := report.table(outcome)) is not None:
                    output.print(table)
            if options.json is not None:
                files.write(options.json, results)


def _work(job: Job, number: int, progress: Progress, task: TaskID) -> list[Outcome]:
    ticks = 0

    def tick(done: str) -> None:
        nonlocal ticks
        ticks += 1
        share = min(ticks / job.ticks, 1)
        progress.update(task, completed=number + share, description=f"{job.title}: {done}", refresh=True)

    return job.work(tick)


def _distributions(names: tuple[str, ...]) -> list[str]:
    """The packages of the peers that are there; the others say so when their turn comes."""
    found: list[str] = []
    for name in names:
        with suppress(ImportError):
            found += peer_class(name).distributions
    return found


def _list() -> None:
    for workload in all_workloads().values():
        print(f"{workload.name:19} {workload.description}")
    print()
    for name, entry in PEERS.items():
        print(f"{name:19} {entry.label}{'' if entry.usual else ' (only where it is named)'}")
    print()
    for axis, meaning in AXES.items():
        print(f"{axis:19} {meaning}")


def main() -> int:
    options = parse()
    if options.list_only:
        _list()
        return 0
    if options.plot is not None:
        try:
            import matplotlib  # noqa: F401  # asked for before the run, not after it
        except ImportError:
            sys.exit("--plot needs matplotlib: install the package's 'bench' extra")
    if options.gpu:
        return gpu.main(options)
    machine.use_one_thread()
    # More workers than cores are what the axis of workers is for.
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    here = machine.describe(_distributions(options.peers))
    results = _results(options, here)
    output, terminal = report.console(), Console(stderr=True)
    output.print(report.machine_line(here), highlight=False, soft_wrap=True)
    progress = Progress(
        TextColumn("{task.description:50}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
        console=terminal,
        transient=True,
        auto_refresh=False,  # a drawing thread would run beside the loaders: the bar moves between blocks
        disable=not terminal.is_terminal,
    )
    interrupted = False
    try:
        with progress:
            run(options, results, output, progress)
    except KeyboardInterrupt:
        print("interrupted: what follows is what was measured until then", file=sys.stderr)
        interrupted = True
    if results.workloads or results.by_bytes or results.by_workers:
        output.print(report.LEGEND, highlight=False, soft_wrap=True)
    for moments in filter(None, (results.start, results.turns)):
        output.print(report.moments_table(moments))
    if results.schedule or results.kills:
        output.print(report.SCHEDULE_LEGEND, highlight=False, soft_wrap=True)
    if options.plot is not None and not interrupted:
        plots.write(results, options.plot)
    return 130 if interrupted else 0  # the shell's 128 + SIGINT


def _results(options: Options, here: dict[str, Any]) -> Results:
    """Empty ones, or those of the run to go on with; the machine is that of its beginning."""
    if not options.resume or options.json is None or not options.json.exists():
        return Results(_settings(options), here)
    try:
        results = files.read(options.json)
    except ValueError as error:
        sys.exit(str(error))
    results.machine["resumed"] = here["date"]
    return results


def _settings(options: Options) -> dict[str, object]:
    """The options as they go into the file."""
    given = asdict(options)
    return {
        name: given[name]
        for name in ("axes", "workloads", "workers", "peers", "blocks", "seconds", "start_method", "memory")
    }


if __name__ == "__main__":
    sys.exit(main())
