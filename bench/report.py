"""How results are shown on the console: a table for each workload and each case, and one for moments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from bench.goals import base_name, goal, goal_reached, kill_bound, seconds_per_kill, times_of, verdict
from bench.results import (
    BASELINE,
    BOUND,
    Block,
    Epoch,
    KillsResult,
    MomentResult,
    PeerResult,
    ScheduleResult,
    Spread,
    WorkloadResult,
    consumer_cpu,
    rate,
    rate_ratio,
    spread,
    switches,
    time_ratio,
    worker_cpu,
)
from bench.words import milliseconds, number, ratio, size, times, worker_count

PIPED_WIDTH = 160  # rich assumes 80 columns when there is no terminal, and the table is wider
RATIO_WIDTH = len("1.0 (0.8-1.1), within noise")  # on one line, also where other columns have to fold

LEGEND = (
    "batches/s: median block (slowest-fastest). ceiling: share of what as many processes fetch and collate\n"
    "without delivering it. / torch: ratio of the medians (lowest-highest in a round), 'within noise' when\n"
    "the rounds disagree on which is faster. p50, p95, p99: of next(), milliseconds. CPU: milliseconds\n"
    "for a batch, consumer + workers. cs: context switches for a batch. PSS: peak of consumer and workers,\n"
    "MB. shm: peak of the machine's shared memory, with what waits there and is mapped by nobody, MB. fd:\n"
    "descriptors, consumer + workers."
)

SCHEDULE_LEGEND = (
    "s: an epoch with its workers up, median (range). next(): of it within next(). busy: share of the time\n"
    "of all workers that went into samples. late head: waiting while later batches were ready. window: the\n"
    "batches that could be under way at the end. list schedule: whoever is free takes the next batch, and\n"
    "nothing else takes time. / base: times as long as the loader that the goal names. A goal is met or\n"
    "missed 'within noise' when the rounds disagree."
)


def console() -> Console:
    """Standard output: as wide as the terminal, or wide enough for the table when there is none."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPED_WIDTH)


def machine_line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {size(machine['memory'], 1024)}, "
        f"load {machine['load_average']}, {machine['system']}\n{versions}, {machine['date']}"
    )


def workload_table(result: WorkloadResult) -> Group:
    """A title, one row for every peer, and notes below."""
    title = (
        f"{result.name}: {result.description}; {size(result.batch_bytes)} a batch, "
        f"{worker_count(result.num_workers)}, {result.start_method}"
    )
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("", no_wrap=True)
    grid.add_column("batches/s", justify="right")
    grid.add_column("bytes/s", justify="right")
    grid.add_column("ceiling", justify="right")
    grid.add_column("/ torch", min_width=RATIO_WIDTH)
    memory = any(peer.peak for peer in result.peers.values())
    for column in ("p50", "p95", "p99", "CPU", "cs", *(("PSS", "shm", "fd") if memory else ())):
        grid.add_column(column, justify="right")
    grid.add_row("the ceiling", *_speed(result, result.ceiling), "", "", "", "", *_costs(result.ceiling))
    baseline = result.peers.get(BASELINE)
    for name, peer in result.peers.items():
        if peer.failure is not None:
            continue
        base = baseline.blocks if baseline is not None and name != BASELINE else []
        grid.add_row(
            peer.label,
            *_speed(result, peer.blocks),
            f"{rate_ratio(peer.blocks, result.ceiling).median:.0%}",
            ratio(rate_ratio(peer.blocks, base)) if base else "",
            *_waits(peer),
            *_costs(peer.blocks),
            *_peak(peer),
        )
    remarks = [f"{peer.label}: {text}" for peer in result.peers.values() for text in _remarks(peer)]
    return Group(Text(title, style="bold"), grid, *map(Text, remarks), Text())


def table(outcome: object) -> Group | None:
    """What is shown of a job's outcome when it is there; None: with others of its kind, at the end."""
    if isinstance(outcome, WorkloadResult):
        return workload_table(outcome)
    if isinstance(outcome, ScheduleResult):
        return schedule_table(outcome)
    if isinstance(outcome, KillsResult):
        return kills_table(outcome)
    return None


def schedule_table(result: ScheduleResult) -> Group:
    """A title, one row for every contender, and notes below."""
    title = f"{result.case}: {result.description}; {worker_count(result.num_workers)}, {result.start_method}"
    base = result.goal.base
    compared = {"/ bound": BOUND} if result.bound is not None else {}
    if base in result.contenders:
        compared["/ base"] = base
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    grid.add_column("", no_wrap=True)
    for column in ("s", "batches/s", *compared):
        grid.add_column(column, justify="right")
    for column in ("next(), s", "busy", "late head, s", "window"):
        grid.add_column(column, justify="right")
    if result.bound is not None:
        grid.add_row(
            f"bound: {result.bounded_by}",
            f"{result.bound:.2f}",
            number(result.batches / result.bound),
            "1.00",
        )
    if result.bound is not None and result.list_schedule is not None:
        listed = result.list_schedule
        share = f"{listed / result.bound:.2f}"
        grid.add_row("list schedule", f"{listed:.2f}", number(result.batches / listed), share)
    for name, contender in result.contenders.items():
        if contender.failure is not None:
            continue
        epochs = contender.epochs
        taken = spread([epoch.seconds for epoch in epochs])
        multiples = [times_of(result, name, each) if each != name else None for each in compared.values()]
        grid.add_row(
            contender.label,
            times(taken),
            number(result.batches / taken.median),
            *("" if value is None else times(value) for value in multiples),
            times(spread([epoch.waited for epoch in epochs])),
            *_inside(result, epochs),
        )
    remarks = [f"goal: {base_name(result, result.goal.of)} takes {goal(result)}: {goal_reached(result)}"]
    remarks += [
        f"{contender.label}: not measured: {contender.failure}"
        for contender in result.contenders.values()
        if contender.failure
    ]
    return Group(Text(title, style="bold"), grid, *map(Text, remarks), Text())


def kills_table(result: KillsResult) -> Group:
    """A title, one row, or why there is none."""
    title = (
        f"kills: {result.batches} batches, {result.description}; {worker_count(result.num_workers)}, "
        f"{result.start_method}"
    )
    if result.failure is not None:
        return Group(Text(title, style="bold"), Text(f"not measured: {result.failure}"), Text())
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in (
        "undisturbed, s",
        "killed, s",
        "kills",
        "ms a kill",
        "worker start, ms",
        "start + batch, ms",
    ):
        grid.add_column(column, justify="right")
    grid.add_column("goal: a kill <= start + batch")
    grid.add_row(
        times(spread(result.undisturbed)),
        times(spread(result.killed)),
        _range(spread(result.kills)),
        milliseconds(seconds_per_kill(result)),
        milliseconds(spread(result.start)),
        number(1e3 * kill_bound(result)),
        verdict(seconds_per_kill(result), kill_bound(result)),
    )
    return Group(Text(title, style="bold"), grid, Text())


def _inside(result: ScheduleResult, epochs: Sequence[Epoch]) -> tuple[str, str, str]:
    """How busy workers were, how long the head was late, and how wide the window: where it is known."""
    busy = [epoch.worked / epoch.seconds / result.num_workers for epoch in epochs if epoch.worked is not None]
    late = [epoch.head_of_line for epoch in epochs if epoch.head_of_line is not None]
    windows = [epoch.window for epoch in epochs if epoch.window is not None]
    return (
        f"{spread(busy).median:.0%}" if busy else "",
        f"{spread(late).median:.2f}" if late else "",
        _range(spread(windows)) if windows else "",
    )


def moments_table(results: Sequence[MomentResult]) -> Table:
    """One row for every moment and peer."""
    grid = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for column in ("", "moment", "workers", "peer"):
        grid.add_column(column)
    grid.add_column("ms: median (range)", justify="right")
    grid.add_column("times shorter than torch's", min_width=RATIO_WIDTH)
    for result in results:
        baseline = result.peers.get(BASELINE)
        for name, peer in result.peers.items():
            base = baseline.seconds if baseline is not None and name != BASELINE else []
            grid.add_row(
                result.workload,
                result.moment,
                f"{result.num_workers}, {result.start_method}",
                peer.label,
                peer.failure or _range(spread([1e3 * seconds for seconds in peer.seconds])),
                ratio(time_ratio(base, peer.seconds)) if base and peer.seconds else "",
            )
    return grid


def _speed(result: WorkloadResult, blocks: Sequence[Block]) -> tuple[str, str]:
    speed = rate(blocks)
    return _range(speed), size(speed.median * result.batch_bytes)


def _waits(peer: PeerResult) -> tuple[str, ...]:
    waits = peer.latency
    return ("", "", "") if waits is None else tuple(_ms(part) for part in (waits.p50, waits.p95, waits.p99))


def _costs(blocks: Sequence[Block]) -> tuple[str, str]:
    consumer, workers = consumer_cpu(blocks).median, worker_cpu(blocks).median
    return f"{_ms(consumer)} + {_ms(workers)}", number(switches(blocks).median)


def _peak(peer: PeerResult) -> tuple[str, ...]:
    peak = peer.peak
    if peak is None:
        return ()
    descriptors = f"{peak.consumer_descriptors} + {peak.worker_descriptors}"
    return f"{peak.pss / 1e6:,.0f}", f"{max(peak.shmem, 0) / 1e6:,.0f}", descriptors


def _remarks(peer: PeerResult) -> list[str]:
    return [*peer.notes, *([f"not measured: {peer.failure}"] if peer.failure else [])]


def _range(figure: Spread) -> str:
    return f"{number(figure.median)} ({number(figure.low)}-{number(figure.high)})"


def _ms(seconds: float) -> str:
    """Milliseconds with two digits that count: 0.018, 0.55, 3.2, 140."""
    value = 1e3 * seconds
    return "0" if value == 0 else f"{value:.0f}" if value >= 9.95 else f"{value:.2g}"
