"""The picture of a trace: who does what when, an arrow for each batch, and how many batches are ready.

    python -m bench.output.trace bench/results/epyc-2-cores/trace.png

records a short epoch with two workers, and draws twelve batches of it. With the name of a trace behind it, it
draws the first twelve batches of that. All of it is read from the file of the trace.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from torch.utils.data import Dataset

from bench.output.drawing import DARK, DOTS_PER_INCH, LIGHT, SMALL, TEXT, WIDTH, legend_below, name_lines

Event = dict[str, Any]

BATCHES = 12
BAR = 0.62  # of a row's height
LIGHT_ARROW = "#B8B8B8"  # of tasks; of batches it is dark
#: What is drawn, each on top of what stands before it.
COLOURS = {
    "next": "#F0C27B",
    "step": "#A6A6A6",
    "wait": "#D55E00",
    "fetch": "#56B4E9",
    "collate": "#009E73",
    "pack": "#0072B2",
}
LABELS = {"next": "the rest of next()", "step": "training step", "wait": "next() waits"}


class Images(Dataset[torch.Tensor]):
    """Images that take a while to read, one of them a long while."""

    def __len__(self) -> int:
        return 8 * 40

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.012 if index == 8 * 15 else 0.0007)
        return torch.full((3, 224, 224), index % 251, dtype=torch.uint8)


def record(path: Path) -> None:
    """Trace an epoch in which workers are too slow, one batch holds up others, and then the step is slow."""
    from fastq_loader import DataLoader

    loader = DataLoader(Images(), 8, num_workers=2, persistent_workers=True)
    for _ in loader:  # the workers are up after it
        continue
    with loader.trace(path):
        for number, _ in enumerate(loader):
            time.sleep(0.002 if number < 18 else 0.009)
    loader.close()


def first_batches(events: Sequence[Event], skip: int) -> tuple[float, float]:
    """From when to when the consumer's steps with so many batches go, in microseconds, without the first."""
    steps = sorted((event["ts"], event["dur"]) for event in events if event["name"] == "step")
    shown = steps[skip : skip + BATCHES]
    return shown[0][0], sum(shown[-1])


def draw(events: Sequence[Event], figure: Figure, skip: int = 0) -> None:
    """Draw the consumer, the workers, the arrows and what is ready."""
    begin, end = first_batches(events, skip)
    names = {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }  # in the order in which they appeared
    tracks = ["consumer", *sorted(name for name in names.values() if name.startswith("worker "))]
    rows = {tid: tracks.index(name) for tid, name in names.items() if name in tracks}
    figure.set_size_inches(WIDTH, 2.9)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3.2, 1))
    _bars(top, events, rows, begin, end)
    _arrows(top, events, rows, begin, end)
    name_lines(top, [track.partition(" (")[0] for track in tracks])
    _ready(bottom, events, begin)
    bottom.set_xlim(0, (end - begin) / 1000)
    bottom.set_xlabel("milliseconds")
    keys = [Patch(color=colour, label=LABELS.get(name, name)) for name, colour in COLOURS.items()]
    legend_below(figure, keys)


def _bars(axes: Axes, events: Sequence[Event], rows: dict[int, int], begin: float, end: float) -> None:
    spans = defaultdict(list)
    for event in events:
        kind = event["name"].partition(" ")[0].rstrip(":")
        kind = "wait" if kind == "wait" and rows.get(event.get("tid", -1)) == 0 else kind
        if event["ph"] != "X" or event["tid"] not in rows or event["ts"] > end or kind not in COLOURS:
            continue
        if rows[event["tid"]] and kind == "wait":  # a worker that waits is a gap
            continue
        row, start = rows[event["tid"]], (event["ts"] - begin) / 1000
        spans[kind, row].append((start, event["dur"] / 1000))
        if kind in ("fetch", "step") and start >= 0 and event["ts"] + event["dur"] <= end:
            place = (start + event["dur"] / 2000, row)
            small: dict[str, Any] = {"color": "white", "fontsize": SMALL - 1, "zorder": 4}
            axes.text(*place, str(event["args"]["batch"]), ha="center", va="center", **small)
    for order, kind in enumerate(COLOURS):
        for (name, row), across in spans.items():
            if name == kind:
                down = (row - BAR / 2, BAR)
                axes.broken_barh(across, down, facecolors=COLOURS[kind], linewidth=0, zorder=2 + order / 10)


def _arrows(axes: Axes, events: Sequence[Event], rows: dict[int, int], begin: float, end: float) -> None:
    """From each task to its fetch, and from where that was packed to where it was given."""
    batches: dict[tuple[int, int], dict[str, Event]] = defaultdict(
        dict
    )  # by epoch and number, events by name
    for event in events:
        if "batch" in event.get("args", {}):
            batches[event["args"]["epoch"], event["args"]["batch"]][event["name"]] = event
    for batch in batches.values():
        if not {"batch", "fetch", "pack", "next"} <= batch.keys():
            continue
        fetch, pack, given = batch["fetch"], batch["pack"], batch["next"]
        row = rows[fetch["tid"]]
        parts = (
            (batch["batch"]["ts"], 0, fetch["ts"], row, LIGHT_ARROW),
            (pack["ts"] + pack["dur"], row, given["ts"] + given["dur"], 0, DARK),
        )
        for x0, y0, x1, y1, colour in parts:
            if begin <= x0 and x1 <= end:
                edge = BAR / 2 if y1 > y0 else -BAR / 2
                style: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 6, "linewidth": 0.8}
                style |= {"color": colour, "shrinkA": 0, "shrinkB": 0}
                places = ((x1 - begin) / 1000, y1 - edge), ((x0 - begin) / 1000, y0 + edge)
                axes.annotate("", *places, arrowprops=style, zorder=1.5)


def _ready(axes: Axes, events: Sequence[Event], begin: float) -> None:
    counts = sorted((event["ts"], event["args"]["batches"]) for event in events if event["ph"] == "C")
    times = [(when - begin) / 1000 for when, _ in counts]
    values = [value for _, value in counts]
    axes.fill_between(times, values, step="post", color="#56B4E9", alpha=0.45, linewidth=0)
    axes.step(times, values, where="post", color="#0072B2", linewidth=1)
    axes.set_ylabel("ready", rotation=0, ha="right", va="center", fontsize=SMALL)
    axes.set_yticks(range(max(values) + 1))
    axes.set_ylim(0, max(values) + 0.4)
    axes.tick_params(labelsize=SMALL)
    axes.grid(axis="y", color=LIGHT)
    axes.spines[["top", "right"]].set_visible(False)


def write(events: Sequence[Event], path: Path, skip: int) -> None:
    """Draw a trace into a file."""
    with rc_context({"font.size": TEXT, "axes.labelsize": SMALL}):
        figure = Figure(layout="constrained")
        draw(events, figure, skip)
        figure.savefig(path, dpi=DOTS_PER_INCH, metadata={"Software": None})


def main(picture: str, trace: str = "") -> None:
    """Draw a trace, or record one and draw it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(trace or Path(folder, "trace.json"))
        if not trace:
            record(path)
        events = json.loads(path.read_text())
    write(events, Path(picture), 0 if trace else 11)


if __name__ == "__main__":
    main(*sys.argv[1:])
