"""The tables of what the loader says of itself: verdicts, searches, and what counting costs."""

from __future__ import annotations

from collections import Counter

from bench.output.figures import compared, figure, paired
from bench.output.goals import best_of
from bench.output.layout import Table, measured, remarks, title_of
from bench.output.rows import CaseRows
from bench.output.words import number, ranged, times
from bench.timing.insight import COST, LABELS, OURS, TRACED, UNCOUNTED, VERDICTS
from bench.timing.tuning import TUNED

ABOUT_VERDICTS = """limit: what time is lost to in this run. found: what diagnose() says, of how many runs.
share: of the epoch's time, in percent, as it says; stopwatch: as a stopwatch in the training loop says;
apart: how far one is from the other, in points."""
ABOUT_TUNING = """tried: batches/s of each setting for a moment; the best of them, what tune() chose and
num_workers="auto" then took turns, epoch by epoch, with persistent workers. ÷ best: of all settings; ÷ best
number: of those with schedule="dynamic" and the usual prefetch. "auto" has its third epoch first, and its
numbers of workers are those of all its epochs. Steps sleep."""
ABOUT_COST = """Each block with a new loader. Ratios are those within each round: their median, and between
which two it lies in 95 of 100 such runs."""


def table(case: CaseRows) -> Table:
    """That of one case."""
    return {VERDICTS: _verdicts, COST: _cost}.get(case.name, _tuning)(case)


def _verdicts(case: CaseRows) -> Table:
    rows = []
    for name, run in measured(case).items():
        found = Counter(row["limit"] for row in run.rows)
        row = {"run": run.label, "limit": run.about["limit"]}
        row["found"] = ", ".join(f"{limit}, {count} of {len(run.rows)}" for limit, count in found.items())
        for column, measure in (("share", "share"), ("stopwatch", "expected"), ("apart", "apart")):
            row[column] = ranged(figure(case, name, measure))
        rows.append(row)
    return Table(title_of(case), rows, 3, ABOUT_VERDICTS, remarks(case))


def _tuning(case: CaseRows) -> Table:
    bases = {"÷ best": best_of(case), "÷ best number": best_of(case, "fixed")}
    rows = []
    for name, lane in measured(case).items():
        if lane.rows:
            row = {"loader": lane.label, "tried": ""}
            row |= {"tried": number(lane.about["tried"])} if "tried" in lane.about else {}
            row["batches/s"] = ranged(figure(case, name, "rate"))
            rows.append(row | {column: times(compared(case, name, base)) for column, base in bases.items()})
    rows.sort(key=lambda row: row["tried"] != "")  # what was chosen before what it is compared to
    notes = [f"{case.facts['tried']} settings were tried, each for a moment"]
    if took := case.peers[TUNED].about.get("took"):
        notes.append(f"tune() took {number(took)} s")
    return Table(title_of(case), rows, about=ABOUT_TUNING, notes=[*notes, *remarks(case)])


def _cost(case: CaseRows) -> Table:
    bases = {UNCOUNTED: OURS, OURS: TRACED}
    rows = []
    for name, lane in measured(case).items():
        row = {"loader": lane.label, "batches/s": ranged(figure(case, name, "rate"))}
        for base, of in bases.items():
            row[f"÷ {LABELS[base]}"] = times(paired(case, name, base)) if name == of else ""
        rows.append(row | {"CPU, µs a batch": ranged(figure(case, name, "cpu", scale=1e6))})
    return Table(title_of(case), rows, about=ABOUT_COST, notes=remarks(case))
