"""The ceiling: what these processes could deliver if delivering cost nothing.

As many processes as the loaders have workers fetch and collate the same batches, each its share, into private
memory that is warm, and drop them. There is no consumer, no queue and no shared memory: what a loader loses
against this is what its transport costs. Without workers it is one process.

A tensor that torch's default collate would make goes into a buffer that was used for it before. What a user's
collate makes is dropped as it comes.
"""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from bench.timing.processes import Owners, named, usage
from bench.timing.rounds import Lane, Row
from bench.workloads import Load

# Below this malloc's memory is as warm as a buffer, and looking for the buffer costs more than it saves.
SMALLEST_BUFFER = 64 << 10  # bytes
STOPPING_S = 10.0
CEILING = "ceiling"
WARM_UP = 0.5  # of a block's length


class WarmBuffers:
    """torch's functions that stack samples, into buffers that are kept: one for each leaf of a batch."""

    def __init__(self) -> None:
        self._buffers: dict[int, torch.Tensor] = {}
        self._leaf = 0

    def begin_batch(self) -> None:
        """The batch before may be overwritten from here on."""
        self._leaf = 0

    def install(self) -> None:
        """Replace torch's functions in this process."""
        for kind in (torch.Tensor, np.ndarray):
            usual = torch_collate.default_collate_fn_map[kind]
            torch_collate.default_collate_fn_map[kind] = partial(self._stack, usual)

    def _stack(self, usual: Any, samples: Any, *, collate_fn_map: Any = None) -> Any:
        first = samples[0]
        plain = type(first) is torch.Tensor or (isinstance(first, np.ndarray) and first.dtype.kind in "biufc")
        if not plain or first.nbytes * len(samples) < SMALLEST_BUFFER:
            return usual(samples, collate_fn_map=collate_fn_map)
        like, shape = torch.as_tensor(first), (len(samples), *first.shape)
        kept = self._buffers.get(self._leaf)
        if kept is None or kept.shape != shape or kept.dtype != like.dtype:
            kept = self._buffers[self._leaf] = torch.zeros(shape, dtype=like.dtype)
        self._leaf += 1
        if isinstance(first, np.ndarray):
            np.stack(samples, out=kept.numpy())
            return kept
        return torch.stack(samples, 0, out=kept)


@dataclass(eq=False, kw_only=True)
class CeilingLane(Lane):
    """The processes, and the clock over all of them."""

    load: Load
    workers: int
    owners: Owners

    def start(self) -> None:
        """Fork them: they share the dataset and differ in nothing from a loader's forked workers."""
        context = multiprocessing.get_context("fork")
        self._pipes: list[Connection] = []
        for number in range(max(1, self.workers)):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(self.load, number, self.workers, theirs), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.closing.callback(_stop, ours, process)
        self._timed(self.seconds * WARM_UP)

    def block(self, part: str) -> list[Row]:
        return [self._timed(self.seconds)]

    def _timed(self, seconds: float) -> Row:
        """Let all of them work for about `seconds`; their rates are added up."""
        pids = self.owners.of(self.peer)
        before = usage(pids)
        for pipe in self._pipes:
            pipe.send(seconds)
        counted = [pipe.recv() for pipe in self._pipes]
        used = named(usage(pids) - before) | {"consumer_cpu": 0.0}
        batches = sum(count for count, _ in counted)
        rate = sum(count / took for count, took in counted)
        # The processes worked side by side: the time is what makes the sum of their rates the rate.
        return {"batches": batches, "seconds": batches / rate, **used}


def _stop(pipe: Connection, process: BaseProcess) -> None:
    with suppress(BrokenPipeError):  # its process is gone already
        pipe.send(None)
    pipe.close()
    process.join(STOPPING_S)
    if process.is_alive():
        process.kill()
        process.join()


@contextmanager
def as_worker(worker: int, workers: int, dataset: Dataset[Any]) -> Iterator[None]:
    """Let `torch.utils.data.get_worker_info()` say so; nothing changes with 0 workers."""
    before = torch_worker._worker_info
    if workers:
        info = torch_worker.WorkerInfo(id=worker, num_workers=workers, seed=0, dataset=dataset)
        torch_worker._worker_info = info
    try:
        yield
    finally:
        torch_worker._worker_info = before


def first_batch(load: Load, shards: int) -> Any:
    """The first batch that a loader gives with so many workers; 0 is none."""
    with as_worker(0, shards, load.dataset):
        return next(load.share(0, shards))


def _work(load: Load, number: int, workers: int, pipe: Connection) -> None:
    """One process: work for as long as the pipe says, answer (batches, seconds), again; None is the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the consumer decides what Ctrl-C means
    torch.set_num_threads(1)
    gc.freeze()
    buffers = WarmBuffers()
    buffers.install()
    # A consumer that was killed is the end, too.
    with as_worker(number, workers, load.dataset), suppress(EOFError, ConnectionResetError):
        batches = _endless(load, number, workers)
        while (seconds := pipe.recv()) is not None:
            taken, started = 0, perf_counter()
            while (took := perf_counter() - started) < seconds:
                buffers.begin_batch()
                next(batches)
                taken += 1
            pipe.send((taken, took))


def _endless(load: Load, number: int, workers: int) -> Iterator[Any]:
    if load.shuffle:
        # The order is the consumer's work, so it is drawn once, before the clock runs.
        indices = list(islice(load.index_batches(), number, None, max(1, workers)))
        yield from (load.collate(load.fetch(batch)) for batch in cycle(indices))
    while True:
        yield from load.share(number, workers)
