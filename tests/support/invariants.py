"""What holds between any two events of the scheduler, and of its pool of blocks. Tests check it after every
step.

Pure. It reads the scheduler's private parts, because it speaks about them.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any

from fastq_loader.memory.blocks import FILLED, FREE
from fastq_loader.scheduling.in_flight import AsTheyCome, Batch, InOrder, PendingTasks
from fastq_loader.scheduling.states import HELD as HELD_BACK
from fastq_loader.scheduling.states import LOST, READY, SENT

if TYPE_CHECKING:
    from fastq_loader.memory.pool import BlockPool
    from fastq_loader.scheduling.scheduler import Scheduler


def check(scheduler: Scheduler) -> None:
    """Raise AssertionError unless the invariants hold."""
    check_pool(scheduler.pool)
    check_tasks(scheduler.pending_tasks)
    _check_batches(scheduler)
    _check_blocks(scheduler)
    _check_workers(scheduler)


def _check_batches(scheduler: Scheduler) -> None:
    in_flight, window, workers = scheduler.in_flight, scheduler.window, scheduler._worker_table
    assert window.size <= window.widest
    assert len(in_flight.batches) <= window.widest + scheduler.workers, "more batches than the window allows"
    # Their end has arrived and is not processed: what they skipped after it is still SENT.
    ending = {batch.worker for batch in in_flight.batches.values() if batch.is_end}

    def to_come(batch: Batch) -> int:
        return (scheduler.pending_tasks.get((scheduler.epoch, batch.seq)) is batch) + batch.is_end

    for batch in in_flight.batches.values():
        assert in_flight.head <= batch.seq < in_flight.drawn, f"batch {batch.seq} is not in flight"
        assert batch.state in (SENT, READY, HELD_BACK, LOST), f"batch {batch.seq} is {batch.state}"
        if batch.state == SENT and (batch.worker is None or not workers.exhausted(batch.worker)):
            assert to_come(batch) == 1 or (to_come(batch) == 0 and batch.worker in ending), (
                f"batch {batch.seq} will be answered {to_come(batch)} times"
            )
    ready = [batch for batch in in_flight.batches.values() if batch.state in (READY, HELD_BACK)]
    assert _waiting(in_flight) == ready, "a ready batch does not wait for its delivery"


def _waiting(in_flight: InOrder | AsTheyCome) -> list[Batch]:
    """The batches that have arrived, in the order of the sampler."""
    if isinstance(in_flight, InOrder):
        ready = [batch for batch in in_flight.batches.values() if batch.state == READY]
        assert in_flight.filled == len(ready)
        assert in_flight.is_next_here == any(batch.seq == in_flight.head for batch in ready)
        arrived: list[Any] = [*ready, *in_flight._from_an_end_on]
    else:
        arrived = list(in_flight._arrivals)
        assert in_flight.filled == len(arrived)
        assert in_flight.is_next_here == bool(arrived)
    batches = [batch for batch in arrived if type(batch) is Batch and not batch.is_end]
    return sorted(batches, key=lambda batch: batch.seq)


def check_tasks(tasks: PendingTasks) -> None:
    """Raise AssertionError unless exactly the unclaimed shared tasks have a slot of the claim table."""
    tickets = tasks.tickets()
    slots = {ticket % tasks._slots for ticket in tickets}
    assert len(slots) == len(tickets), "two tasks share a slot of the claim table"
    assert slots == tasks._taken, "a slot is taken without a task, or a task has no slot"


def _check_blocks(scheduler: Scheduler) -> None:
    filled = sorted(offset for batch in scheduler.in_flight.batches.values() for offset, _ in batch.used)
    blocks = states(scheduler.pool)
    assert filled == sorted(offset for offset, state in blocks.items() if state == FILLED), (
        "a filled block belongs to no batch that waits"
    )


def _check_workers(scheduler: Scheduler) -> None:
    workers, pending = scheduler._worker_table, scheduler.pending_tasks
    if not scheduler.shared_tasks:
        assert all(batch.worker is not None for batch in pending.values()), "a task was sent to no worker"
    for (epoch, seq), batch in pending.items():
        assert batch.worker is None or not workers.is_dead(batch.worker), "a dead worker owes an answer"
        assert epoch != scheduler.epoch or not workers.is_dead(None), f"no worker is left for batch {seq}"


def states(pool: BlockPool) -> dict[int, str]:
    """The state of every block, by its offset."""
    return {offset: block.state for offset, block in pool._blocks.items()}


def check_pool(pool: BlockPool) -> None:
    """Raise AssertionError unless counts, free lists and states agree."""
    known, blocks = pool._blocks, pool._blocks.values()
    free = [offset for offsets in pool._free.values() for offset in offsets]
    assert len(free) == len(set(free)) == pool.free_blocks, "a block is in a free list twice"
    assert {b.offset for b in blocks if b.state == FREE} == set(free), "free lists and states differ"
    assert all(known[offset].size == size for size, offsets in pool._free.items() for offset in offsets)
    assert pool.nbytes == sum(b.size for b in blocks)
    assert all(b.size <= b.room for b in blocks)
    spans = sorted([(b.offset, b.room) for b in blocks] + [(offset, room) for room, offset in pool._cold])
    for (left, size), (right, _) in pairwise(spans):
        assert left + size <= right, f"blocks {left} and {right} overlap"
