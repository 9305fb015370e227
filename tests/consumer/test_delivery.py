"""What becomes of an answer, and of its blocks, whatever happens on the way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fastq_loader.consumer.delivery import Delivery
from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BATCH, ERROR, Answer, BatchHandle
from fastq_loader.scheduling.states import Batch
from fastq_loader.statistics.counters import Counters


class Pool:
    """Notes what becomes of blocks."""

    def __init__(self) -> None:
        self.delivered: list[int] = []
        self.dropped: list[int] = []
        self.deliver = self.delivered.extend
        self.drop = self.dropped.extend


class Unpacker:
    """Handles whose batch is in block 1 and copied out of block 2; what is set here is raised."""

    def __init__(self, opening: Exception | None = None, unpacking: Exception | None = None) -> None:
        self._opening, self._unpacking = opening, unpacking

    def open(self, handle: BatchHandle) -> tuple[list[int], list[int], None]:
        if self._opening is not None:
            raise self._opening
        return [1], [2], None

    def unpack(self, handle: BatchHandle, pickled: None) -> Any:
        if self._unpacking is not None:
            raise self._unpacking
        return "batch"

    def exception(self, handle: BatchHandle) -> BaseException:
        if self._opening is not None:
            raise self._opening
        return handle.values[0]  # type: ignore[no-any-return]


def hand_out(
    unpacker: Unpacker, outcome: int = BATCH, error: Exception | None = None
) -> tuple[Any, Pool, Counters]:
    """An answer with blocks 1 and 2; `error` is what it carries."""
    pool, counters = Pool(), Counters()
    handle = BatchHandle(0, SimpleNamespace(nbytes=40), (error,), None, ((1, 30, 0), (2, 10, 0)))
    answer = Answer(1, 0, 0, outcome, 0, 0, (), (), handle, ((1, 30), (2, 10)))
    delivery = Delivery(unpacker, pool, counters)  # type: ignore[arg-type]
    batch = Batch(0, 3, None)
    batch.answer = answer
    return delivery.hand_out(batch), pool, counters


def test_a_batch_is_delivered_with_leases_and_without_what_was_copied() -> None:
    outcome, pool, counters = hand_out(Unpacker())
    assert (outcome.batch, outcome.error) == ("batch", None)
    assert (pool.delivered, pool.dropped) == ([1], [2])
    assert (counters.batches, counters.bytes) == (1, 40)


@pytest.mark.parametrize("error", [ProtocolError("no such block"), MemoryError("no room")])
def test_a_batch_that_cannot_be_unpacked_fails_at_its_position(error: Exception) -> None:
    outcome, pool, counters = hand_out(Unpacker(unpacking=error))
    assert (outcome.error, outcome.fatal) == (error, None)
    assert (pool.delivered, pool.dropped) == ([1], [2]), "its leases give the first one back"
    assert counters.rejected_frames == isinstance(error, ProtocolError)
    assert counters.batches == 0


def test_a_handle_that_does_not_fit_leaves_no_blocks_behind() -> None:
    for outcome_code in (BATCH, ERROR):
        outcome, pool, counters = hand_out(Unpacker(opening=(error := ProtocolError("no"))), outcome_code)
        assert outcome.error is error
        assert (pool.delivered, pool.dropped) == ([], [1, 2])
        assert counters.rejected_frames == 1
