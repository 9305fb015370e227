"""`--device cuda`: batches onto a GPU, in several ways, here called arms.

A round times each arm's full drain, and its loop with steps of several lengths. Beside them runs a large copy
from pinned memory, the link's peak. Workers come from a fork server, which never sees the device. Nothing of
CUDA is touched at import, nor before a `CudaDevice` is made.

Blocks have `steps`, seconds in which the device was within steps, and `gaps`, those between the end of a
step and the start of the next; `p50` and `p99` are of `next()`, and with torch's loader of every `.to()`.
"""

from __future__ import annotations

import itertools
import resource
import statistics
import time
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils import collect_env
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader as TorchDataLoader

from bench.timing.batches import compare
from bench.timing.rounds import Case, Lane, Plan, Row
from bench.timing.steady import latency
from bench.workloads.ready_made import SHAPES, ReadyMade, Shape
from fastq_loader import DataLoader, Prefetcher

KIND = "device"
LINK, RESIDENT, TORCH = "link", "resident", "torch"
OURS = "register"
ARMS = {
    RESIDENT: "batches that are there",
    TORCH: "torch, pin_memory=True and .to()",
    "torch_side_stream": "the same loader in a Prefetcher",
    OURS: "fastq_loader, register",
}
DRAIN, COPY = "drain", "copy"
LENGTHS = ("0.5", "1", "2", "4")
"""Lengths of steps, in units of a batch's copy."""

START_METHOD = "forkserver"
PREFETCH_FACTOR = 2  # torch's default
PEAK_BYTES = 256 << 20  # long enough that neither the launch nor the first pages count
COPIES = 20  # one after the other
STEPS_AHEAD = 2  # queued before the loop waits for one: as one that reads each loss a step late
LEAD_IN = 0.5  # of a block's length, for what was made ready while others were timed
WARM_UP = 4  # blocks' lengths, to use every block and buffer once
CALIBRATION_CYCLES = 20_000_000  # some 10 ms
DESCRIPTORS = 65_536  # torch sends each field through one of its own

Mark = Any


class CudaDevice:
    """The first GPU; making this initialises it.

    A step is a kernel that counts clock cycles (`torch.cuda._sleep`): it takes one multiprocessor and no
    memory, so that a copy beside it runs at full speed, and it always takes the same time, so that what is
    between two steps is the loader's doing. A matrix product would compete with copies for the memory.
    """

    def __init__(self) -> None:
        self.torch = torch.device("cuda", torch.cuda.current_device())
        rates = []
        for _ in range(5):  # the first ones find the clock low
            start = self.mark()
            torch.cuda._sleep(CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end = self.mark()
            self.wait(end)
            rates.append(CALIBRATION_CYCLES / self.between(start, end))
        self._cycles_per_second = statistics.median_high(rates[1:])

    def mark(self) -> Mark:
        """An event on the current stream, which knows when it took place."""
        # Waiting for an event that is not "blocking" spins, and would be counted as the consumer's CPU time.
        event = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch))
        return event

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def between(self, first: Mark, second: Mark) -> float:
        """Seconds on the device between two events that have taken place."""
        return float(first.elapsed_time(second)) / 1e3

    def step(self, seconds: float) -> None:
        """Keep the current stream busy for so long."""
        torch.cuda._sleep(int(seconds * self._cycles_per_second))  # type: ignore[no-untyped-call]

    def copy_seconds(self, nbytes: int) -> float:
        """Seconds on the device for a copy from pinned memory."""
        there = torch.empty(nbytes, dtype=torch.uint8, device=self.torch)
        here = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).fill_(1)
        for count in (2, COPIES):  # once to warm up
            start = self.mark()
            for _ in range(count):
                there.copy_(here, non_blocking=True)
            end = self.mark()
            self.wait(end)
        return self.between(start, end) / COPIES

    def describe(self) -> dict[str, str]:
        return {
            "device": torch.cuda.get_device_name(self.torch),
            "driver": str(collect_env.get_nvidia_driver_version(collect_env.run)),  # type: ignore[no-untyped-call]
            "cuda": str(torch.version.cuda or torch.version.hip),
        }


class Batches(Iterable[list[int]]):
    """A batch sampler of the same batch over and over."""

    def __init__(self, samples: int) -> None:
        self._indices = list(range(samples))

    def __iter__(self) -> Iterator[list[int]]:
        return itertools.repeat(self._indices)


def arm(
    name: str, shape: Shape, device: torch.device, workers: int, start_method: str, closing: ExitStack
) -> Iterator[Any]:
    """Batches without an end, on the device for what is queued on the current stream from then on.

    `closing` ends a loader of ours; torch's ends with the last reference.
    """
    if name == RESIDENT:
        return itertools.cycle([to_device(ReadyMade(shape).batch(), device) for _ in range(2)])
    common: dict[str, Any] = {
        "dataset": ReadyMade(shape),
        "batch_sampler": Batches(shape.samples),
        "num_workers": workers,
        "prefetch_factor": PREFETCH_FACTOR,
        "persistent_workers": True,
        "multiprocessing_context": start_method,
    }
    if name == OURS:
        ours = DataLoader(**common, device=device)
        closing.callback(ours.close)
        return iter(ours)
    loader: Any = TorchDataLoader(**common, pin_memory=True)
    if name == TORCH:
        return (to_device(batch, device) for batch in loader)
    return iter(Prefetcher(loader, device))


def to_device(batch: Any, device: torch.device) -> Any:
    """Each leaf by itself, on the current stream: what most training loops do."""
    return tree_map(lambda leaf: leaf.to(device, non_blocking=True), batch)


@dataclass(eq=False, kw_only=True)
class LinkLane(Lane):
    """A large copy from pinned memory: the most that the link gives."""

    device: CudaDevice

    def block(self, part: str) -> list[Row]:
        return [{"bytes": PEAK_BYTES, "seconds": self.device.copy_seconds(PEAK_BYTES)}]


@dataclass(eq=False, kw_only=True)
class ArmLane(Lane):
    """One arm with one shape of batches. `make`: makes it; `unit`: a step of length 1, in seconds."""

    make: Callable[[ExitStack], Iterator[Any]]
    shape: Shape
    device: CudaDevice
    unit: float

    def start(self) -> None:
        self._batches = self.make(self.closing)
        batch = next(self._batches)
        self.device.wait(self.device.mark())
        if compare(tree_map(torch.Tensor.cpu, batch), ReadyMade(self.shape).batch())[0]:
            raise RuntimeError("wrong batches")
        self._loop(0.0, WARM_UP * self.seconds)

    def block(self, part: str) -> list[Row]:
        step = 0.0 if part == DRAIN else float(part) * self.unit
        self._loop(step, LEAD_IN * self.seconds)
        found, waits, spans = self._loop(step, self.seconds)
        if step:
            found["steps"] = sum(self.device.between(start, end) for start, end in spans)
            pairs = itertools.pairwise(spans)
            found["gaps"] = sum(self.device.between(before[1], after[0]) for before, after in pairs)
        percentiles = latency(waits)
        return [found | {name: percentiles[name] for name in ("p50", "p99")}]

    def close(self) -> None:
        super().close()
        self._batches = iter(())  # torch's workers end with the last reference

    def _loop(self, step: float, seconds: float) -> Looped:
        device = self.device
        return loop(self._batches, device, seconds, (lambda batch: device.step(step)) if step else None)


Looped = tuple[Row, list[float], list[tuple[Mark, Mark]]]


def loop(
    batches: Iterator[Any], device: Any, seconds: float, step: Callable[[Any], None] | None = None
) -> Looped:
    """Take batches, at least three, until time is up and the device is done with them.

    Returns:
        Batches, seconds and the consumer's CPU; the host's seconds within each `next()`; and each step
        between its events.
    """
    waits: list[float] = []
    spans: list[tuple[Mark, Mark]] = []
    under_way: deque[Mark] = deque()
    cpu, began = time.process_time(), time.perf_counter()
    while len(waits) < 3 or time.perf_counter() < began + seconds:
        if len(under_way) == STEPS_AHEAD:
            device.wait(under_way.popleft())
        asked = time.perf_counter()
        batch = next(batches)
        waits.append(time.perf_counter() - asked)
        start = end = device.mark()
        if step is not None:
            step(batch)
            end = device.mark()
        spans.append((start, end))
        under_way.append(end)
        del batch  # its memory may be used again after the step
    device.wait(under_way[-1])
    found = {"batches": len(waits), "seconds": time.perf_counter() - began}
    return found | {"consumer_cpu": time.process_time() - cpu}, waits, spans


def cases(
    options: Namespace, device: CudaDevice, cores: int, start_method: str = START_METHOD
) -> Iterator[Case]:
    """All arms with each of these shapes. There are as many workers as the machine has cores, but for the
    consumer's and that of torch's pin thread."""
    allow_descriptors()
    workers = options.workers[0] or max(1, cores - 2)

    def plan(name: str) -> Plan:
        shape = SHAPES[name]
        facts = {"description": shape.description, "batch_bytes": shape.nbytes}
        unit = facts["unit"] = device.copy_seconds(shape.nbytes)
        common: dict[str, Any] = {"shape": shape, "device": device, "unit": unit, "seconds": options.seconds}
        lanes: list[Lane] = [LinkLane(LINK, "peak of a pinned copy", parts=(COPY,), device=device)]
        for peer in options.peers:
            make = partial(arm, peer, shape, device.torch, workers, start_method)
            parts = LENGTHS if peer == RESIDENT else (DRAIN, *LENGTHS)
            lanes.append(ArmLane(peer, ARMS[peer], parts=parts, make=make, **common))
        return Plan(facts, lanes, (COPY, DRAIN, *LENGTHS))

    for name in options.workloads:
        yield Case(KIND, name, workers, start_method, options.blocks, partial(plan, name))


def allow_descriptors() -> None:
    """Before the fork server starts, whose children have the same limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
