"""Figures drawn from rows: medians, ranges over the rounds, ratios and shares. Pure: no clock, no process.

A measure of blocks is a pandas series by round, so that a ratio is taken within each round: its blocks ran
within seconds of each other, and what slows the machine for longer cancels out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pandas as pd

from bench.output.rows import CaseRows
from bench.peers import PEERS
from bench.peers.device import RESIDENT
from bench.timing.device import COPY, LENGTHS, LINK, SUPPLY

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
    "switches": lambda blocks: blocks["switches"] / blocks["batches"],
    "copy_rate": lambda blocks: blocks["bytes"] / blocks["seconds"],
    "call": lambda blocks: blocks["seconds"] / blocks["calls"],
    "stall": lambda blocks: 100 * blocks["gaps"] / (blocks["steps"] + blocks["gaps"]),
    "descriptors": lambda blocks: blocks["consumer_descriptors"] + blocks["worker_descriptors"],
}
"""What blocks come to: batches per second, bytes per second, seconds and switches for a batch, seconds
of a call, the percentage of a device's time between two steps, points between two shares. Any
other measure is a column."""


class Spread(NamedTuple):
    """A figure with the lowest and the highest of what it was drawn from."""

    median: float
    low: float
    high: float

    def scaled(self, by: float) -> Spread:
        """The same in another unit."""
        return Spread(*(each * by for each in self))


def spread(values: Series | None) -> Spread | None:
    """The median with the range; None without values."""
    if values is None or values.dropna().empty:
        return None
    return Spread(float(values.median()), float(values.min()), float(values.max()))


def series(case: CaseRows | None, peer: str, measure: str, part: str = "") -> Series | None:
    """A measure of a peer's blocks, by round; None where it was not measured."""
    blocks = case.part(peer, part) if case else pd.DataFrame()
    if blocks.empty or (measure not in MEASURES and measure not in blocks):
        return None
    return MEASURES[measure](blocks) if measure in MEASURES else blocks[measure]


def figure(case: CaseRows | None, peer: str, measure: str, part: str = "", scale: float = 1) -> Spread | None:
    found = series(case, peer, measure, part)
    return None if found is None else spread(found * scale)


def median(case: CaseRows | None, peer: str, measure: str, scale: float = 1) -> float | None:
    found = figure(case, peer, measure, "", scale)
    return found.median if found else None


def ratio(values: Series | None, base: Series | None) -> Spread | None:
    """The ratio of the medians; its range is that of the ratios within each round."""
    if values is None or base is None:
        return None
    rounds = spread(values / base)
    return rounds and rounds._replace(median=float(values.median() / base.median()))


def compared(case: CaseRows, peer: str, base: str, measure: str = "rate", part: str = "") -> Spread | None:
    """How many times another peer's."""
    return ratio(series(case, peer, measure, part), series(case, base, measure, part))


def between_parts(case: CaseRows, peer: str, measure: str, part: str, base: str) -> Spread | None:
    """How many times what it is in another part of the same rounds."""
    return ratio(series(case, peer, measure, part), series(case, peer, measure, base))


def best_other(case: CaseRows) -> str | None:
    """The fastest of the loaders with workers that are neither ours nor torch's."""
    others = [name for name in case.peers if name in PEERS and name not in (BASELINE, OURS, *INLINE)]
    found = {name: rate for name in others if (rate := median(case, name, "rate")) is not None}
    return max(found, key=lambda name: found[name]) if found else None


# ---- onto a device ------------------------------------------------------------------------------


def supplied(shape: CaseRows, length: str) -> bool:
    """Whether both workers and link have `SUPPLY` times what steps of this length need."""
    facts = shape.facts
    slowest = max(1 / facts["supply"], facts["copy_seconds"])
    return bool(float(length) * facts["unit"] >= SUPPLY * slowest * (1 - 1e-9))  # the unit may be just that


def share_of_peak(shape: CaseRows, arm: str, part: str) -> Spread | None:
    """Bytes per second as shares of the link's peak (eta), which is the best of all rounds."""
    peak = figure(shape, LINK, "copy_rate", COPY)
    rate = figure(shape, arm, "copy_rate", COPY) if part == COPY else figure(shape, arm, "rate", part)
    if peak is None or rate is None:
        return None
    return rate.scaled((1 if part == COPY else shape.facts["batch_bytes"]) / peak.high)


def stall_points(shape: CaseRows, arm: str, length: str) -> Spread | None:
    """The stall in percentage points beyond the resident arm's of the same round."""
    own, bound = (series(shape, name, "stall", length) for name in (arm, RESIDENT))
    return None if own is None or bound is None else spread(own - bound)


def lengths(shape: CaseRows) -> Sequence[str]:
    """The lengths of steps of which there are blocks, ascending."""
    return [length for length in LENGTHS if any(not shape.part(arm, length).empty for arm in shape.peers)]
