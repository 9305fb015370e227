"""Rows of a bench run that never took place, in round figures."""

from __future__ import annotations

from typing import Any

from bench.timing.cluster import ACTORS, BARE, LOCAL, LOOPBACK, REMOTE, TURN, WORK
from bench.timing.resume import FRESH, PERMUTED, RESUMED, SHUFFLE, STATE, STEPS, WITH, WITHOUT

from bench.output.rows import Results, run_row

Row = dict[str, Any]
MACHINE = {
    "cpu": "A CPU",
    "cores": 2,
    "memory": 1 << 34,
    "load_average": 0.1,
    "system": "Linux 6.1",
    "versions": {"python": "3.11.7", "torch": "2.13.0"},
    "date": "2026-01-02T03:04:05+00:00",
}
ROUNDS = (0.9, 1.0, 1.1)  # so that ratios within a round have no spread


def run(date: str = MACHINE["date"]) -> Row:
    return run_row(MACHINE | {"date": date}, {"blocks": 3})


def case(axis: str, name: str, facts: Row, peers: dict[str, Row], blocks: dict[str, list[Row]]) -> list[Row]:
    """The rows of a case; block rows count up where they do not say which round they are of."""
    key = {"axis": axis, "case": name, "workers": facts.pop("workers", 2), "start_method": "fork"}
    rows = [{"row": "case", **key, "description": f"what {name} loads", **facts}]
    usual = {"failure": None, "notes": []}
    rows += [{"row": "peer", **key, "peer": p, "label": p, **usual, **about} for p, about in peers.items()]
    for peer, found in blocks.items():
        head = {"row": "block", **key, "peer": peer, "part": ""}
        rows += [{**head, "block": n, **row} for n, row in enumerate(found)]
    return rows


def blocks(rate: float) -> list[Row]:
    """Blocks of one second, which took 100 ms of the consumer's CPU and 300 ms of the workers'."""
    used = {"seconds": 1.0, "consumer_cpu": 0.1, "worker_cpu": 0.3, "switches": 1000}
    return [{"batches": round(rate * factor), **used} for factor in ROUNDS]


def steady(
    name: str = "rows", axis: str = "steady", workers: int = 2, size: float = 2560.0, **more: Row
) -> list[Row]:
    waits = {"calls": 300, "p50": 0.001, "p95": 0.002, "p99": 0.003, "longest": 0.004}
    rates = {"ceiling": 2000, "torch": 100, "fastq_loader": 1000, "grain": 200, "torch_0": 2000}
    peers = {peer: {} if peer == "ceiling" else dict(waits) for peer in rates} | more
    facts = {"workers": workers, "batch_size": 64, "batch_bytes": size}
    found = {peer: blocks(rate) for peer, rate in rates.items() if peer not in more}
    return case(axis, name, facts, peers, found)


def memory(name: str = "rows") -> list[Row]:
    held = {"pss": 2e8, "shared_memory": 2e7, "consumer_descriptors": 10, "worker_descriptors": 20}
    both = ("torch", "fastq_loader")
    return case("memory", name, {}, {peer: {} for peer in both}, {peer: [held] for peer in both})


def turns(**failed: Row) -> list[Row]:
    seconds = {"torch": (0.040, 0.044, 0.036), "fastq_loader": (0.010, 0.011, 0.009)}
    found = {peer: [{"part": "epoch turn", "seconds": each} for each in of] for peer, of in seconds.items()}
    return case("turns", "rows", {}, {"torch": {}, "fastq_loader": {}} | failed, found)


def schedule(goal_base: str = "bound", bound: float | None = 1.0) -> list[Row]:
    """Two workers."""
    facts: Row = {"batches": 7, "bound": bound, "bounded_by": "sum of costs / 2"}
    facts["goal"] = {"of": "dynamic", "times": 1.2, "base": goal_base}
    peers: dict[str, Row] = {"torch": {}, "dynamic": {}}
    peers["round_robin"] = {"failure": "no\nsuch argument"}
    seconds = {"torch": (2.4, 2.2, 2.0), "dynamic": (1.1, 1.0, 1.15)}
    inside = {"batches": 7, "worked": 1.0, "waited": 0.5}
    found = {peer: [{"seconds": each, **inside} for each in of] for peer, of in seconds.items()}
    found["dynamic"] = [row | {"head_of_line": 0.5, "window": 16} for row in found["dynamic"]]
    return case("schedule", "stalls", facts, peers, found)


def resume() -> list[Row]:
    """Our `state_dict()`, steps, and first batches, in three rounds."""
    states = [_row(STATE, n, calls=1000, seconds=0.02 * each, bytes=4000) for n, each in enumerate(ROUNDS)]
    steps = [
        _row(part, n, batches=1000, seconds=seconds * each)
        for part, seconds in ((WITHOUT, 1.0), (WITH, 1.25))
        for n, each in enumerate(ROUNDS)
    ]
    firsts = [
        _row(part, n, seconds=seconds * each)
        for part, seconds in ((FRESH, 0.5), (RESUMED, 1.0), (SHUFFLE, 0.8))
        for n, each in enumerate(ROUNDS)
    ]
    cases = {STATE: ("fastq_loader", states), STEPS: ("fastq_loader", steps)}
    cases |= {"resume_8": ("fastq_loader", firsts), "resume_9": (PERMUTED, firsts[:6])}
    return [
        row
        for name, (peer, found) in cases.items()
        for row in case("resume", name, {}, {peer: {}}, {peer: found})
    ]


def insight() -> list[Row]:
    """A search that `tune` won."""
    tried = {"num_workers": 2, "fixed": True}
    lanes: dict[str, Row] = {"tune": {"label": "tune: 0 workers", "num_workers": 0, "took": 20.0}}
    lanes |= {"2 workers": tried, "4 workers": tried | {"fixed": False}}
    lanes |= {"0 workers": tried | {"num_workers": 0}, "slow": tried, "auto": {"label": "auto: 2, 0 workers"}}
    rates = {"tune": 100, "2 workers": 90, "4 workers": 95, "0 workers": 110, "auto": 88}
    epochs = {name: blocks(rate) for name, rate in rates.items()}
    return case("insight", "tune_csv", {}, lanes, epochs)


def cluster(**failed: Row) -> list[Row]:
    """Workers on other machines."""
    rates = {LOCAL: 250, REMOTE: 200, ACTORS: 40, BARE: 250}
    peers: dict[str, Row] = {name: {} for name in rates}
    peers[REMOTE] = {"p50": 0.001, "p95": 0.002}
    facts = {"batch_bytes": 10**7}
    found = {name: blocks(rate) for name, rate in rates.items()}
    rows = [
        row
        for name in (LOOPBACK, *WORK)
        for row in case("cluster", name, dict(facts), peers | failed, {} if failed else found)
    ]
    turns = {LOCAL: 0.004, REMOTE: 0.008}
    spans = {name: [{"seconds": seconds * each} for each in ROUNDS] for name, seconds in turns.items()}
    return [*rows, *case("cluster", TURN, {"batch_bytes": 10**6}, {name: {} for name in turns}, spans)]


def _row(part: str, number: int, **figures: float) -> Row:
    return {"part": part, "block": number, **figures}


def everything() -> Results:
    """A whole run on the host."""
    sizes = [row for n in (1 << 10, 1 << 20) for row in steady(f"bytes_{n}", "bytes", size=n)]
    several = [row for workers in (1, 4) for row in steady(axis="workers", workers=workers)]
    rows = [run(), *steady(), *steady("tokens"), *sizes, *several, *memory(), *turns(), *schedule()]
    return Results([*rows, *resume(), *insight(), *cluster()])
