"""A loader alone, in a fresh process: its first batch, epochs with new workers in each, and its memory.

The process (`python -m bench.timing.starts`) has one loader and no other's workers, pages or modules, and
writes its row as JSON. `first`: seconds from making the loader to its first batch. `epoch`: seconds of an
epoch of `EPOCH` batches, from `iter()` until the workers have ended; the median of several. Memory is looked
at in the middle of a last epoch, when all workers live and have filled their prefetch: `pss`, of all
processes, where a page that several map counts once; `uss`, the pages that a process has alone, summed up;
`shared`, the machine's shared memory beyond that of before, also where nobody maps it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import psutil

from bench import machine
from bench.output.layout import say
from bench.peers import PEERS, LoaderSettings, Peer, Unsupported, make_peer
from bench.timing.processes import descendants
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import Load, find_workload
from fastq_loader.extras.insight.processes import proportional, shared_and_private

KIND = "starts"
#: Workloads with their numbers of workers: where starting is all the work, and where memory counts.
MEASURED = (("rows", 2), ("large_u8", 8))
LOADERS = ("torch", "fastq_loader")
EPOCH, EPOCHS = 64, 3
SETTLING_S = 0.2  # in which workers fill their prefetch while the consumer waits
LONGEST_S = 120.0


@dataclass(eq=False, kw_only=True)
class StartLane(Lane):
    """One loader, in a new process for each block. `arguments`: what `main` gets."""

    arguments: Sequence[str]

    def block(self, part: str) -> list[Row]:
        say(f"{self.arguments[1]} alone, with {self.label}")
        command = [sys.executable, "-m", "bench.timing.starts", *self.arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise Unsupported((done.stderr.strip().splitlines() or [f"ended with {done.returncode}"])[-1])
        return [json.loads(done.stdout)]


def cases(options: Namespace, folder: Path) -> Iterator[Case]:
    """Torch's loader and ours with each of `MEASURED`; their files are in `folder`."""
    for name, workers in MEASURED:
        plan = partial(_plan, name, workers, options.start_method, folder)
        yield Case(KIND, name, workers, options.start_method, options.blocks, plan)


def _plan(name: str, workers: int, method: str, folder: Path) -> Plan:
    workload = find_workload(name)
    workload.files(folder)  # written here, so that no loader's memory has what writes them
    line = (name, str(workers), method, str(folder))
    lanes = [StartLane(peer, PEERS[peer].label, LONGEST_S, arguments=(peer, *line)) for peer in LOADERS]
    return Plan({"description": workload.description, "epoch": EPOCH}, lanes)


# ---- the fresh process --------------------------------------------------------------------------


def measured(name: str, load: Load, settings: LoaderSettings) -> Row:
    """The fields of a row for the loader of that name."""
    load, shared = replace(load, batches=EPOCH), psutil.virtual_memory().shared
    began = perf_counter()
    peer = make_peer(name, load, settings._replace(persistent=False))
    batches = peer.epoch()
    next(batches)
    first = perf_counter() - began
    _finish(batches)
    seconds = [_epoch(peer) for _ in range(EPOCHS)]
    memory: Row = {}
    for number, _ in enumerate(peer.epoch()):
        if number == EPOCH // 2:
            sleep(SETTLING_S)
            memory = _memory(shared)
    peer.close()
    timed = {"batches": EPOCH * EPOCHS, "seconds": sum(seconds), "first": first, "epoch": median(seconds)}
    return timed | memory


def _finish(batches: Iterator[object]) -> None:
    for _ in batches:
        pass


def _epoch(peer: Peer) -> float:
    began = perf_counter()
    _finish(peer.epoch())
    return perf_counter() - began


def _memory(shared_before: int) -> Row:
    pids = (os.getpid(), *descendants())
    private = [found[1] for pid in pids if (found := shared_and_private(pid))]
    shared = psutil.virtual_memory().shared - shared_before
    return {"pss": proportional(os.getpid()), "uss": sum(private), "shared": shared}


def main() -> None:
    peer, name, workers, method, folder = sys.argv[1:]
    machine.use_one_thread()
    load = find_workload(name).load(Path(folder))
    print(json.dumps(measured(peer, load, LoaderSettings(int(workers), method))))


if __name__ == "__main__":
    main()
