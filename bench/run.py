"""The cases of a run, in their order, as the command line asks for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from bench.arguments import Options
from bench.machine import machine_bytes
from bench.peers import LoaderSettings
from bench.peers.device import START_METHOD
from bench.timing import alone, device, kills, schedule, steady, turns
from bench.timing.device_clock import CudaDevice
from bench.timing.rounds import Case
from bench.timing.schedule_cases import CONTENDERS, schedule_cases
from bench.workloads import Workload

MOST_STARTS = 3  # repetitions in fresh processes, each of which takes seconds
START_METHODS = ("fork", "spawn", "forkserver")
DROP_INS = ("torch", "fastq_loader")
"""Peers that take torch's arguments, and end an epoch when the next one begins."""


class Files:
    """The folder of the workloads' files; each workload writes its own once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._prepared: set[str] = set()

    def prepare(self, workload: Workload) -> Path:
        """Where the workload's files are."""
        if workload.name not in self._prepared:
            workload.prepare(self._folder)
            self._prepared.add(workload.name)
        return self._folder


def cases(options: Options, files: Files) -> Iterator[Case]:
    """All cases of a run on the host."""
    for axis in options.axes:
        if axis in ("schedule", "kills"):
            yield from _schedule(options) if axis == "schedule" else _kills(options)
            continue
        for name in options.workloads[axis]:
            for workers in options.workers[axis]:
                yield from _of_workload(options, files, axis, name, workers)


def _of_workload(options: Options, files: Files, axis: str, name: str, workers: int) -> Iterator[Case]:
    settings = LoaderSettings(workers, options.start_method)
    drop_ins = [peer for peer in options.peers if peer in DROP_INS]
    if axis == "memory":
        yield alone.case(axis, name, options.peers, settings, 1, files.prepare)
    elif axis in ("start", "turns"):
        if not (drop_ins and workers):
            return
        if axis == "turns":
            yield turns.case(name, drop_ins, settings, options.blocks, files.prepare)
            return
        for method in START_METHODS:
            blocks = min(options.blocks, MOST_STARTS)
            yield alone.case(axis, name, drop_ins, LoaderSettings(workers, method), blocks, files.prepare)
    else:
        memory = machine_bytes()
        yield steady.case(
            axis, name, options.peers, settings, options.blocks, options.seconds, files.prepare, memory
        )


def _schedule(options: Options) -> Iterator[Case]:
    for case in schedule_cases():
        if any(CONTENDERS[name].peer in options.peers for name in case.contenders):
            yield schedule.case(case, options.peers, options.start_method, options.blocks)


def _kills(options: Options) -> Iterator[Case]:
    for workers, count in kills.KILLS.items() if "fastq_loader" in options.peers else ():
        yield kills.case(kills.Setting(workers, count, options.start_method), options.blocks)


def device_cases(
    options: Options, machine: CudaDevice, cores: int, start_method: str = START_METHOD
) -> list[Case]:
    """All cases of a run onto a device. There are as many workers as the machine has cores, but for the
    consumer's and that of torch's pin thread."""
    workers = next(filter(None, options.workers["device"]), max(1, cores - 2))
    names, blocks, seconds = options.workloads["device"], options.blocks, options.seconds
    return device.cases(names, options.peers, machine, workers, blocks, seconds, start_method)
