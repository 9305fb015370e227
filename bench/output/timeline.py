"""The picture of who loads what when: an epoch as a row for each worker, and the consumer's deliveries below.

A batch that takes much longer than most stands out, so that one sees who waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.output.drawing import DARK, SMALL, WIDTH, Picture, legend_below, name_lines
from bench.output.rows import CaseRows, PeerRows
from bench.output.words import worker_count

FAST, SLOW = "#56B4E9", "#D55E00"
TIMES_MEDIAN = 3  # a batch that takes so many times as long as the median one is a slow one
BAR = 0.8  # of a row's height
TOGETHER = 0.01  # of the longest epoch: deliveries that a reader could not tell apart
ROW_INCHES = 0.2
UNCHANGED = ("torch_unordered",)
"""Contenders without a panel: without order nothing stalls, and nothing of it is new."""


def pictures(cases: Sequence[CaseRows]) -> list[Picture]:
    """One for each case of which there is a timeline."""
    found = []
    for case in cases:
        if shown := [
            peer for name, peer in case.peers.items() if "timeline" in peer.about and name not in UNCHANGED
        ]:
            run = f"({worker_count(case.facts['workers'])}, {case.facts['start_method']})"
            title = f"{case.facts['description']}: who loads which one when {run}"
            found.append(Picture(f"timeline-{case.name}.png", title, partial(_draw, case, shown)))
    return found


def work(peer: PeerRows) -> pd.DataFrame:
    """Who loaded which batch from when to when, and whether it is a slow one."""
    timeline = peer.about["timeline"]
    frame = pd.DataFrame({name: timeline[name] for name in ("batch", "worker", "start", "end")})
    frame["seconds"] = frame["end"] - frame["start"]
    frame["slow"] = frame["seconds"] > TIMES_MEDIAN * frame["seconds"].median()
    return frame


def together(deliveries: Sequence[float], within: float) -> list[tuple[float, int]]:
    """Deliveries that follow each other within so many seconds: when the last one came, and how many."""
    times = pd.Series(deliveries)
    groups = times.groupby((times.diff() > within).cumsum())
    return list(zip(groups.max(), groups.size(), strict=True))


def _draw(case: CaseRows, shown: Sequence[PeerRows], figure: Figure) -> None:
    longest = max(peer.about["timeline"]["delivered"][-1] for peer in shown)
    rows = case.facts["workers"] + 1
    figure.set_size_inches(WIDTH, 1.35 + len(shown) * (0.35 + ROW_INCHES * rows))
    grid = figure.subplots(len(shown), 1, squeeze=False, sharex=True)
    for axes, peer in zip(grid.flat, shown, strict=True):
        _panel(axes, case, peer, longest)
    grid.flat[-1].set_xlabel("seconds since the epoch began")
    grid.flat[-1].set_xlim(0, 1.02 * longest)
    tick: dict[str, Any] = {"color": "black", "marker": "|", "linestyle": "", "markersize": 8}
    keys: list[Any] = [
        Patch(color=FAST, label="a batch in a worker"),
        Patch(color=SLOW, label="a slow one, with its number"),
        Line2D([], [], label="so many batches delivered", **tick),
    ]
    if case.facts["bound"] is not None:
        label = f"the bound: {case.facts['bounded_by']}"
        keys.append(Line2D([], [], color=DARK, linestyle="--", linewidth=1, label=label))
    legend_below(figure, keys)


def _panel(axes: Axes, case: CaseRows, peer: PeerRows, longest: float) -> None:
    workers, bound = case.facts["workers"], case.facts["bound"]
    small: dict[str, Any] = {"va": "center", "fontsize": SMALL - 1}
    for row in work(peer).itertuples():
        across, down = (row.start, row.seconds), (row.worker - BAR / 2, BAR)
        colour = SLOW if row.slow else FAST
        axes.broken_barh([across], down, facecolors=colour, edgecolor="white", linewidth=0.6)
        if row.slow:
            middle = (row.start + row.end) / 2
            axes.text(middle, row.worker, str(row.batch), ha="center", color="white", **small)
    delivered = peer.about["timeline"]["delivered"]
    axes.vlines(delivered, workers - BAR / 2, workers + BAR / 2, color="black", linewidth=0.7)
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}  # no line goes through the number
    for seconds, batches in together(delivered, TOGETHER * longest):
        place: dict[str, Any] = {"xy": (seconds, workers), "xytext": (2.5, 0), "textcoords": "offset points"}
        axes.annotate(str(batches), **place, bbox=box, **small)
    title = f"{peer.label}: {delivered[-1]:.2f} s"
    if bound is not None:
        axes.axvline(bound, color=DARK, linestyle="--", linewidth=1, zorder=0.9)  # behind bars
        title += f", {delivered[-1] / bound:.2f} \N{MULTIPLICATION SIGN} the bound"
    axes.set_title(title, loc="left", fontweight="bold")
    name_lines(axes, [*(f"worker {worker}" for worker in range(workers)), "delivered"])
