"""The parts of a run, one for each line of results: what is measured, where it is kept, what it takes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from bench.arguments import Options
from bench.batches import nbytes
from bench.cases import VARIANTS, Case, cases
from bench.kills import KILLS, Setting, measure_kills
from bench.machine import machine_bytes
from bench.measure import Tick, measure
from bench.memory import peak_memory
from bench.peers import PEERS, LoaderSettings
from bench.results import KillsResult, MomentResult, PeerResult, Results, ScheduleResult, WorkloadResult
from bench.schedule import measure_schedule
from bench.start import measure_start
from bench.turns import DROP_INS, measure_turns
from bench.words import worker_count
from bench.workloads import Workload, find_workload

BATCH_BYTES = tuple(1 << power for power in range(10, 29, 3))  # 1 KiB to 256 MiB
SIZED_BATCHES = 4  # over which the bytes of a batch are averaged: ragged ones differ
# Of one peer: what is prefetched, what is looked at, and copies on their way.
BATCHES_ALIVE = 16
MOST_STARTS = 3  # repetitions in fresh processes, each of which takes seconds
START_METHODS = ("fork", "spawn", "forkserver")

Outcome = WorkloadResult | MomentResult | ScheduleResult | KillsResult


@dataclass(frozen=True)
class Job:
    """One part of a run.

    Attributes:
        title: for the progress bar.
        ticks: how often it will call `tick`, about.
        work: measures, puts the results where they belong, and returns them to be shown.
    """

    title: str
    ticks: int
    work: Callable[[Tick], list[Outcome]]


class Files:
    """The folder of the workloads' files; each workload writes its own once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._prepared: set[str] = set()

    def prepare(self, workload: Workload) -> None:
        if workload.name not in self._prepared:
            workload.prepare(self.folder)
            self._prepared.add(workload.name)


def jobs(options: Options, files: Files, results: Results) -> Iterator[Job]:
    """The jobs of a run, in order; their outcomes go into `results`, and what is there is not done again."""
    if "steady" in options.axes:
        for name in options.workloads["steady"]:
            for workers in options.workers["steady"]:
                if not _measured(results.workloads, name, workers):
                    yield _steady(options, files, name, workers, results.workloads)
    if "bytes" in options.axes:
        for size in BATCH_BYTES:
            peers, reason = _fitting(options.peers, size, machine_bytes())
            name = f"bytes_{size}"
            for workers in options.workers["bytes"]:
                if not _measured(results.by_bytes, name, workers):
                    some = replace(options, peers=peers, memory=False)
                    yield _steady(some, files, name, workers, results.by_bytes, reason)
    if "workers" in options.axes:
        for name in options.workloads["workers"]:
            for workers in options.workers["workers"]:
                if not _measured(results.by_workers, name, workers):
                    yield _steady(replace(options, memory=False), files, name, workers, results.by_workers)
    drop_ins = [peer for peer in options.peers if peer in DROP_INS]
    if "start" in options.axes and drop_ins:
        for name in options.workloads["start"]:
            for method in START_METHODS:
                for workers in options.workers["start"]:
                    settings = LoaderSettings(workers, method)
                    if not _timed(results.start, name, settings):
                        yield _start(options, files, name, settings, drop_ins, results.start)
    if "turns" in options.axes and drop_ins:
        for name in options.workloads["turns"]:
            for workers in options.workers["turns"]:
                settings = LoaderSettings(workers, options.start_method)
                if not _timed(results.turns, name, settings):
                    yield _turns(options, files, name, settings, drop_ins, results.turns)
    if "schedule" in options.axes:
        yield from _schedule_jobs(options, drop_ins, results)


def _schedule_jobs(options: Options, peers: list[str], results: Results) -> Iterator[Job]:
    method = options.start_method
    for case in cases():
        names = [name for name in case.contenders if VARIANTS[name].peer in peers]
        done = any((each.case, each.start_method) == (case.name, method) for each in results.schedule)
        if names and not done:
            yield _schedule(options, case, names, results.schedule)
    for workers, kills in KILLS.items() if "fastq_loader" in peers else ():
        if not any((each.num_workers, each.start_method) == (workers, method) for each in results.kills):
            yield _kills(options, Setting(workers, kills, method), results.kills)


def _measured(results: list[WorkloadResult], name: str, workers: int) -> bool:
    return any(result.name == name and result.num_workers == workers for result in results)


def _timed(results: list[MomentResult], name: str, settings: LoaderSettings) -> bool:
    asked = (name, settings.num_workers, settings.start_method)
    return any((each.workload, each.num_workers, each.start_method) == asked for each in results)


def _fitting(peers: tuple[str, ...], batch_bytes: int, memory: int) -> tuple[tuple[str, ...], str | None]:
    """The first peers whose batches fit into half of the memory together, and what to say of the others."""
    count = memory // 2 // (batch_bytes * BATCHES_ALIVE)
    if count >= len(peers):
        return peers, None
    left = "; ".join(PEERS[name].label for name in peers[count:])
    return peers[:count], f"not measured, for want of memory for all at once: {left}"


def _steady(
    options: Options,
    files: Files,
    name: str,
    workers: int,
    into: list[WorkloadResult],
    note: str | None = None,
) -> Job:
    workload = find_workload(name)
    settings = LoaderSettings(workers, options.start_method)

    def work(tick: Tick) -> list[Outcome]:
        files.prepare(workload)
        load = workload.build(files.folder)
        ceiling, peers = measure(
            workload, load, options.peers, settings, options.blocks, options.seconds, tick
        )
        sizes = [nbytes(batch) for batch in load.first_batches(SIZED_BATCHES)]
        batch_size = load.batch_size
        del load  # no other process's memory is measured beside this dataset
        if options.memory:
            for peer in options.peers:
                peers[peer] = _with_peak(peers[peer], name, peer, files.folder, settings)
                tick(f"{peer}, memory")
        if note is not None:
            first = options.peers[0]
            peers[first] = replace(peers[first], notes=[*peers[first].notes, note])
        result = WorkloadResult(
            name,
            workload.description,
            batch_size,
            sum(sizes) / len(sizes),
            workload.transport_bound,
            workers,
            options.start_method,
            ceiling,
            peers,
        )
        into.append(result)
        return [result]

    ticks = (len(options.peers) + 1) * (options.blocks + 1) + options.memory * len(options.peers)
    return Job(f"{name}, {workers} workers", ticks, work)


def _with_peak(
    result: PeerResult, workload: str, peer: str, folder: Path, settings: LoaderSettings
) -> PeerResult:
    if result.failure is not None:
        return result
    try:
        return replace(result, peak=peak_memory(workload, peer, folder, settings))
    except RuntimeError as error:
        return replace(result, notes=[*result.notes, str(error)])


def _start(
    options: Options,
    files: Files,
    name: str,
    settings: LoaderSettings,
    peers: list[str],
    into: list[MomentResult],
) -> Job:
    repetitions = min(options.blocks, MOST_STARTS)

    def work(tick: Tick) -> list[Outcome]:
        files.prepare(find_workload(name))
        result = measure_start(name, files.folder, peers, settings, repetitions, tick)
        into.append(result)
        return [result]

    title = f"{name}, {settings.num_workers} workers, {settings.start_method}"
    return Job(title, len(peers) * repetitions, work)


def _turns(
    options: Options,
    files: Files,
    name: str,
    settings: LoaderSettings,
    peers: list[str],
    into: list[MomentResult],
) -> Job:
    workload = find_workload(name)

    def work(tick: Tick) -> list[Outcome]:
        files.prepare(workload)
        load = workload.build(files.folder)
        found = measure_turns(name, load, peers, settings, options.blocks, tick)
        into.extend(found)
        return list(found)

    return Job(f"{name}, {settings.num_workers} workers, turns", len(peers) * options.blocks, work)


def _schedule(options: Options, case: Case, names: list[str], into: list[ScheduleResult]) -> Job:
    rounds = min(options.blocks, case.most_rounds or options.blocks)

    def work(tick: Tick) -> list[Outcome]:
        result = measure_schedule(case, names, options.start_method, rounds, tick)
        into.append(result)
        return [result]

    return Job(f"{case.name}, {worker_count(case.workers)}", len(names) * rounds, work)


def _kills(options: Options, setting: Setting, into: list[KillsResult]) -> Job:
    def work(tick: Tick) -> list[Outcome]:
        result = measure_kills(setting, options.blocks, tick)
        into.append(result)
        return [result]

    return Job(f"kills, {worker_count(setting.workers)}", 3 * options.blocks, work)
