"""What all pictures have in common: their size, their text, and how axes look.

matplotlib is imported when something is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from bench.results import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

WIDTH = 9.0  # inches: at the width of a README, some 900 pixels, text keeps its size in points as pixels
DOTS_PER_INCH = 160
TEXT, SMALL = 9, 8  # points
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Picture:
    """One file to draw.

    Attributes:
        name: of the file.
        title: what it shows, in a line; also its text for those who cannot see it.
        draw: puts it into an empty figure.
    """

    name: str
    title: str
    draw: Callable[[Figure], None]


def write_pictures(pictures: Sequence[Picture], caption: str, folder: Path) -> list[Path]:
    """Draw pictures into a folder, each under its title and a caption; the files, in the same order.

    Raises:
        ImportError: matplotlib is not installed; it comes with the package's 'bench' extra.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for picture in pictures:
        with rc_context({"font.size": TEXT, "axes.titlesize": TEXT, "axes.labelsize": SMALL}):
            figure = Figure(layout="constrained")
            picture.draw(figure)
            figure.suptitle(f"{picture.title}\n{caption}", fontsize=TEXT + 1)
            path = folder / picture.name
            # Without the version of matplotlib in it, the same figures give the same file.
            figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})
        paths.append(path)
    return paths


def plain_decades(axis: Axis, digits: Sequence[float]) -> None:
    """Ticks of a log scale at these digits of every decade, written out: 10,000 instead of a power of ten."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis.set_major_locator(LogLocator(subs=digits))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_locator(NullLocator())


def curve(
    axes: Axes,
    points: Sequence[tuple[float, Spread]],
    label: str,
    colour: str,
    marker: str,
    linestyle: str = "-",
) -> None:
    """A line through the medians at these places, with the spread as error bars."""
    error = (
        [max(0, value.median - value.low) for _, value in points],
        [max(0, value.high - value.median) for _, value in points],
    )
    axes.errorbar(
        [place for place, _ in points],
        [value.median for _, value in points],
        yerr=error,
        label=label,
        color=colour,
        marker=marker,
        linestyle=linestyle,
        markersize=5,
        capsize=2,
        linewidth=1.5,
        elinewidth=0.9,
    )


def name_lines(axes: Axes, labels: Sequence[str]) -> None:
    """Lines of bars, one below the other, each with its name at the left."""
    axes.set_yticks(range(len(labels)), labels, fontsize=SMALL)
    axes.set_ylim(len(labels) - 0.4, -0.6)  # the first on top
    axes.grid(axis="x", color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def finish(axes: Axes) -> None:
    axes.grid(color="#DDDDDD")
    axes.set_axisbelow(True)
    axes.tick_params(labelsize=SMALL)
    axes.spines[["top", "right"]].set_visible(False)
