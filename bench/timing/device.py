"""`--device cuda`: batches onto a GPU, by the arms of `peers.device`, for every shape of batches.

A round times, of every arm in turn: a full drain, steps of several lengths, `next()` when the batch is ready,
and the arm's kind of copies without a loader. Beside them runs a large copy, which is the link's peak.
"""

from __future__ import annotations

import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map

from bench.peers.device import ARMS, BOUNCE, HOST, OURS, RESIDENT, Arm, make
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
SUPPLY_BLOCKS = 3
STARTING_S = 60.0
WARM_UP_S = 6.0  # at most, to use every block and buffer once: the system makes a gigabyte of pages in 2 s
LIMIT_S = 540.0  # no block starts after it: what is left to do then fits into the rest of ten minutes
DESCRIPTORS = 65_536  # torch sends each field through one of its own


@dataclass(eq=False, kw_only=True)
class LinkLane(Lane):
    """A large copy from pinned memory: the most that the link gives."""

    device: CudaDevice

    def block(self, part: str) -> list[Row]:
        return [{"bytes": PEAK_BYTES, "seconds": self.device.copy_seconds(BOUNCE, PEAK_BYTES, 1)}]


@dataclass(eq=False, kw_only=True)
class ArmLane(Lane):
    """One arm with one shape of batches.

    Attributes:
        make: makes the arm of that name, as late as the lane starts.
        unit: a step of length 1, in seconds.
    """

    make: Callable[[str], Arm]
    shape: Shape
    device: CudaDevice
    unit: float

    def start(self) -> None:
        arm = self._arm = self.make(self.peer)
        self.closing.callback(arm.close)
        batch = arm.next()
        self.device.wait(self.device.mark())
        if compare(tree_map(torch.Tensor.cpu, batch), ReadyMade(self.shape).batch())[0]:
            raise RuntimeError("wrong batches")
        until = time.monotonic() + WARM_UP_S
        for _ in range(3 * arm.ahead):
            self.device.wait(self.device.mark())
            arm.next()
            if time.monotonic() > until:
                break

    def block(self, part: str) -> list[Row]:
        if part != COPY:
            paces = {DRAIN: Pace(), READY: Pace(pause=PAUSE_S)}
            pace = paces.get(part) or Pace(float(part) * self.unit)
            return [timed_block(self._arm, self.device, pace, self.seconds)]
        # torch copies each leaf, ours the whole batch.
        memory, pieces = (self.peer, 1) if self.peer in OURS else (BOUNCE, self.shape.fields)
        seconds = self.device.copy_seconds(memory, self.shape.nbytes, pieces)
        return [{"bytes": self.shape.nbytes, "seconds": seconds}]

    def close(self) -> None:
        super().close()
        vars(self).pop("_arm", None)  # torch's workers end with the last reference


def step_unit(copy_seconds: float, supply: float) -> float:
    """Seconds of a step of length 1: what the copy of a batch takes. Where the workers make `supply` batches
    per second, and that is less than `SUPPLY` times what such steps need, it is as long as makes it so:
    against shorter steps one would only measure that workers are slow."""
    return max(copy_seconds, SUPPLY / supply)


def cases(options: Namespace, device: CudaDevice, workers: int, start_method: str) -> list[Case]:
    """All arms with each of these shapes."""
    allow_descriptors()
    began, names = time.monotonic(), options.workloads["device"]

    def plan(name: str) -> Plan:
        shape = SHAPES[name]
        # Each shape has its share of the time, and what those before it have left of theirs.
        until = began + LIMIT_S * (names.index(name) + 1) / len(names)
        maker = partial(make, shape=shape, device=device.torch, workers=workers, start_method=start_method)
        copy_seconds = device.copy_seconds(BOUNCE, shape.nbytes, 1)
        supply = _supply(maker(HOST), device, options.seconds)
        unit = step_unit(copy_seconds, supply)
        facts = {"description": shape.description, "batch_bytes": shape.nbytes, "fields": shape.fields}
        facts |= {"copy_seconds": copy_seconds, "supply": supply, "unit": unit}
        common: dict[str, Any] = {"shape": shape, "device": device, "unit": unit}
        common |= {"make": maker, "seconds": options.seconds}
        lanes: list[Lane] = [LinkLane(LINK, "peak of a pinned copy", parts=(COPY,), device=device)]
        lanes += [
            ArmLane(arm, ARMS[arm], parts=LENGTHS if arm == RESIDENT else PARTS, **common)
            for arm in options.peers
        ]
        return Plan(facts, lanes, PARTS, until)

    blocks = options.blocks
    return [Case(AXIS, name, workers, start_method, blocks, partial(plan, name)) for name in names]


def _supply(host: Arm, device: CudaDevice, seconds: float) -> float:
    """Batches per second that the workers make and a consumer takes, on the host."""
    with closing(host), time_limit(STARTING_S):
        for _ in range(3 * host.ahead):
            host.next()
        blocks = [timed_block(host, device, Pace(), seconds) for _ in range(SUPPLY_BLOCKS)]
    return float(statistics.median(block["batches"] / block["seconds"] for block in blocks))


def allow_descriptors() -> None:
    """Before the fork server starts, whose children have the same limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
