"""What batches cost, from the counters of an epoch: what the model is asked with.

Pure. With workers every cost is measured. Without them nothing is known of what they would add, so a batch of
the least size is assumed; and nothing tells the CPU time of loading from that of the step, so as much of it
as fits is the loading's: then no more is promised of workers than they can give.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fastq_loader.insight.model import Costs
from fastq_loader.statistics.epoch import EpochCounters

if TYPE_CHECKING:
    from fastq_loader.statistics.counters import WorkerCounters

#: Seconds that packing a small batch takes a worker, and that its message and unpacking take the consumer.
_LEAST_PACK, _LEAST_OVERHEAD = 50e-6, 100e-6


def costs_of(
    epoch: EpochCounters, workers: Sequence[WorkerCounters], contention: float = 0.0
) -> Costs | None:
    """What a batch of an epoch cost; None before the first.

    Args:
        epoch: its counters.
        workers: those that loaded it; none where the consumer did.
        contention: the part of the time in which processes of this machine waited for a CPU, from 0 to 1. As
            much of what loading did without a CPU is taken for that, and not for a disk or a network.
    """
    ordered = sorted(epoch.costs)
    if not ordered or not epoch.batches:
        return None
    mean = sum(cost.load for cost in ordered) / len(ordered)
    scale = epoch.load / mean if mean else 1.0  # what is kept stands for all
    loads = tuple(cost.load / 1e9 * scale for cost in ordered)
    seconds = {cause: nanoseconds / 1e9 / epoch.batches for cause, nanoseconds in epoch.spent.items()}
    cpu = epoch.cpu / 1e9 / epoch.batches
    if workers:
        pack = sum(cost.pack for cost in ordered) / 1e9 / len(ordered)
        overhead = max(0.0, seconds["transport"] - epoch.in_transit / 1e9 / epoch.batches)
        load_cpu = _cpu_share(workers)
        step_cpu = cpu - overhead - seconds["sampler"] - seconds["device_copy"]
    else:
        load = seconds["workers"]
        load_cpu = min(1.0, cpu / load) if load and cpu else 1.0
        pack, overhead = _LEAST_PACK, _LEAST_OVERHEAD
        step_cpu = cpu - load * load_cpu
    return Costs(
        loads,
        pack=pack,
        overhead=overhead,
        device=seconds["device_copy"],
        draw=seconds["sampler"],
        step=seconds["consumer"],
        load_cpu=load_cpu + (1 - load_cpu) * contention,
        step_cpu=max(0.0, step_cpu),
    )


def _cpu_share(workers: Sequence[WorkerCounters]) -> float:
    """The part of their work in which workers used a CPU; all of it where that is not known."""
    marks = [worker.cpu_marks for worker in workers if len(worker.cpu_marks) > 1]
    work = sum(last[1] - first[1] for first, last in marks)
    cpu = sum(last[0] - first[0] for first, last in marks)
    return min(1.0, cpu / work) if work > 0 else 1.0
