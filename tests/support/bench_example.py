"""Rows of a bench run that never took place, in round figures."""

from __future__ import annotations

from typing import Any

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
REVISION = {"commit": "0123456789", "package": "abc"}
ROUNDS = (0.9, 1.0, 1.1)  # so that ratios within a round have no spread


def run(date: str = MACHINE["date"]) -> Row:
    return run_row(MACHINE | {"date": date}, REVISION, {"blocks": 3, "seconds": 1.0})


def case(kind: str, name: str, facts: Row, peers: dict[str, Row], blocks: dict[str, list[Row]]) -> list[Row]:
    """The rows of a case; block rows count up where they do not say which round they are of."""
    key = {"kind": kind, "case": name, "workers": facts.pop("workers", 2), "start_method": "fork"}
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


def steady(name: str = "rows", workers: int = 2, size: float = 2560.0, **more: Row) -> list[Row]:
    waits = {"calls": 300, "p50": 0.001, "p95": 0.002, "p99": 0.003, "longest": 0.004}
    rates = {"ceiling": 2000, "torch": 100, "fastq_loader": 1000, "grain": 200, "torch_0": 2000}
    peers = {peer: {} if peer == "ceiling" else dict(waits) for peer in rates} | more
    facts = {"workers": workers, "batch_size": 64, "batch_bytes": size}
    found = {peer: blocks(rate) for peer, rate in rates.items() if peer not in more}
    return case("steady", name, facts, peers, found)


def program(name: str = "csv_table", end: str = "loss 0.5, predictions abc", **failed: Row) -> list[Row]:
    """A program whose runs with our loader took half of the time, and came to `end`."""
    ends = {"torch": "loss 0.5, predictions abc", "fastq_loader": end}
    seconds = {"torch": (4.0, 8.0, 6.0), "fastq_loader": (2.0, 4.0, 3.0)}
    found = {
        peer: [
            {
                "batches": 9,
                "seconds": each,
                "waited": 0.5,
                "first": each / 2,
                "epoch": each / 4,
                "memory": [1e8, 2e8],
                "idle": 0.002,
            }
            | {"end": ends[peer]}
            for each in of
        ]
        for peer, of in seconds.items()
        if peer not in failed
    }
    return case("program", name, {}, {peer: {} for peer in seconds} | failed, found)


def starts(workers: int = 8) -> list[Row]:
    """Loaders alone: ours starts in half of torch's time, and has half of its memory."""
    row = {"first": 0.2, "epoch": 0.4, "pss": 8e8, "uss": 4e8, "shared": 2e8}
    halves = {"torch": 1.0, "fastq_loader": 0.5}
    found = {
        peer: [{name: value * half * factor for name, value in row.items()} for factor in ROUNDS]
        for peer, half in halves.items()
    }
    return case("starts", "large_u8", {"workers": workers}, {peer: {} for peer in halves}, found)


def everything() -> Results:
    """A whole run on the host."""
    return Results([run(), *steady(), *steady("tokens"), *starts(), *program()])
