"""`--device cuda --train`: whole trainings, with each loader and with batches that are on the device already.

The lanes of a training take turns. A block makes a new loader, and times its first batch and then its steady
state: `first` is seconds from making the loader to its first batch on the device, `waited` those within
`next()` (of torch's way also within `.to()`), and `locked` the most page-locked memory, in bytes. Operations
of torch have as many threads in the consumer as torch gives them: that is how users train.
"""

from __future__ import annotations

import itertools
import multiprocessing
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader as TorchDataLoader

from bench import machine
from bench.peers import LoaderSettings
from bench.peers.torch_loader import loader_arguments
from bench.timing.batches import compare, nbytes
from bench.timing.device import (
    LEAD_IN,
    RESIDENT,
    START_METHOD,
    TORCH,
    CudaDevice,
    allow_descriptors,
    loop,
    to_device,
)
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.workloads import Load
from bench.workloads.trainings import Training, trainings
from fastq_loader import DataLoader

KIND = "training"
PINNED, ON_DEVICE = "fastq_loader_pinned", "fastq_loader_device"
LANES = {
    TORCH: "torch, pin_memory=True",
    PINNED: "fastq_loader, pin_memory=True",
    ON_DEVICE: "fastq_loader, device=",
    RESIDENT: "batches that are there",
}
SPARE_CORES = 4  # for the consumer, torch's pin thread and the driver


class Cuda(CudaDevice):
    """The first GPU, and torch's page-locked memory."""

    def begin(self) -> None:
        """Give torch's cached page-locked memory back, and count from here."""
        torch._C._host_emptyCache()
        torch.cuda.reset_peak_host_memory_stats()

    def locked(self) -> int:
        """The most bytes that torch has had page-locked since `begin`."""
        return int(torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0))


class Host:
    """This machine's CPUs in place of a GPU, for a try."""

    torch = torch.device("cpu")

    def mark(self) -> None:
        """Nothing is queued: what was called has run."""

    def wait(self, mark: None) -> None:
        """Nothing is under way."""

    def begin(self) -> None:
        """Nothing is page-locked."""

    def locked(self) -> int:
        return 0

    def describe(self) -> dict[str, str]:
        return {"device": "no GPU: small sizes, for a try", "driver": "none", "cuda": "none"}


class Trainer:
    """A model under training: call it with a batch that is on the device."""

    def __init__(self, training: Training, device: torch.device) -> None:
        torch.manual_seed(0)
        model: Any = training.model().to(device)
        if device.type == "cuda":  # its fast layout; on a CPU, torch 2.13 crashes in some shapes
            model = model.to(memory_format=torch.channels_last)
        self._model, self._loss = model, training.loss
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.01)
        self._autocast = partial(torch.autocast, device.type, torch.bfloat16, device.type == "cuda")

    def __call__(self, batch: Any) -> None:
        with self._autocast():
            loss = self._loss(self._model, batch)
        self._optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()


@dataclass(eq=False, kw_only=True)
class TrainingLane(Lane):
    """A training with one way to get its batches."""

    training: Training
    load: Load
    settings: LoaderSettings
    device: Any

    def start(self) -> None:
        self._first = next(self.load.share())
        self._train: Callable[[Any], None] = Trainer(self.training, self.device.torch)
        loop(self._resident(), self.device, LEAD_IN * self.seconds, self._train)

    def block(self, part: str) -> list[Row]:
        self.device.begin()
        with ExitStack() as closing:
            began = time.perf_counter()
            batches = self._batches(closing)
            batch = next(batches)
            self.device.wait(self.device.mark())
            found: Row = {"first": time.perf_counter() - began}
            self._check(batch)
            loop(batches, self.device, LEAD_IN * self.seconds, self._train)
            row, waits, _ = loop(batches, self.device, self.seconds, self._train)
            found |= row | {"waited": sum(waits), "locked": self.device.locked() + self._registered()}
            del batches, batch  # torch's workers end with the last reference
        return [found]

    def close(self) -> None:
        self._train = lambda batch: None  # its model is let go of
        super().close()

    def _batches(self, closing: ExitStack) -> Iterator[Any]:
        """Batches without an end, on the device."""
        if self.peer == RESIDENT:
            return self._resident()
        device, arguments = self.device.torch, loader_arguments(self.load, self.settings)
        on_device = {"device": device} if self.peer == ON_DEVICE else {"pin_memory": device.type == "cuda"}
        if self.peer == TORCH:
            loader: Any = TorchDataLoader(**arguments, **on_device)
        else:
            loader = DataLoader(**arguments, **on_device)
            closing.callback(loader.close)
        if self.peer == ON_DEVICE:
            self._ours = loader
            return iter(loader)
        return (to_device(batch, device) for batch in loader)

    def _resident(self) -> Iterator[Any]:
        return itertools.repeat(to_device(self._first, self.device.torch))

    def _registered(self) -> int:
        """Bytes of workers' blocks that our loader has page-locked in place."""
        staging = self._ours.statistics().staging if self.peer == ON_DEVICE else None
        return staging.pinned_bytes if staging else 0

    def _check(self, batch: Any) -> None:
        values = not self.training.workload.random
        if compare(tree_map(torch.Tensor.cpu, batch), self._first, values=values)[0]:
            raise RuntimeError("wrong batches")


def cases(options: Namespace, device: Any, here: Row, folder: Path) -> Iterator[Case]:
    """Each of these trainings, with all of these loaders."""
    allow_descriptors()
    cuda = device.torch.type == "cuda"
    method = START_METHOD if cuda else options.start_method
    if cuda:  # else each worker of torch's would import torch, in every block
        multiprocessing.set_forkserver_preload([__name__])
    workers = options.workers[0] or max(1, here["cores"] - SPARE_CORES)
    known, settings = trainings(small=not cuda), LoaderSettings(workers, method)

    def plan(name: str) -> Plan:
        training = known[name]
        load = training.workload.load(folder)
        where = f"{here['device']}, {here['cores']} cores, commit {machine.revision()['commit']}"
        facts: Row = {
            "description": training.workload.description,
            "batch_size": load.batch_size,
            "batch_bytes": nbytes(next(load.share())),
            "notes": [where],
        }
        common: dict[str, Any] = {"training": training, "load": load, "settings": settings, "device": device}
        lanes = [TrainingLane(peer, LANES[peer], options.seconds, **common) for peer in options.peers]
        return Plan(facts, lanes)

    for name in options.workloads:
        yield Case(KIND, name, workers, method, options.blocks, partial(plan, name))
