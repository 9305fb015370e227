"""Figures drawn from rows: medians, ranges over the rounds, ratios and shares. Pure: no clock, no process.

A measure of blocks is a pandas series by round, so that a ratio is taken within each round: its blocks ran
within seconds of each other, and what slows the machine for longer cancels out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd

from bench.output.rows import CaseRows
from bench.peers import PEERS

Series = Any
"""A pandas series by round; pandas brings no types."""

BASELINE = "torch"
"""The peer that ratios are taken to."""
OURS = "fastq_loader"
CEILING = "ceiling"
INLINE = ("torch_0", "fastq_loader_0")
"""The loaders without workers."""

MEASURES: dict[str, Callable[[pd.DataFrame], Series]] = {
    "rate": lambda blocks: blocks["batches"] / blocks["seconds"],
    "cpu": lambda blocks: (blocks["consumer_cpu"] + blocks["worker_cpu"]) / blocks["batches"],
    "consumer_cpu": lambda blocks: blocks["consumer_cpu"] / blocks["batches"],
    "worker_cpu": lambda blocks: blocks["worker_cpu"] / blocks["batches"],
    "wait": lambda blocks: blocks["waited"] / blocks["batches"],
    "switches": lambda blocks: blocks["switches"] / blocks["batches"],
    "stall": lambda blocks: 100 * blocks["gaps"] / (blocks["steps"] + blocks["gaps"]),
}
"""What blocks come to: batches per second, seconds (of CPU, or waited) and switches for a batch, the
percentage of a device's time between two steps. Any other measure is a column."""


class Spread(NamedTuple):
    """A figure with the lowest and the highest of what it was drawn from."""

    median: float
    low: float
    high: float


def spread(values: Series | None) -> Spread | None:
    """The median with the range; None without values."""
    if values is None or values.dropna().empty:
        return None
    return Spread(float(values.median()), float(values.min()), float(values.max()))


def series(case: CaseRows, peer: str, measure: str, part: str = "") -> Series | None:
    """A measure of a peer's blocks, by round; None where it was not measured."""
    blocks = case.part(peer, part)
    if blocks.empty or (measure not in MEASURES and measure not in blocks):
        return None
    return MEASURES[measure](blocks) if measure in MEASURES else blocks[measure]


def figure(case: CaseRows, peer: str, measure: str, part: str = "", scale: float = 1) -> Spread | None:
    found = series(case, peer, measure, part)
    return None if found is None else spread(found * scale)


def median(case: CaseRows, peer: str, measure: str, scale: float = 1) -> float | None:
    found = figure(case, peer, measure, "", scale)
    return found.median if found else None


def ratio(values: Series | None, base: Series | None) -> Spread | None:
    """The ratio of the medians; its range is that of the ratios within each round."""
    if values is None or base is None:
        return None
    values, base = values.align(base, join="inner")  # a tie has more rounds than others
    rounds = spread(values / base)
    return rounds and rounds._replace(median=float(values.median() / base.median()))


def compared(case: CaseRows, peer: str, base: str, measure: str = "rate") -> Spread | None:
    """How many times another peer's."""
    return ratio(series(case, peer, measure), series(case, base, measure))


def others(case: CaseRows) -> dict[str, float]:
    """Batches per second of the loaders with workers that are neither ours nor torch's, the fastest first."""
    names = [name for name in case.peers if name in PEERS and name not in (BASELINE, OURS, *INLINE)]
    found = {name: rate for name in names if (rate := median(case, name, "rate")) is not None}
    return dict(sorted(found.items(), key=lambda item: -item[1]))
