"""Figures as text, the same in tables and pictures."""

from __future__ import annotations

from bench.output.figures import Spread

NONE = "–"  # noqa: RUF001 - a dash in a table, where there is no figure


def number(value: float | None) -> str:
    """Whole from 10 on, two digits that count below; never a power of ten."""
    if value is None:
        return NONE
    size = abs(value)
    small = ".2f" if size >= 0.0995 else ".2g"
    digits = ",.0f" if size >= 9.95 or not size else ".1f" if size >= 0.995 else small
    return f"{value:{digits}}"


def size(count: float, step: int = 1000) -> str:
    """Bytes in steps of 1000 (kB) or of 1024 (KiB)."""
    units = ("B", "kB", "MB", "GB") if step == 1000 else ("B", "KiB", "MiB", "GiB")
    place = 0
    while count >= step and place < len(units) - 1:
        count, place = count / step, place + 1
    return f"{count:.3g} {units[place]}"


def worker_count(workers: int) -> str:
    return f"{workers} worker" if workers == 1 else f"{workers} workers"


def ranged(value: Spread | None, scale: float = 1) -> str:
    """The median with its range."""
    if value is None:
        return NONE
    median, low, high = (number(each * scale) for each in value)
    return f"{median} ({low}..{high})"  # a dash would stand beside a minus


def ratio(value: Spread | None) -> str:
    """The same, and whether the rounds agree on which of the two is larger."""
    return ranged(value) + noise(value)


def noise(value: Spread | None) -> str:
    """Said behind a ratio where the rounds do not agree."""
    return ", within noise" if value is not None and value.low <= 1 <= value.high else ""


def times(value: Spread | None) -> str:
    """Multiples of something close to 1, where the second digit after the point counts."""
    return NONE if value is None else f"{value.median:.2f} ({value.low:.2f}..{value.high:.2f})"


def percent(value: Spread | None) -> str:
    return NONE if value is None else f"{value.median:.0%} ({value.low:.0%}..{value.high:.0%})"
