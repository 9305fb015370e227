"""The table of two revisions: a row for each workload."""

from __future__ import annotations

from collections.abc import Sequence

from bench.output.figures import CEILING, compared, median, series, spread
from bench.output.layout import Table, remarks
from bench.output.rows import CaseRows
from bench.output.words import noise, number, percent, times
from bench.timing.against import NEW, OLD

ABOUT = """old, new: batches/s, the median block. new ÷ old: median of the ratios within each round
(lowest..highest), 'within noise' when the rounds disagree on which is faster. CPU: µs for a batch, old → new.
ceiling: share of what as many processes fetch and collate without delivering it, old → new."""


def table(cases: Sequence[CaseRows]) -> Table:
    """All cases of one run."""
    rows, notes = [], []
    for case in cases:
        old, new = (series(case, name, "rate") for name in (OLD, NEW))
        ratios = None if old is None or new is None else spread(new / old)
        row = {"workload": case.name, "workers": str(case.facts["workers"])}
        row |= {name: number(median(case, name, "rate")) for name in (OLD, NEW)}
        row["new ÷ old"] = times(ratios) + noise(ratios)
        for column in ("consumer", "worker"):
            figures = (median(case, name, f"{column}_cpu", 1e6) for name in (OLD, NEW))
            row[f"{column} CPU"] = " → ".join(map(number, figures))
        if CEILING in case.peers:
            shares = (percent(compared(case, name, CEILING)).split(" ")[0] for name in (OLD, NEW))
            row["ceiling"] = " → ".join(shares)
        rows.append(row)
        notes += [f"{case.name}: {remark}" for remark in remarks(case)]
    return Table(cases[0].facts["title"], rows, 1, ABOUT, notes)
