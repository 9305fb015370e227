"""One peer alone in a fresh process (`python -m bench.timing.alone`): its start, and its memory.

The time to the first batch needs a fresh process because a fork server that is up, or modules that a program
has imported, belong to what is measured. The clock runs from the loader's constructor to the first batch.

Memory needs one so that no loader sees another's and the dataset costs each of them the same. It is read from
outside while the peer iterates, which also sees what is alive in the middle of a batch. PSS counts a page
only while somebody maps it, and batches that wait in shared memory may be mapped by nobody (torch's are). So
beside it stands the shared memory of the whole machine beyond what it was before.
"""

from __future__ import annotations

import argparse
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.machine import use_one_thread
from bench.peers import PEERS, LoaderSettings, Peer, peer_class
from bench.timing.batches import touch
from bench.timing.processes import descendants, descriptors, machine_shared_memory, pss
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.steady import Prepare
from bench.workloads import Step, Workload, find_workload

FIRST_BATCH = "first batch, in a fresh process"
LIMIT_S = 120.0  # many spawned workers import torch on few cores
SAMPLING_S, INTERVAL_S = 1.2, 0.04  # a look takes milliseconds: looking more often would slow the loader
STOPPING_S = 30.0
_STEADY = "steady"


class AloneLane(Lane):
    """A peer that runs in a process of its own, made for every block."""

    seconds = LIMIT_S

    def __init__(self, peer: str, workload: Workload, folder: Path, settings: LoaderSettings) -> None:
        super().__init__(peer, PEERS[peer].label)
        self._arguments = [workload.name, peer, str(folder), str(settings.num_workers), settings.start_method]

    def _popen(self, what: str) -> subprocess.Popen[str]:
        # In a session of its own Ctrl-C does not reach it: it ends when its standard input is closed.
        return subprocess.Popen(
            [sys.executable, "-m", "bench.timing.alone", what, *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )


class StartLane(AloneLane):
    def block(self, part: str) -> list[Row]:
        with self._popen("start") as process:
            try:
                written, errors = process.communicate(timeout=LIMIT_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise RuntimeError((errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1])
        return [{"part": FIRST_BATCH, "seconds": float(written)}]


class MemoryLane(AloneLane):
    def block(self, part: str) -> list[Row]:
        before = machine_shared_memory()
        with self._popen("memory") as process:
            assert process.stdin is not None
            assert process.stdout is not None
            looks, died = [], True
            try:
                spoke = select.select([process.stdout], [], [], LIMIT_S)[0]
                if spoke and process.stdout.readline().strip() == _STEADY:
                    deadline = time.monotonic() + SAMPLING_S
                    while time.monotonic() < deadline:
                        looks.append(_look(process.pid, before))
                        time.sleep(INTERVAL_S)
                    died = process.poll() is not None
            finally:
                process.stdin.close()
                try:
                    process.wait(STOPPING_S)
                except subprocess.TimeoutExpired:
                    process.kill()
        if died:
            raise RuntimeError(f"its process ended with {process.returncode} after {len(looks)} looks")
        return [{name: max(look[name] for look in looks) for name in looks[0]}]


def _look(consumer: int, shared_before: int) -> dict[str, int]:
    workers = descendants(consumer)
    return {
        "pss": pss([consumer, *workers]),
        "shared_memory": machine_shared_memory() - shared_before,
        "consumer_descriptors": descriptors(consumer),
        "worker_descriptors": sum(map(descriptors, workers)),
    }


def case(
    axis: str, name: str, peers: Sequence[str], settings: LoaderSettings, blocks: int, prepare: Prepare
) -> Case:
    """The start ("start") or the memory ("memory") of one workload's loaders."""
    workload = find_workload(name)
    kind = StartLane if axis == "start" else MemoryLane

    def plan() -> Plan:
        folder = prepare(workload)
        lanes = [kind(peer, workload, folder, settings) for peer in peers]
        return Plan({"description": workload.description}, lanes)

    return Case(axis, name, settings.num_workers, settings.start_method, blocks, plan)


# ---- the fresh process --------------------------------------------------------------------------


def _start(make: type[Peer], workload: Workload, folder: Path, settings: LoaderSettings) -> None:
    load = workload.build(folder)
    started = time.perf_counter()
    peer = make(load, settings)
    batches = peer.epoch()
    next(batches)
    print(time.perf_counter() - started)
    del batches
    peer.close()


def _iterate(make: type[Peer], workload: Workload, folder: Path, settings: LoaderSettings) -> None:
    """Until standard input is closed, which also happens when the parent dies."""
    peer = make(workload.build(folder), settings)
    try:
        _consume(peer, workload.new_step())
    finally:
        peer.close()


def _consume(peer: Peer, step: Step) -> None:
    settled = 4 * (peer.prefetched + 1)  # by then every buffer has been used several times
    seen = 0
    while True:
        for batch in peer.epoch():
            touch(batch)
            step(batch)
            seen += 1
            if seen == settled:
                print(_STEADY, flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                return


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.timing.alone")
    parser.add_argument("what", choices=("start", "memory"))
    parser.add_argument("workload", type=find_workload)
    parser.add_argument("peer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("start_method")
    given = parser.parse_args()
    use_one_thread()
    run = _start if given.what == "start" else _iterate
    settings = LoaderSettings(given.workers, given.start_method)
    run(peer_class(given.peer), given.workload, given.folder, settings)


if __name__ == "__main__":
    main()
