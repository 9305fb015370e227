"""What pictures have in common: size and text, the look of a panel, legends, files."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

WIDTH = 9.0  # inches: at the width of a README, some 900 pixels, text keeps its size in points as pixels
DOTS_PER_INCH = 160
TEXT, SMALL = 9, 8  # points
TITLE_WIDTH = 115  # characters
LIGHT, GREY, DARK = "#DDDDDD", "#7F7F7F", "#404040"


class Picture(NamedTuple):
    """One file to draw: its name, what it shows in a line, and what puts it into an empty figure."""

    name: str
    title: str
    draw: Callable[[Figure], None]


def write_pictures(pictures: Iterable[Picture], caption: str, folder: Path) -> list[Path]:
    """Draw pictures into a folder, each under its title and a caption; the files, in the same order."""
    folder.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        with rc_context({"font.size": TEXT, "axes.titlesize": TEXT, "axes.labelsize": SMALL}):
            figure = Figure(layout="constrained")
            picture.draw(figure)
            figure.suptitle(f"{textwrap.fill(picture.title, TITLE_WIDTH)}\n{caption}", fontsize=TEXT + 1)
            # Without the version of matplotlib in it, the same figures give the same file.
            figure.savefig(folder / picture.name, dpi=DOTS_PER_INCH, metadata={"Software": None})
    return [folder / picture.name for picture in pictures]


def name_lines(axes: Axes, labels: Sequence[str]) -> None:
    """Lines of bars, one below the other, each with its name at the left."""
    axes.set_yticks(range(len(labels)), labels, fontsize=SMALL)
    axes.set_ylim(len(labels) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", color=LIGHT)
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def plain_decades(axis: Axis, digits: Sequence[float]) -> None:
    """Ticks of a log scale at these digits of every decade, written out: 10,000 instead of a power of ten."""
    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def legend_below(figure: Figure, handles: Sequence[Any]) -> None:
    figure.legend(handles=handles, loc="outside lower center", ncols=4, fontsize=SMALL, frameon=False)
