"""The worker's blocks: what is handed over without a copy, what is copied, and what comes back."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.memory import allocator
from fastq_loader.memory.allocator import Allocator, empty, out_array, out_tensor
from fastq_loader.memory.arena import AVAILABLE, Mapping
from fastq_loader.memory.blocks import SMALLEST, Extents
from tests.support.pair import DTYPES, LARGE, Pair, offset_of, paired
from tests.support.simulated_fork import Fork
from tests.support.thorough import examples

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as pair:
        yield pair


# ---- without a copy ---------------------------------------------------------------------------------


def test_new_memory_is_that_of_one_task(pair: Pair) -> None:
    times = []
    for length in (LARGE, LARGE, 9 * LARGE):
        pair.run(lambda length=length: empty((length,)).fill_(1))
        times.append(pair.allocator.new_memory)
    assert [nanoseconds > 0 for nanoseconds in times] == [True, False, True], "the second block was there"


# ---- what user code keeps ---------------------------------------------------------------------------


@examples(30)
@given(st.lists(st.tuples(st.sampled_from(("make", "keep", "drop", "ship")), st.integers(1, 4)), max_size=20))
def test_no_block_is_written_to_while_somebody_has_it(steps: list[tuple[str, int]]) -> None:
    with paired() as pair:
        kept: list[tuple[int, torch.Tensor]] = []  # by the dataset; the number that it is full of
        shipped: list[tuple[int, torch.Tensor]] = []

        def make(step: str, factor: int, number: int) -> Any:
            tensor = empty((factor * LARGE,)).fill_(number)
            if step == "keep":
                kept.append((number, tensor))
            return tensor if step != "make" else tensor[:4].clone()

        for number, (step, factor) in enumerate(steps):
            if step == "drop":
                del kept[: factor // 2], shipped[: factor // 2]
                continue
            result = pair.run(partial(make, step, factor, number))
            if step != "make":
                shipped.append((number, result))
            del result
            assert all(bool((tensor == value).all()) for value, tensor in kept + shipped)
        kept.clear()
        shipped.clear()
        pair.trip(None)
        assert pair.idle()


def test_a_block_that_a_child_saw_is_shipped_in_a_copy_and_comes_back_with_its_end(pair: Pair) -> None:
    children: list[Fork] = []

    def make(alive: bool) -> torch.Tensor:
        tensor = empty((LARGE,)).fill_(1)
        children.append(Fork())
        if not alive:
            children[-1].die()
        return tensor

    for alive, copies in ((False, 0), (True, 1)):
        result = pair.run(partial(make, alive))
        assert (len(pair.copied), float(result.sum())) == (copies, LARGE)
        del result
    pair.trip(None)
    assert not pair.idle()
    children[-1].die()
    pair.trip(None)
    assert pair.idle()


# ---- the allocator ----------------------------------------------------------------------------------


def test_a_granted_block_is_taken_before_a_new_one(pair: Pair) -> None:
    assert pair.allocator.finish([]) == ((), ())
    far = 100 * SMALLEST
    pair.allocator.begin([(far, 2 * SMALLEST), (2 * far, SMALLEST), (3 * far, 8 * SMALLEST)])
    taken = [pair.allocator.take(nbytes).offset for nbytes in (SMALLEST - 1, SMALLEST, SMALLEST)]
    assert taken == [2 * far, far, 0], "eight times as large is too large"
    fresh, returned = pair.allocator.finish([(far, SMALLEST)])
    assert fresh == ((0, SMALLEST),)
    assert sorted(returned) == [0, 2 * far, 3 * far]
    assert pair.allocator.finish([]) == ((), ())


def test_a_shipped_block_is_not_given_out_before_the_answer(pair: Pair) -> None:
    """A thread of the dataset may allocate while the worker answers."""
    batch = [empty((LARGE,))]
    address = batch[0].data_ptr()
    handle, used = pair.packer.pack(batch)
    batch.clear()
    assert empty((LARGE,)).data_ptr() != address
    assert pair.packer.copy_held(handle, used) == (handle, used)
    pair.allocator.finish(used)
    assert pair.allocator.block_at(address) is None


@pytest.mark.parametrize("space", [None, ((SMALLEST, SMALLEST), (4 * SMALLEST, 2 * SMALLEST))])
def test_a_worker_makes_blocks_in_its_own_part_and_in_the_ranges_that_it_was_given(
    space: Extents | None, pair: Pair
) -> None:
    """A worker in a dead one's place must not write where the dead one's batches still lie."""
    mapping = Mapping(pair.arena.fd, pair.arena.mapping.length, 4)
    for number in range(4):
        start, end = mapping.region(number)
        blocks = Allocator(mapping, number, space and [(start + at, size) for at, size in space])
        taken = [blocks.take(2 * SMALLEST), blocks.take(SMALLEST)]
        assert [(block.offset - start) // SMALLEST for block in taken] == ([4, 1] if space else [0, 2])
        with pytest.raises(MemoryError, match="do not fit"):
            blocks.take(end - start)
        assert blocks.finish([])[0] == tuple((block.offset, block.size) for block in taken)


# ---- what collate functions call --------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_empty_made_is_handed_over_where_it_lies(pair: Pair, dtype: torch.dtype) -> None:
    made = []

    def make() -> torch.Tensor:
        tensor = empty((300, 400), dtype)
        assert (tensor.dtype, tuple(tensor.shape), tensor.is_contiguous()) == (dtype, (300, 400), True)
        tensor.view(torch.uint8).fill_(1)
        made.append(offset_of(pair, tensor))
        return tensor

    result = pair.run(make)
    assert (pair.copied, offset_of(pair, result)) == ([], made[0])
    assert (result.dtype, tuple(result.shape)) == (dtype, (300, 400))
    assert bool((result.view(torch.uint8) == 1).all())


def test_outside_workers_nothing_lies_in_blocks() -> None:
    assert allocator.current is None
    for shape, dtype in (((LARGE, 2), torch.int16), (7, None), ((), torch.bool)):
        tensor = empty(shape, dtype)
        assert tensor.dtype is (dtype or torch.get_default_dtype())
        assert tensor.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert out_tensor((LARGE,), torch.float32) is None
    assert out_array((LARGE,), np.dtype("f4")) is None
