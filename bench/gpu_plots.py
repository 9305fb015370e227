"""The pictures of `python -m bench gpu`, as PNG files. Drawn from results alone: no device, no clock.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.drawing import SMALL, WIDTH, Picture, curve, finish, name_lines, plain_decades, write_pictures
from bench.gpu_results import (
    BOUNCE,
    LABELS,
    PAGEABLE,
    PREFETCH,
    REGISTER,
    RESIDENT,
    TORCH,
    GpuResults,
    ShapeResult,
    lengths,
    next_times,
    rates,
    share_of_peak,
    stall_points,
    supplied,
)
from bench.machine import days
from bench.results import Spread
from bench.words import number, size

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, as in the other pictures; lines have markers besides.
COLOURS = {
    TORCH: "#000000",
    PREFETCH: "#0072B2",
    PAGEABLE: "#CC79A7",
    BOUNCE: "#009E73",
    REGISTER: "#D55E00",
}
MARKERS = dict(zip(COLOURS, "osv^D", strict=True))
ARMS = tuple(name for name in LABELS if name != RESIDENT)
GOAL_ETA, GOAL_STALL = 95, 2  # percent of the peak; percentage points
STALL_TICKS = (0, 1, 2, 5, 10, 20, 50, 100)
ROW_INCHES = 0.26


def pictures(results: GpuResults) -> list[Picture]:
    """What there is to draw."""
    shapes = results.shapes
    several = [shape for shape in shapes if shape.fields > 1]
    found = []
    if shapes:
        found = [
            Picture(
                "gpu-eta.png",
                "Host to device: share of the peak of a pinned copy, full drain and the copies alone",
                partial(_eta, shapes),
            ),
            Picture(
                "gpu-stall.png",
                "Time the device has no step to work on, beyond that with resident batches",
                partial(_stall, shapes),
            ),
        ]
    if several:
        found.append(
            Picture(
                "gpu-next.png",
                "Time of next() on the host when the batch is ready (torch's with .to() of each field)",
                partial(_next, several),
            )
        )
    return found


def write(results: GpuResults, folder: Path) -> list[Path]:
    """Draw every picture there are figures for; the files, in the order of `pictures`.

    Raises:
        ImportError: matplotlib is not installed; it comes with the package's 'bench' extra.
    """
    return write_pictures(pictures(results), caption(results), folder)


def caption(results: GpuResults) -> str:
    """The device, what drives it and the date in a line."""
    machine = results.machine
    return (
        f"{machine['device']}, driver {machine['driver']}, torch {machine['versions']['torch']}, "
        f"{machine['cores']} cores, {days(machine)}"
    )


def _title(shape: ShapeResult) -> str:
    return f"{shape.name}: {shape.description}; {size(shape.batch_bytes)} a batch"


# ---- bars ---------------------------------------------------------------------------------------


def _rows(shapes: Sequence[ShapeResult], figure: Figure) -> list[Axes]:
    """A panel for each shape, with a line for each arm, one below the other."""
    figure.set_size_inches(WIDTH, 1.4 + len(shapes) * (0.45 + ROW_INCHES * len(ARMS)))
    panels = list(figure.subplots(len(shapes), 1, squeeze=False, sharex=True).flat)
    for axes, shape in zip(panels, shapes, strict=True):
        axes.set_title(_title(shape), loc="left", fontweight="bold")
        name_lines(axes, [LABELS[name] for name in ARMS])
    return panels


def _bar(axes: Axes, line: int, name: str, value: Spread | None, text: str) -> None:
    """A median with its range, and its figure at the right; or that there is none."""
    if value is None:
        axes.text(
            0.01, line, "not measured", transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL
        )
        return
    axes.barh(line, value.median, color=COLOURS[name], height=0.6)
    error = ([value.median - value.low], [value.high - value.median])
    axes.errorbar(value.median, line, xerr=error, color="#808080", capsize=2, linewidth=0.9)
    axes.text(1.01, line, text, transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL)


def _mark(axes: Axes, line: int, value: Spread | None) -> None:
    if value is not None:
        axes.plot(
            value.median, line, marker="D", color="white", markeredgecolor="black", markersize=5, zorder=4
        )


def _eta(shapes: Sequence[ShapeResult], figure: Figure) -> None:
    panels = _rows(shapes, figure)
    for axes, shape in zip(panels, shapes, strict=True):
        for line, name in enumerate(ARMS):
            arm = shape.arms[name]
            drain, copies = (
                _scaled(share_of_peak(shape, each), 100) for each in (rates(shape, arm.drain), arm.copy_rates)
            )
            _bar(axes, line, name, drain, "" if drain is None else f"{number(drain.median)} %")
            _mark(axes, line, copies)
        axes.axvline(GOAL_ETA, color="#404040", linestyle="--", linewidth=1)
    panels[-1].set_xlabel("% of the bandwidth of a 256 MiB copy from pinned memory")
    panels[-1].set_xlim(left=0)
    _legend(
        figure, "bar: full drain, median and range", "copies alone", f"goal for large batches: {GOAL_ETA} %"
    )


def _scaled(value: Spread | None, by: float) -> Spread | None:
    return None if value is None else value.scaled(by)


def _next(shapes: Sequence[ShapeResult], figure: Figure) -> None:
    panels = _rows(shapes, figure)
    for axes, shape in zip(panels, shapes, strict=True):
        for line, name in enumerate(ARMS):
            blocks = shape.arms[name].ready
            p50, p99 = (_scaled(next_times(blocks, each), 1e6) for each in ("p50", "p99"))
            _bar(axes, line, name, p50, "" if p50 is None else f"{number(p50.median)} µs")
            _mark(axes, line, p99)
    panels[-1].set_xscale("log")
    panels[-1].set_xlim(left=1)  # no call takes less: bars begin at the same place in every run
    plain_decades(panels[-1].xaxis, (1,))
    panels[-1].set_xlabel("microseconds of the host's time")
    _legend(figure, "bar: p50, median and range of the blocks", "p99", None)


def _legend(figure: Figure, bar: str, mark: str, dashed: str | None) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    white: dict[str, Any] = {"color": "white", "markeredgecolor": "black", "linestyle": ""}
    keys = [Patch(color="#808080", label=bar), Line2D([], [], marker="D", markersize=5, label=mark, **white)]
    if dashed is not None:
        keys.append(Line2D([], [], color="#404040", linestyle="--", linewidth=1, label=dashed))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=SMALL, frameon=False)


# ---- lines --------------------------------------------------------------------------------------


def _stall(shapes: Sequence[ShapeResult], figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.ticker import NullLocator

    figure.set_size_inches(WIDTH, 4.6)
    grid = figure.subplots(1, len(shapes), squeeze=False, sharey=True)[0]
    for axes, shape in zip(grid, shapes, strict=True):
        steps = lengths(shape)
        for name in ARMS:
            points = [
                (float(length), value)
                for length in steps
                if (value := stall_points(shape, name, length)) is not None
            ]
            if points:
                curve(axes, points, LABELS[name], COLOURS[name], MARKERS[name])
        axes.axhline(GOAL_STALL, color="#404040", linestyle="--", linewidth=1)
        axes.set_yscale("symlog", linthresh=GOAL_STALL)  # what matters is near 0, and what is bad near 100
        axes.set_yticks(STALL_TICKS, [str(points) for points in STALL_TICKS])
        axes.yaxis.set_minor_locator(NullLocator())
        axes.set_xscale("log", base=2)
        axes.set_xticks(
            [float(length) for length in steps],
            [f"{length}{'*' if supplied(shape, length) else ''}" for length in steps],
        )
        axes.set_title(f"{shape.name}: {size(shape.batch_bytes)} a batch", loc="left", fontweight="bold")
        axes.set_xlabel(f"length of a step, in units of {number(1e6 * shape.unit)} µs")
        finish(axes)
    grid[0].set_ylabel("stall beyond the resident arm, percentage points")
    keys: dict[str, Artist] = {}
    for axes in grid:
        keys |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    goal = f"goal: {GOAL_STALL} points where workers and link suffice (*)"
    keys[goal] = Line2D([], [], color="#404040", linestyle="--", linewidth=1)
    figure.legend(
        list(keys.values()), list(keys), loc="outside lower center", ncols=2, fontsize=SMALL, frameon=False
    )
