"""What collate functions call: where their results lie, and that others get what torch gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.memory import results
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.memory.results import empty, out_array, out_tensor
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import DTYPES, LARGE, Pair, offset_of, paired

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as pair:
        yield pair


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


def test_views_of_what_empty_made_are_handed_over_where_they_lie(pair: Pair) -> None:
    def make() -> Any:
        tensor = torch.arange(4 * LARGE, out=empty((4 * LARGE,), torch.int64))
        return {
            "view": tensor.view(4, -1)[1:3].t(),
            "another": tensor[2 * LARGE :].view(torch.uint8),
            "array": empty((LARGE,)).fill_(3).numpy(),
            "in an object": Opaque(empty((LARGE,)).fill_(2)),
        }

    answer = pair.pack(make)
    result = pair.deliver(pair.arrive(answer))
    assert pair.copied == []
    assert answer.used[0][1] < 2000, "the object was pickled with its tensor"
    assert_same(torch.arange(4 * LARGE).view(4, -1)[1:3].t(), result["view"])
    assert offset_of(pair, result["view"]) == LARGE * 8
    result["view"][0, 1] = 0x17
    assert result["another"][0] == 0x17, "they share memory"
    assert type(result["array"]) is np.ndarray
    assert (result["array"] == 3).all()
    assert float(result["in an object"].value.sum()) == 2 * LARGE


def test_outside_workers_nothing_lies_in_blocks() -> None:
    assert results._current is None
    for shape, dtype in (((LARGE, 2), torch.int16), (7, None), ((), torch.bool)):
        tensor = empty(shape, dtype)
        assert tensor.dtype is (dtype or torch.get_default_dtype())
        assert tensor.shape == (shape if isinstance(shape, tuple) else (shape,))
    assert out_tensor((LARGE,), torch.float32) is None
    assert out_array((LARGE,), np.dtype("f4")) is None
    assert not results.use_nontemporal(1 << 30)


def test_small_results_are_not_worth_a_block(pair: Pair) -> None:
    assert pair.allocator.block_at(empty((SMALLEST - 1,), torch.uint8).data_ptr()) is None
    assert out_tensor((SMALLEST - 1,), torch.uint8) is None
    assert out_array((SMALLEST // 8 - 1,), np.dtype("f8")) is None
    just_enough = empty(SMALLEST, torch.uint8)
    block = pair.allocator.block_at(just_enough.data_ptr())
    assert block is not None
    assert (block.offset, block.size) == (0, SMALLEST)
    assert empty((LARGE,)).dtype is torch.get_default_dtype()
