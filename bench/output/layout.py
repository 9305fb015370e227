"""Figures as text, and tables as Markdown: the same on the console and in a file."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd

from bench.output.figures import Spread
from bench.output.rows import CaseRows, PeerRows

NONE = "–"  # noqa: RUF001 - a dash in a table, where there is no figure


def say(text: str) -> None:
    """Say on the terminal what is being done."""
    print(text, file=sys.stderr, flush=True)


# ---- figures ------------------------------------------------------------------------------------


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


# ---- tables -------------------------------------------------------------------------------------


class Table(NamedTuple):
    """A table under a title.

    Attributes:
        rows: the cells of each row by their column; a cell may be missing.
        names: so many of the first columns hold names; the others hold figures, which stand to the right.
        about: what the columns are. `notes`: what has to be known beside the figures.
    """

    title: str
    rows: Sequence[dict[str, str]]
    names: int = 1
    about: str = ""
    notes: Sequence[str] = ()

    @property
    def frame(self) -> pd.DataFrame:
        return pd.DataFrame(self.rows).fillna("")


def in_markdown(table: Table, heading: str = "") -> str:
    """Title, table and notes; `heading` goes before the title."""
    frame = table.frame
    columns = []
    for place, name in enumerate(frame.columns):
        cells = [name, *frame[name]]
        width = max(3, *map(len, cells))
        left = place < table.names
        cells.insert(1, "-" * width if left else f"{'-' * (width - 1)}:")
        columns.append([f"{cell:{'<' if left else '>'}{width}}" for cell in cells])
    grid = "\n".join(f"| {' | '.join(line)} |" for line in zip(*columns, strict=True))
    title, notes = heading + table.title, "\n".join(f"- {note}" for note in table.notes)
    return "\n\n".join(filter(None, (title, table.about, grid, notes)))


def title_of(case: CaseRows) -> str:
    """What was measured, with how many workers."""
    facts = case.facts
    bytes_of = f"; {size(facts['batch_bytes'])} a batch" if "batch_bytes" in facts else ""
    run = f"{worker_count(facts['workers'])}, {facts['start_method']}"
    return f"{case.name}: {facts['description']}{bytes_of}; {run}"


def remarks(case: CaseRows) -> list[str]:
    """Who was not measured and why, and what has to be known of those who were."""
    found: list[str] = list(case.facts.get("notes", ()))
    for peer in case.peers.values():
        found += [f"{peer.label}: {note}" for note in peer.about["notes"]]
        found += [f"{peer.label}: not measured: {peer.failure}"] if peer.failure else []
    return [" ".join(text.split()) for text in found]


def measured(case: CaseRows, *without: str) -> dict[str, PeerRows]:
    """The contenders that have figures."""
    return {name: peer for name, peer in case.peers.items() if not peer.failure and name not in without}
