"""The picture of who loads what when: an epoch as a row for each worker, and the consumer's deliveries below.

Drawn from what the samples themselves told. A batch that takes much longer than most stands out, so that one
sees who waits for it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from bench.drawing import SMALL, TIMES, WIDTH, Picture, name_lines
from bench.results import Contender, ScheduleResult, Timeline, Work
from bench.words import worker_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of Okabe and Ito's colours, as in the other pictures.
FAST, SLOW = "#56B4E9", "#D55E00"
TIMES_MEDIAN = 3  # a batch that takes so many times as long as the median one is a slow one
BAR = 0.8  # of a row's height
TOGETHER = 0.01  # of the longest epoch: deliveries that a reader could not tell apart
ROW_INCHES = 0.2
UNCHANGED = ("torch_unordered",)
"""Contenders without a panel: without order nothing stalls, and nothing of it is new."""


def pictures(results: Sequence[ScheduleResult]) -> list[Picture]:
    """One for each case of which there is a timeline."""
    return [
        Picture(
            f"timeline-{result.case}.png",
            f"{result.description}: who loads which one when "
            f"({worker_count(result.num_workers)}, {result.start_method})",
            partial(_draw, result, shown),
        )
        for result in results
        if (shown := _shown(result))
    ]


def _shown(result: ScheduleResult) -> list[tuple[Contender, Timeline]]:
    return [
        (contender, contender.timeline)
        for name, contender in result.contenders.items()
        if contender.timeline is not None and name not in UNCHANGED
    ]


def slow_batches(work: Sequence[Work]) -> set[int]:
    """The numbers of the batches that took much longer than most."""
    limit = TIMES_MEDIAN * statistics.median(each.end - each.start for each in work)
    return {each.batch for each in work if each.end - each.start > limit}


def together(deliveries: Sequence[float], within: float) -> list[tuple[float, int]]:
    """When the last of several deliveries came that follow each other within so many seconds, and how many
    they were."""
    groups: list[tuple[float, int]] = []
    for seconds in deliveries:
        if groups and seconds - groups[-1][0] <= within:
            groups[-1] = seconds, groups[-1][1] + 1
        else:
            groups.append((seconds, 1))
    return groups


def _draw(result: ScheduleResult, shown: Sequence[tuple[Contender, Timeline]], figure: Figure) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    rows = result.num_workers + 1
    longest = max(timeline.deliveries[-1] for _, timeline in shown)
    figure.set_size_inches(WIDTH, 1.35 + len(shown) * (0.35 + ROW_INCHES * rows))
    grid = figure.subplots(len(shown), 1, squeeze=False, sharex=True)
    for axes, (contender, timeline) in zip(grid.flat, shown, strict=True):
        _panel(axes, result, contender, timeline, longest)
    last = grid.flat[-1]
    last.set_xlabel("seconds since the epoch began")
    last.set_xlim(0, 1.02 * longest)
    keys = [
        Patch(color=FAST, label="a batch in a worker"),
        Patch(color=SLOW, label="a slow one, with its number"),
        Line2D(
            [], [], color="black", marker="|", linestyle="", markersize=8, label="so many batches delivered"
        ),
    ]
    if result.bound is not None:
        label = f"the ideal: {result.bounded_by}"
        keys.append(Line2D([], [], color="#404040", linestyle="--", linewidth=1, label=label))
    figure.legend(handles=keys, loc="outside lower center", ncols=len(keys), fontsize=SMALL, frameon=False)


def _panel(
    axes: Axes, result: ScheduleResult, contender: Contender, timeline: Timeline, longest: float
) -> None:
    slow = slow_batches(timeline.work)
    for worker in range(result.num_workers):
        own = [work for work in timeline.work if work.worker == worker]
        axes.broken_barh(
            [(work.start, work.end - work.start) for work in own],
            (worker - BAR / 2, BAR),
            facecolors=[SLOW if work.batch in slow else FAST for work in own],
            edgecolor="white",
            linewidth=0.6,
        )
        for work in own:
            if work.batch in slow:
                middle = (work.start + work.end) / 2
                axes.text(
                    middle,
                    worker,
                    str(work.batch),
                    ha="center",
                    va="center",
                    color="white",
                    fontsize=SMALL - 1,
                )
    line = result.num_workers
    axes.vlines(timeline.deliveries, line - BAR / 2, line + BAR / 2, color="black", linewidth=0.7)
    for seconds, batches in together(timeline.deliveries, TOGETHER * longest):
        axes.annotate(
            str(batches),
            (seconds, line),
            (2.5, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL - 1,
        )
    title = f"{contender.label}: {timeline.deliveries[-1]:.2f} s"
    if result.bound is not None:
        axes.axvline(result.bound, color="#404040", linestyle="--", linewidth=1, zorder=0.9)  # behind bars
        title += f", {timeline.deliveries[-1] / result.bound:.2f} {TIMES} the ideal"
    axes.set_title(title, loc="left", fontweight="bold")
    labels = [*(f"worker {worker}" for worker in range(result.num_workers)), "delivered"]
    name_lines(axes, labels)
