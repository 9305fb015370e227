"""Peak memory and descriptors of one peer: the summed PSS of its consumer and its workers.

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

import select
import subprocess
import sys
import time
from pathlib import Path

from bench import child
from bench.batches import touch
from bench.peers import LoaderSettings, Peer
from bench.proc import descriptors, machine_shmem, process_tree, pss
from bench.results import Peak
from bench.workloads import Step

SAMPLING_S = 1.2
INTERVAL_S = 0.04  # reading one process's rollup takes milliseconds: much shorter would slow the loader
STARTING_S = 120.0  # many spawned workers that each import torch on few cores
STOPPING_S = 30.0
_STEADY = "steady\n"


def peak_memory(workload: str, peer: str, folder: Path, settings: LoaderSettings) -> Peak:
    """Run the peer in a process of its own; what it held at its peak.

    Raises:
        RuntimeError: the process ended or hung before it was measured.
    """
    before = machine_shmem()
    # In a session of its own a Ctrl-C does not reach the child: it stops when its standard input is closed.
    with subprocess.Popen(
        child.command("bench.memory", workload, peer, folder, settings),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        samples, died = [], True
        try:
            spoke = select.select([process.stdout], [], [], STARTING_S)[0]
            if spoke and process.stdout.readline() == _STEADY:
                deadline = time.monotonic() + SAMPLING_S
                while time.monotonic() < deadline:
                    samples.append(_sample(process.pid, before))
                    time.sleep(INTERVAL_S)
                died = process.poll() is not None
        finally:
            process.stdin.close()
            try:
                process.wait(STOPPING_S)
            except subprocess.TimeoutExpired:
                process.kill()
    if died:
        raise RuntimeError(
            f"memory: its process ended with {process.returncode} after {len(samples)} samples"
        )
    highest = max(samples, key=lambda sample: sample["Pss"])
    return Peak(
        pss=highest["Pss"],
        pss_anon=highest["Pss_Anon"],
        pss_file=highest["Pss_File"],
        pss_shmem=highest["Pss_Shmem"],
        shmem=max(sample["Shmem"] for sample in samples),
        consumer_descriptors=max(sample["consumer_descriptors"] for sample in samples),
        worker_descriptors=max(sample["worker_descriptors"] for sample in samples),
    )


def _sample(consumer: int, shmem_before: int) -> dict[str, int]:
    pids = process_tree(consumer)
    return {
        **pss(pids),
        "Shmem": machine_shmem() - shmem_before,
        "consumer_descriptors": descriptors(consumer),
        "worker_descriptors": sum(descriptors(pid) for pid in pids[1:]),
    }


def main() -> None:
    """The child: iterate until standard input is closed, which also happens when the parent dies."""
    asked = child.alone("bench.memory")
    peer = asked.peer(asked.load, asked.settings)
    try:
        _iterate(peer, asked.workload.new_step())
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
