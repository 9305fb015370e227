"""The tables of a run, the same on the console and in a file: text in rows of cells, made of rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.output import figures
from bench.output.figures import (
    BASELINE,
    CEILING,
    INLINE,
    OURS,
    between_parts,
    compared,
    figure,
    median,
    series,
    share_of_peak,
    spread,
)
from bench.output.goals import (
    Goal,
    best_of,
    goals,
    name_of,
    seconds_beyond_fresh,
    times_of,
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
from bench.output.rows import CaseRows, PeerRows, Results
from bench.peers.device import MEANINGS, RESIDENT
from bench.timing.against import AGAINST, NEW, OLD
from bench.timing.cluster import AXIS as CLUSTER
from bench.timing.cluster import LOCAL, REMOTE, TURN
from bench.timing.device import AXIS as DEVICE
from bench.timing.device import COPY, DRAIN, LINK, READY, SUPPLY
from bench.timing.resume import AXIS as RESUME
from bench.timing.resume import FRESH, RESUMED, SHUFFLE, STATE, STEPS, WITH, WITHOUT
from bench.timing.schedule import BOUND
from bench.timing.tuning import AXIS as INSIGHT

Cells = dict[str, str]

STEADY = ("steady", "bytes", "workers")

ABOUT_PEERS = """batches/s: the median block (slowest..fastest). ceiling: share of what as many processes
fetch and collate without delivering it. ÷ torch: ratio of the medians (lowest..highest in a round), 'within
noise' when the rounds disagree on which is faster. p50, p95, p99: of next(), in ms. CPU: ms for a batch,
consumer + workers. switches: context switches for a batch."""
ABOUT_COSTS = "Each as torch's / ours."
ABOUT_MEMORY = """PSS: peak of consumer and workers. shared: peak of the machine's shared memory, with what
waits there and is mapped by nobody."""
ABOUT_SCHEDULE = """Seconds of an epoch whose workers were up. bound: what no order of loading can do
without. next(): seconds of it within next(). busy: share of all workers' time that went into samples.
late head: seconds of waiting while later batches were ready. window: batches that could be under way in the
end."""
ABOUT_RESUME = """µs: of state_dict(), called after each batch; bytes: of the state as JSON, or pickled where
that fails. with, without: batches/s with such calls and without; StatefulDataLoader notes its state in every
step of either. fresh: seconds from the loader's constructor to its first batch; resumed: the same with
load_state_dict(). shuffle: seconds of torch.randperm alone. Ratios and differences are of the same round."""
ABOUT_GOALS = "A goal is met or missed 'within noise' when the rounds disagree."
ABOUT_AGAINST = """old, new: batches/s, the median block. new ÷ old: median of the ratios within each round
(lowest..highest), 'within noise' when the rounds disagree on which is faster. CPU: µs for a batch, old → new.
ceiling: share of what as many processes fetch and collate without delivering it, old → new."""
ABOUT_CLUSTER = """Other machines are nodes of a Ray cluster on this one. RayWorkers ÷ it: ratio of the
medians (lowest..highest in a round). actors: as many as workers, with as many batches asked for ahead as a
loader prefetches, handed out in order. recv_into: as many TCP connections as workers, into memory that is
used again; nobody makes the batches, or puts them in order. p50, p95: of next()."""
ABOUT_TURN = """From asking for what comes after the last batch to the first batch of the next epoch, with
persistent workers."""
ABOUT_TUNING = """÷ best: of all settings; ÷ best number: of those with schedule="dynamic" and the usual
prefetch. "auto" has its third epoch first, and its numbers of workers are those of all its epochs. Steps
sleep."""
ABOUT_SPEED = f"""{MEANINGS} eta: bytes per second as a share of the peak of a 256 MiB copy from pinned
memory; copies: the arm's kind of copy alone; drain: the whole loader. stall: share of the device's time
between the end of a step and the start of the next, in percentage points beyond the resident arm (whose row
has its own share, %); *: workers and link supply {SUPPLY:g} x what such steps need. At most two steps are
queued ahead."""
ABOUT_ARMS = """ready: next() after a pause, when the batch is there; behind: next() at the longest steps.
CPU: the consumer's seconds per GB of a full drain."""


def case_tables(case: CaseRows) -> list[Table]:
    """What is shown of a case as soon as it is measured; nothing where it is a row of a summary."""
    makers: dict[str, tuple[Callable[[CaseRows], Table], ...]]
    makers = {"schedule": (_schedule,), RESUME: (_resume,), DEVICE: (_speed_onto_device, _cost_onto_device)}
    makers |= dict.fromkeys(STEADY, (_peers,)) | {INSIGHT: (_tuning,), CLUSTER: (_cluster,)}
    makers[AGAINST] = (lambda case: _against([case]),)
    return [make(case) for make in makers.get(case.key[0], ())]


def summary_tables(results: Results) -> list[Table]:
    """What is shown of several cases together."""
    found = []
    for (workers, method), cases in results.by_workers("steady").items():
        several = f"{worker_count(workers)} ({method})"
        found.append(Table(f"Speed with {several}, in batches per second", list(map(_speed, cases))))
        found.append(Table(f"Cost with {several}", list(map(_costs, cases)), about=ABOUT_COSTS))
    for (workers, method), cases in results.by_workers("memory").items():
        title = f"Memory with {worker_count(workers)} ({method}): torch / fastq_loader"
        found.append(Table(title, list(map(_memory, cases)), about=ABOUT_MEMORY))
    found.append(Table("Moments in a loader's life, in milliseconds", list(_moments(results)), 3))
    found.append(Table("Goals", list(map(_goal, goals(results))), about=ABOUT_GOALS))
    if len(revisions := results.cases(AGAINST)) > 1:
        found.append(_against(revisions))
    return [table for table in found if table.rows]


def missed_table(results: Results) -> Table:
    """The goals that were not reached."""
    missed = [goal for goal in goals(results) if goal.verdict.startswith("missed")]
    return Table("", list(map(_goal, missed)))


def short_table(results: Results, names: Iterable[str]) -> Table:
    """The table of the project's own README: the fastest of each kind on these workloads."""
    rows = []
    for case in results.cases("steady"):
        if case.name in names:
            best, full = figures.best_other(case), _speed(case)
            row = {"batches per second": f"{case.name}: {case.facts['description']}", "torch": full["torch"]}
            rate = best and number(median(case, best, "rate"))
            row["best other"] = f"{rate} ({case.peers[best].label})" if best else NONE
            rows.append(row | {name: full[name] for name in (OURS, "÷ torch")})
    return Table("", rows)


def _goal(goal: Goal) -> Cells:
    text = times if goal.wanted < 10 else ranged
    return {
        "goal": goal.measure,
        "wanted": f"at {'most' if goal.at_most else 'least'} {goal.wanted:.3g}{goal.unit}",
        "measured": text(goal.figure),
        "verdict": goal.verdict,
        "torch": text(goal.beside) if goal.beside else "",
    }


def _table(case: CaseRows, about: str, cells: Callable[[CaseRows, str, PeerRows], Cells]) -> Table:
    """A row for every contender with figures."""
    rows = [{"loader": peer.label} | cells(case, name, peer) for name, peer in measured(case).items()]
    return Table(title_of(case), rows, about=about, notes=remarks(case))


def _waits(peer: PeerRows, *percentiles: str) -> Cells:
    found = {f"{each}, ms": peer.about.get(each) for each in percentiles}
    return {name: "" if wait is None else number(1e3 * wait) for name, wait in found.items()}


# ---- the steady state, one revision against another -----------------------------------------------


def _peers(case: CaseRows) -> Table:
    def cells(case: CaseRows, name: str, peer: PeerRows) -> Cells:
        cpu = (median(case, name, each, 1e3) for each in ("consumer_cpu", "worker_cpu"))
        bytes_of = median(case, name, "rate", case.facts["batch_bytes"])
        return {
            "batches/s": ranged(figure(case, name, "rate")),
            "bytes/s": NONE if bytes_of is None else size(bytes_of),
            "ceiling": "" if name == CEILING else _share_of_ceiling(case, name),
            "÷ torch": "" if name in (CEILING, BASELINE) else ratio(compared(case, name, BASELINE)),
            **_waits(peer, "p50", "p95", "p99"),
            "CPU, ms": " + ".join(map(number, cpu)),
            "switches": number(median(case, name, "switches")),
        }

    return _table(case, ABOUT_PEERS, cells)


def _share_of_ceiling(case: CaseRows, peer: str) -> str:
    return percent(compared(case, peer, CEILING)).split(" ")[0]


def _speed(case: CaseRows) -> Cells:
    rates = {name: number(median(case, name, "rate")) for name in (*case.peers, BASELINE, OURS, *INLINE)}
    best = figures.best_other(case)
    other = best and f"{case.peers[best].label} {rates[best]}; {ratio(compared(case, OURS, best))}"
    return {
        "workload": f"{case.name}: {case.facts['description']}; {size(case.facts['batch_bytes'])}",
        "torch": rates[BASELINE],
        OURS: rates[OURS],
        "÷ torch": ratio(compared(case, OURS, BASELINE)),
        "share of the ceiling": percent(compared(case, OURS, CEILING)),
        "best other loader; ours ÷ it": other or NONE,
        "0 workers: torch / ours": " / ".join(rates[name] for name in INLINE),
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


def _memory(case: CaseRows) -> Cells:
    return {
        "workload": case.name,
        "PSS, MB": _both(case, "pss", 1e-6),
        "shared, MB": _both(case, "shared_memory", 1e-6),
        "descriptors": _both(case, "descriptors"),
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


# ---- moments, the schedule, a resume --------------------------------------------------------------


def _moments(results: Results) -> Iterator[Cells]:
    """A row for every moment, whose figures are times: shorter is better."""
    for case in results.cases("start", "turns"):
        run = {"workload": case.name, "workers": f"{case.facts['workers']}, {case.facts['start_method']}"}
        for note in remarks(case):
            yield {"moment": note} | run
        for part in dict.fromkeys(row["part"] for peer in case.peers.values() for row in peer.rows):
            seconds = {name: figure(case, name, "seconds", part) for name in case.peers}
            shorter = ratio(compared(case, BASELINE, OURS, "seconds", part))
            cells = {case.peers[name].label: ranged(found, 1e3) for name, found in seconds.items()}
            yield {"moment": part} | run | cells | {"times shorter": shorter}


def _schedule(case: CaseRows) -> Table:
    """The bound, and a row for every contender."""
    facts, base = case.facts, case.facts["goal"]["base"]
    rows = []
    if facts["bound"] is not None:
        rows.append({"loader": f"bound: {facts['bounded_by']}", "s": f"{facts['bound']:.2f}"})
    titles = {base: f"÷ {name_of(case, base)}"} | {BOUND: "÷ bound"}

    def cells(case: CaseRows, name: str, peer: PeerRows) -> Cells:
        found = {each: times_of(case, name, each) for each in dict.fromkeys((BOUND, base)) if each != name}
        worked = figures.ratio(series(case, name, "worked"), series(case, name, "seconds"))
        late, window = (figure(case, name, each) for each in ("head_of_line", "window"))
        return {
            "s": times(figure(case, name, "seconds")),
            **{titles[each]: times(value) for each, value in found.items() if value},
            "batches/s": ranged(figure(case, name, "rate")),
            "next(), s": times(figure(case, name, "waited")),
            "busy": f"{worked.median / facts['workers']:.0%}" if worked else "",
            "late head, s": f"{late.median:.2f}" if late else "",
            "window": ranged(window) if window else "",
        }

    found = _table(case, ABOUT_SCHEDULE, cells)
    return found._replace(rows=[*rows, *found.rows])


def _resume(case: CaseRows) -> Table:
    return _table(case, ABOUT_RESUME, {STATE: _state, STEPS: _steps}.get(case.name, _first_batches))


def _state(case: CaseRows, name: str, peer: PeerRows) -> Cells:
    held = figure(case, name, "bytes", STATE)
    call = figure(case, name, "call", STATE, 1e6)
    return {"µs": ranged(call), "bytes": size(held.median) if held else NONE}


def _steps(case: CaseRows, name: str, peer: PeerRows) -> Cells:
    rates = {part: ranged(figure(case, name, "rate", part)) for part in (WITHOUT, WITH)}
    return rates | {"with ÷ without": times(between_parts(case, name, "rate", WITH, WITHOUT))}


def _first_batches(case: CaseRows, name: str, peer: PeerRows) -> Cells:
    return {
        **{f"{part}, s": times(figure(case, name, "seconds", part)) for part in (FRESH, RESUMED, SHUFFLE)},
        "resumed - fresh, s": times(seconds_beyond_fresh(case, name)),
        "resumed ÷ shuffle": times(between_parts(case, name, "seconds", RESUMED, SHUFFLE)),
    }


# ---- other machines -------------------------------------------------------------------------------


def _cluster(case: CaseRows) -> Table:
    return _table(case, *((ABOUT_TURN, _turns) if case.name == TURN else (ABOUT_CLUSTER, _rates)))


def _rates(case: CaseRows, name: str, peer: PeerRows) -> Cells:
    return {
        "batches/s": ranged(figure(case, name, "rate")),
        "MB/s": ranged(figure(case, name, "rate", scale=case.facts["batch_bytes"] / 1e6)),
        "RayWorkers ÷ it": "" if name == REMOTE else times(compared(case, REMOTE, name)),
        **_waits(peer, "p50", "p95"),
    }


def _turns(case: CaseRows, name: str, peer: PeerRows) -> Cells:
    return {
        "turn, ms": ranged(figure(case, name, "seconds", scale=1e3)),
        "÷ workers here": "" if name == LOCAL else times(compared(case, name, LOCAL, "seconds")),
    }


# ---- what tune() and "auto" choose ----------------------------------------------------------------


def _tuning(case: CaseRows) -> Table:
    bases = {"÷ best": best_of(case), "÷ best number": best_of(case, fixed=True)}

    def cells(case: CaseRows, name: str, peer: PeerRows) -> Cells:
        ratios = {column: times(compared(case, name, base)) for column, base in bases.items()}
        return {"batches/s": ranged(figure(case, name, "rate"))} | ratios

    found = _table(case, ABOUT_TUNING, cells)
    kept = [row for row in found.rows if row["batches/s"] != NONE]
    return found._replace(rows=kept)


# ---- onto a device ------------------------------------------------------------------------------


def _speed_onto_device(shape: CaseRows) -> Table:
    rows, megabytes = [], shape.facts["batch_bytes"] / 1e6
    for name, arm in measured(shape, LINK).items():
        row = {"arm": arm.label, "MB/s, drain": ranged(figure(shape, name, "rate", DRAIN, megabytes))}
        row |= {f"eta, {part}": times(share_of_peak(shape, name, part)) for part in (DRAIN, COPY)}
        for length in figures.lengths(shape):
            title = f"stall, {length}{'*' if figures.supplied(shape, length) else ''}"
            beyond = figures.stall_points(shape, name, length)
            row[title] = ranged(figure(shape, name, "stall", length) if name == RESIDENT else beyond)
        rows.append(row)
    return Table(title_of(shape), rows, about=" ".join(ABOUT_SPEED.split()))


def _cost_onto_device(shape: CaseRows) -> Table:
    facts, peak = shape.facts, figure(shape, LINK, "copy_rate", COPY, 1e-9)
    rows = []
    for name, arm in measured(shape, LINK, RESIDENT).items():
        row = {"arm": arm.label}
        for title, part in zip(("ready", "behind"), (READY, *figures.lengths(shape)[-1:]), strict=False):
            row |= {f"{title} {p}, µs": ranged(figure(shape, name, p, part, 1e6)) for p in ("p50", "p99")}
        row["CPU s/GB"] = ranged(figure(shape, name, "consumer_cpu", DRAIN, 1e9 / facts["batch_bytes"]))
        rows.append(row)
    source = (
        "the copy of a batch" if facts["unit"] == facts["copy_seconds"] else f"{SUPPLY:g} x the workers' time"
    )
    note = (
        f"peak {number(peak.high if peak else None)} GB/s; a copy takes {1e6 * facts['copy_seconds']:,.0f} "
        f"µs; workers supply a batch every {1e6 / facts['supply']:,.0f} µs; steps in units of "
        f"{1e6 * facts['unit']:,.0f} µs: {source}"
    )
    return Table(f"{shape.name}: what it costs", rows, about=ABOUT_ARMS, notes=[note, *remarks(shape)])
