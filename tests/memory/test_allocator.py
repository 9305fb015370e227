"""The worker's blocks: what is handed over without a copy, what is copied, and what comes back."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.memory import allocator as allocator_module
from fastq_loader.memory.allocator import Allocator, empty, out_tensor
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.ledger import SMALLEST
from fastq_loader.memory.space import AddressSpace
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import DTYPES, LARGE, Pair, paired

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as pair:
        yield pair


@pytest.fixture
def no_copies_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[Pair], list[int]]:
    """The sizes of what a worker copies into blocks."""

    def count(pair: Pair) -> list[int]:
        copied: list[int] = []
        write = pair.allocator.write

        def counting(offset: int, source: int, nbytes: int) -> None:
            copied.append(nbytes)
            write(offset, source, nbytes)

        monkeypatch.setattr(pair.allocator, "write", counting)
        return copied

    return count


@pytest.fixture
def no_copies(pair: Pair, no_copies_of: Callable[[Pair], list[int]]) -> list[int]:
    return no_copies_of(pair)


# ---- zero copy --------------------------------------------------------------------------------------


def address(pair: Pair, tensor: torch.Tensor) -> int:
    return tensor.data_ptr() - pair.arena.mapping.base


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_empty_made_is_handed_over_where_it_lies(
    pair: Pair, no_copies: list[int], dtype: torch.dtype
) -> None:
    places = []

    def make() -> torch.Tensor:
        tensor = empty((300, 400), dtype)
        assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (300, 400), True)
        tensor.view(torch.uint8).fill_(1)
        places.append(address(pair, tensor))
        return tensor

    result = pair.deliver(pair.arrive(pair.pack(make)))
    assert no_copies == []
    assert address(pair, result) == places[0]
    assert (result.dtype, tuple(result.shape)) == (dtype, (300, 400))
    assert bool((result.view(torch.uint8) == 1).all())


def test_a_view_of_what_empty_made_is_handed_over_where_it_lies(pair: Pair, no_copies: list[int]) -> None:
    def make() -> Any:
        tensor = torch.arange(4 * LARGE, out=empty((4 * LARGE,), torch.int64))
        return {"view": tensor.view(4, -1)[1:3].t(), "array": None}

    result = pair.deliver(pair.arrive(pair.pack(make)))
    assert no_copies == []
    assert_same(torch.arange(4 * LARGE).view(4, -1)[1:3].t(), result["view"])
    assert address(pair, result["view"]) == LARGE * 8


def test_a_numpy_array_over_what_empty_made_is_handed_over(pair: Pair, no_copies: list[int]) -> None:
    result = pair.deliver(pair.arrive(pair.pack(lambda: empty((LARGE,)).fill_(3).numpy())))
    assert no_copies == []
    assert type(result) is np.ndarray
    assert (result == 3).all()


def test_leaves_inside_objects_are_not_pickled(pair: Pair, no_copies: list[int]) -> None:
    answer = pair.pack(lambda: Opaque({"image": empty((LARGE,)).fill_(2), "name": "x"}))
    assert no_copies == []
    result = pair.deliver(pair.arrive(answer)).value
    assert float(result["image"].sum()) == 2 * LARGE
    assert len(answer.used) == 2
    assert answer.used[0][1] < 2000


def test_overlapping_views_of_one_block_share_it(pair: Pair, no_copies: list[int]) -> None:
    def make() -> Any:
        tensor = empty((3 * LARGE,)).fill_(0)
        return tensor[: 2 * LARGE], tensor[LARGE:], tensor.view(torch.uint8)

    first, second, third = pair.deliver(pair.arrive(pair.pack(make)))
    assert no_copies == []
    first[LARGE] = 1
    assert second[0] == 1
    assert int(third.sum()) == sum(np.float32(1).tobytes())


def test_a_second_place_in_one_block_is_copied(pair: Pair, no_copies: list[int]) -> None:
    def make() -> Any:
        tensor = torch.arange(3 * LARGE, out=empty((3 * LARGE,), torch.int32))
        return tensor[:LARGE], tensor[2 * LARGE :]

    first, second = pair.deliver(pair.arrive(pair.pack(make)))
    assert no_copies == [LARGE * 4]
    assert first.tolist() == list(range(LARGE))
    assert second.tolist() == list(range(2 * LARGE, 3 * LARGE))
    first.zero_()
    assert second[0] == 2 * LARGE
    del first
    assert len(pair.arena.released_blocks()) == 1
    assert second[1] == 2 * LARGE + 1


def test_a_small_part_of_a_block_does_not_hold_the_whole(pair: Pair, no_copies: list[int]) -> None:
    def make() -> torch.Tensor:
        tensor = torch.arange(40 * LARGE, out=empty((40 * LARGE,), torch.int32))
        return tensor[LARGE : 2 * LARGE]

    answer = pair.pack(make)
    assert no_copies == [LARGE * 4]
    assert [size for _, size in answer.used] == [LARGE * 4]
    result = pair.deliver(pair.arrive(answer))
    assert result.tolist() == list(range(LARGE, 2 * LARGE))
    assert len(pair.ledger.held()) == 1
    assert pair.ledger.held()[0][1] < 8 * LARGE


def test_what_a_dataset_keeps_is_shipped_in_a_copy(pair: Pair, no_copies: list[int]) -> None:
    kept: list[torch.Tensor] = []

    def make() -> Any:
        kept.append(empty((LARGE,)).fill_(len(kept)))
        return {"kept": kept[-1][3:], "free": empty((LARGE,)).fill_(9)}

    first = pair.deliver(pair.arrive(pair.pack(make)))
    assert len(no_copies) == 1
    kept[0].fill_(100)
    assert float(first["kept"].sum()) == 0
    assert address(pair, first["kept"]) != address(pair, kept[0]) + 12
    second = pair.deliver(pair.arrive(pair.pack(make)))
    assert float(kept[0].sum()) == 100 * LARGE, "a later task wrote to what the dataset keeps"
    assert float(second["kept"].sum()) == LARGE - 3
    del first, second
    assert not pair.idle()  # the dataset's two
    kept.clear()
    pair.trip(None)
    assert pair.idle(), "blocks that the dataset dropped did not come back"


def test_a_kept_tensor_can_be_shipped_again_and_at_last_without_a_copy(
    pair: Pair, no_copies: list[int]
) -> None:
    kept = [empty((LARGE,)).fill_(1)]
    for _ in range(3):
        assert float(pair.deliver(pair.arrive(pair.pack(lambda: kept[0]))).sum()) == LARGE
    assert len(no_copies) == 3
    result = pair.deliver(pair.arrive(pair.pack(kept.pop)))
    assert len(no_copies) == 3
    assert float(result.sum()) == LARGE
    del result
    assert pair.idle()


def test_blocks_are_used_again(pair: Pair) -> None:
    places = set()
    for step in range(20):
        result = pair.trip({"a": torch.full((LARGE,), step), "b": torch.full((3 * LARGE,), step)})
        places.update(address(pair, result[key]) for key in "ab")
        assert int(result["a"][-1]) == int(result["b"][-1]) == step
        del result
    assert len(places) <= 4
    assert pair.idle()


def test_unused_blocks_of_a_task_come_back(pair: Pair) -> None:
    answer = pair.pack(lambda: [empty((LARGE,))[:5].clone(), empty((2 * LARGE,)).shape])
    assert answer.used == () or answer.handle is not None
    assert len(answer.fresh) == len(answer.returned) + len(answer.used)
    pair.arrive(answer)
    assert pair.ledger.free_blocks == len(answer.returned)


# ---- the allocator ----------------------------------------------------------------------------------


def test_empty_is_torch_empty_outside_workers() -> None:
    assert allocator_module._current is None
    tensor = empty((LARGE, 2), torch.int16)
    assert (tensor.dtype, tuple(tensor.shape)) == (torch.int16, (LARGE, 2))
    assert empty(7).shape == (7,)
    assert empty((), torch.bool).shape == ()
    assert out_tensor((LARGE,), torch.float32) is None


def test_small_results_are_not_worth_a_block(pair: Pair) -> None:
    just_below = empty((SMALLEST - 1,), torch.uint8)
    assert pair.allocator.block_at(just_below.data_ptr()) is None
    just_enough = empty(SMALLEST, torch.uint8)
    assert pair.allocator.block_at(just_enough.data_ptr()) == (0, SMALLEST)
    assert out_tensor((SMALLEST - 1,), torch.uint8) is None
    assert empty((LARGE,)).dtype is torch.get_default_dtype()


def test_block_at_finds_the_blocks_of_the_task_and_no_others(pair: Pair) -> None:
    base = pair.arena.mapping.base
    blocks = [pair.allocator.take(SMALLEST * factor) for factor in (1, 3, 2)]
    for offset, size in blocks:
        for at in (offset, offset + size // 2, offset + size - 1):
            assert pair.allocator.block_at(base + at) == (offset, size)
    end = sum(size for _, size in blocks)
    for at in (-1, end, end + SMALLEST, pair.arena.mapping.length, -base):
        assert pair.allocator.block_at(base + at) is None
    pair.allocator.finish([])
    assert pair.allocator.block_at(base) is None


def test_a_granted_block_is_taken_before_a_new_one(pair: Pair) -> None:
    fresh, returned = pair.allocator.finish([])
    assert (fresh, returned) == ([], [])
    far = 100 * SMALLEST
    pair.allocator.begin([(far, 2 * SMALLEST), (2 * far, SMALLEST), (3 * far, 8 * SMALLEST)])
    assert pair.allocator.take(SMALLEST - 1) == (2 * far, SMALLEST)
    assert pair.allocator.take(SMALLEST) == (far, 2 * SMALLEST)
    assert pair.allocator.take(SMALLEST) == (0, SMALLEST)  # eight times as large is too large
    fresh, returned = pair.allocator.finish([far])
    assert fresh == [(0, SMALLEST)]
    assert sorted(returned) == [0, 2 * far, 3 * far]


def test_a_promised_block_is_taken_when_it_was_let_go(pair: Pair) -> None:
    far = 100 * SMALLEST
    pair.arena.mapping.leased(far, 7)
    for up in (0, 1):
        pair.arena.mapping.let_go(far, 6 + up)
        pair.allocator.begin([], [(far, SMALLEST)])
        offset, _ = pair.allocator.take(SMALLEST)
        assert (offset == far) == bool(up)
        fresh, returned = pair.allocator.finish([])
        assert far in returned, "a promise that was not used is declined"
        assert len(fresh) + up == 1


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 40), st.integers(0, 20)), max_size=40))
def test_the_address_space_gives_each_byte_once(steps: list[tuple[bool, int, int]]) -> None:
    space = AddressSpace(((10, 100),))
    taken: list[tuple[int, int]] = []
    for take, size, which in steps:
        if take:
            offset = space.take(size)
            held = {byte for start, length in taken for byte in range(start, start + length)}
            free = [byte for byte in range(10, 110) if byte not in held]
            runs = {
                tuple(range(byte, byte + size)) for byte in free if set(range(byte, byte + size)) <= set(free)
            }
            if offset is None:
                assert not runs, "there was room"
            else:
                assert offset == min(run[0] for run in runs), "not the first range"
                taken.append((offset, size))
        elif taken:
            space.give(*taken.pop(which % len(taken)))
    for entry in taken:
        space.give(*entry)
    assert space.take(100) == 10
    assert space.take(1) is None


@pytest.mark.processes
def test_blocks_that_a_child_of_user_code_sees_are_written_again_when_it_has_ended(
    no_copies_of: Callable[[Pair], list[int]],
) -> None:
    with paired() as pair:
        no_copies = no_copies_of(pair)
        stay, end = os.pipe()

        def make() -> torch.Tensor:
            nonlocal pid
            tensor = empty((LARGE,)).fill_(1)
            pid = os.fork()
            if not pid:
                os.close(end)
                os.read(stay, 1)
                os._exit(0)
            return tensor

        pid = 0
        first = pair.deliver(pair.arrive(pair.pack(make)))
        assert no_copies == [LARGE * 4]
        assert address(pair, first) != 0
        del first
        for _ in range(3):
            pair.trip(torch.zeros(LARGE))
        seen = np.frombuffer(pair.arena.mapping.memory, np.float32, LARGE)
        assert (seen == 1).all()
        assert not pair.idle()
        os.close(end)
        os.waitpid(pid, 0)
        os.close(stay)
        pair.trip(None)
        assert pair.idle(), "the block did not come back"
        del seen


@pytest.mark.processes
def test_a_block_is_shipped_where_it_lies_when_the_child_has_ended_before(
    no_copies_of: Callable[[Pair], list[int]],
) -> None:
    with paired() as pair:
        no_copies = no_copies_of(pair)

        def make() -> torch.Tensor:
            tensor = empty((LARGE,)).fill_(1)
            pid = os.fork()
            if not pid:
                os._exit(0)
            os.waitpid(pid, 0)
            return tensor

        for _ in range(5):
            assert float(pair.deliver(pair.arrive(pair.pack(make))).sum()) == LARGE
        assert no_copies == []
        assert pair.ledger.grown <= 2


def test_new_blocks_are_made_in_space_that_came_back(pair: Pair) -> None:
    blocks = [pair.allocator.take(SMALLEST) for _ in range(3)]
    pair.allocator.finish([offset for offset, _ in blocks])
    pair.allocator.give(tuple(blocks[:2]))
    assert pair.allocator.take(2 * SMALLEST) == (0, 2 * SMALLEST)
    assert pair.allocator.take(SMALLEST) == (3 * SMALLEST, SMALLEST)


def test_a_worker_makes_blocks_in_the_ranges_that_it_was_given(pair: Pair) -> None:
    """Who takes a dead worker's place must not write where the dead one's batches still lie."""
    blocks = Allocator(pair.arena.mapping, 0, ((SMALLEST, SMALLEST), (4 * SMALLEST, 2 * SMALLEST)))
    assert blocks.take(2 * SMALLEST) == (4 * SMALLEST, 2 * SMALLEST)
    assert blocks.take(SMALLEST) == (SMALLEST, SMALLEST)
    with pytest.raises(MemoryError, match="do not fit"):
        blocks.take(SMALLEST)


def test_a_worker_stays_in_its_own_part() -> None:
    arena = Arena(4)
    try:
        for number in range(4):
            start, end = arena.mapping.region(number)
            blocks = Allocator(arena.mapping, number)
            offset, size = blocks.take(10 * SMALLEST)
            assert start <= offset < offset + size <= end
            with pytest.raises(MemoryError, match="do not fit"):
                blocks.take(end - start)
            assert blocks.finish([])[0] == [(offset, size)]
    finally:
        arena.retire([])


@settings(deadline=None, max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(("make", "keep", "drop", "ship")), st.integers(1, 4)), max_size=20))
def test_no_block_is_in_two_hands(steps: list[tuple[str, int]]) -> None:
    with paired() as pair:
        kept: list[torch.Tensor] = []
        shipped: list[torch.Tensor] = []
        marks: list[tuple[torch.Tensor, float]] = []
        for number, (step, factor) in enumerate(steps):
            if step == "drop":
                for hands in (kept, shipped):
                    del hands[: factor // 2]
                marks = [mark for mark in marks if any(mark[0] is one for one in kept + shipped)]
                continue

            def make(step: str = step, factor: int = factor, number: int = number) -> Any:
                tensor = empty((factor * LARGE,)).fill_(number)
                if step == "keep":
                    kept.append(tensor)
                return tensor if step != "make" else tensor[:4].clone()

            result = pair.deliver(pair.arrive(pair.pack(make)))
            if step == "keep":
                marks.append((kept[-1], number))
            if step != "make":
                shipped.append(result)
                marks.append((result, number))
            del result
            for tensor, value in marks:
                assert bool((tensor == value).all())
        kept.clear()
        shipped.clear()
        marks.clear()
        tensor = torch.empty(0)
        pair.trip(None)
        assert pair.idle()


def test_ctypes_reads_what_the_allocator_wrote(pair: Pair) -> None:
    source = ctypes.create_string_buffer(b"some bytes")
    pair.allocator.write(SMALLEST, ctypes.addressof(source), 10)
    assert bytes(pair.arena.mapping.memory[SMALLEST : SMALLEST + 10]) == b"some bytes"
