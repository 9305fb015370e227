"""What pictures have in common: their size and text, panels of bars, and lines with error bars.

matplotlib is imported when something is drawn, so that names and titles of pictures are to be had without it.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from bench.output.figures import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches: at the width of a README, some 900 pixels, text keeps its size in points as pixels
DOTS_PER_INCH = 160
TEXT, SMALL = 9, 8  # points
ROW_INCHES, PANEL_INCHES = 0.165, 0.4
REASON_WIDTH = 36  # characters of a failure that fit into a panel
TITLE_WIDTH = 115
LIGHT, GREY, DARK = "#DDDDDD", "#7F7F7F", "#404040"

Style = tuple[str, str, str]
"""Colour, marker and line."""


class Picture(NamedTuple):
    """One file to draw: its name, what it shows in a line, and what puts it into an empty figure."""

    name: str
    title: str
    draw: Callable[[Figure], None]


class Bar(NamedTuple):
    """A row of a panel: a figure with a mark beside it, or why there is none."""

    label: str
    colour: str
    figure: Spread | None
    text: str
    mark: Spread | None = None


def write_pictures(pictures: Iterable[Picture], caption: str, folder: Path) -> list[Path]:
    """Draw pictures into a folder, each under its title and a caption; the files, in the same order."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        with rc_context({"font.size": TEXT, "axes.titlesize": TEXT, "axes.labelsize": SMALL}):
            figure = Figure(layout="constrained")
            picture.draw(figure)
            figure.suptitle(f"{textwrap.fill(picture.title, TITLE_WIDTH)}\n{caption}", fontsize=TEXT + 1)
            # Without the version of matplotlib in it, the same figures give the same file.
            figure.savefig(folder / picture.name, dpi=DOTS_PER_INCH, metadata={"Software": None})
    return [folder / picture.name for picture in pictures]


def bar_panels(
    figure: Figure, panels: dict[str, list[Bar]], unit: str, columns: int, start: float, log: bool
) -> list[Axes]:
    """A panel for each title, with one scale for all; bars begin at `start`."""
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    height = PANEL_INCHES + ROW_INCHES * max(5, *map(len, panels.values()))
    figure.set_size_inches(WIDTH, 1.3 + lines * height)
    grid = list(
        figure.subplots(lines, columns, squeeze=False, sharex=True, gridspec_kw={"wspace": 0.06}).flat
    )
    used = grid[: len(panels)]
    for axes, (title, bars) in zip(used, panels.items(), strict=True):
        if log:
            axes.set_xscale("log")
            plain_decades(axes.xaxis, (1, 3))
        for line, bar in enumerate(bars):
            _bar(axes, line, bar, start)
        name_lines(axes, [bar.label for bar in bars])
        axes.set_title(title, loc="left", fontweight="bold")
    for axes in grid[len(panels) :]:
        axes.set_axis_off()
    for axes in used[-columns:]:  # the lowest panel of each column, also where the last line is not full
        axes.set_xlabel(unit)
        axes.tick_params(labelbottom=True)
    return used


def _bar(axes: Axes, line: int, bar: Bar, start: float) -> None:
    across: dict[str, Any] = {"transform": axes.get_yaxis_transform(), "va": "center"}
    if bar.figure is None:
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}  # no line goes through words
        reason = textwrap.shorten(bar.text, REASON_WIDTH, placeholder=" …")
        axes.text(0.02, line, reason, fontsize=SMALL - 1.5, bbox=box, **across)
        return
    median, low, high = bar.figure
    axes.barh(line, median - start, left=start, color=bar.colour, height=0.72)
    error = ([max(0, median - low)], [max(0, high - median)])
    axes.errorbar(median, line, xerr=error, color=DARK, capsize=2, linewidth=0.9)
    axes.text(1.01, line, bar.text, fontsize=SMALL, **across)
    if bar.mark is not None:
        white: dict[str, Any] = {"color": "white", "markeredgecolor": "black", "zorder": 4}
        axes.plot(bar.mark.median, line, marker="D", markersize=4, **white)


def name_lines(axes: Axes, labels: Sequence[str]) -> None:
    """Lines of bars, one below the other, each with its name at the left."""
    axes.set_yticks(range(len(labels)), labels, fontsize=SMALL)
    axes.set_ylim(len(labels) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", color=LIGHT)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def curve(axes: Axes, points: Iterable[tuple[float, Spread | None]], label: str, style: Style) -> None:
    """A line through the medians at these places, the range as error bars; a gap where there is no figure."""
    found = [(place, *value) for place, value in points if value is not None]
    if found:
        places, medians, lows, highs = zip(*found, strict=True)
        low = [max(0, median - low) for median, low in zip(medians, lows, strict=True)]
        high = [max(0, high - median) for median, high in zip(medians, highs, strict=True)]
        colour, marker, line = style
        lines: dict[str, Any] = {"linewidth": 1.5, "elinewidth": 0.9, "capsize": 2, "markersize": 5}
        lines |= {"color": colour, "marker": marker, "linestyle": line}
        axes.errorbar(places, medians, yerr=(low, high), label=label, **lines)


def finish(axes: Axes, title: str, xlabel: str, ticks: dict[float, str]) -> None:
    """A panel of lines: its grid, its title, its axis."""
    axes.grid(color=LIGHT)
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set_xlabel(xlabel)
    axes.set_xticks(list(ticks), list(ticks.values()))


def plain_decades(axis: Axis, digits: Sequence[float]) -> None:
    """Ticks of a log scale at these digits of every decade, written out: 10,000 instead of a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def dashed(label: str) -> Any:
    """The legend's entry for a dashed line."""
    from matplotlib.lines import Line2D

    return Line2D([], [], color=DARK, linestyle="--", linewidth=1, label=label)


def legend_below(
    figure: Figure, panels: Iterable[Axes] = (), more: Sequence[Any] = (), columns: int = 4
) -> None:
    """One legend for the lines of all panels, each label once, and for what else is drawn."""
    handles: dict[str, Any] = {}
    for axes in panels:
        handles |= dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    keys = [*handles.values(), *more]
    figure.legend(handles=keys, loc="outside lower center", ncols=columns, fontsize=SMALL, frameon=False)
