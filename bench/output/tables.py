"""The tables of a run, the same on the console and in a README: text in data frames, made of rows alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from bench.output import against, cluster, figures, insight
from bench.output.figures import (
    BASELINE,
    CEILING,
    INLINE,
    OURS,
    between_parts,
    compared,
    figure,
    median,
    share_of_peak,
)
from bench.output.goals import goals, kill_limit, name_of, seconds_beyond_fresh, seconds_per_kill, times_of
from bench.output.layout import Table, measured, remarks, title_of
from bench.output.rows import CaseRows, Results
from bench.output.words import NONE, number, percent, ranged, ratio, size, times, worker_count
from bench.peers import PEERS
from bench.peers.device import MEANINGS, RESIDENT
from bench.timing.against import AGAINST
from bench.timing.cluster import AXIS as CLUSTER
from bench.timing.device import AXIS as DEVICE
from bench.timing.device import COPY, DRAIN, EPOCHS, LINK, READY, SUPPLY
from bench.timing.insight import AXIS as INSIGHT
from bench.timing.kills import KILLED, START, UNDISTURBED
from bench.timing.resume import AXIS as RESUME
from bench.timing.resume import FRESH, RESUMED, SHUFFLE, STATE, STEPS, WITH, WITHOUT
from bench.timing.schedule_cases import BOUND

STEADY = ("steady", "bytes", "workers")

ABOUT_PEERS = """batches/s: the median block (slowest..fastest). ceiling: share of what as many processes
fetch and collate without delivering it. ÷ torch: ratio of the medians (lowest..highest in a round), 'within
noise' when the rounds disagree on which is faster. p50, p95, p99: of next(), in ms. CPU: ms for a batch,
consumer + workers. switches: context switches for a batch."""
ABOUT_COST = """Each as torch's / ours. PSS: peak of consumer and workers. shared: peak of the machine's
shared memory, with what waits there and is mapped by nobody."""
ABOUT_SCHEDULE = """Seconds of an epoch whose workers were up. bound: what no order of loading can do
without. list schedule: whoever is free takes the next batch, and nothing else takes time. next(): seconds
of it within next(). busy: share of all workers' time that went into samples. late head: seconds of waiting
while later batches were ready. window: batches that could be under way at the end."""
ABOUT_RESUME = """µs: of state_dict(), called after each batch; bytes: of the state as JSON, or pickled where
that fails. with, without: batches/s with such calls and without; StatefulDataLoader notes its state in every
step of either. fresh: seconds from the loader's constructor to its first batch; resumed: the same with
load_state_dict(). shuffle: seconds of torch.randperm alone. Ratios and differences are of the same round."""
ABOUT_GOALS = "A goal is met or missed 'within noise' when the rounds disagree."
ABOUT_SPEED = f"""{MEANINGS} eta: bytes per second as a share of the peak of a 256 MiB copy from pinned
memory; copies: the arm's kind of copy alone; drain: the whole loader. stall: share of the device's time
between the end of a step and the start of the next, in percentage points beyond the resident arm (whose row
has its own share, %); *: workers and link supply {SUPPLY:g} x what such steps need. At most two steps are
queued ahead."""
ABOUT_ARMS = f"""ready: next() after a pause, when the batch is there; behind: next() at the longest steps.
CPU: the consumer's seconds per GB of a full drain. first: seconds until the first batch, the workers' start
included. populate, register: seconds until all pages were mapped and locked. reserved: device memory after
{EPOCHS[0]} and {EPOCHS[1]} epochs."""


def case_tables(case: CaseRows) -> list[Table]:
    """What is shown of a case as soon as it is measured; nothing where it is a row of a summary."""
    makers: dict[str, tuple[Callable[[CaseRows], Table], ...]]
    makers = {"schedule": (_schedule,), RESUME: (_resume,), DEVICE: (_speed_onto_device, _cost_onto_device)}
    makers |= dict.fromkeys(STEADY, (_peers,)) | {INSIGHT: (insight.table,), CLUSTER: (cluster.table,)}
    makers[AGAINST] = (lambda case: against.table([case]),)
    return [make(case) for make in makers.get(case.key[0], ())]


def summary_tables(results: Results) -> list[Table]:
    """What is shown of several cases together."""
    found = []
    for (workers, method), cases in results.by_workers("steady").items():
        several = f"{worker_count(workers)} ({method})"
        costs = [_cost(case, results.case("memory", case)) for case in cases]
        found.append(Table(f"Speed with {several}, in batches per second", list(map(_speed, cases))))
        found.append(Table(f"Cost with {several}", costs, about=ABOUT_COST))
    found.append(Table("Moments in a loader's life, in milliseconds", list(_moments(results)), 3))
    kills = list(map(_kills, results.cases("kills")))
    found.append(Table("What the death of a worker costs an epoch, with Processes(max_restarts=n)", kills))
    found.append(Table("Goals", list(_goals(results)), about=ABOUT_GOALS))
    if len(compared_cases := results.cases(AGAINST)) > 1:
        found.append(against.table(compared_cases))
    return [table for table in found if table.rows]


def _goals(results: Results) -> Iterator[dict[str, str]]:
    for goal in goals(results):
        text = times if goal.wanted < 10 else ranged
        yield {
            "goal": goal.measure,
            "wanted": f"at {'most' if goal.at_most else 'least'} {goal.wanted:.3g}{goal.unit}",
            "measured": text(goal.figure),
            "verdict": goal.verdict,
            "torch": text(goal.beside) if goal.beside else "",
        }


# ---- the steady state ---------------------------------------------------------------------------


def _peers(case: CaseRows) -> Table:
    rows = []
    for name, peer in measured(case).items():
        cpu = (median(case, name, each, 1e3) for each in ("consumer_cpu", "worker_cpu"))
        bytes_of = median(case, name, "rate", case.facts["batch_bytes"])
        waits = {each: peer.about.get(each) for each in ("p50", "p95", "p99")}
        rows.append(
            {
                "loader": peer.label,
                "batches/s": ranged(figure(case, name, "rate")),
                "bytes/s": NONE if bytes_of is None else size(bytes_of),
                "ceiling": "" if name == CEILING else percent(compared(case, name, CEILING)).split(" ")[0],
                "÷ torch": "" if name in (CEILING, BASELINE) else ratio(compared(case, name, BASELINE)),
                **{f"{each}, ms": "" if wait is None else number(1e3 * wait) for each, wait in waits.items()},
                "CPU, ms": " + ".join(map(number, cpu)),
                "switches": number(median(case, name, "switches")),
            }
        )
    return Table(title_of(case), rows, about=ABOUT_PEERS, notes=remarks(case))


def _speed(case: CaseRows) -> dict[str, str]:
    rates = {name: number(median(case, name, "rate")) for name in (*case.peers, BASELINE, OURS, *INLINE)}
    by_hand = [f"{name}: {rates[name]}" for name in case.peers if name not in PEERS and name != CEILING]
    best = figures.best_other(case)
    other = best and f"{case.peers[best].label} {rates[best]}; {ratio(compared(case, OURS, best))}"
    return {
        "workload": f"{case.name}: {case.facts['description']}; {size(case.facts['batch_bytes'])}",
        "torch": rates[BASELINE],
        OURS: rates[OURS],
        "÷ torch": ratio(compared(case, OURS, BASELINE)),
        "share of the ceiling": percent(compared(case, OURS, CEILING)),
        "best other loader; ours ÷ it": other or NONE,
        "0 workers: torch / ours": "; ".join([" / ".join(rates[name] for name in INLINE), *by_hand]),
    }


def _cost(case: CaseRows, memory: CaseRows | None) -> dict[str, str]:
    def both(of: CaseRows, measure: str, scale: float = 1) -> str:
        return " / ".join(number(median(of, name, measure, scale)) for name in (BASELINE, OURS))

    waits = (case.peers[name].about.get("p95") if name in case.peers else None for name in (BASELINE, OURS))
    costs = {
        "workload": case.name,
        "next(), p95 in ms": " / ".join(number(wait and 1e3 * wait) for wait in waits),
        "CPU µs per batch": both(case, "cpu", 1e6),
        "switches per batch": both(case, "switches"),
    }
    if memory is not None:
        costs |= {
            "PSS, MB": both(memory, "pss", 1e-6),
            "shared, MB": both(memory, "shared_memory", 1e-6),
            "descriptors": both(memory, "descriptors"),
        }
    return costs


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


# ---- moments, the schedule, kills ---------------------------------------------------------------


def _moments(results: Results) -> Iterator[dict[str, str]]:
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
    """The bounds, and a row for every contender."""
    facts, base = case.facts, case.facts["goal"]["base"]
    bounds = {f"bound: {facts['bounded_by']}": facts["bound"], "list schedule": facts["list_schedule"]}
    rows = [
        {"loader": label, "s": f"{seconds:.2f}", "÷ bound": f"{seconds / facts['bound']:.2f}"}
        for label, seconds in bounds.items()
        if seconds is not None
    ]
    titles = {base: f"÷ {name_of(case, base)}"} | {BOUND: "÷ bound"}
    for name, peer in measured(case).items():
        found = {each: times_of(case, name, each) for each in dict.fromkeys((BOUND, base)) if each != name}
        worked = figures.ratio(figures.series(case, name, "worked"), figures.series(case, name, "seconds"))
        late, window = (figure(case, name, each) for each in ("head_of_line", "window"))
        row = {"loader": peer.label, "s": times(figure(case, name, "seconds"))}
        row |= {titles[each]: times(value) for each, value in found.items() if value}
        row["batches/s"] = ranged(figure(case, name, "rate"))
        row["next(), s"] = times(figure(case, name, "waited"))
        row["busy"] = f"{worked.median / facts['workers']:.0%}" if worked else ""
        row["late head, s"] = f"{late.median:.2f}" if late else ""
        row["window"] = ranged(window) if window else ""
        rows.append(row)
    return Table(title_of(case), rows, about=ABOUT_SCHEDULE, notes=remarks(case))


def _resume(case: CaseRows) -> Table:
    """A row for every contender, with the columns of the case."""
    columns = {STATE: _state, STEPS: _steps}.get(case.name, _first_batches)
    rows = [{"loader": peer.label} | columns(case, name) for name, peer in measured(case).items()]
    return Table(title_of(case), rows, about=ABOUT_RESUME, notes=remarks(case))


def _state(case: CaseRows, peer: str) -> dict[str, str]:
    held = figure(case, peer, "bytes", STATE)
    call = figure(case, peer, "call", STATE, 1e6)
    return {"µs": ranged(call), "bytes": size(held.median) if held else NONE}


def _steps(case: CaseRows, peer: str) -> dict[str, str]:
    rates = {part: ranged(figure(case, peer, "rate", part)) for part in (WITHOUT, WITH)}
    return rates | {"with ÷ without": times(between_parts(case, peer, "rate", WITH, WITHOUT))}


def _first_batches(case: CaseRows, peer: str) -> dict[str, str]:
    return {
        **{f"{part}, s": times(figure(case, peer, "seconds", part)) for part in (FRESH, RESUMED, SHUFFLE)},
        "resumed - fresh, s": times(seconds_beyond_fresh(case, peer)),
        "resumed ÷ shuffle": times(between_parts(case, peer, "seconds", RESUMED, SHUFFLE)),
    }


def _kills(case: CaseRows) -> dict[str, str]:
    seconds = {part: figure(case, OURS, "seconds", part) for part in (UNDISTURBED, KILLED, START)}
    return {
        "epoch": "; ".join([f"{case.facts['batches']} batches, {title_of(case)}", *remarks(case)]),
        "undisturbed, s": times(seconds[UNDISTURBED]),
        "with kills, s": times(seconds[KILLED]),
        "kills": ranged(figure(case, OURS, "kills", KILLED)),
        "ms a kill": ranged(seconds_per_kill(case), 1e3),
        "a worker's start, ms": ranged(seconds[START], 1e3),
        "start and one batch, ms": number(1e3 * kill_limit(case) if seconds[START] else None),
    }


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
        row["first, s"] = number(arm.about.get("first_batch"))
        staging: dict[str, Any] = arm.about.get("staging", {})
        row |= {f"{each}, s": number(staging.get(f"{each}_seconds")) for each in ("populate", "register")}
        row["pinned"] = size(staging["pinned_bytes"], 1024) if staging else NONE
        for epochs in EPOCHS:
            reserved = arm.about.get(f"reserved_{epochs}")
            row[f"reserved, {epochs}"] = size(reserved, 1024) if reserved else NONE
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
