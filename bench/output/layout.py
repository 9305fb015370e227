"""What a table is, how it looks on the console and in a README, and what all tables of a case say."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.console import Group
from rich.table import Table as Grid
from rich.text import Text

from bench.output.rows import CaseRows, PeerRows
from bench.output.words import size, worker_count


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


def on_console(table: Table) -> Group:
    grid = Grid(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for place, name in enumerate(table.frame.columns):
        grid.add_column(name, justify="left" if place < table.names else "right", no_wrap=place == 0)
    for row in table.frame.itertuples(index=False):
        grid.add_row(*row)
    return Group(Text(table.title, style="bold"), grid, *map(Text, table.notes), Text())


def in_markdown(table: Table, heading: str = "") -> str:
    """Title, table and notes; `heading` goes before the title."""
    frame = table.frame
    rules = ["---"] * table.names + ["---:"] * (len(frame.columns) - table.names)
    lines = [frame.columns, rules, *frame.itertuples(index=False)]
    grid = "\n".join(f"| {' | '.join(line)} |" for line in lines if table.rows)
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
    found = list(case.facts.get("notes", ()))
    for peer in case.peers.values():
        found += [f"{peer.label}: {note}" for note in peer.about["notes"]]
        found += [f"{peer.label}: not measured: {peer.failure}"] if peer.failure else []
    if left_out := case.facts.get("left_out"):
        found.append(f"no time was left for {len(left_out)} blocks, the first of them {left_out[0]}")
    return [" ".join(text.split()) for text in found]


def measured(case: CaseRows, *without: str) -> dict[str, PeerRows]:
    """The contenders that have figures."""
    return {name: peer for name, peer in case.peers.items() if not peer.failure and name not in without}
