"""Whether what a worker answered can be true, asked before it changes anything.

Pure. The frame has the structure of an answer, and its handle that of a batch (see `messages`, `unpacking`).
What is left is what only the scheduler can say: whether the worker may have come to such an outcome, and
whether the blocks that it names are its to name. It looks at the private parts of the scheduler, like
`invariants`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import ENDED, SKIPPED, Answer
from fastq_loader.memory.ledger import GRANTED, PAGE, PROMISED, Extents, size_class
from fastq_loader.scheduling.states import Batch

if TYPE_CHECKING:
    from fastq_loader.scheduling.scheduler import Scheduler


def objection(scheduler: Scheduler, worker: int, batch: Batch, answer: Answer) -> ProtocolError | None:
    """Why `worker` cannot have given this answer for `batch`, which it was asked for; None if it can."""
    if answer.epoch == scheduler.epoch and answer.outcome in (ENDED, SKIPPED):
        ended = worker in scheduler._quiet
        if ended != (answer.outcome == SKIPPED):
            return _refusal(worker, answer, "its part of the dataset has ended already, or has not")
    if (answer.used or answer.fresh or answer.returned) and not _as_granted(batch, answer):
        reason = _unlikely_blocks(scheduler, worker, batch, answer)
        if reason is not None:
            return _refusal(worker, answer, reason)
    return None


def _as_granted(batch: Batch, answer: Answer) -> bool:
    """Whether the batch lies in all the blocks that were granted for it, as nearly every one does."""
    grants = dict(batch.grants)
    return (
        not answer.fresh
        and not answer.returned
        and len(answer.used) == len(grants)
        and all(0 < need <= grants.pop(offset, 0) for offset, need in answer.used)
    )


def _refusal(worker: int, answer: Answer, reason: str) -> ProtocolError:
    return ProtocolError(f"worker {worker} gave batch {answer.seq} an answer that cannot be true: {reason}")


def _unlikely_blocks(scheduler: Scheduler, worker: int, batch: Batch, answer: Answer) -> str | None:
    used = [offset for offset, _ in answer.used]
    named = [*used, *answer.returned]
    if len(set(named)) != len(named):
        return f"one block is named twice among {named}"
    fresh = dict(answer.fresh)
    reason = _unlikely_fresh(scheduler, worker, answer.fresh)
    if reason is not None:
        return reason
    own = {offset for offset, _ in batch.grants + batch.promises}
    needs = dict(answer.used)
    for offset in named:
        size = fresh.get(offset)
        if size is None:
            block = scheduler.ledger.look(offset)
            if block is None or block.writer not in (worker, batch.holder):
                return f"the block at {offset} is not its to write to"
            if block.state != GRANTED and (block.state != PROMISED or offset in needs):
                return f"the block at {offset} is {block.state}"
            if offset not in own and _is_another_tasks(scheduler, batch, offset):
                return f"the block at {offset} was granted to another task"
            size = block.size
        if not 0 < needs.get(offset, 1) <= size:
            return f"{needs[offset]} bytes in a block of {size}"
    return None


def _unlikely_fresh(scheduler: Scheduler, worker: int, fresh: Extents) -> str | None:
    end = 0
    for offset, size in sorted(fresh):
        if offset % PAGE or size != size_class(size):
            return f"{size} bytes at {offset} are no block"
        if offset < end or not scheduler.ledger.vacant(worker, offset, size):
            return f"a new block of {size} bytes at {offset} lies where none can be made"
        end = offset + size
    return None


def _is_another_tasks(scheduler: Scheduler, batch: Batch, offset: int) -> bool:
    return any(
        offset == at
        for other in scheduler.outstanding.values()
        if other is not batch
        for at, _ in other.grants + other.promises
    )
