"""The picture of a run, drawn from rows alone: every loader beside torch's, a panel for each workload."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from bench.output.figures import BASELINE, CEILING, compared
from bench.output.layout import number, size, worker_count
from bench.output.rows import CaseRows, PeerRows, Results

# Okabe and Ito's colours, which are told apart with any kind of colour blindness; without their yellow, which
# is faint on white.
COLOURS = {
    "fastq_loader": "#D55E00",
    "stateful": "#0072B2",
    "spdl_processes": "#009E73",
    "spdl_threads": "#56B4E9",
    "grain": "#CC79A7",
    "torch_0": "#7F7F7F",
    "fastq_loader_0": "#E69F00",
}
OTHERS = "#A6761D"
WIDTH, ROW_INCHES, PANEL_INCHES = 9.0, 0.165, 0.4  # at the width of a README, text keeps its size
DOTS_PER_INCH = 160
TEXT, SMALL = 9, 8  # points
REASON_WIDTH = 36  # characters of a failure that fit into a panel
LEAST_RANGE = 3.5  # the axis has numbers also where all are alike


class Picture(NamedTuple):
    """One file to draw: its name, what it shows in a line, and its cases."""

    name: str
    title: str
    cases: Sequence[CaseRows]


def pictures(results: Results) -> list[Picture]:
    """What there is to draw: one for each number of workers and start method."""
    title = "Batches per second, in multiples of torch's DataLoader"
    return [
        Picture(f"ratio-{workers}-workers.png", f"{title} ({worker_count(workers)}, {method})", cases)
        for (workers, method), cases in results.by_workers().items()
    ]


def write(results: Results, folder: Path) -> list[Path]:
    """Draw every picture there are figures for; the files, in the order of `pictures`."""
    folder.mkdir(parents=True, exist_ok=True)
    several = pictures(results)
    for picture in several:
        with rc_context({"font.size": TEXT, "axes.titlesize": TEXT, "axes.labelsize": SMALL}):
            figure = Figure(layout="constrained")
            _draw(picture.cases, figure)
            figure.suptitle(f"{picture.title}\n{results.caption}", fontsize=TEXT + 1)
            # Without the version of matplotlib in it, the same figures give the same file.
            figure.savefig(folder / picture.name, dpi=DOTS_PER_INCH, metadata={"Software": None})
    return [folder / picture.name for picture in several]


def _draw(cases: Sequence[CaseRows], picture: Figure) -> None:
    """A panel for each case, in two columns with one log scale around torch's."""
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    most = max(len(_shown(case)) for case in cases)
    picture.set_size_inches(WIDTH, 1.3 + lines * (PANEL_INCHES + ROW_INCHES * max(5, most)))
    grid = picture.subplots(lines, columns, squeeze=False, sharex=True, gridspec_kw={"wspace": 0.06}).flat
    for axes in grid[len(cases) :]:
        axes.set_axis_off()
    used: list[Axes] = list(grid[: len(cases)])
    for axes, case in zip(used, cases, strict=True):
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 3)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
        axes.xaxis.set_minor_locator(NullLocator())
        _bars(axes, case)
        axes.axvline(1, color="black", linewidth=1)
    low, high = used[0].get_xlim()
    used[0].set_xlim(min(low, 1 / LEAST_RANGE), max(high, LEAST_RANGE))
    for axes in used[-columns:]:  # the lowest panel of each column, also where the last line is not full
        axes.set_xlabel("times torch's batches/s")
        axes.tick_params(labelbottom=True)


def _shown(case: CaseRows) -> dict[str, PeerRows]:
    return {name: peer for name, peer in case.peers.items() if name not in (BASELINE, CEILING)}


def _bars(axes: Axes, case: CaseRows) -> None:
    """A bar for each peer, in multiples of torch's; or why there is none."""
    shown, place = _shown(case), axes.get_yaxis_transform()
    text = partial(axes.text, transform=place, va="center")
    for line, (name, peer) in enumerate(shown.items()):
        found = compared(case, name, BASELINE)
        if found is None:
            box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no line goes through words
            said = textwrap.shorten(peer.failure or "nothing to compare to", REASON_WIDTH, placeholder=" …")
            text(0.02, line, said, fontsize=SMALL - 1.5, bbox=box)
            continue
        median, low, high = found
        axes.barh(line, median - 1, left=1, color=COLOURS.get(name, OTHERS), height=0.72)
        error = ([max(0, median - low)], [max(0, high - median)])
        axes.errorbar(median, line, xerr=error, color="#404040", capsize=2, linewidth=0.9)
        text(1.01, line, f"{number(median)}\N{MULTIPLICATION SIGN}", fontsize=SMALL)
    axes.set_yticks(range(len(shown)), [peer.label for peer in shown.values()], fontsize=SMALL)
    axes.set_ylim(len(shown) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    title = f"{case.name}: {size(case.facts['batch_bytes'])} a batch"
    axes.set_title(title, loc="left", fontweight="bold")
