"""What a run measured, and the figures drawn from it. Pure: no clock, no process, no loader."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Block:
    """One timed stretch of iteration."""

    batches: int
    seconds: float

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds


@dataclass(frozen=True)
class Spread:
    """A figure with the lowest and the highest of what it was drawn from."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class PeerResult:
    """All that was measured of one peer on one workload: block k of every peer ran in round k."""

    blocks: list[Block]
    peak_memory: dict[str, int]  # bytes, by the kernel's names: Pss and its parts, Shmem


@dataclass(frozen=True)
class WorkloadResult:
    """All that was measured on one workload."""

    name: str
    description: str
    batch_size: int
    batch_bytes: int
    peers: dict[str, PeerResult]


def rate(blocks: Sequence[Block]) -> Spread:
    """Batches per second: the median block, the slowest and the fastest."""
    rates = [block.rate for block in blocks]
    return Spread(statistics.median(rates), min(rates), max(rates))


def rate_ratio(blocks: Sequence[Block], baseline: Sequence[Block]) -> Spread:
    """Ratio of the median rates; its spread is that of the ratios within each round.

    Blocks of one round ran within seconds of each other: what slows the machine for longer cancels out.
    """
    rounds = [block.rate / base.rate for block, base in zip(blocks, baseline, strict=True)]
    return Spread(rate(blocks).median / rate(baseline).median, min(rounds), max(rounds))


def within_noise(ratio: Spread) -> bool:
    """Whether the rounds disagree on which of the two is faster."""
    return ratio.low <= 1 <= ratio.high
