"""The tables of a run, the same on the console and in a file: text in rows of cells, made of rows alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.output.figures import (
    BASELINE,
    CEILING,
    INLINE,
    OURS,
    Spread,
    compared,
    figure,
    median,
    others,
    series,
    spread,
)
from bench.output.layout import (
    NONE,
    Table,
    measured,
    noise,
    number,
    percent,
    ranged,
    ratio,
    remarks,
    size,
    times,
    title_of,
    worker_count,
)
from bench.output.rows import CaseRows, Results
from bench.peers import PEERS
from bench.programs import report
from bench.timing.against import AGAINST, NEW, OLD
from bench.timing.device import COPY, DRAIN, LENGTHS, LINK, RESIDENT
from bench.timing.device import KIND as DEVICE
from bench.timing.starts import KIND as STARTS
from bench.timing.training import KIND as TRAINING

Cells = dict[str, str]

ABOUT_PEERS = """batches/s: the median block (slowest..fastest). ceiling: share of what as many processes
fetch and collate without delivering it. ÷ torch: ratio of the medians (lowest..highest in a round), 'within
noise' when the rounds disagree on which is faster. p50, p95, p99: of next(), in ms. CPU: ms for a batch,
consumer + workers. switches: context switches for a batch."""
ABOUT_COSTS = "Each as torch's / ours."
ABOUT_AGAINST = """old, new: batches/s, the median block. new ÷ old: median of the ratios within each round
(lowest..highest), 'within noise' when the rounds disagree on which is faster. CPU: µs for a batch, old → new.
ceiling: share of what as many processes fetch and collate without delivering it, old → new."""
ABOUT_DEVICE = """eta: bytes per second as a share of the peak of a 256 MiB copy from pinned memory. stall:
share of the device's time between the end of a step and the start of the next, in percentage points beyond
the first row's (which has its own share, %); steps are so many times as long as the copy of a batch, and two
are queued ahead. next(): at the longest steps. CPU: the consumer's seconds per GB of a full drain."""

ABOUT_TRAINING = """items/s: samples trained. share: of the speed with batches that are on the device already.
next(): the mean, with .to() where there is one. CPU: of the consumer's process, for 1,000 items. first batch:
from making the loader on. page-locked: the most at a time."""

ABOUT_STARTS = """Each loader alone, in a fresh process for each block. first batch: from making the loader
on. epoch: 64 batches with new workers, from iter() until these have ended. PSS: of all processes, where a
page that several map counts once; USS: the pages that each has alone; shared: the machine's shared memory
beyond that of before. Memory is looked at in the middle of an epoch, with all prefetched batches ready."""
START_COLUMNS = {
    "first": ("first batch, ms", 1e3),
    "epoch": ("epoch, ms", 1e3),
    "pss": ("PSS, MB", 1e-6),
    "uss": ("USS, MB", 1e-6),
    "shared": ("shared, MB", 1e-6),
}


def case_tables(case: CaseRows) -> list[Table]:
    """What is shown of a case as soon as it is measured."""
    makers: dict[str, Callable[[CaseRows], Table]]
    makers = {"steady": _peers, "program": report.table, DEVICE: _onto_device}
    makers[TRAINING] = _trained
    makers[STARTS] = _started
    makers[AGAINST] = lambda case: _against([case])
    return [makers[case.key[0]](case)]


def summary_tables(results: Results) -> list[Table]:
    """What is shown of several cases together."""
    found = []
    for (workers, method), cases in results.by_workers().items():
        several = f"{worker_count(workers)} ({method})"
        found.append(Table(f"Speed with {several}, in batches per second", list(map(_speed, cases))))
        found.append(Table(f"Cost with {several}", list(map(_costs, cases)), about=ABOUT_COSTS))
    if len(revisions := results.cases(AGAINST)) > 1:
        found.append(_against(revisions))
    return found


def short_table(results: Results) -> Table:
    """The workloads in the table of the project's own README."""
    rows = []
    for case in results.cases("steady"):
        full = _speed(case)
        row = {"batches per second": f"{case.name}: {case.facts['description']}"}
        best = next(
            (f"{number(rate)} ({case.peers[name].label})" for name, rate in others(case).items()), NONE
        )
        inline = [PEERS[name].label for name in INLINE]
        row |= {name: full[name] for name in (BASELINE, inline[0])} | {"best other": best}
        rows.append(row | {name: full[name] for name in (OURS, inline[1], "÷ torch")})
    return Table("", rows)


def program_table(results: Results) -> Table:
    """The programs in it: a row for each loader beside torch's."""
    rows = []
    for case in results.cases("program"):
        workers = worker_count(case.facts["workers"])
        for name, peer in measured(case, BASELINE).items():
            row = {"seconds of a program": f"{case.name}: {case.facts['description']}; {workers}"}
            row |= {"loader": peer.label, "torch": report.single(figure(case, BASELINE, "seconds"))}
            row["this loader"] = report.single(figure(case, name, "seconds"))
            rows.append(row | {"torch ÷ it": report.single(compared(case, BASELINE, name, "seconds"))})
    return Table("", rows, 2)


def started(case: CaseRows) -> str:
    """How loaders start and what memory they have, in a sentence; torch's first."""
    found = []
    for measure, (title, scale) in START_COLUMNS.items():
        both = " / ".join(number(median(case, name, measure, scale)) for name in (BASELINE, OURS))
        what, unit = title.split(", ")
        found.append(f"{what} {both} {unit}")
    return f"{case.name} with {worker_count(case.facts['workers'])}, torch / {OURS}: {', '.join(found)}."


def _started(case: CaseRows) -> Table:
    rows = []
    for name, peer in measured(case).items():
        row = {"loader": peer.label}
        for measure, (title, scale) in START_COLUMNS.items():
            row[title] = report.single(figure(case, name, measure, scale=scale))
        row["torch's epoch ÷ it"] = "" if name == BASELINE else ratio(compared(case, BASELINE, name, "epoch"))
        rows.append(row)
    return Table(title_of(case), rows, about=ABOUT_STARTS, notes=remarks(case))


def _peers(case: CaseRows) -> Table:
    """A row for every contender with figures."""
    rows = []
    for name, peer in measured(case).items():
        cpu = (median(case, name, each, 1e3) for each in ("consumer_cpu", "worker_cpu"))
        waits = {f"{each}, ms": peer.about.get(each) for each in ("p50", "p95", "p99")}
        row = {
            "loader": peer.label,
            "batches/s": ranged(figure(case, name, "rate")),
            "bytes/s": size(median(case, name, "rate", case.facts["batch_bytes"]) or 0),
            "ceiling": "" if name == CEILING else _share_of_ceiling(case, name),
            "÷ torch": "" if name in (CEILING, BASELINE) else ratio(compared(case, name, BASELINE)),
            **{title: "" if wait is None else number(1e3 * wait) for title, wait in waits.items()},
            "CPU, ms": " + ".join(map(number, cpu)),
            "switches": number(median(case, name, "switches")),
        }
        rows.append(row)
    return Table(title_of(case), rows, about=ABOUT_PEERS, notes=remarks(case))


def _share_of_ceiling(case: CaseRows, peer: str) -> str:
    return percent(compared(case, peer, CEILING)).split(" ")[0]


def _speed(case: CaseRows) -> Cells:
    rates = {name: number(median(case, name, "rate")) for name in (*case.peers, BASELINE, OURS, *INLINE)}
    best = next(iter(others(case)), None)
    other = best and f"{case.peers[best].label} {rates[best]}; {ratio(compared(case, OURS, best))}"
    return {
        "workload": f"{case.name}: {case.facts['description']}; {size(case.facts['batch_bytes'])}",
        "torch": rates[BASELINE],
        **{PEERS[name].label: rates[name] for name in INLINE},
        OURS: rates[OURS],
        "÷ torch": ratio(compared(case, OURS, BASELINE)),
        "share of the ceiling": percent(compared(case, OURS, CEILING)),
        "best other loader; ours ÷ it": other or NONE,
    }


def _both(of: CaseRows, measure: str, scale: float = 1) -> str:
    return " / ".join(number(median(of, name, measure, scale)) for name in (BASELINE, OURS))


def _costs(case: CaseRows) -> Cells:
    waits = (case.peers[name].about.get("p95") if name in case.peers else None for name in (BASELINE, OURS))
    return {
        "workload": case.name,
        "next(), p95 in ms": " / ".join(number(wait and 1e3 * wait) for wait in waits),
        "CPU µs per batch": _both(case, "cpu", 1e6),
        "switches per batch": _both(case, "switches"),
    }


def _against(cases: Sequence[CaseRows]) -> Table:
    """All cases of two revisions: a row for each workload."""
    rows, notes = [], []
    for case in cases:
        old, new = (series(case, name, "rate") for name in (OLD, NEW))
        ratios = None if old is None or new is None else spread(new / old)
        row = {"workload": case.name, "workers": str(case.facts["workers"])}
        row |= {name: number(median(case, name, "rate")) for name in (OLD, NEW)}
        row["new ÷ old"] = times(ratios) + noise(ratios)
        for column in ("consumer", "worker"):
            cpu = (median(case, name, f"{column}_cpu", 1e6) for name in (OLD, NEW))
            row[f"{column} CPU"] = " → ".join(map(number, cpu))
        if CEILING in case.peers:
            row["ceiling"] = " → ".join(_share_of_ceiling(case, name) for name in (OLD, NEW))
        rows.append(row)
        notes += [f"{case.name}: {remark}" for remark in remarks(case)]
    return Table(cases[0].facts["title"], rows, 1, ABOUT_AGAINST, notes)


# ---- onto a device ------------------------------------------------------------------------------


def _onto_device(shape: CaseRows) -> Table:
    nbytes, copies = shape.facts["batch_bytes"], shape.part(LINK, COPY)
    peak = None if copies.empty else float((copies["bytes"] / copies["seconds"]).max())
    rows = []
    for name, arm in measured(shape, LINK).items():
        rate = figure(shape, name, "rate", DRAIN, nbytes)
        row = {"arm": arm.label, "MB/s": ranged(rate, 1e-6)}
        row["eta"] = times(Spread(*(each / peak for each in rate)) if rate and peak else None)
        for length in LENGTHS:
            own, bound = (series(shape, each, "stall", length) for each in (name, RESIDENT))
            beyond = None if own is None or bound is None else own - bound
            row[f"stall, {length}"] = ranged(spread(own if name == RESIDENT else beyond))
        for each in ("p50", "p99"):
            row[f"next(), {each}, µs"] = ranged(figure(shape, name, each, LENGTHS[-1], 1e6))
        row["CPU s/GB"] = ranged(figure(shape, name, "consumer_cpu", DRAIN, 1e9 / nbytes))
        rows.append(row)
    note = f"peak {number(peak and peak / 1e9)} GB/s; a copy takes {1e6 * shape.facts['unit']:,.0f} µs"
    return Table(title_of(shape), rows, about=ABOUT_DEVICE, notes=[note, *remarks(shape)])


def _trained(case: CaseRows) -> Table:
    rows, items = [], case.facts["batch_size"]
    for name, lane in measured(case).items():
        row = {"training": lane.label, "items/s": report.single(figure(case, name, "rate"), items)}
        row["share"] = "" if name == RESIDENT else percent(compared(case, name, RESIDENT))
        row["next(), ms"] = report.single(figure(case, name, "wait"), 1e3)
        row["CPU, s"] = report.single(figure(case, name, "consumer_cpu"), 1e3 / items)
        row["first batch, s"] = report.single(figure(case, name, "first"))
        row["page-locked, MB"] = report.single(figure(case, name, "locked"), 1e-6)
        rows.append(row)
    return Table(title_of(case), rows, about=ABOUT_TRAINING, notes=remarks(case))
