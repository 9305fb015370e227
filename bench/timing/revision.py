"""One revision of the package under measurement, in a process of its own: `timing.against` starts it.

The package comes from a folder that stands before this bench on the path, and may be an older one: nothing
here may import more of it than `DataLoader`.

The process gets a `Trial` as JSON, makes the loader and answers with a line. For every line that it reads it
times a block and answers with another one. An answer is JSON: the fields of a row, or in `failure` why there
are none. The end of its input is its own end.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import fastq_loader
from bench import machine
from bench.peers import LoaderSettings, Peer
from bench.peers.fastq import FastqLoader
from bench.timing.processes import Owners, named, usage
from bench.timing.rounds import Row, reason
from bench.timing.steady import PeerLane
from bench.timing.turns import EPOCH
from bench.workloads import Load, Workload, find_workload

NEW_WORKERS = "new_workers"
"""The name of `rows` with new workers in each epoch."""


class Trial(NamedTuple):
    """What is timed.

    Attributes:
        package: the folder that the package has to come from. `folder`: where workloads keep their files.
        keywords: arguments of the loader beyond torch's.
        seconds: of a block.
    """

    package: str
    folder: str
    workload: str
    workers: int
    start_method: str
    prefetch_factor: int
    keywords: dict[str, Any]
    seconds: float


class EpochsLane(PeerLane):
    """Whole epochs, from `iter()` until the last batch and the end of the workers."""

    def _timed(self, length: float) -> Row:
        self._discard(EPOCH)  # what is left of one that was begun
        batches, before, started = 0, usage(()), perf_counter()
        while (seconds := perf_counter() - started) < length:
            self._batches = self._peer.epoch()
            batches += self._discard(EPOCH + 1)  # the call that ends the epoch ends the workers
        return {"batches": batches, "seconds": seconds, **named(usage(()) - before)}


def workload_and_load(name: str, folder: Path) -> tuple[Workload, Load]:
    """What is compared under this name."""
    workload = find_workload("rows" if name == NEW_WORKERS else name)
    load = workload.load(folder)
    return workload, replace(load, batches=EPOCH) if name == NEW_WORKERS else load


def lane_of(trial: Trial) -> PeerLane:
    """The loader and the loop that consumes it, not started yet."""
    if not Path(fastq_loader.__file__).is_relative_to(trial.package):
        raise RuntimeError(f"the package came from {fastq_loader.__file__}, not from {trial.package}")
    workload, load = workload_and_load(trial.workload, Path(trial.folder))
    persistent = trial.workload != NEW_WORKERS
    settings = LoaderSettings(trial.workers, trial.start_method, trial.prefetch_factor, persistent)
    loader = staticmethod(partial(fastq_loader.DataLoader, **trial.keywords))
    peer: type[Peer] = type("Revision", (FastqLoader,), {"loader_class": loader})
    return (PeerLane if persistent else EpochsLane)(
        "fastq_loader",
        "fastq_loader",
        trial.seconds,
        make=partial(peer, load, settings),
        workload=workload,
        load=load,
        burst=max(1, trial.workers),
        owners=Owners(),
    )


def answers(trial: Trial) -> Iterator[Row]:
    """One when the loader runs, and one for every line of input, until one says why it is the last."""
    try:
        lane = lane_of(trial)
        try:
            lane.start()
            yield {}
            for _ in sys.stdin:
                yield lane.block("")[0]
        finally:
            lane.close()
    except Exception as error:
        yield {"failure": reason(error)}


if __name__ == "__main__":
    output = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what a dataset prints is no answer
    warnings.filterwarnings("ignore", "This DataLoader will create", UserWarning)
    machine.use_one_thread()
    torch.manual_seed(0)  # both revisions load the same samples
    for answer in answers(Trial(**json.loads(sys.argv[1]))):
        print(json.dumps(answer), file=output)
