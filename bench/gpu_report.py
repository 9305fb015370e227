"""How the results of `python -m bench gpu` are shown on the console: two for each shape, one of goals."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from bench import report
from bench.gpu_results import (
    EPOCHS,
    MEANINGS,
    RESIDENT,
    SUPPLY,
    ArmResult,
    GpuBlock,
    GpuResults,
    ShapeResult,
    cpu_per_gigabyte,
    goals,
    lengths,
    next_times,
    rates,
    share_of_peak,
    stall,
    stall_points,
    supplied,
)
from bench.results import Spread, spread
from bench.words import number, size, times, worker_count

LEGEND = (
    f"{MEANINGS}\n"
    "Medians of blocks, in brackets the range over the rounds. eta: bytes per second as a share of the peak\n"
    "of a 256 MiB copy from pinned memory, the better one of before and after; copies: the arm's kind of\n"
    "copy alone; drain: the whole loader. stall: share of the device's time between the end of a step and\n"
    "the start of the next, in percentage points beyond the resident arm (whose row has its own share, %);\n"
    f"*: workers and link supply {SUPPLY:g} x what such steps need. At most two steps are queued ahead.\n"
    "ready: next() after a pause, when the batch is there; behind: next() at the longest steps; both as p50\n"
    "and p99 of a block, in microseconds. CPU: the consumer's seconds per GB of a full drain, all threads.\n"
    "first: seconds until the first batch, the workers' start included. populate, register: seconds until\n"
    f"all pages were mapped and locked. reserved: device memory after {EPOCHS[0]} and {EPOCHS[1]} epochs."
)


def machine_line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['device']}, driver {machine['driver']}, CUDA {machine['cuda']}\n"
        f"{report.machine_line(machine)}"
    )


def shape_tables(shape: ShapeResult) -> Group:
    """A title, speed, costs, and notes below."""
    supply = statistics.median(shape.supply)
    source = "the copy of a batch" if shape.unit == shape.copy_seconds else f"{SUPPLY:g} x the workers' time"
    title = (
        f"{shape.name}: {shape.description}; {size(shape.batch_bytes)} a batch, "
        f"{worker_count(shape.num_workers)}, {shape.start_method}"
    )
    about = (
        f"peak {', '.join(f'{each / 1e9:.1f}' for each in shape.peaks)} GB/s (before, after); "
        f"a copy takes {shape.copy_seconds * 1e6:,.0f} us; workers supply one every {1e6 / supply:,.0f} us; "
        f"steps in units of {shape.unit * 1e6:,.0f} us: {source}"
    )
    notes = [f"{arm.label}: not measured: {arm.failure}" for arm in shape.arms.values() if arm.failure]
    notes += [f"{arm.label}: {note}" for arm in shape.arms.values() for note in arm.notes]
    notes += _left_out(shape.left_out)
    return Group(
        Text(title, style="bold"), Text(about), _speed(shape), _costs(shape), *map(Text, notes), Text()
    )


def _left_out(left_out: Sequence[str]) -> list[str]:
    """One line for each round of which something is missing."""
    counts = Counter(text.split(",")[0] for text in left_out)
    return [f"left out, because the time was over: {count} of {what}" for what, count in counts.items()]


def _measured(shape: ShapeResult) -> list[tuple[str, ArmResult]]:
    return [(name, arm) for name, arm in shape.arms.items() if arm.failure is None]


def _grid(*columns: str) -> Table:
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("", no_wrap=True)
    for column in columns:
        grid.add_column(column, justify="right")
    return grid


def _speed(shape: ShapeResult) -> Table:
    steps = lengths(shape)
    grid = _grid(
        "MB/s, drain",
        "eta, drain",
        "eta, copies",
        *(f"stall, {length}{'*' if supplied(shape, length) else ''}" for length in steps),
    )
    for name, arm in _measured(shape):
        drained = rates(shape, arm.drain)
        stalls = [
            _figure(spread([100 * stall(block) for block in arm.steps[length]]), suffix="%")
            if name == RESIDENT and length in arm.steps
            else _figure(stall_points(shape, name, length))
            for length in steps
        ]
        grid.add_row(
            arm.label,
            f"{statistics.median(drained) / 1e6:,.1f}" if drained else "",
            _share(share_of_peak(shape, drained)),
            _share(share_of_peak(shape, arm.copy_rates)),
            *stalls,
        )
    return grid


def _costs(shape: ShapeResult) -> Table:
    grid = _grid(
        "ready, us",
        "p99",
        "behind, us",
        "p99",
        "CPU s/GB",
        "first, s",
        "populate",
        "register",
        "pinned",
        "reserved",
    )
    longest = lengths(shape)[-1:]
    for name, arm in _measured(shape):
        if name == RESIDENT:
            continue
        behind = [block for length in longest for block in arm.steps.get(length, [])]
        grid.add_row(
            arm.label,
            *_next(arm.ready),
            *_next(behind),
            _figure(cpu_per_gigabyte(shape, arm.drain)),
            "" if arm.first_batch is None else f"{arm.first_batch:.2f}",
            *_staging(arm),
            ", ".join(size(count, 1024) for count in arm.reserved.values()),
        )
    return grid


def _next(blocks: Sequence[GpuBlock]) -> tuple[str, str]:
    """The median with its range, and the 99th percentile, in microseconds."""
    p99 = next_times(blocks, "p99")
    return _figure(next_times(blocks), 1e6), "" if p99 is None else number(1e6 * p99.median)


def _staging(arm: ArmResult) -> tuple[str, str, str]:
    if not arm.staging:
        return "", "", ""
    populate, register = (f"{arm.staging[f'{what}_seconds']:.2f}" for what in ("populate", "register"))
    return populate, register, size(arm.staging["pinned_bytes"], 1024)


def _figure(value: Spread | None, scale: float = 1, suffix: str = "") -> str:
    if value is None:
        return ""
    median, low, high = (_signed(each * scale) for each in (value.median, value.low, value.high))
    return f"{median}{suffix} ({low}..{high})"  # a dash would stand beside the minus of a stall below 0


def _signed(value: float) -> str:
    return f"-{number(-value)}" if value < 0 else number(value)


def _share(value: Spread | None) -> str:
    return "" if value is None else times(value)


def goals_table(results: GpuResults) -> Group:
    """What was wanted, what came, and whether that is enough."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("goal", "wanted", "measured", "/ wanted", "", "beside"):
        grid.add_column(column, justify="right" if column in ("measured", "/ wanted") else "left")
    for goal in goals(results):
        wanted = f"at {'most' if goal.at_most else 'least'} {goal.wanted:g}{goal.unit}"
        verdict = {None: "not measured", True: "met", False: "not met"}[goal.met]
        ratio = "" if goal.ratio is None else f"{goal.ratio:.2f}"
        grid.add_row(goal.measure, wanted, _share(goal.figure), ratio, verdict, goal.beside)
    return Group(Text("Goals", style="bold"), grid)
