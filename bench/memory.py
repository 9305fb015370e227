"""Peak memory of one peer: the summed PSS of its consumer and its workers.

Each peer runs alone in a fresh process (`python -m bench.memory`, started from here), so that no loader sees
another's memory and the dataset costs each of them the same. The figures are read from outside while it
iterates, so that they also see what is alive in the middle of a batch. They are whole: interpreter, torch and
dataset are in them. Pages of library files are divided among all processes that map them, this one included;
the parts (Pss_Anon, Pss_File, Pss_Shmem) are in the JSON file.

PSS counts a page only while somebody maps it. Batches that wait in shared memory between a worker that is
done with them and a consumer that has not taken them yet may be mapped by nobody (torch's are). So beside it
stands the shared memory of the whole machine (Shmem of /proc/meminfo) beyond what it was before the peer
started. The consumer reads one byte of every page of a batch, as a training step would.
"""

from __future__ import annotations

import argparse
import select
import subprocess
import sys
import time
from pathlib import Path

from bench.batches import touch
from bench.machine import use_one_thread
from bench.peers import LoaderSettings, Peer, peer_class
from bench.proc import machine_shmem, tree_pss
from bench.results import Peak
from bench.workloads import Step, find_workload

SAMPLING_S = 1.2
INTERVAL_S = 0.04  # reading one process's rollup takes milliseconds: much shorter would slow the loader
STARTING_S = 120.0  # many spawned workers that each import torch on few cores
STOPPING_S = 30.0
_STEADY = "steady\n"


def peak_memory(workload: str, peer: str, folder: Path, settings: LoaderSettings) -> Peak:
    """Run the peer in a process of its own; what it held at its peak."""
    command = [sys.executable, "-m", "bench.memory", workload, peer, str(folder)]
    command += [str(settings.num_workers), settings.start_method]
    before = machine_shmem()
    # In a session of its own a Ctrl-C does not reach the child: it stops when its standard input is closed.
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        samples = []
        try:
            spoke = select.select([child.stdout], [], [], STARTING_S)[0]
            if spoke and child.stdout.readline() == _STEADY:
                deadline = time.monotonic() + SAMPLING_S
                while time.monotonic() < deadline:
                    samples.append(tree_pss(child.pid) | {"Shmem": machine_shmem() - before})
                    time.sleep(INTERVAL_S)
        finally:
            child.stdin.close()
            try:
                child.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                child.kill()
    if child.returncode or not samples:
        raise RuntimeError(
            f"memory of peer {peer!r} on workload {workload!r}: its process ended with {child.returncode} "
            f"after {len(samples)} samples"
        )
    highest = max(samples, key=lambda sample: sample["Pss"])
    return Peak(
        pss=highest["Pss"],
        pss_anon=highest["Pss_Anon"],
        pss_file=highest["Pss_File"],
        pss_shmem=highest["Pss_Shmem"],
        shmem=max(sample["Shmem"] for sample in samples),
        consumer_descriptors=0,
        worker_descriptors=0,
    )


def main() -> None:
    """The child: iterate until standard input is closed, which also happens when the parent dies."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory")
    parser.add_argument("workload")
    parser.add_argument("peer")
    parser.add_argument("folder", type=Path)
    parser.add_argument("workers", type=int)
    parser.add_argument("start_method")
    arguments = parser.parse_args()
    use_one_thread()
    workload = find_workload(arguments.workload)
    settings = LoaderSettings(arguments.workers, arguments.start_method)
    peer = peer_class(arguments.peer)(workload.build(arguments.folder), settings)
    try:
        _iterate(peer, workload.new_step())
    finally:
        peer.close()


def _iterate(peer: Peer, step: Step) -> None:
    settled = 4 * (peer.prefetched + 1)  # by then every buffer has been used several times
    seen = 0
    while True:
        for batch in peer.epoch():
            touch(batch)
            step(batch)
            seen += 1
            if seen == settled:
                print(_STEADY, end="", flush=True)
            if select.select([sys.stdin], [], [], 0)[0]:
                return


if __name__ == "__main__":
    main()
