"""The cases of a run, in their order, as the command line asks for them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from bench.peers import LoaderSettings
from bench.peers.device import START_METHOD
from bench.timing import alone, cluster, device, resume, schedule, steady, tuning, turns
from bench.timing.device_clock import CudaDevice
from bench.timing.rounds import Case

MOST_STARTS = 3  # repetitions in fresh processes, each of which takes seconds
START_METHODS = ("fork", "spawn", "forkserver")
DROP_INS = ("torch", "fastq_loader")
"""Peers that take torch's arguments, and end an epoch when the next one begins."""


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """All cases of a run on the host; workloads keep their files in `folder`."""
    for axis in options.axes:
        if axis == "schedule":
            for each in schedule.schedule_cases():
                if any(schedule.CONTENDERS[name].peer in options.peers for name in each.contenders):
                    yield schedule.case(each, options.peers, options.start_method, options.blocks)
        elif axis == resume.AXIS:
            for workers in filter(None, options.workers[axis] if "fastq_loader" in options.peers else ()):
                yield from resume.cases(options, workers, folder)
        elif axis == tuning.AXIS:
            yield from tuning.cases(options, folder) if "fastq_loader" in options.peers else ()
        elif axis == cluster.AXIS:
            yield from cluster.cases(options, folder) if "fastq_loader" in options.peers else ()
        else:
            for name in options.workloads[axis]:
                for workers in options.workers[axis]:
                    yield from _of_workload(options, folder, axis, name, workers)


def _of_workload(options: Namespace, folder: Path, axis: str, name: str, workers: int) -> Iterator[Case]:
    settings, blocks = LoaderSettings(workers, options.start_method), options.blocks
    drop_ins = [peer for peer in options.peers if peer in DROP_INS]
    if axis == "memory":
        yield alone.case(axis, name, options.peers, settings, 1, folder)
    elif axis not in ("start", "turns"):
        yield steady.case(axis, name, workers, options, folder)
    elif drop_ins and workers and axis == "turns":
        yield turns.case(name, drop_ins, settings, blocks, folder)
    elif drop_ins and workers:
        for method in START_METHODS:
            settings, blocks = LoaderSettings(workers, method), min(blocks, MOST_STARTS)
            yield alone.case(axis, name, drop_ins, settings, blocks, folder)


def device_cases(
    options: Namespace, machine: CudaDevice, cores: int, start_method: str = START_METHOD
) -> list[Case]:
    """All cases of a run onto a device. There are as many workers as the machine has cores, but for the
    consumer's and that of torch's pin thread."""
    workers = next(filter(None, options.workers["device"]), max(1, cores - 2))
    return device.cases(options, machine, workers, start_method)
