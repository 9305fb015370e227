"""The clocks of `--device cuda`: a device with timed events and with steps of a known length, and blocks.

Nothing of CUDA is touched at import, nor before a `CudaDevice` is made.
"""

from __future__ import annotations

import mmap
import statistics
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch.utils import collect_env

from bench.peers.device import PAGEABLE, REGISTER, Arm
from bench.timing.rounds import Row
from bench.timing.steady import latency

COPIES = 20  # of a batch, one after the other
AHEAD = 2  # steps that are queued before the loop waits for one: as one that reads each loss a step late
LEAD_IN = 0.5  # of a block's length at most, for what was made ready while others were timed
PAUSE_S = 0.06  # in which a batch gets ready; torch's pin thread takes 20 to 40 ms for 500 fields
_CALIBRATION_CYCLES = 20_000_000  # some 10 ms

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
            torch.cuda._sleep(_CALIBRATION_CYCLES)  # type: ignore[no-untyped-call]
            end = self.mark()
            self.wait(end)
            rates.append(_CALIBRATION_CYCLES / self.between(start, end))
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

    def copy_seconds(self, memory: str, nbytes: int, pieces: int) -> float:
        """Seconds on the device for a copy in so many pieces, from memory that is pinned as the arm's."""
        there = torch.empty(nbytes, dtype=torch.uint8, device=self.torch).chunk(pieces)
        with _host_memory(memory, nbytes) as host:
            pairs = list(zip(there, host.chunk(pieces), strict=True))
            for count in (2, COPIES):  # once to warm up
                start = self.mark()
                for _ in range(count):
                    for target, source in pairs:
                        target.copy_(source, non_blocking=True)
                end = self.mark()
                self.wait(end)
            return self.between(start, end) / COPIES

    def describe(self) -> dict[str, str]:
        return {
            "device": torch.cuda.get_device_name(self.torch),
            "driver": str(collect_env.get_nvidia_driver_version(collect_env.run)),  # type: ignore[no-untyped-call]
            "cuda": str(torch.version.cuda or torch.version.hip),
        }


@contextmanager
def _host_memory(memory: str, nbytes: int) -> Iterator[torch.Tensor]:
    """Written once, so that its pages are there."""
    if memory != REGISTER:
        yield torch.empty(nbytes, dtype=torch.uint8, pin_memory=memory != PAGEABLE).fill_(1)
        return
    # MAP_SHARED, as the workers' blocks are; the map goes with the tensor.
    host = torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).fill_(1)
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(int(runtime.cudaHostRegister(host.data_ptr(), nbytes, 1)))
    try:
        yield host
    finally:
        torch.cuda.check_error(int(runtime.cudaHostUnregister(host.data_ptr())))


class Pace(NamedTuple):
    """Seconds that the device works on each batch (0: it only has to arrive), and that the host sleeps before
    each `next()`."""

    step: float = 0.0
    pause: float = 0.0


def timed_block(arm: Arm, device: CudaDevice, pace: Pace, seconds: float) -> Row:
    """Batches for about that long, after those that had become ready in the meantime.

    `steps` are seconds in which the device was within steps, `gaps` those between the end of a step and the
    start of the next. `p50` and `p99` are of `next()`, and with torch's loader of the `.to()` of every leaf.
    """
    if arm.ahead and not pace.pause:
        _loop(arm, device, pace, seconds * LEAD_IN, arm.ahead)
    cpu, began = time.process_time(), time.perf_counter()
    waits, spans = _loop(arm, device, pace, seconds)
    elapsed, cpu = time.perf_counter() - began, time.process_time() - cpu
    found: Row = {"batches": len(waits), "seconds": elapsed, "consumer_cpu": cpu, "steps": 0.0, "gaps": 0.0}
    if pace.step:
        found["steps"] = sum(device.between(start, end) for start, end in spans)
        found["gaps"] = sum(device.between(before[1], after[0]) for before, after in pairwise(spans))
    percentiles = latency(waits)
    return found | {name: percentiles[name] for name in ("p50", "p99")}


def _loop(
    arm: Arm, device: CudaDevice, pace: Pace, seconds: float, most: float = float("inf")
) -> tuple[list[float], list[tuple[Mark, Mark]]]:
    """Take batches, at least three, until time or number is up and the device is done with them; the host's
    seconds within `next()`, and each step between its events."""
    waits: list[float] = []
    spans: list[tuple[Mark, Mark]] = []
    under_way: deque[Mark] = deque()
    until = time.perf_counter() + seconds
    while len(waits) < 3 or (time.perf_counter() < until and len(waits) < most):
        if len(under_way) == AHEAD:
            device.wait(under_way.popleft())
        if pace.pause:
            time.sleep(pace.pause)
        asked = time.perf_counter()
        batch = arm.next()
        waits.append(time.perf_counter() - asked)
        start = end = device.mark()
        if pace.step:
            device.step(pace.step)
            end = device.mark()
        spans.append((start, end))
        under_way.append(end)
        del batch  # its memory may be used again after the step
    device.wait(under_way[-1])
    return waits, spans
