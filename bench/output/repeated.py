"""A run against an earlier one of the same command: whether each figure of the README is the same. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from bench.output.figures import BASELINE, INLINE, OURS, Spread, figure, others
from bench.output.layout import Table, ranged, worker_count
from bench.output.rows import CaseRows, Results
from bench.output.tables import START_COLUMNS
from bench.timing.starts import KIND as STARTS

ABOUT = """Medians (lowest..highest in a round). same: whether the median of now lies in the range of before;
'overlaps' where only the two ranges have something in common."""
SAME, OVERLAPS, OTHER = "yes", "overlaps", "NO"


class Repeated(NamedTuple):
    """A figure before and now."""

    name: str
    before: Spread
    now: Spread | None

    @property
    def same(self) -> str:
        before, now = self.before, self.now
        if now is None or now.low > before.high or now.high < before.low:
            return OTHER
        return SAME if before.low <= now.median <= before.high else OVERLAPS


class Comparison(NamedTuple):
    """What is shown, in a table and in three sentences, and the status of the command."""

    table: Table
    sentences: list[str]
    status: int


def repeated(before: Results, now: Results) -> Comparison:
    """Each figure of the README that was drawn from these results, beside that of a new run."""
    again = {case.key: case for case in now.cases()}
    pairs = [(case, again.get(case.key, CaseRows(case.facts))) for case in before.cases()]
    figures = [found for pair in pairs for found in _figures(*pair)]
    by = {same: [each.name for each in figures if each.same == same] for same in (SAME, OVERLAPS, OTHER)}
    rows = [
        {"figure": each.name, "before": ranged(each.before), "now": ranged(each.now), "same": each.same}
        for each in figures
    ]
    sentences = [
        f"{len(by[SAME])} of {len(figures)} figures lie within the spread of those before.",
        f"Outside, with ranges that overlap: {'; '.join(by[OVERLAPS]) or 'none'}.",
        f"Other figures than before: {'; '.join(by[OTHER]) or 'none'}.",
    ]
    table = Table("The README's figures, before and now", rows, about=ABOUT)
    return Comparison(table, sentences, int(bool(by[OTHER])))


def _figures(case: CaseRows, again: CaseRows) -> Iterator[Repeated]:
    title = f"{case.name} ({worker_count(case.facts['workers'])})"
    for name, measure, unit, scale in _shown(case):
        before, now = (figure(each, name, measure, scale=scale) for each in (case, again))
        if before is not None:
            yield Repeated(f"{title}, {case.peers[name].label}, {unit}", before, now)


def _shown(case: CaseRows) -> Iterator[tuple[str, str, str, float]]:
    """Peer, measure, unit and scale of the figures of a case in the README, whose ratios are made of them."""
    kind = case.key[0]
    if kind == "steady":
        for name in (BASELINE, INLINE[0], *list(others(case))[:1], OURS, INLINE[1]):
            yield name, "rate", "batches/s", 1
    for name in case.peers if kind in ("program", STARTS) else ():
        if kind == "program":
            yield name, "seconds", "seconds", 1
        else:
            yield from ((name, measure, *column) for measure, column in START_COLUMNS.items())
