"""One peer alone in a fresh process (`python -m bench.timing.alone`): its start, and its memory.

The time to the first batch needs a fresh process because a fork server that is up, or modules that a program
has imported, belong to what is measured. The clock runs from the loader's constructor to the first batch.

Memory needs one so that no loader sees another's and the dataset costs each of them the same. It is read from
outside while the peer iterates, which also sees what is alive in the middle of a batch. PSS counts a page
only while somebody maps it, and batches that wait in shared memory may be mapped by nobody (torch's are). So
beside it stands the shared memory of the whole machine beyond what it was before.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.machine import use_one_thread
from bench.peers import PEERS, LoaderSettings, Peer, peer_class
from bench.timing.batches import touch
from bench.timing.processes import descendants, descriptors
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import Step, find_workload
from fastq_loader.system.pages import proportional

FIRST_BATCH = "first batch, in a fresh process"
LIMIT_S = 120.0  # many spawned workers import torch on few cores
SAMPLING_S, INTERVAL_S = 1.2, 0.04  # a look takes milliseconds: looking more often would slow the loader
STOPPING_S = 30.0
STEADY = "steady\n"


@dataclass(eq=False, kw_only=True)
class AloneLane(Lane):
    """A peer that runs in a process of its own, made for every block."""

    arguments: Sequence[str]

    def block(self, part: str) -> list[Row]:
        command = [sys.executable, "-m", "bench.timing.alone", self.peer, *self.arguments]
        before = psutil.virtual_memory().shared
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        # In a session of its own Ctrl-C does not reach it: it ends when its standard input is closed.
        with subprocess.Popen(command, text=True, start_new_session=True, **pipes) as process:
            try:
                assert process.stdout is not None
                spoke = select.select([process.stdout], [], [], LIMIT_S)[0]
                said = process.stdout.readline() if spoke else ""
                looks = _looks(process.pid, before) if said == STEADY else []
                _, errors = process.communicate(timeout=STOPPING_S)
            except BaseException:
                process.kill()
                raise
        if process.returncode or not said:
            raise RuntimeError((errors.strip().splitlines() or [f"ended with {process.returncode}"])[-1])
        if said != STEADY:
            return [{"part": FIRST_BATCH, "seconds": float(said)}]
        return [{name: max(look[name] for look in looks) for name in looks[0]}]


def _looks(consumer: int, shared_before: int) -> list[dict[str, int]]:
    found = []
    deadline = time.monotonic() + SAMPLING_S
    while time.monotonic() < deadline:
        workers = descendants(consumer)
        found.append(
            {
                "pss": proportional(consumer),
                "shared_memory": psutil.virtual_memory().shared - shared_before,
                "consumer_descriptors": descriptors(consumer),
                "worker_descriptors": sum(map(descriptors, workers)),
            }
        )
        time.sleep(INTERVAL_S)
    return found


def case(
    axis: str, name: str, peers: Sequence[str], settings: LoaderSettings, blocks: int, folder: Path
) -> Case:
    """The start ("start") or the memory ("memory") of one workload's loaders."""
    workload, workers, method = find_workload(name), settings.num_workers, settings.start_method

    def plan() -> Plan:
        workload.files(folder)  # written here, so that what writes them is in no loader's memory
        arguments = (axis, name, str(folder), str(workers), method)
        lanes = [AloneLane(peer, PEERS[peer].label, LIMIT_S, arguments=arguments) for peer in peers]
        return Plan({"description": workload.description}, lanes)

    return Case(axis, name, workers, method, blocks, plan)


# ---- the fresh process --------------------------------------------------------------------------


def _consume(peer: Peer, step: Step, settles: int) -> None:
    """Until standard input is closed, which also happens when the parent dies."""
    settled = max(settles, 4 * (peer.prefetched + 1))  # by then every buffer has been used several times
    seen = 0
    while True:
        for batch in peer.epoch():
            touch(batch)
            step(batch)
            seen += 1
            if seen == settled:
                print(STEADY, end="", flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                return


def main() -> None:
    name, axis, workload_name, folder, workers, start_method = sys.argv[1:]
    use_one_thread()
    workload, settings = find_workload(workload_name), LoaderSettings(int(workers), start_method)
    load, make = workload.load(Path(folder)), peer_class(name)
    started = time.perf_counter()
    peer = make(load, settings)
    try:
        if axis == "memory":
            _consume(peer, workload.new_step(), workload.settles)
        else:
            batches = peer.epoch()
            next(batches)
            print(time.perf_counter() - started)
            del batches
    finally:
        peer.close()


if __name__ == "__main__":
    main()
