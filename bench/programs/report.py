"""What runs of a program came to, as a table, and whether its loaders agree. Pure."""

from __future__ import annotations

from typing import Any

import pandas as pd

from bench.output.figures import BASELINE, Series, Spread, compared, figure, series
from bench.output.layout import Table, number, ranged, remarks, worker_count
from bench.output.rows import CaseRows
from bench.programs import PROGRAMS

SAME = "in every run, to the bit"
DIFFERENT = "RUNS DIFFER"
ABOUT = """Each run in a fresh process, the loaders in turn. seconds: of all passes over data, workers' starts
included. waited: in iter() and next(). epoch: the mean of all but the first. memory: peak of each epoch, PSS
of all processes. idle: CPU that workers of the loader which is not being read used. gains and costs: beside
torch's loader."""


def table(case: CaseRows) -> Table:
    """The runs of a program: a row for each loader."""
    notes = [_ended(case)]
    rows = []
    for name, peer in case.peers.items():
        if peer.failure:
            continue
        peaks = _peaks(series(case, name, "memory"))
        idle = figure(case, name, "idle", scale=1e3)
        rows.append(
            {
                "loader": peer.label,
                "seconds": single(figure(case, name, "seconds")),
                "torch's ÷ it": "" if name == BASELINE else single(compared(case, BASELINE, name, "seconds")),
                "waited, s": single(figure(case, name, "waited")),
                "epoch, ms": single(figure(case, name, "epoch", scale=1e3)),
                "first, ms": single(figure(case, name, "first", scale=1e3)),
                "memory, MB": ", ".join(number(peak / 1e6) for peak in _few(peaks)),
                "idle, ms": number(idle and idle.median),
            }
        )
        notes += filter(None, (_balance(case, name), _holds(case, name)))
        if PROGRAMS[case.name].part:
            notes.append(
                f"{peer.label}: the last epoch's peak is {peaks[-1] / peaks[0]:.3f} times the first's"
            )
    title = f"{case.name}: {case.facts['description']}; {worker_count(case.facts['workers'])}"
    return Table(title, rows, about=ABOUT, notes=[*notes, *remarks(case)])


def _balance(case: CaseRows, name: str) -> str:
    """What a loader gains, and what it costs."""
    whole, later, first = (compared(case, BASELINE, name, each) for each in ("seconds", "epoch", "first"))
    if name == BASELINE or not (whole and later and first):
        return ""
    own, torchs = (_peaks(series(case, each, "memory"))[-1] for each in (name, BASELINE))
    return (
        f"{case.peers[name].label}: {single(later)} times as fast as torch's from the second epoch on, "
        f"{single(whole)} times in the whole run; the first epoch {single(first)} times as fast, and "
        f"{(own - torchs) / 1e6:+,.0f} MB of memory"
    )


def _holds(case: CaseRows, name: str) -> str:
    """How much of the table a cache holds, in the last run."""
    blocks = case.part(name)
    if "cached" not in blocks:
        return ""
    values, samples, nbytes, most = blocks["cached"].iloc[-1]
    return (
        f"{case.peers[name].label}: holds {values:,} of {samples:,} samples ({values / samples:.0%}) in "
        f"{nbytes / 1e6:,.1f} of the {most / 1e6:,.1f} MB that it may take"
    )


def agree(case: CaseRows) -> bool:
    """Whether all loaders ran, and came to the same loss and predictions, to the bit."""
    apart = PROGRAMS[case.name].apart
    failed = [name for name, peer in case.peers.items() if peer.failure and name not in apart]
    return len(set(_ends(case).values())) <= 1 and not failed


def single(value: Spread | None, scale: float = 1) -> str:
    """A figure with its range, where there was more than one round."""
    alone = value is not None and value.low == value.high
    return number(value.median * scale) if alone and value else ranged(value, scale)


def _ends(case: CaseRows) -> dict[str, Any]:
    apart = PROGRAMS[case.name].apart
    peers = ((name, peer) for name, peer in case.peers.items() if name not in apart)
    return {f"{name}: {row['end']}": row["end"] for name, peer in peers for row in peer.rows}


def _ended(case: CaseRows) -> str:
    """What the runs came to, to the last digit."""
    ends = _ends(case)
    if not ends:
        return "nothing to compare its end with"
    if len(set(ends.values())) == 1:
        apart = [peer.label for name, peer in case.peers.items() if name in PROGRAMS[case.name].apart]
        but = f", but with {' and '.join(apart)}, whose crops are others" if apart else ""
        return f"{next(iter(ends.values()))}, {SAME}{but}"
    return f"{DIFFERENT}: {'; '.join(ends)}"


def _few(values: list[float]) -> list[float]:
    """Of many epochs the first, the middle one and the last."""
    return values if len(values) < 6 else [values[0], values[len(values) // 2], values[-1]]


def _peaks(memory: Series) -> list[float]:
    """Peak memory of each epoch, the median of the rounds."""
    return list(pd.DataFrame(memory.tolist()).median())
