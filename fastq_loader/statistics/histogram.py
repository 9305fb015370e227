"""How long something took, many times: percentiles without keeping every value.

Pure. A value is counted in a bucket that is 1/16 of an octave wide, so a percentile is within 3 % of the
value (half a bucket, 2^(1/32)); HdrHistogram does the same with linear buckets.
"""

from __future__ import annotations

from math import log2

_PER_OCTAVE = 16


class Histogram:
    """Counts of durations in nanoseconds."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}

    def add(self, nanoseconds: int) -> None:
        """Count one; below 1 counts as 1."""
        bucket = int(_PER_OCTAVE * log2(nanoseconds)) if nanoseconds > 1 else 0
        self._counts[bucket] = self._counts.get(bucket, 0) + 1

    def include(self, other: Histogram) -> None:
        """Count all that another one has counted."""
        for bucket, count in list(other._counts.items()):
            self._counts[bucket] = self._counts.get(bucket, 0) + count

    def percentile(self, percent: float) -> float:
        """The duration in seconds that so many percent of all do not exceed; 0.0 of none."""
        left = percent / 100 * sum(self._counts.values())
        for bucket, count in sorted(self._counts.items()):
            left -= count
            if left <= 0:
                return float(2 ** ((bucket + 0.5) / _PER_OCTAVE)) / 1e9
        return 0.0
