"""`python -m bench.readme FILE`, from the repository root: the README's figures, from a file of results.

Rewrites what stands between two markers in README.md, and draws the pictures that it links to into a folder
beside the file. The first marker names the file, so that a test can see that nobody typed there.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path, PurePosixPath

from bench import files, plots
from bench.goals import goal, goal_reached, kill_bound, seconds_per_kill, times_of, verdict
from bench.machine import days
from bench.peers import PEERS
from bench.results import (
    BASELINE,
    BOUND,
    KillsResult,
    MomentResult,
    PeerResult,
    Results,
    ScheduleResult,
    WorkloadResult,
    cpu,
    rate,
    rate_ratio,
    spread,
    switches,
    time_ratio,
)
from bench.words import milliseconds, number, ratio, size, times, worker_count

README = Path("README.md")
OURS = "fastq_loader"
INLINE, OURS_INLINE = f"{BASELINE}_0", f"{OURS}_0"

BEGIN = "<!-- bench:begin: written by `python -m bench.readme {source}` -->"
END = "<!-- bench:end -->"
_SECTION = re.compile(
    r"<!-- bench:begin(?:: written by `python -m bench\.readme (\S+)`)? -->\n.*?" + END, re.S
)

NONE = "–"  # noqa: RUF001 - a dash in a table, where there is no figure


def source_of(readme: str) -> str | None:
    """The file that the README's figures were drawn from; None when its marker names none.

    Raises:
        ValueError: the README has not exactly one section between markers.
    """
    found = _SECTION.findall(readme)
    if len(found) != 1:
        raise ValueError(
            f"the README has {len(found)} sections from {BEGIN.split(':')[0]}... to {END}, not one"
        )
    return found[0] or None


def rewritten(readme: str, results: Results, source: str) -> str:
    """The README with the figures of these results.

    Args:
        source: where the results are, relative to the README, with forward slashes.

    Raises:
        ValueError: the README has not exactly one section between markers, or a workload is without torch's
            DataLoader or ours.
    """
    source_of(readme)
    compared: list[tuple[str, Collection[str]]] = [(row.name, row.peers) for row in results.workloads]
    compared += [(row.moment, row.peers) for row in (*results.start, *results.turns)]
    for what, peers in compared:
        if missing := [name for name in (BASELINE, OURS) if name not in peers]:
            raise ValueError(
                f"{what!r} was measured without {', '.join(missing)}; the README compares these two"
            )
    text = f"{BEGIN.format(source=source)}\n\n{section(results, source)}\n{END}"
    return _SECTION.sub(lambda _: text, readme)


def section(results: Results, source: str) -> str:
    """All that stands between the markers, in Markdown."""
    parts = [_run(results, source)]
    for workers, rows in plots.by_number_of_workers(results.workloads).items():
        parts.append(f"Speed with {worker_count(workers)} ({rows[0].start_method}), in batches per second:")
        parts.append(_table(_SPEED, map(_speed, rows)))
        parts.append("What it costs, each as torch's / ours:")
        parts.append(_table(_COST, map(_cost, rows)))
    if moments := [*results.start, *results.turns]:
        parts.append("Moments in a loader's life, in milliseconds:")
        parts.append(_table(_MOMENTS, map(_moment, moments), names=3))
    if results.schedule:
        parts.append(_SCHEDULE_HEAD)
        parts.append(_table(_SCHEDULE, (row for result in results.schedule for row in _schedule(result)), 2))
    if results.kills:
        parts.append("What the death of a worker costs an epoch, with `Processes(max_restarts=n)`:")
        parts.append(_table(_KILLS, map(_kills, results.kills)))
    parts += [_remarks(results.workloads), _not_measured(results.schedule)]
    folder = PurePosixPath(source).with_suffix("")
    parts += [f"![{picture.title}]({folder / picture.name})" for picture in plots.pictures(results)]
    return "\n\n".join(part for part in parts if part) + "\n"


# ---- the tables ---------------------------------------------------------------------------------

_SPEED = (
    "workload",
    "torch",
    OURS,
    "÷ torch",
    "share of the ceiling",
    "best other loader; ours ÷ it",
    "num_workers=0: torch / ours",
)
_COST = (
    "workload",
    "`next()`, p95 in ms",
    "CPU µs per batch",
    "context switches per batch",
    "PSS, MB",
    "shared memory, MB",
    "descriptors",
)
_SCHEDULE_HEAD = (
    "Order without the stall: seconds of an epoch whose workers were up. The bound is what no order of "
    "loading can do without; in a list schedule whoever is free takes the next batch, and nothing else takes "
    "time. The head of the line is late while later batches are ready and the next one is not."
)
_SCHEDULE = ("case", "loader", "seconds", "÷ bound", "÷ the goal's base", "late head, s", "goal")
_KILLS = (
    "workers; batches",
    "undisturbed, s",
    "with kills, s",
    "kills",
    "ms a kill",
    "a worker's start and one batch, ms",
    "goal: at most that",
)
_MOMENTS = ("moment", "workload", "workers", "torch", OURS, "times shorter")


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], names: int = 1) -> str:
    """A table of which the first columns hold names and the others figures, which stand to the right."""
    lines = [head, ["---"] * names + ["---:"] * (len(head) - names), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _run(results: Results, source: str) -> str:
    machine = results.machine
    where = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}, {days(machine)}"
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    rounds = max((len(row.peers[BASELINE].blocks) for row in results.workloads), default=0)
    return (
        f"{where}; {versions}. "
        f"Peers in turn in one run, medians of {rounds} blocks; in brackets the range over the rounds. "
        f"Raw figures: [`{source}`]({source}); `python -m bench --json FILE` writes such a file."
    )


def _speed(row: WorkloadResult) -> list[str]:
    ours, torch = row.peers[OURS], row.peers[BASELINE]
    return [
        f"**{row.name}**: {row.description}; {size(row.batch_bytes)}",
        _rate(torch),
        _rate(ours),
        _over(ours, torch),
        _share(row, ours),
        _best(row),
        _without_workers(row),
    ]


def _rate(peer: PeerResult) -> str:
    return number(rate(peer.blocks).median) if peer.blocks else NONE


def _over(peer: PeerResult, other: PeerResult) -> str:
    return ratio(rate_ratio(peer.blocks, other.blocks)) if peer.blocks and other.blocks else NONE


def _share(row: WorkloadResult, peer: PeerResult) -> str:
    """Of the ceiling; a range around 100 % is no doubt about who is faster, so it says nothing of noise."""
    if not (peer.blocks and row.ceiling):
        return NONE
    share = rate_ratio(peer.blocks, row.ceiling)
    return f"{share.median:.0%} ({share.low:.0%}-{share.high:.0%})"


def _best(row: WorkloadResult) -> str:
    """The fastest of the others that have workers."""
    others = [
        peer
        for name, peer in row.peers.items()
        if name in PEERS and name not in (OURS, OURS_INLINE, INLINE) and peer.blocks
    ]
    if not others:
        return NONE
    best = max(others, key=lambda peer: rate(peer.blocks).median)
    return f"{best.label} {_rate(best)}; {_over(row.peers[OURS], best)}"


def _without_workers(row: WorkloadResult) -> str:
    cells = [_rate(row.peers[name]) if name in row.peers else NONE for name in (INLINE, OURS_INLINE)]
    by_hand = [f"{peer.label}: {_rate(peer)}" for name, peer in row.peers.items() if name not in PEERS]
    return "; ".join([" / ".join(cells), *by_hand])


def _cost(row: WorkloadResult) -> list[str]:
    both = [row.peers[name] for name in (BASELINE, OURS)]
    figures: list[list[float | None]] = [
        [peer.latency.p95 * 1e3 if peer.latency else None for peer in both],
        [cpu(peer.blocks).median * 1e6 if peer.blocks else None for peer in both],
        [switches(peer.blocks).median if peer.blocks else None for peer in both],
        [peer.peak.pss / 1e6 if peer.peak else None for peer in both],
        [max(peer.peak.shmem, 0) / 1e6 if peer.peak else None for peer in both],
        [
            peer.peak.consumer_descriptors + peer.peak.worker_descriptors if peer.peak else None
            for peer in both
        ],
    ]
    cells = [[NONE if value is None else number(value) for value in values] for values in figures]
    return [row.name, *(" / ".join(pair) for pair in cells)]


def _moment(result: MomentResult) -> list[str]:
    ours, torch = result.peers[OURS], result.peers[BASELINE]
    return [
        result.moment,
        result.workload,
        f"{result.num_workers}, {result.start_method}",
        _milliseconds(torch.seconds),
        _milliseconds(ours.seconds),
        ratio(time_ratio(torch.seconds, ours.seconds)) if torch.seconds and ours.seconds else NONE,
    ]


def _schedule(result: ScheduleResult) -> Iterator[list[str]]:
    """The bound, and a row for every contender; the case is described in the first."""
    head = (
        f"**{result.case}**: {result.description}; {worker_count(result.num_workers)}, {result.start_method}"
    )
    if result.bound is not None:
        yield [head, f"bound: {result.bounded_by}", f"{result.bound:.2f}", "1.00", "", "", ""]
        head = ""
    if result.bound is not None and result.list_schedule is not None:
        listed = result.list_schedule
        yield ["", "list schedule, computed", f"{listed:.2f}", f"{listed / result.bound:.2f}", "", "", ""]
    for name, contender in result.contenders.items():
        bound = times_of(result, name, BOUND)
        base = times_of(result, name, result.goal.base) if result.goal.base not in (BOUND, name) else None
        late = [epoch.head_of_line for epoch in contender.epochs if epoch.head_of_line is not None]
        wanted = f"{goal(result)}: {goal_reached(result)}" if name == result.goal.of else ""
        yield [
            head,
            contender.label,
            times(spread([epoch.seconds for epoch in contender.epochs])) if contender.epochs else NONE,
            times(bound) if bound else "",
            times(base) if base else "",
            f"{spread(late).median:.2f}" if late else "",
            wanted,
        ]
        head = ""


def _kills(result: KillsResult) -> list[str]:
    workers = f"{worker_count(result.num_workers)}, {result.start_method}"
    name = f"{workers}; {result.batches} batches, {result.description}"
    if result.failure is not None:
        return [name, *[NONE] * (len(_KILLS) - 2), f"not measured: {_in_a_line(result.failure)}"]
    cost = seconds_per_kill(result)
    return [
        name,
        times(spread(result.undisturbed)),
        times(spread(result.killed)),
        number(spread(result.kills).median),
        milliseconds(cost),
        number(1e3 * kill_bound(result)),
        verdict(cost, kill_bound(result)),
    ]


def _milliseconds(seconds: Sequence[float]) -> str:
    if not seconds:
        return NONE
    return milliseconds(spread(seconds))


def _remarks(rows: Sequence[WorkloadResult]) -> str:
    """Who was not measured and why, and what has to be known of those who were."""
    lines = []
    for name in dict.fromkeys(name for row in rows for name in row.peers):
        asked = {row.name: row.peers[name] for row in rows if name in row.peers}
        label = next(iter(asked.values())).label
        measured = [workload for workload, peer in asked.items() if peer.failure is None]
        for note in dict.fromkeys(note for peer in asked.values() for note in peer.notes):
            where = [workload for workload in measured if note in asked[workload].notes]
            lines.append(f"- {label}: {_in_a_line(note)}{_where(where, measured)}")
        for failure in dict.fromkeys(peer.failure for peer in asked.values() if peer.failure):
            where = [workload for workload, peer in asked.items() if peer.failure == failure]
            lines.append(f"- {label}: not measured, {_in_a_line(failure)}{_where(where, asked)}")
    return "\n".join(lines)


def _not_measured(cases: Sequence[ScheduleResult]) -> str:
    return "\n".join(
        f"- {contender.label}: not measured, {_in_a_line(contender.failure)} ({result.case})"
        for result in cases
        for contender in result.contenders.values()
        if contender.failure is not None
    )


def _where(workloads: Sequence[str], of: Collection[str]) -> str:
    """Which of them, or nothing where it is all."""
    return "" if len(workloads) == len(of) else f" ({', '.join(workloads)})"


def _in_a_line(text: str) -> str:
    return " ".join(text.split())


# ---- the command --------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.readme", description="Draw the figures and pictures of README.md from results."
    )
    parser.add_argument(
        "file", type=Path, help="what `python -m bench --json` wrote, below the current folder"
    )
    file: Path = parser.parse_args().file
    try:
        source = file.resolve().relative_to(Path.cwd()).as_posix()
        results = files.read(file)
        text = rewritten(README.read_text(), results, source)
        paths = plots.write(results, file.with_suffix(""))
    except (OSError, ValueError, ImportError) as error:
        sys.exit(f"{parser.prog}: {error}")
    README.write_text(text)
    print(README, *paths, sep="\n")


if __name__ == "__main__":
    main()
