"""What `python -m bench gpu` measured, the figures drawn from it, and whether the goals came about.

Pure: no clock, no process, no device. As in `results`, the file holds raw figures of each block only:
medians, ranges, shares and ratios are drawn from them here, for the table and the pictures alike.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.results import Latency, Spread, spread, time_ratio

VERSION = 1
"""Of the file's layout."""

RESIDENT, TORCH, PREFETCH = "resident", "torch", "torch_prefetch"
PAGEABLE, BOUNCE, REGISTER = "pageable", "bounce", "register"
OURS = (PAGEABLE, BOUNCE, REGISTER)
LABELS = {
    RESIDENT: "resident",
    TORCH: "torch, .to()",
    PREFETCH: "torch, side stream",
    PAGEABLE: "fastq_loader, pageable",
    BOUNCE: "fastq_loader, bounce",
    REGISTER: "fastq_loader, register",
}
"""The arms, in the order of the report."""

MEANINGS = (
    "resident: batches that are on the device already. torch, .to(): its DataLoader with pin_memory=True,\n"
    "and .to(non_blocking=True) of each leaf; side stream: the same beside the step, by a prefetcher.\n"
    "fastq_loader: device='cuda' and that pin=."
)
"""What is behind the labels."""

LARGE = "large"
"""The shape that speed and CPU time are judged by; `next()` is by those with several fields."""

SUPPLY = 1.2
"""So many times what the steps need is enough of a supply for the goal of the stall to hold."""

EPOCHS = (2, 20)
"""After so many epochs one looks at the memory that is reserved on the device."""


@dataclass(frozen=True)
class GpuBlock:
    """One timed stretch of iteration.

    Attributes:
        batches: how many were taken.
        seconds: of wall clock, until the device was done with the last one.
        consumer_cpu: seconds of CPU, user and system, of all threads of the consumer's process.
        next: how long it took to have a batch on the device, on the host's clock: `next()`, and with torch's
            loader the `.to()` of every leaf besides.
        steps: seconds in which the device was within steps; 0 in a block without any.
        gaps: seconds on the device between the end of a step and the start of the next one.
    """

    batches: int
    seconds: float
    consumer_cpu: float
    next: Latency
    steps: float = 0.0
    gaps: float = 0.0


@dataclass(frozen=True)
class ArmResult:
    """All that was measured of one arm with one shape of batches: block k of every arm ran in round k.

    Attributes:
        label: the name to show.
        drain: blocks without steps.
        steps: blocks with steps, by the length in multiples of the shape's unit ("0.5").
        ready: blocks in which the loader had time to get a batch ready before each `next()`.
        copy_rates: bytes per second of the arm's kind of copies alone, timed by the device's events.
        first_batch: seconds from `iter()` until a batch was on the device; workers start in it.
        staging: the fields of `StagingStatistics` at the end; {} for other loaders.
        reserved: bytes reserved on the device after so many epochs, by their number; {} where not asked for.
        notes: what did not work besides.
        failure: why the arm is not measured, in words.
    """

    label: str
    drain: list[GpuBlock] = field(default_factory=list)
    steps: dict[str, list[GpuBlock]] = field(default_factory=dict)
    ready: list[GpuBlock] = field(default_factory=list)
    copy_rates: list[float] = field(default_factory=list)
    first_batch: float | None = None
    staging: dict[str, Any] = field(default_factory=dict)
    reserved: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None


@dataclass(frozen=True)
class ShapeResult:
    """All that was measured with one shape of batches.

    Attributes:
        name, description: a word, and what a batch is.
        batch_bytes: of all its fields. `fields`: how many they are.
        num_workers: of every loader.
        peaks: bytes per second of a large copy from pinned memory, before and after the blocks.
        copy_seconds: what the copy of a batch takes from pinned memory in one piece.
        supply: batches per second that the workers made, without a device; one of each block.
        unit: seconds, the length of a step of length 1; see `step_unit`.
        arms: by name, in the order of the report.
        left_out: blocks that the time did not suffice for.
    """

    name: str
    description: str
    batch_bytes: int
    fields: int
    num_workers: int
    start_method: str
    peaks: list[float]
    copy_seconds: float
    supply: list[float]
    unit: float
    arms: dict[str, ArmResult]
    left_out: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class GpuResults:
    """A whole run.

    Attributes:
        arguments: the command line's settings, by name.
        machine: CPU, cores, memory, versions and date, and the device with its driver.
    """

    arguments: dict[str, Any]
    machine: dict[str, Any]
    shapes: list[ShapeResult] = field(default_factory=list)
    version: int = VERSION


# ---- figures ------------------------------------------------------------------------------------


def step_unit(copy_seconds: float, supply: float) -> float:
    """Seconds of a step of length 1: what the copy of a batch takes; where the workers make `supply` batches
    per second and that is less than `SUPPLY` times what such steps need, as long as makes it so. Against
    shorter steps one would only measure that workers are slow."""
    return max(copy_seconds, SUPPLY / supply)


def supplied(shape: ShapeResult, length: str) -> bool:
    """Whether both workers and link have `SUPPLY` times what steps of this length need."""
    step = float(length) * shape.unit
    slowest = max(1 / statistics.median(shape.supply), shape.copy_seconds)
    return step >= SUPPLY * slowest * (1 - 1e-9)  # the unit may be just that


def peak(shape: ShapeResult) -> float:
    """Bytes per second of the link: the better one of both measurements."""
    return max(shape.peaks)


def rates(shape: ShapeResult, blocks: Sequence[GpuBlock]) -> list[float]:
    """Bytes per second of each block."""
    return [block.batches * shape.batch_bytes / block.seconds for block in blocks]


def share_of_peak(shape: ShapeResult, rates: Sequence[float]) -> Spread | None:
    """These bytes per second as shares of the link's peak (eta); None without any."""
    return spread([rate / peak(shape) for rate in rates]) if rates else None


def stall(block: GpuBlock) -> float:
    """The share of the device's time from the first step to the last in which it was between two."""
    whole = block.steps + block.gaps
    return block.gaps / whole if whole else 0.0


def stall_points(shape: ShapeResult, arm: str, length: str) -> Spread | None:
    """The stall in percentage points beyond the resident arm's of the same round; None without figures."""
    rounds = zip(_steps(shape, arm, length), _steps(shape, RESIDENT, length), strict=False)
    points = [100 * (stall(own) - stall(bound)) for own, bound in rounds]
    return spread(points) if points else None


def _steps(shape: ShapeResult, arm: str, length: str) -> list[GpuBlock]:
    result = shape.arms.get(arm)
    return result.steps.get(length, []) if result is not None else []


def next_times(blocks: Sequence[GpuBlock], percentile: str = "p50") -> Spread | None:
    """Seconds of `next()`: that percentile of each block."""
    return spread([getattr(block.next, percentile) for block in blocks]) if blocks else None


def cpu_per_gigabyte(shape: ShapeResult, blocks: Sequence[GpuBlock]) -> Spread | None:
    """The consumer's seconds of CPU for 1e9 bytes that arrived."""
    each = [block.consumer_cpu / (block.batches * shape.batch_bytes) * 1e9 for block in blocks]
    return spread(each) if each else None


def lengths(shape: ShapeResult) -> list[str]:
    """The lengths of steps of which there are blocks, ascending."""
    return sorted({length for arm in shape.arms.values() for length in arm.steps}, key=float)


# ---- goals --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuGoal:
    """What was wanted, and what came.

    Attributes:
        measure: what, in words.
        wanted: the bound. `at_most`: the figure is to stay below it; else to reach it.
        unit: of both, as a suffix.
        figure: the median, with the range of the rounds; None: not measured.
        beside: the same of torch, in words.
    """

    measure: str
    wanted: float
    at_most: bool
    unit: str
    figure: Spread | None
    beside: str = ""

    @property
    def met(self) -> bool | None:
        """Whether the median is on the right side; None: not measured."""
        if self.figure is None:
            return None
        value = self.figure.median
        return value <= self.wanted if self.at_most else value >= self.wanted

    @property
    def ratio(self) -> float | None:
        """The figure in multiples of what was wanted; None: not measured."""
        return None if self.figure is None else self.figure.median / self.wanted


def goals(results: GpuResults) -> list[GpuGoal]:
    """Every goal of the project that can be measured here, for the arm that pages are registered in."""
    found = []
    for shape in results.shapes:
        if shape.name == LARGE:
            found += [*_speed(shape), _cpu(shape)]
        else:
            found.append(_next(shape))
        found += [_stall(shape, length) for length in lengths(shape) if supplied(shape, length)]
        found += [_reserved(shape, arm) for arm in OURS if arm in shape.arms]
    return found


def _speed(shape: ShapeResult) -> list[GpuGoal]:
    own, torch = (shape.arms.get(name, ArmResult("")) for name in (REGISTER, TORCH))
    return [
        GpuGoal(
            f"{shape.name}: GB/s of {what} / peak of a pinned copy",
            0.95,
            False,
            "",
            share_of_peak(shape, mine),
            _beside(share_of_peak(shape, theirs)),
        )
        for what, mine, theirs in (
            ("the copies alone", own.copy_rates, torch.copy_rates),
            ("a full drain", rates(shape, own.drain), rates(shape, torch.drain)),
        )
    ]


def _beside(figure: Spread | None, unit: str = "") -> str:
    return "" if figure is None else f"torch {figure.median:.2f}{unit}"


def _stall(shape: ShapeResult, length: str) -> GpuGoal:
    return GpuGoal(
        f"{shape.name}: stall beyond the resident arm, steps of {length} x the unit",
        2.0,
        True,
        " points",
        stall_points(shape, REGISTER, length),
        _beside(stall_points(shape, TORCH, length), " points"),
    )


def _cpu(shape: ShapeResult) -> GpuGoal:
    return GpuGoal(
        f"{shape.name}: consumer's CPU seconds per GB of a full drain, torch / ours",
        3.0,
        False,
        " x",
        *_against_torch(shape, lambda arm: [block.consumer_cpu / block.batches for block in arm.drain]),
    )


def _next(shape: ShapeResult) -> GpuGoal:
    return GpuGoal(
        f"{shape.name}: time of next() when the batch is ready, torch / ours",
        5.0,
        False,
        " x",
        *_against_torch(shape, lambda arm: [block.next.p50 for block in arm.ready]),
    )


def _against_torch(shape: ShapeResult, cost: Callable[[ArmResult], list[float]]) -> tuple[Spread | None, str]:
    """How many times less it costs here than with torch's loader, and what that costs there."""
    torch, own = (cost(shape.arms.get(name, ArmResult(""))) for name in (TORCH, REGISTER))
    rounds = min(len(torch), len(own))
    if not rounds or not all(own):
        return None, ""
    theirs, ours = (statistics.median(each) * 1e6 for each in (torch, own))
    beside = f"torch {theirs:,.0f} us, ours {ours:,.0f} us a batch"
    return time_ratio(torch[:rounds], own[:rounds]), beside


def _reserved(shape: ShapeResult, arm: str) -> GpuGoal:
    few, many = (shape.arms[arm].reserved.get(str(epochs)) for epochs in EPOCHS)
    grown = None if few is None or many is None else many / few if few else 1.0
    return GpuGoal(
        f"{shape.name}, {arm}: reserved after {EPOCHS[1]} epochs / after {EPOCHS[0]}",
        1.0,
        True,
        " x",
        None if grown is None else spread([grown]),
    )
