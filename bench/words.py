"""Figures as text, for pictures and the README alike."""

from __future__ import annotations

from bench.results import Spread, within_noise


def number(value: float) -> str:
    """Whole from 10 on, two digits that count below; never a power of ten."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}" if value >= 0.995 else f"{value:.2f}"


def size(count: float, step: int = 1000) -> str:
    """Bytes in steps of 1000 (kB) or of 1024 (KiB)."""
    units = ("B", "kB", "MB", "GB") if step == 1000 else ("B", "KiB", "MiB", "GiB")
    place = 0
    while count >= step and place < len(units) - 1:
        count /= step
        place += 1
    return f"{count:.3g} {units[place]}"


def worker_count(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def ratio(value: Spread) -> str:
    """The median with the range of the rounds, and whether they agree on which is faster."""
    text = f"{number(value.median)} ({number(value.low)}-{number(value.high)})"
    return f"{text}, within noise" if within_noise(value) else text


def times(value: Spread) -> str:
    """Multiples of something close to 1, where the second digit after the point counts."""
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def milliseconds(value: Spread) -> str:
    """A time in seconds, as milliseconds with its range."""
    return f"{number(value.median * 1e3)} ({number(value.low * 1e3)}-{number(value.high * 1e3)})"
