"""The pictures of a run, drawn from rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench.output import figures, timeline
from bench.output.drawing import (
    DARK,
    GREY,
    SMALL,
    WIDTH,
    Bar,
    Picture,
    Style,
    bar_panels,
    curve,
    dashed,
    finish,
    legend_below,
    plain_decades,
    write_pictures,
)
from bench.output.figures import BASELINE, CEILING, Spread, compared, figure, share_of_peak
from bench.output.rows import CaseRows, Results
from bench.output.words import number, size, worker_count
from bench.peers.device import ARMS, BOUNCE, PAGEABLE, REGISTER, RESIDENT, SIDE_STREAM
from bench.timing.device import AXIS as DEVICE
from bench.timing.device import COPY, DRAIN, READY

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TIMES = "\N{MULTIPLICATION SIGN}"
# Okabe and Ito's colours, which are told apart with any kind of colour blindness; without their yellow, which
# is faint on white. Lines without worker processes are dashed.
STYLES: dict[str, Style] = {
    "fastq_loader": ("#D55E00", "o", "-"),
    BASELINE: ("#000000", "s", "-"),
    "stateful": ("#0072B2", "v", "-"),
    "spdl_processes": ("#009E73", "^", "-"),
    "spdl_threads": ("#56B4E9", "D", "-"),
    "grain": ("#CC79A7", "P", "-"),
    "torch_0": (GREY, "X", "--"),
    "fastq_loader_0": ("#E69F00", "*", "--"),
    SIDE_STREAM: ("#0072B2", "v", "-"),
    PAGEABLE: ("#CC79A7", "P", "-"),
    BOUNCE: ("#009E73", "^", "-"),
    REGISTER: ("#D55E00", "o", "-"),
}
BY_HAND = ("#A6761D", "<", "-")  # loops that are no peers of every workload
CEILING_COLOUR = "#B0B0B0"
GOAL_ETA, GOAL_STALL = 95, 2  # percent of the peak; percentage points
STALL_TICKS = (0, 1, 2, 5, 10, 20, 50, 100)


def pictures(results: Results) -> list[Picture]:
    """What there is to draw, in the order of the README."""
    found = []
    for axis in ("steady", "bytes"):
        for workers, method in dict.fromkeys(case.key[2:] for case in results.cases(axis)):
            cases = [case for case in results.cases(axis) if case.key[2:] == (workers, method)]
            for name, (of, title, draw) in _OF_WORKERS.items():
                title = f"{title} ({worker_count(workers)}, {method})"
                found += (
                    [Picture(f"{name}-{workers}-workers.png", title, partial(draw, cases))]
                    if of == axis
                    else []
                )
    if cases := results.cases("workers"):
        title = "CPU time of a batch, consumer and workers together, over the number of workers"
        found.append(Picture("cost.png", title, partial(_over_workers, cases)))
    found += timeline.pictures(results.cases("schedule"))
    for name, (title, draw_shapes, fields) in _OF_SHAPES.items():
        shapes = [shape for shape in results.cases(DEVICE) if shape.facts["fields"] >= fields]
        found += [Picture(f"gpu-{name}.png", title, partial(draw_shapes, shapes))] if shapes else []
    return found


def write(results: Results, folder: Path) -> list[Path]:
    """Draw every picture there are figures for; the files, in the order of `pictures`."""
    return write_pictures(pictures(results), caption(results), folder)


def caption(results: Results) -> str:
    """The machine and the date in a line."""
    machine = results.machine
    device = f"{machine['device']}, driver {machine['driver']}, " if "device" in machine else ""
    torch = machine["versions"]["torch"]
    return f"{device}{machine['cpu']}, {machine['cores']} cores, torch {torch}, {results.days}"


def _title(case: CaseRows) -> str:
    return f"{case.name}: {size(case.facts['batch_bytes'])} a batch"


# ---- bars: a panel for each workload ------------------------------------------------------------


def _ratios(cases: Sequence[CaseRows], picture: Figure) -> None:
    """In multiples of torch's, on a log scale around it."""
    panels = _panels(cases, BASELINE, lambda median: f"{number(median)}{TIMES}", 1)
    grid = bar_panels(picture, panels, "times torch's batches/s", 2, start=1.0, log=True)
    low, high = grid[0].get_xlim()
    grid[0].set_xlim(min(low, 1 / 3.5), max(high, 3.5))  # the axis has numbers also where all are alike
    for axes in grid:
        axes.axvline(1, color="black", linewidth=1)


def _shares(cases: Sequence[CaseRows], picture: Figure) -> None:
    """In percent of the ceiling."""
    panels = _panels(cases, CEILING, lambda median: f"{number(100 * median)} %", 100)
    for axes in bar_panels(picture, panels, "% of the ceiling", 2, start=0.0, log=False):
        axes.axvline(100, color="black", linewidth=1)


def _panels(
    cases: Sequence[CaseRows], base: str, text: Callable[[float], str], scale: float
) -> dict[str, list[Bar]]:
    def bar(case: CaseRows, peer: str) -> Bar:
        found, of = compared(case, peer, base), case.peers[peer]
        if found is None:
            return Bar(of.label, "", None, of.failure or "nothing to compare to")
        return Bar(of.label, STYLES.get(peer, BY_HAND)[0], found.scaled(scale), text(found.median))

    return {
        _title(case): [bar(case, peer) for peer in case.peers if peer not in (base, CEILING)]
        for case in cases
    }


def _eta(shapes: Sequence[CaseRows], picture: Figure) -> None:
    def bar(shape: CaseRows, arm: str) -> Bar:
        return _arm_bar(arm, share_of_peak(shape, arm, DRAIN), share_of_peak(shape, arm, COPY), 100, " %")

    panels = {_title(shape): [bar(shape, arm) for arm in _arms(shape)] for shape in shapes}
    unit = "% of the bandwidth of a 256 MiB copy from pinned memory"
    for axes in bar_panels(picture, panels, unit, 1, start=0.0, log=False):
        axes.axvline(GOAL_ETA, color=DARK, linestyle="--", linewidth=1)
    goal = dashed(f"goal for large batches: {GOAL_ETA} %")
    _legend(picture, "bar: full drain, median and range", "copies alone", [goal])


def _next(shapes: Sequence[CaseRows], picture: Figure) -> None:
    def bar(shape: CaseRows, arm: str) -> Bar:
        p50, p99 = (figure(shape, arm, percentile, READY) for percentile in ("p50", "p99"))
        return _arm_bar(arm, p50, p99, 1e6, " µs")

    panels = {_title(shape): [bar(shape, arm) for arm in _arms(shape)] for shape in shapes}
    # No call takes less than a microsecond: bars begin at the same place in every run.
    grid = bar_panels(picture, panels, "microseconds of the host's time", 1, start=1.0, log=True)
    grid[-1].set_xlim(left=1)
    _legend(picture, "bar: p50, median and range of the blocks", "p99", [])


def _arm_bar(arm: str, found: Spread | None, mark: Spread | None, scale: float, unit: str) -> Bar:
    text = f"{number(scale * found.median)}{unit}" if found else "not measured"
    scaled = (each and each.scaled(scale) for each in (found, mark))
    return Bar(ARMS[arm], STYLES[arm][0], next(scaled), text, next(scaled))


def _arms(shape: CaseRows) -> list[str]:
    return [name for name in shape.peers if name in ARMS and name != RESIDENT]


def _legend(picture: Figure, bar: str, mark: str, more: Sequence[object]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    diamond = Line2D([], [], marker="D", markersize=4, label=mark, color="white", markeredgecolor="black")
    legend_below(picture, more=[Patch(color=GREY, label=bar), diamond, *more])


# ---- lines --------------------------------------------------------------------------------------


def _over_bytes(cases: Sequence[CaseRows], picture: Figure) -> None:
    picture.set_size_inches(WIDTH, 5.2)
    axes = picture.subplots()
    sizes = {float(case.facts["batch_bytes"]): size(case.facts["batch_bytes"], 1024) for case in cases}
    ceiling = [figures.median(case, CEILING, "rate") or 0.0 for case in cases]
    axes.plot(list(sizes), ceiling, color=CEILING_COLOUR, linewidth=6, label="ceiling: no transport")
    _lines(axes, cases, "batch_bytes", "rate", 1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_decades(axes.yaxis, (1,))
    finish(axes, "", "bytes of a batch", sizes)
    axes.set_ylabel("batches per second")
    axes.legend(loc="lower left", fontsize=SMALL, frameon=False)


def _over_workers(cases: Sequence[CaseRows], picture: Figure) -> None:
    names = list(dict.fromkeys(case.name for case in cases))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    picture.set_size_inches(WIDTH, 1.5 + 2.6 * lines)
    grid = picture.subplots(lines, columns, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        same = sorted(
            (case for case in cases if case.name == name), key=lambda case: int(case.facts["workers"])
        )
        _lines(axes, same, "workers", "cpu", 1e6)
        axes.set_yscale("log")
        plain_decades(axes.yaxis, (1, 2, 5))
        finish(
            axes,
            _title(same[0]),
            "workers",
            {case.facts["workers"]: str(case.facts["workers"]) for case in same},
        )
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for line in grid:
        line[0].set_ylabel("CPU µs per batch")
    legend_below(picture, grid.flat)


def _lines(axes: Axes, cases: Sequence[CaseRows], place: str, measure: str, scale: float) -> None:
    """A line for each peer through its medians."""
    labels = {name: peer.label for case in cases for name, peer in case.peers.items() if name != CEILING}
    for name, label in labels.items():
        points = ((float(case.facts[place]), figure(case, name, measure, scale=scale)) for case in cases)
        curve(axes, points, label, STYLES.get(name, BY_HAND))


def _stall(shapes: Sequence[CaseRows], picture: Figure) -> None:
    from matplotlib.ticker import NullLocator

    picture.set_size_inches(WIDTH, 4.6)
    grid = picture.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
    for axes, shape in zip(grid, shapes, strict=True):
        steps = figures.lengths(shape)
        for arm in _arms(shape):
            points = ((float(length), figures.stall_points(shape, arm, length)) for length in steps)
            curve(axes, points, ARMS[arm], STYLES[arm])
        axes.axhline(GOAL_STALL, color=DARK, linestyle="--", linewidth=1)
        axes.set_yscale("symlog", linthresh=GOAL_STALL)  # what matters is near 0, and what is bad near 100
        axes.set_xscale("log", base=2)
        unit = f"length of a step, in units of {number(1e6 * shape.facts['unit'])} µs"
        marked = {
            float(length): f"{length}{'*' if figures.supplied(shape, length) else ''}" for length in steps
        }
        finish(axes, _title(shape), unit, marked)
        axes.set_yticks(STALL_TICKS, [str(points) for points in STALL_TICKS])
        axes.yaxis.set_minor_locator(NullLocator())
    grid[0].set_ylabel("stall beyond the resident arm, percentage points")
    goal = f"goal: {GOAL_STALL} points where workers and link suffice (*)"
    legend_below(picture, grid, [dashed(goal)], 3)


_OF_WORKERS = {
    "ratio": ("steady", "Batches per second, in multiples of torch's DataLoader", _ratios),
    "ceiling": ("steady", "Batches per second, as a share of the same processes' without transport", _shares),
    "bytes": ("bytes", "Batches per second over the bytes of a batch", _over_bytes),
}
"""Name → axis, title, what draws it."""
_OF_SHAPES = {
    "eta": ("Host to device: share of the peak of a pinned copy, full drain and the copies alone", _eta, 1),
    "stall": ("Time the device has no step to work on, beyond that with resident batches", _stall, 1),
    "next": ("Time of next() when the batch is ready (torch's with .to() of each field)", _next, 2),
}
"""Name → title, what draws it, and how many fields a shape needs for it."""
