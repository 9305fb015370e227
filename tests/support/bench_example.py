"""Results of a bench run that never took place, in round figures."""

from __future__ import annotations

from bench.results import Block, Latency, MomentResult, Peak, PeerResult, Repeated, Results, WorkloadResult

ROUNDS = 3


def blocks(rate: float) -> list[Block]:
    """Blocks of one second in which everything took 100 ms of the consumer's and 300 ms of the workers' CPU.

    The rounds run at 0.9, 1 and 1.1 times the rate, so that ratios within a round have no spread.
    """
    return [Block(round(rate * factor), 1.0, 0.1, 0.3, switches=1000) for factor in (0.9, 1.0, 1.1)]


def peer(label: str, rate: float) -> PeerResult:
    peak = Peak(200_000_000, 150_000_000, 40_000_000, 10_000_000, 20_000_000, 10, 20)
    return PeerResult(label, blocks(rate), Latency(ROUNDS * round(rate), 0.001, 0.002, 0.003, 0.004), peak)


def workload(name: str, batch_bytes: float = 2560, num_workers: int = 2) -> WorkloadResult:
    peers = {
        "torch": peer("torch", 100),
        "fastq_loader": peer("fastq_loader", 1000),
        "grain": peer("Grain", 200),
        "spdl_threads": PeerResult("SPDL, threads", failure="not installed"),
        "torch_0": peer("torch, num_workers=0", 2000),
        "fastq_loader_0": peer("fastq_loader, num_workers=0", 3000),
    }
    return WorkloadResult(
        name=name,
        description=f"what {name} loads",
        batch_size=64,
        batch_bytes=batch_bytes,
        transport_bound=True,
        num_workers=num_workers,
        start_method="fork",
        ceiling=blocks(2000),
        peers=peers,
    )


def moment() -> MomentResult:
    peers = {
        "torch": Repeated("torch", [0.040, 0.044, 0.036]),
        "fastq_loader": Repeated("fastq_loader", [0.010, 0.011, 0.009]),
        "grain": Repeated("Grain", failure="not installed"),
    }
    return MomentResult("epoch turn", "rows", 2, "fork", peers)


def run() -> Results:
    """A whole run: two workloads, three sizes of batches, two numbers of workers, one moment."""
    return Results(
        arguments={"blocks": ROUNDS},
        machine={
            "cpu": "A CPU",
            "cores": 2,
            "load_average": 0.1,
            "system": "Linux 6.1",
            "versions": {"python": "3.11.7", "torch": "2.13.0"},
            "date": "2026-01-02T03:04:05+00:00",
        },
        workloads=[workload("rows"), workload("tokens", 524_288)],
        by_bytes=[workload(f"bytes_{size}", size) for size in (1 << 10, 1 << 20, 1 << 28)],
        by_workers=[workload("rows", num_workers=workers) for workers in (1, 4)],
        turns=[moment()],
    )
