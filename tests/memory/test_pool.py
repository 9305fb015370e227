"""The pool: every way of a block back to the free ones, and the memory behind it."""

from __future__ import annotations

from typing import Any

import pytest

from fastq_loader.memory.blocks import SMALLEST as B
from fastq_loader.memory.blocks import Extents, Holder
from fastq_loader.memory.pool import BlockPool

REGION = 1 << 40


class RecordingArena:
    """An arena without memory, that notes what is given back."""

    def __init__(self) -> None:
        self.mapping = self
        self.retired = False
        self.released: list[int] = []
        self.punched: list[tuple[int, int]] = []
        self.kept: list[list[tuple[int, int]]] = []

    def region(self, worker: int) -> tuple[int, int]:
        return worker * REGION, (worker + 1) * REGION

    def released_blocks(self) -> list[int]:
        released, self.released = self.released, []
        return released

    def punch(self, offset: int, size: int) -> None:
        self.punched.append((offset, size))

    def retire(self, held: list[tuple[int, int]]) -> None:
        self.retired = True
        self.kept.append(held)


@pytest.fixture
def pool() -> BlockPool:
    arena: Any = RecordingArena()
    return BlockPool(arena, 2)


def arena(pool: BlockPool) -> Any:
    return pool.arena


def write(pool: BlockPool, worker: int, count: int) -> list[int]:
    """A batch of so many new blocks; their offsets."""
    blocks: Extents = tuple((worker * REGION + at * B, B) for at in range(count))
    pool.accept(worker, blocks, blocks, (), ())
    return [offset for offset, _ in blocks]


def test_blocks_come_back_from_users_workers_and_dropped_batches(pool: BlockPool) -> None:
    first, second, third = write(pool, 0, 3)
    assert pool.usage() == (3, 0, 3 * B)
    assert pool.filled() == [first, second, third]
    pool.drop([third])
    pool.deliver([first, second])
    arena(pool).released.append(first)
    pool.collect()
    pool.collect()
    assert pool.usage() == (1, 2, 3 * B)
    assert len(pool.grant(Holder(1))[0]) == 2
    assert pool.usage() == (3, 0, 3 * B)
    pool.mark_dead(1)
    assert pool.usage() == (1, 2, 3 * B)
    assert (pool.grown, pool.batch_bytes, pool.size_of(first), pool.size_of(7)) == (3, 3 * B, B, None)
    pool.check()


def test_pages_go_back_after_the_device_has_forgotten_them(pool: BlockPool) -> None:
    pool.drop(write(pool, 0, 2))
    forgotten: list[int] = []

    def forget(offset: int) -> None:
        assert (offset, B) not in arena(pool).punched
        forgotten.append(offset)

    assert not pool.trim(1, forget)
    assert pool.trim(0, forget)
    assert forgotten == [0, B]
    assert arena(pool).punched == [(0, B), (B, B)]
    assert pool.space(0) == ((0, B), (B, B))
    assert pool.space(0) == pool.space(1) == ()
    pool.drop(write(pool, 1, 1))
    assert pool.trim(0)
    assert pool.usage() == (0, 0, 0)


def test_what_a_dead_worker_wrote_in_no_block_goes_back(pool: BlockPool) -> None:
    pool.deliver(write(pool, 1, 1))
    free = (REGION + B, REGION - B)
    assert pool.clear_space(1) == (free,)
    assert arena(pool).punched == [free]


def test_closing_keeps_only_what_users_hold_and_may_be_called_again(pool: BlockPool) -> None:
    first, second, third, _ = write(pool, 0, 4)
    pool.deliver([first, second, third])
    arena(pool).released.append(first)
    pool.close()
    arena(pool).released.append(second)  # this is for the arena: it was interrupted perhaps
    pool.close()
    assert arena(pool).kept == [[(second, B), (third, B)]] * 2
    assert arena(pool).released == [second]
