"""The pictures of a run, as PNG files. Drawn from results alone: no loader, no clock.

matplotlib is imported when something is drawn, so that the names and captions of the pictures are to be had
without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench import timeline
from bench.drawing import (
    SMALL,
    TIMES,
    WIDTH,
    Picture,
    curve,
    finish,
    name_lines,
    plain_decades,
    write_pictures,
)
from bench.machine import days
from bench.results import BASELINE, Block, PeerResult, Results, Spread, WorkloadResult, cpu, rate, rate_ratio
from bench.words import number, size, worker_count

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which are told apart with any kind of colour blindness; without their yellow, which
# is faint on white. Lines have markers besides.
COLOURS = {
    "fastq_loader": "#D55E00",
    "torch": "#000000",
    "stateful": "#0072B2",
    "spdl_processes": "#009E73",
    "spdl_threads": "#56B4E9",
    "grain": "#CC79A7",
    "torch_0": "#7F7F7F",
    "fastq_loader_0": "#E69F00",
}
BY_HAND = "#A6761D"  # loops that are no peers of every workload
CEILING = "#B0B0B0"
MARKERS = dict(zip(COLOURS, "osv^DPX*", strict=True))

REASON_WIDTH = 44  # characters of a failure that fit into a panel


@dataclass(frozen=True)
class Bar:
    """A row of a panel: a figure, or why there is none."""

    label: str
    colour: str
    figure: Spread | None
    reason: str = ""


def pictures(results: Results) -> list[Picture]:
    """What there is to draw, in the order of the README."""
    found = []
    for workers, rows in by_number_of_workers(results.workloads).items():
        run = _run(rows[0])
        found += [
            Picture(
                f"ratio-{workers}-workers.png",
                f"Batches per second, in multiples of torch's DataLoader ({run})",
                partial(_panels, rows, _ratio_bars, "times torch's batches/s", 1.0, TIMES),
            ),
            Picture(
                f"ceiling-{workers}-workers.png",
                f"Batches per second, as a share of what the same processes make without transport ({run})",
                partial(_panels, rows, _ceiling_bars, "% of the ceiling", None, " %"),
            ),
        ]
    for workers, rows in by_number_of_workers(results.by_bytes).items():
        found.append(
            Picture(
                f"bytes-{workers}-workers.png",
                f"Batches per second over the bytes of a batch ({_run(rows[0])})",
                partial(_over_bytes, rows),
            )
        )
    if results.by_workers:
        method = results.by_workers[0].start_method
        found.append(
            Picture(
                "cost.png",
                f"CPU time of a batch, consumer and workers together, over the number of workers ({method})",
                partial(_over_workers, results.by_workers),
            )
        )
    return found + timeline.pictures(results.schedule)


def write(results: Results, folder: Path) -> list[Path]:
    """Draw every picture there are figures for; the files, in the order of `pictures`.

    Raises:
        ImportError: matplotlib is not installed; it comes with the package's 'bench' extra.
    """
    return write_pictures(pictures(results), caption(results), folder)


def caption(results: Results) -> str:
    """The machine and the date in a line."""
    machine = results.machine
    torch = machine["versions"]["torch"]
    return f"{machine['cpu']}, {machine['cores']} cores, torch {torch}, {days(machine)}"


def by_number_of_workers(rows: Sequence[WorkloadResult]) -> dict[int, list[WorkloadResult]]:
    """The results of workloads, divided by how many workers they ran with."""
    groups: dict[int, list[WorkloadResult]] = {}
    for row in rows:
        groups.setdefault(row.num_workers, []).append(row)
    return groups


def _run(row: WorkloadResult) -> str:
    return f"{worker_count(row.num_workers)}, {row.start_method}"


def colour(peer: str) -> str:
    return COLOURS.get(peer, BY_HAND)


# ---- panels of bars, one for each workload ------------------------------------------------------


def _ratio_bars(row: WorkloadResult) -> list[Bar]:
    others = {name: peer for name, peer in row.peers.items() if name != BASELINE}
    baseline = row.peers.get(BASELINE)
    return _bars(others, baseline.blocks if baseline else [], scale=1)


def _ceiling_bars(row: WorkloadResult) -> list[Bar]:
    return _bars(row.peers, row.ceiling, scale=100)


def _bars(peers: dict[str, PeerResult], baseline: Sequence[Block], scale: float) -> list[Bar]:
    bars = []
    for name, peer in peers.items():
        if peer.blocks and baseline:
            figure = rate_ratio(peer.blocks, baseline).scaled(scale)
            bars.append(Bar(peer.label, colour(name), figure))
        else:
            bars.append(Bar(peer.label, colour(name), None, peer.failure or "nothing to compare to"))
    return bars


def _panels(
    rows: Sequence[WorkloadResult],
    bars_of: Callable[[WorkloadResult], list[Bar]],
    unit: str,
    centre: float | None,
    suffix: str,
    figure: Figure,
) -> None:
    """A grid of panels with one axis for all: a log scale around `centre`, or from 0 where there is none."""
    bars = [bars_of(row) for row in rows]
    columns = min(2, len(rows))
    lines = -(-len(rows) // columns)
    longest = max(len(each) for each in bars)
    figure.set_size_inches(WIDTH, 1.1 + lines * (0.4 + 0.165 * longest))
    grid = figure.subplots(lines, columns, squeeze=False, sharex=True, gridspec_kw={"wspace": 0.06})
    for axes, row, each in zip(grid.flat, rows, bars, strict=False):
        _panel(axes, each, centre, suffix)
        axes.set_title(f"{row.name}: {size(row.batch_bytes)} a batch", loc="left", fontweight="bold")
    for axes in grid.flat[len(rows) :]:
        axes.set_axis_off()
    if centre is not None:  # wide enough for numbers beside the centre's, also where all are alike
        low, high = grid[0][0].get_xlim()
        grid[0][0].set_xlim(min(low, centre / 3.5), max(high, centre * 3.5))
    # Under the lowest panel of each column, also where the last line is not full.
    for column in range(columns):
        axes = grid[(len(rows) - 1 - column) // columns][column]
        axes.set_xlabel(unit)
        axes.tick_params(labelbottom=True)


def _panel(axes: Axes, bars: Sequence[Bar], centre: float | None, suffix: str) -> None:
    start = 0.0 if centre is None else centre
    if centre is not None:
        axes.set_xscale("log")
        plain_decades(axes.xaxis, (1, 3))
        axes.axvline(centre, color="black", linewidth=1)
    else:
        axes.axvline(100, color="black", linewidth=1)
    for line, bar in enumerate(bars):
        if bar.figure is None:
            reason = textwrap.shorten(bar.reason, REASON_WIDTH, placeholder=" …")
            axes.text(
                0.02,
                line,
                reason,
                transform=axes.get_yaxis_transform(),
                va="center",
                fontsize=SMALL - 1.5,
                bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},  # no line goes through words
            )
            continue
        value = bar.figure
        axes.barh(line, value.median - start, left=start, color=bar.colour, height=0.72)
        error = ([max(0, value.median - value.low)], [max(0, value.high - value.median)])
        axes.errorbar(value.median, line, xerr=error, color="#404040", capsize=2, linewidth=0.9)
        axes.text(
            1.01,
            line,
            f"{number(value.median)}{suffix}",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=SMALL,
        )
    name_lines(axes, [bar.label for bar in bars])


# ---- lines ------------------------------------------------------------------------------------


def _over_bytes(rows: Sequence[WorkloadResult], figure: Figure) -> None:
    figure.set_size_inches(WIDTH, 5.2)
    axes = figure.subplots()
    sizes = [row.batch_bytes for row in rows]
    axes.plot(
        sizes,
        [rate(row.ceiling).median for row in rows],
        color=CEILING,
        linewidth=6,
        label="ceiling: no transport",
        solid_capstyle="round",
    )
    _lines(axes, rows, sizes, rate, scale=1)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    plain_decades(axes.yaxis, (1,))
    axes.set_xticks(sizes, [size(count, 1024) for count in sizes])
    axes.set_xlabel("bytes of a batch")
    axes.set_ylabel("batches per second")
    finish(axes)
    axes.legend(loc="lower left", fontsize=SMALL, frameon=False)


def _over_workers(rows: Sequence[WorkloadResult], figure: Figure) -> None:
    workloads: dict[str, list[WorkloadResult]] = {}
    for row in rows:
        workloads.setdefault(row.name, []).append(row)
    columns = 2 if len(workloads) in (2, 4) else min(3, len(workloads))
    lines = -(-len(workloads) // columns)
    figure.set_size_inches(WIDTH, 1.5 + 2.6 * lines)
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (name, same) in zip(grid.flat, workloads.items(), strict=False):
        same = sorted(same, key=lambda row: row.num_workers)
        numbers = [row.num_workers for row in same]
        _lines(axes, same, numbers, cpu, scale=1e6)
        axes.set_yscale("log")
        plain_decades(axes.yaxis, (1, 2, 5))
        axes.set_xticks(numbers, [str(count) for count in numbers])
        axes.set_title(f"{name}: {size(same[0].batch_bytes)} a batch", loc="left", fontweight="bold")
        axes.set_xlabel("workers")
        finish(axes)
    for axes in grid.flat[len(workloads) :]:
        axes.set_axis_off()
    for line in grid:
        line[0].set_ylabel("CPU µs per batch")
    handles: dict[str, Artist] = {}
    for axes in grid.flat:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    figure.legend(
        list(handles.values()),
        list(handles),
        loc="outside lower center",
        ncols=4,
        fontsize=SMALL,
        frameon=False,
    )


def _lines(
    axes: Axes,
    rows: Sequence[WorkloadResult],
    places: Sequence[float],
    figure_of: Callable[[Sequence[Block]], Spread],
    scale: float,
) -> None:
    """A line for each peer through its medians, with the spread as error bars; where it has none, a gap."""
    labels = {name: peer.label for row in rows for name, peer in row.peers.items()}
    for name, label in labels.items():
        points = [
            (place, figure_of(row.peers[name].blocks).scaled(scale))
            for place, row in zip(places, rows, strict=True)
            if name in row.peers and row.peers[name].blocks
        ]
        if points:
            linestyle = "--" if name.endswith("_0") else "-"  # no worker processes
            curve(axes, points, label, colour(name), MARKERS.get(name, "<"), linestyle)
