"""The pictures of a run, drawn from rows alone."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.output import figures, timeline
from bench.output.drawing import (
    DARK,
    GREY,
    LIGHT,
    SMALL,
    WIDTH,
    Picture,
    legend_below,
    name_lines,
    plain_decades,
    write_pictures,
)
from bench.output.figures import BASELINE, CEILING, compared, figure
from bench.output.rows import CaseRows, PeerRows, Results
from bench.output.words import number, size, worker_count

# Okabe and Ito's colours, which are told apart with any kind of colour blindness; without their yellow, which
# is faint on white. Lines without worker processes are dashed.
STYLES = {
    "fastq_loader": ("#D55E00", "o", "-"),
    BASELINE: ("#000000", "s", "-"),
    "stateful": ("#0072B2", "v", "-"),
    "spdl_processes": ("#009E73", "^", "-"),
    "spdl_threads": ("#56B4E9", "D", "-"),
    "grain": ("#CC79A7", "P", "-"),
    "torch_0": (GREY, "X", "--"),
    "fastq_loader_0": ("#E69F00", "*", "--"),
}
"""Peer → colour, marker and line."""
BY_HAND = ("#A6761D", "<", "-")  # loops that are no peers of every workload
CEILING_COLOUR = "#B0B0B0"
ROW_INCHES, PANEL_INCHES = 0.165, 0.4
REASON_WIDTH = 36  # characters of a failure that fit into a panel


def pictures(results: Results) -> list[Picture]:
    """What there is to draw, in the order of the README."""
    found = []
    for axis, kinds in _OF_WORKERS.items():
        for (workers, method), cases in results.by_workers(axis).items():
            run = f"({worker_count(workers)}, {method})"
            found += [
                Picture(f"{name}-{workers}-workers.png", f"{title} {run}", partial(draw, cases))
                for name, (title, draw) in kinds.items()
            ]
    if cases := results.cases("workers"):
        title = "CPU time of a batch, consumer and workers together, over the number of workers"
        found.append(Picture("cost.png", title, partial(_over_workers, cases)))
    return found + timeline.pictures(results.cases("schedule"))


def write(results: Results, folder: Path) -> list[Path]:
    """Draw every picture there are figures for; the files, in the order of `pictures`."""
    return write_pictures(pictures(results), caption(results), folder)


def caption(results: Results) -> str:
    """The machine and the date in a line."""
    machine = results.machine
    return f"{machine['cpu']}, {machine['cores']} cores, torch {machine['versions']['torch']}, {results.days}"


def _title(case: CaseRows) -> str:
    return f"{case.name}: {size(case.facts['batch_bytes'])} a batch"


# ---- bars: a panel for each workload ------------------------------------------------------------


def _ratios(cases: Sequence[CaseRows], picture: Figure) -> None:
    """In multiples of torch's, on a log scale around it."""
    grid = _grid(picture, cases, BASELINE, "times torch's batches/s")
    for axes, case in zip(grid, cases, strict=True):
        axes.set_xscale("log")
        plain_decades(axes.xaxis, (1, 3))
        _bars(axes, case, BASELINE, 1, "\N{MULTIPLICATION SIGN}")
    low, high = grid[0].get_xlim()
    grid[0].set_xlim(min(low, 1 / 3.5), max(high, 3.5))  # the axis has numbers also where all are alike
    for axes in grid:
        axes.axvline(1, color="black", linewidth=1)


def _shares(cases: Sequence[CaseRows], picture: Figure) -> None:
    """In percent of the ceiling."""
    for axes, case in zip(_grid(picture, cases, CEILING, "% of the ceiling"), cases, strict=True):
        _bars(axes, case, CEILING, 100, " %")
        axes.axvline(100, color="black", linewidth=1)


def _grid(picture: Figure, cases: Sequence[CaseRows], base: str, unit: str) -> list[Axes]:
    """A panel for each case, in two columns with one scale for all."""
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    most = max(len(_shown(case, base)) for case in cases)
    height = PANEL_INCHES + ROW_INCHES * max(5, most)
    picture.set_size_inches(WIDTH, 1.3 + lines * height)
    grid = picture.subplots(lines, columns, squeeze=False, sharex=True, gridspec_kw={"wspace": 0.06})
    for axes in grid.flat[len(cases) :]:
        axes.set_axis_off()
    used: list[Axes] = list(grid.flat[: len(cases)])
    for axes in used[-columns:]:  # the lowest panel of each column, also where the last line is not full
        axes.set_xlabel(unit)
        axes.tick_params(labelbottom=True)
    return used


def _shown(case: CaseRows, base: str) -> dict[str, PeerRows]:
    return {name: peer for name, peer in case.peers.items() if name not in (base, CEILING)}


def _bars(axes: Axes, case: CaseRows, base: str, scale: float, unit: str) -> None:
    """A bar for each peer, in multiples of the base; or why there is none."""
    start = 1.0 if axes.get_xscale() == "log" else 0.0
    shown = _shown(case, base)
    for line, (name, peer) in enumerate(shown.items()):
        found = compared(case, name, base)
        if found is None:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no line goes through words
            said = textwrap.shorten(peer.failure or "nothing to compare to", REASON_WIDTH, placeholder=" …")
            place = axes.get_yaxis_transform()
            axes.text(0.02, line, said, fontsize=SMALL - 1.5, bbox=box, transform=place, va="center")
            continue
        median, low, high = found.scaled(scale)
        axes.barh(line, median - start, left=start, color=STYLES.get(name, BY_HAND)[0], height=0.72)
        error = ([max(0, median - low)], [max(0, high - median)])
        axes.errorbar(median, line, xerr=error, color=DARK, capsize=2, linewidth=0.9)
        text, place = f"{number(median)}{unit}", axes.get_yaxis_transform()
        axes.text(1.01, line, text, fontsize=SMALL, transform=place, va="center")
    name_lines(axes, [peer.label for peer in shown.values()])
    axes.set_title(_title(case), loc="left", fontweight="bold")


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
    _finish(axes, "", "bytes of a batch", sizes)
    axes.set_ylabel("batches per second")
    axes.legend(loc="lower left", fontsize=SMALL, frameon=False)


def _over_workers(cases: Sequence[CaseRows], picture: Figure) -> None:
    names = list(dict.fromkeys(case.name for case in cases))
    columns = min(3, len(names))
    lines = -(-len(names) // columns)
    picture.set_size_inches(WIDTH, 1.5 + 2.6 * lines)
    grid = picture.subplots(lines, columns, squeeze=False)
    for axes, name in zip(grid.flat, names, strict=False):
        same = {int(case.facts["workers"]): case for case in cases if case.name == name}
        several = [same[workers] for workers in sorted(same)]
        _lines(axes, several, "workers", "cpu", 1e6)
        axes.set_yscale("log")
        plain_decades(axes.yaxis, (1, 2, 5))
        _finish(axes, _title(several[0]), "workers", {workers: str(workers) for workers in sorted(same)})
    for axes in grid.flat[len(names) :]:
        axes.set_axis_off()
    for line in grid:
        line[0].set_ylabel("CPU µs per batch")
    handles: dict[str, object] = {}
    for axes in grid.flat:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    legend_below(picture, list(handles.values()))


def _lines(axes: Axes, cases: Sequence[CaseRows], place: str, measure: str, scale: float) -> None:
    """A line for each peer through its medians, with ranges; a gap where there is no figure."""
    labels = {name: peer.label for case in cases for name, peer in case.peers.items() if name != CEILING}
    for name, label in labels.items():
        found = {case.facts[place]: figure(case, name, measure, scale=scale) for case in cases}
        points = np.array([(at, *value) for at, value in found.items() if value is not None])
        if len(points):
            at, medians, lows, highs = points.T
            colour, marker, line = STYLES.get(name, BY_HAND)
            axes.errorbar(
                at,
                medians,
                yerr=(medians - lows, highs - medians),
                label=label,
                color=colour,
                marker=marker,
                linestyle=line,
                linewidth=1.5,
                elinewidth=0.9,
                capsize=2,
                markersize=5,
            )


def _finish(axes: Axes, title: str, xlabel: str, ticks: dict[float, str]) -> None:
    """A panel of lines: its grid, its title, its axis."""
    axes.grid(color=LIGHT)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_xticks(list(ticks), list(ticks.values()))


_OF_WORKERS = {
    "steady": {
        "ratio": ("Batches per second, in multiples of torch's DataLoader", _ratios),
        "ceiling": ("Batches per second, as a share of the same processes' without transport", _shares),
    },
    "bytes": {"bytes": ("Batches per second over the bytes of a batch", _over_bytes)},
}
"""Axis → name of the file → title, what draws it."""
