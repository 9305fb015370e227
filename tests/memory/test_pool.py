"""The pool: every way of a block back to the free ones, and the memory behind it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock, call

import pytest

from fastq_loader.memory.blocks import SMALLEST as B
from fastq_loader.memory.blocks import Extents, Holder
from fastq_loader.memory.pool import BlockPool

REGION = 1 << 40


@pytest.fixture
def arena() -> Any:
    arena = Mock(retired=False)
    arena.mapping.region = lambda worker: (worker * REGION, (worker + 1) * REGION)
    arena.released_blocks.return_value = []
    return arena


@pytest.fixture
def pool(arena: Any) -> BlockPool:
    return BlockPool(arena, 2)


def write(pool: BlockPool, worker: int, count: int) -> list[int]:
    """A batch of so many new blocks; their offsets."""
    blocks: Extents = tuple((worker * REGION + at * B, B) for at in range(count))
    pool.accept(worker, blocks, blocks, (), ())
    return [offset for offset, _ in blocks]


def test_blocks_come_back_from_users_workers_and_dropped_batches(pool: BlockPool, arena: Any) -> None:
    first, second, third = write(pool, 0, 3)
    assert pool.usage() == (3, 0, 3 * B)
    assert pool.filled() == [first, second, third]
    pool.drop([third])
    pool.deliver([first, second])
    arena.released_blocks.return_value = [first]
    pool.collect()
    assert pool.usage() == (1, 2, 3 * B)
    assert len(pool.grant(Holder(1))[0]) == 2
    assert pool.usage() == (3, 0, 3 * B)
    pool.mark_dead(1)
    assert pool.usage() == (1, 2, 3 * B)
    assert (pool.grown, pool.batch_bytes, pool.block_at(7)) == (3, 3 * B, None)
    pool.check()


def test_pages_go_back_after_the_device_has_forgotten_them(pool: BlockPool, arena: Any) -> None:
    pool.drop(write(pool, 0, 2))
    assert not pool.trim(1, arena.forget)
    assert pool.trim(0, arena.forget)
    forget, punch = call.forget, call.mapping.punch
    assert arena.mock_calls == [forget(0), punch(0, B), forget(B), punch(B, B)]
    assert (pool.space(0), pool.space(0), pool.space(1)) == (((0, B), (B, B)), (), ())
    pool.drop(write(pool, 1, 1))
    assert pool.trim(0)
    assert pool.usage() == (0, 0, 0)


def test_what_a_dead_worker_wrote_in_no_block_goes_back(pool: BlockPool, arena: Any) -> None:
    pool.deliver(write(pool, 1, 1))
    free = (REGION + B, REGION - B)
    assert pool.clear_space(1) == (free,)
    assert arena.mapping.punch.call_args_list == [call(*free)]


def test_closing_keeps_only_what_users_hold_and_may_be_called_again(pool: BlockPool, arena: Any) -> None:
    first, second, third, _ = write(pool, 0, 4)
    pool.deliver([first, second, third])
    arena.released_blocks.return_value = [first]
    pool.close()
    arena.retired, arena.released_blocks.return_value = True, [second]  # this is for the arena, see there
    pool.close()
    assert arena.retire.call_args_list == [call([(second, B), (third, B)])] * 2
