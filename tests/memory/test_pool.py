"""The pool of blocks, against a model that keeps a dict of states; and with the memory behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fastq_loader.errors import InvalidTransition, ProtocolError
from fastq_loader.memory.blocks import (
    BLOCK_TRANSITIONS,
    FILLED,
    FREE,
    GRANTED,
    HELD,
    SMALLEST,
    BlockOwner,
    Extents,
    size_class,
)
from fastq_loader.memory.pool import PATIENCE, RECENT, BlockPool
from tests.support.invariants import check_pool, states
from tests.support.thorough import examples

WORKERS = 3
REGION = 1 << 40  # bytes of address range for each worker in these tests
B = SMALLEST


def part(worker: int) -> tuple[int, int]:
    return worker * REGION, (worker + 1) * REGION


def new_pool() -> BlockPool:
    arena: Any = Mock(retired=False)
    arena.mapping.region = part
    arena.released_blocks.return_value = []
    return BlockPool(arena)


def trimmed(pool: BlockPool, batches: int) -> list[tuple[int, int]]:
    """The blocks whose pages go back."""
    punch: Any = pool.arena.mapping.punch
    punch.reset_mock()
    some = pool.trim(batches)
    blocks = [each.args for each in punch.call_args_list]
    assert some == bool(blocks)
    return blocks


def write(pool: BlockPool, worker: int, *sizes: int, at: int = 0) -> list[int]:
    """A batch of `worker` in new blocks of these sizes, `at` bytes into its part; their offsets."""
    offsets = list(accumulate(sizes, initial=worker * REGION + at))[: len(sizes)]
    blocks = tuple(zip(offsets, sizes, strict=True))
    pool.accept(worker, blocks, blocks, ())
    return offsets


EVENTS: dict[str, Callable[[BlockPool, int], object]] = {
    "fill": lambda pool, offset: pool.accept(0, ((offset, B),), (), ()),
    "give_back": lambda pool, offset: pool.give_back([offset]),
    "deliver": lambda pool, offset: pool.deliver([offset]),
    "drop": lambda pool, offset: pool.drop([offset]),
    "release": lambda pool, offset: pool.release([offset]),
}


# ---- what a worker says -----------------------------------------------------------------------------

#: Answers of worker 0, which has a grant of B bytes at B: used, fresh, returned.
MISFITS = {
    "a new block where one is": ((), ((0, B),), ()),
    "a block that is not there": (((20 * B, 1),), (), ()),
    "a block of another worker": (((REGION, 1),), (), ()),
    "a block that is held": (((0, 1),), (), ()),
    "a block twice": (((B, 1), (B, 1)), (), ()),
    "a block used and returned": (((B, 1),), (), (B,)),
    "a block returned twice": ((), (), (B, B)),
    "a block returned that is not there": ((), (), (20 * B,)),
}


@pytest.mark.parametrize(("used", "fresh", "returned"), MISFITS.values(), ids=MISFITS)
def test_an_answer_that_does_not_fit_changes_nothing(
    used: Extents, fresh: Extents, returned: tuple[int, ...]
) -> None:
    pool = new_pool()
    pool.deliver(write(pool, 0, B))
    pool.accept(1, (), ((REGION, B),), ())
    pool.accept(0, (), ((B, B),), ())
    before = states(pool)
    with pytest.raises(ProtocolError, match="worker 0"):
        pool.accept(0, used, fresh, returned)
    assert states(pool) == before
    check_pool(pool)
    pool.accept(0, ((B, B), (20 * B, 1)), ((20 * B, B), (30 * B, B)), (30 * B,))
    assert states(pool) == before | {B: FILLED, 20 * B: FILLED, 30 * B: FREE}


# ---- grants -----------------------------------------------------------------------------------------


def test_a_grant_has_the_sizes_of_recent_batches_and_the_warmest_blocks() -> None:
    pool = new_pool()
    offsets = write(pool, 0, 16 * B, 4 * B, 4 * B, 4 * B)
    pool.drop([offsets[at] for at in (2, 0, 3, 1)])
    assert pool.grant(BlockOwner(1)) == ((0, 16 * B), *[(offsets[at], 4 * B) for at in (1, 3, 2)])
    assert pool.free_blocks == 0


# ---- trimming ---------------------------------------------------------------------------------------


def released(batches: int, held: int = 0) -> BlockPool:
    """A pool after a loop kept so many batches of one block and released all but the last `held`."""
    pool = new_pool()
    for at in range(batches):
        pool.deliver(write(pool, 0, B, at=at * B))
    assert trimmed(pool, 0) == [], "they are the user's wish"
    for at in range(batches - held):
        pool.release([at * B])
    return pool


def test_trimming_keeps_what_some_batches_need_beside_those_that_users_hold() -> None:
    pool = released(10, held=2)
    assert trimmed(pool, 3) == [(at * B, B) for at in range(5)], "the coldest"
    assert (pool.nbytes, pool.free_blocks) == (5 * B, 3)
    assert trimmed(pool, 3) == []
    check_pool(pool)
    for _ in range(PATIENCE + 1):
        pool.give_back([offset for offset, _ in pool.grant(BlockOwner(0))])
    write(pool, 0, B, at=10 * B)
    assert trimmed(pool, 3) == [(at * B, B) for at in range(5, 8)], "they were not used for long"


def test_a_cold_block_serves_a_smaller_one_before_a_worker_makes_a_new_one() -> None:
    pool = new_pool()
    pool.drop([*write(pool, 0, 8 * B), *write(pool, 1, B)])
    for _ in range(RECENT):
        assert trimmed(pool, 1) == [], "batches like them may come again"
        pool.give_back([offset for offset, _ in pool.grant(BlockOwner(0))])
    assert trimmed(pool, 1) == [(0, 8 * B), (REGION, B)]
    write(pool, 1, B, at=B)
    assert [pool.grant(BlockOwner(0)) for _ in range(3)] == [((REGION, B),), ((0, B),), ()]
    assert pool.usage() == (3, 0, 3 * B)
    pool.give_back([0])
    assert trimmed(pool, 0) == [(0, B)]
    write(pool, 0, 8 * B, at=8 * B)
    assert pool.grant(BlockOwner(0)) == ((0, 8 * B),), "it has its room again"


def test_a_range_full_of_cold_blocks_goes_back_to_the_worker() -> None:
    pool = new_pool()
    pool.drop(write(pool, 0, REGION // 8, at=B))
    assert trimmed(pool, 0) == [(B, REGION // 8)]
    assert pool.space(0) == (), "there is room enough"
    write(pool, 0, B)
    pool.drop(write(pool, 0, REGION // 8, at=REGION // 4))
    assert trimmed(pool, 0) == [(REGION // 4, REGION // 8)]
    assert pool.space(1) == ()
    assert pool.space(0) == ((B, REGION // 8), (REGION // 4, REGION // 8))
    assert pool.space(0) == ()


# ---- everything at once -----------------------------------------------------------------------------


@dataclass
class Known:
    """What the model knows of a block."""

    size: int
    writer: BlockOwner | None
    room: int
    state: str = GRANTED


class LedgerMachine(RuleBasedStateMachine):
    """Random lives of blocks. The model does not know how the pool picks a block, only what it may pick."""

    @initialize()
    def start(self) -> None:
        self.pool = new_pool()
        self.model: dict[int, Known] = {}
        self.ends = [worker * REGION for worker in range(WORKERS)]
        self.cold: dict[int, int] = {}  # offset → bytes
        self.grown = 0

    def pick(self, data: st.DataObject, *states: str) -> int:
        return data.draw(st.sampled_from([o for o, known in self.model.items() if known.state in states]))

    def some(self, *states: str) -> bool:
        return any(known.state in states for known in self.model.values())

    def move(self, offset: int, state: str) -> None:
        self.model[offset].state = state

    def make(self, worker: int, fresh: Extents) -> None:
        self.pool.accept(worker, (), fresh, ())
        for offset, size in fresh:
            self.model[offset] = Known(size, BlockOwner(worker), size)
        self.grown += len(fresh)

    @rule(worker=st.integers(0, WORKERS - 1), needs=st.lists(st.integers(1, 1 << 20), max_size=3))
    def new_blocks(self, worker: int, needs: list[int]) -> None:
        sizes = list(map(size_class, needs))
        ends = list(accumulate(sizes, initial=self.ends[worker]))
        self.make(worker, tuple(zip(ends, sizes, strict=False)))
        self.ends[worker] = ends[-1]

    @rule(
        holder=st.sampled_from([*map(BlockOwner, range(WORKERS)), BlockOwner(None, 1), BlockOwner(None, 2)])
    )
    def grant(self, holder: BlockOwner) -> None:
        granted = self.pool.grant(holder)
        offsets = [offset for offset, _ in granted]
        wanted = self.pool.wanted
        assert len(offsets) <= len(wanted)
        assert len(set(offsets)) == len(offsets), "one block granted twice"
        for offset, size in granted:
            if offset in self.cold:
                self.model[offset] = Known(size, holder, self.cold.pop(offset), FREE)
                assert size in wanted
            known = self.model[offset]
            assert (known.state, known.size) == (FREE, size), "a block in use was granted"
            assert any(want <= size <= 2 * want for want in wanted), "a block too small, or too large"
            known.state, known.writer = GRANTED, holder
        if not granted:
            free = [known.size for known in self.model.values() if known.state == FREE]
            assert not [size for size in free if any(want <= size <= 2 * want for want in wanted)]
            assert not wanted or max(self.cold.values(), default=0) < min(wanted)

    def of(self, holder: BlockOwner | None, *states: str) -> Extents:
        return tuple((o, k.size) for o, k in self.model.items() if k.state in states and k.writer == holder)

    @precondition(lambda self: self.some(GRANTED))
    @rule(data=st.data(), number=st.integers(1, 3))
    def fill(self, data: st.DataObject, number: int) -> None:
        holder = self.model[self.pick(data, GRANTED)].writer
        if holder is None or holder.worker is None:
            return
        mine = self.of(holder, GRANTED)
        used = tuple((offset, data.draw(st.integers(1, size))) for offset, size in mine[:number])
        self.pool.accept(holder.worker, used, (), ())
        for offset, _ in used:
            self.move(offset, FILLED)

    @precondition(lambda self: self.some(FILLED))
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        filled = [offset for offset, known in self.model.items() if known.state == FILLED]
        batch = data.draw(st.lists(st.sampled_from(filled), unique=True, max_size=3))
        self.pool.deliver(batch)
        for offset in batch:
            self.move(offset, HELD)

    @precondition(lambda self: bool(self.model))
    @rule(data=st.data(), event=st.sampled_from(["give_back", "drop", "release"]))
    def one_block(self, data: st.DataObject, event: str) -> None:
        offset = self.pick(data, *BLOCK_TRANSITIONS)
        target = BLOCK_TRANSITIONS[self.model[offset].state].get(event)
        if target is None:
            with pytest.raises(InvalidTransition):
                EVENTS[event](self.pool, offset)
            return
        EVENTS[event](self.pool, offset)
        self.move(offset, target)

    @rule(worker=st.integers(0, WORKERS - 1))
    def writer_dead(self, worker: int) -> None:
        self.pool.mark_dead(worker)
        for offset, _ in self.of(BlockOwner(worker), GRANTED):
            self.move(offset, FREE)

    @rule(batches=st.integers(0, 3))
    def trim(self, batches: int) -> None:
        for offset, size in trimmed(self.pool, batches):
            known = self.model.pop(offset)
            assert (known.state, known.size) == (FREE, size), "a block in use was trimmed"
            self.cold[offset] = known.room

    @rule(worker=st.integers(0, WORKERS - 1), ticket=st.integers(1, 2))
    def hand_over(self, worker: int, ticket: int) -> None:
        """A shared task was claimed."""
        mine = self.of(BlockOwner(None, ticket), GRANTED)
        self.pool.hand_over(BlockOwner(None, ticket), worker, mine)
        for offset, _ in mine:
            self.model[offset].writer = BlockOwner(worker)

    @rule(worker=st.integers(0, WORKERS - 1))
    def replace(self, worker: int) -> None:
        """A new process for a dead worker may make blocks wherever none lies."""
        self.writer_dead(worker)
        start, end = worker * REGION, (worker + 1) * REGION
        spans = sorted((offset, known.room) for offset, known in self.model.items() if start <= offset < end)
        spans += self.pool.clear_space(worker)
        at = start
        for offset, size in sorted(spans):
            assert offset == at, "space overlaps a block, or some was forgotten"
            at += size
        assert at == end
        self.cold = {offset: room for offset, room in self.cold.items() if not start <= offset < end}

    @invariant()
    def agrees_with_the_model(self) -> None:
        check_pool(self.pool)
        known = self.model.values()
        assert states(self.pool) == {offset: block.state for offset, block in self.model.items()}
        assert self.pool.grown == self.grown
        assert {offset: room for room, offset in self.pool._cold} == self.cold
        assert self.pool.free_blocks == sum(block.state == FREE for block in known)
        for offset, of_model in self.model.items():
            block = self.pool.block_at(offset)
            assert block is not None
            assert block.size == of_model.size


TestLedger = LedgerMachine.TestCase
TestLedger.settings = examples(80, stateful_step_count=50)


SIZES = st.lists(st.integers(1, 1 << 20), min_size=1, max_size=4)


@examples(100)
@given(st.lists(SIZES, min_size=1, max_size=8))
def test_a_task_gets_enough_for_any_recent_batch(batches: list[list[int]]) -> None:
    pool = new_pool()
    for at, needs in enumerate(batches):
        write(pool, 0, *map(size_class, needs), at=at << 30)
    for needs in batches:
        left = sorted(pool.wanted)
        for size in sorted(map(size_class, needs)):
            fitting = [wanted for wanted in left if size <= wanted <= 2 * size]
            assert fitting, "a block of its own, at most twice as large"
            left.remove(fitting[0])
