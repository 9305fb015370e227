"""`--device cuda`: batches onto a GPU, by the arms of `peers.device`, for every shape of batches.

A round times, of every arm in turn: a full drain, steps of several lengths, `next()` when the batch is ready,
and the arm's kind of copies without a loader. Beside them runs a large copy, which is the link's peak.
"""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch.utils._pytree import tree_map

from bench.peers.device import ARMS, BOUNCE, OURS, RESIDENT, START_METHOD, Arm, host_only, make
from bench.timing.batches import compare
from bench.timing.device_clock import PAUSE_S, CudaDevice, Pace, timed_block
from bench.timing.rounds import Case, Lane, Plan, Row, time_limit
from bench.workloads.ready_made import SHAPES, ReadyMade, Shape

AXIS = "device"
LINK = "link"
LENGTHS = ("0.5", "1", "2", "4")
"""Lengths of steps, in units of the shape."""
DRAIN, READY, COPY = "drain", "ready", "copy"
PARTS = (DRAIN, *LENGTHS, READY, COPY)

PEAK_BYTES = 256 << 20  # long enough that neither the launch nor the first pages count
SUPPLY = 1.2
"""So many times what the steps need is enough of a supply for the goal of the stall to hold."""
EPOCHS = (2, 20)
"""After so many epochs one looks at the memory that is reserved on the device."""
EPOCH_BATCHES = 32
SUPPLY_BLOCKS = 3
STARTING_S = 60.0
WARM_UP_S = 6.0  # at most, to use every block and buffer once: the system makes a gigabyte of pages in 2 s
ENDING_S = 15.0  # beyond the time for blocks; the epochs take a second or two for each arm
LIMIT_S = 540.0  # no block starts after it: what is left to do then fits into the rest of ten minutes
DESCRIPTORS = 65_536  # torch sends each field through one of its own


class LinkLane(Lane):
    """A large copy from pinned memory: the most that the link gives."""

    parts = (COPY,)

    def __init__(self, device: CudaDevice) -> None:
        super().__init__(LINK, "peak of a pinned copy")
        self._device = device

    def block(self, part: str) -> list[Row]:
        return [{"bytes": PEAK_BYTES, "seconds": self._device.copy_seconds(BOUNCE, PEAK_BYTES, 1)}]


class ArmLane(Lane):
    """One arm with one shape of batches; `unit` is a step of length 1 in seconds, `until` as of a plan."""

    def __init__(self, name: str, shape: Shape, device: CudaDevice, unit: float, until: float) -> None:
        super().__init__(name, ARMS[name])
        self.parts = LENGTHS if name == RESIDENT else PARTS
        self.workers, self.start_method = 1, START_METHOD
        self._shape = shape
        self._device = device
        self._until = until
        self._paces = {DRAIN: Pace(), READY: Pace(pause=PAUSE_S)}
        self._paces |= {length: Pace(float(length) * unit) for length in LENGTHS}
        self._about: Row = {}
        self._arm: Arm | None = None

    def start(self) -> None:
        arm = self._arm = make(self.peer, self._shape, self._device.torch, self.workers, self.start_method)
        began = time.perf_counter()
        batch = arm.next()
        self._device.wait(self._device.mark())
        if self.peer != RESIDENT:
            self._about["first_batch"] = time.perf_counter() - began
        if compare(tree_map(torch.Tensor.cpu, batch), ReadyMade(self._shape).batch())[0]:
            raise RuntimeError("wrong batches")
        until = time.monotonic() + WARM_UP_S
        for _ in range(3 * arm.ahead):
            self._device.wait(self._device.mark())
            arm.next()
            if time.monotonic() > until:
                break

    def block(self, part: str) -> list[Row]:
        assert self._arm is not None
        if part != COPY:
            return [timed_block(self._arm, self._device, self._paces[part], self.seconds)]
        # torch copies each leaf, ours the whole batch.
        memory, pieces = (self.peer, 1) if self.peer in OURS else (BOUNCE, self._shape.fields)
        seconds = self._device.copy_seconds(memory, self._shape.nbytes, pieces)
        return [{"bytes": self._shape.nbytes, "seconds": seconds}]

    def finish(self) -> Row:
        """Counters, and the device's memory after many epochs."""
        assert self._arm is not None
        if self.peer not in OURS:
            return self._about
        self._about["staging"] = self._arm.staging()
        if time.monotonic() > self._until + ENDING_S:
            self.notes.append(f"no time was left to look at its memory after {EPOCHS[1]} epochs")
            return self._about
        self._device.release()
        done = 0
        for epochs in EPOCHS:
            self._arm.epochs(epochs - done, EPOCH_BATCHES)
            self._about[f"reserved_{epochs}"], done = self._device.reserved(), epochs
        return self._about

    def close(self) -> None:
        if self._arm is not None:
            self._arm.close()


def step_unit(copy_seconds: float, supply: float) -> float:
    """Seconds of a step of length 1: what the copy of a batch takes. Where the workers make `supply` batches
    per second, and that is less than `SUPPLY` times what such steps need, it is as long as makes it so:
    against shorter steps one would only measure that workers are slow."""
    return max(copy_seconds, SUPPLY / supply)


def cases(
    names: Sequence[str],
    arms: Sequence[str],
    device: CudaDevice,
    workers: int,
    blocks: int,
    seconds: float,
    start_method: str = START_METHOD,
) -> list[Case]:
    """All arms with each of these shapes."""
    allow_descriptors()
    began = time.monotonic()

    def plan(name: str) -> Plan:
        shape = SHAPES[name]
        # Each shape has its share of the time, and what those before it have left of theirs.
        until = began + LIMIT_S * (names.index(name) + 1) / len(names)
        copy_seconds = device.copy_seconds(BOUNCE, shape.nbytes, 1)
        supply = _supply(shape, device, workers, start_method, seconds)
        unit = step_unit(copy_seconds, supply)
        several = [ArmLane(name, shape, device, unit, until) for name in arms]
        for lane in several:
            lane.seconds, lane.workers, lane.start_method = seconds, workers, start_method
        facts = {"description": shape.description, "batch_bytes": shape.nbytes, "fields": shape.fields}
        facts |= {"copy_seconds": copy_seconds, "supply": supply, "unit": unit}
        return Plan(facts, [LinkLane(device), *several], PARTS, until)

    return [Case(AXIS, name, workers, start_method, blocks, partial(plan, name)) for name in names]


def _supply(shape: Shape, device: CudaDevice, workers: int, start_method: str, seconds: float) -> float:
    """Batches per second that the workers make and a consumer takes, on the host."""
    arm = host_only(shape, workers, start_method)
    try:
        with time_limit(STARTING_S):
            for _ in range(3 * arm.ahead):
                arm.next()
            blocks = [timed_block(arm, device, Pace(), seconds) for _ in range(SUPPLY_BLOCKS)]
    finally:
        arm.close()
    return float(statistics.median(block["batches"] / block["seconds"] for block in blocks))


def allow_descriptors() -> None:
    """Before the fork server starts, whose children have the same limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
