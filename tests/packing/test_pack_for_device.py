"""Batches that go to a device: laid out in one block by the worker, put together from one piece."""

from __future__ import annotations

import collections
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.ipc.messages import BatchHandle
from fastq_loader.memory.allocator import empty
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.memory.blocks import DEVICE_ALIGNMENT, SMALLEST
from fastq_loader.packing.tensors import tensors_of
from tests.support.datasets import Opaque, Point, Slotted, assert_same
from tests.support.pair import DTYPES, Pair, noise, paired, random_tensor
from tests.support.thorough import examples

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


FOR_DEVICE = True  # of the fixture `pair`


def filled(nbytes: int, value: int) -> torch.Tensor:
    return empty((nbytes,), torch.uint8).fill_(value)


def contents(batch: Any) -> list[list[int]]:
    return [np.unique(part).tolist() for part in batch]


PLACES = st.sampled_from(("private", "block", "view", "array", "text"))
FIELDS = st.lists(st.tuples(st.integers(0, 3 * SMALLEST), st.sampled_from(DTYPES), PLACES), max_size=6)


def made(field: Any, seed: int, in_worker: bool) -> Any:
    nbytes, dtype, where = field
    content = random_tensor((-(-nbytes // dtype.itemsize),), dtype, seed)
    if where == "text":
        return str(seed)
    if where == "array":
        return noise(nbytes + 1, seed)
    if where == "view":
        return torch.cat([content, content])[content.numel() :] if content.numel() else content
    if where == "block":
        make = empty if in_worker else torch.empty
        return make(tuple(content.shape), dtype=dtype).copy_(content)
    return content


def made_all(fields: list[Any], first: int, in_worker: bool) -> list[Any]:
    return [made(field, first + at, in_worker) for at, field in enumerate(fields)]


def check_layout(handle: BatchHandle) -> None:
    layout = handle.layout
    there = {leaf.number for leaf in layout.on_device.leaves}
    assert there == {number for number, leaf in enumerate(layout.leaves) if not leaf.array}
    for number, dtype, _, _, at, _ in layout.on_device.leaves:
        assert (at * dtype.itemsize - layout.leaves[number].start) % DEVICE_ALIGNMENT == 0


@examples(100)
@given(st.lists(FIELDS, min_size=1, max_size=4))
def test_any_fields_from_anywhere(batches: list[Any]) -> None:
    with paired(for_device=True) as pair:
        for number, fields in enumerate(batches):
            make = partial(made_all, fields, 100 * number, True)
            handle = pair.arrive(pair.pack(make))
            check_layout(handle)
            assert_same(made_all(fields, 100 * number, False), pair.deliver(handle))
        assert pair.idle()


def test_what_lies_between_is_not_copied_for_ever(pair: Pair) -> None:
    """A small field behind a large temporary: the part that is copied is not much larger than the fields."""

    def make() -> Any:
        first, temporary, last = filled(70_000, 1), filled(900_000, 9), filled(70_000, 2)
        del temporary
        return first, last

    for _ in range(3):
        pair.run(lambda: filled(1_200_000, 5))  # the next batch gets as large a block
        handle = pair.arrive(pair.pack(make))
        part = pair.unpacker.part(handle)
        assert part is not None
        assert part[3] <= 2 * 140_000 + 2 * DEVICE_ALIGNMENT
        assert contents(pair.deliver(handle)) == [[1], [2]]


@pytest.mark.parametrize("kind", ["array", "views", "kept"])
def test_what_lies_beside_a_tensor_in_its_block_is_not_overwritten(kind: str, pair: Pair) -> None:
    kept: list[torch.Tensor] = []

    def make() -> Any:
        """A large tensor, a small one that is not in its block, and something else that is."""
        whole, label = filled(400_000, 1), torch.full((9,), 5)
        if kind == "array":
            return whole, filled(70_000, 2).numpy(), label
        if kind == "kept":
            kept.append(filled(70_000, 7))
            return whole, label
        parts = whole[:100_000], whole[200_001:300_001], whole[300_017:300_100]
        return *(part.fill_(value) for part, value in zip(parts, (3, 4, 6), strict=True)), label

    expected = {"array": [[1], [2], [5]], "views": [[3], [4], [6], [5]], "kept": [[1], [5]]}
    for _ in range(4):
        assert contents(pair.run(make)) == expected[kind]
        assert all(values == [7] for values in contents(kept))


class Marked(torch.Tensor):
    """A subclass, which is pickled with its storage."""


def test_tensors_that_are_no_leaves_are_moved(pair: Pair) -> None:
    whole = torch.ones(3).as_subclass(Marked)
    batch = [torch.arange(3), torch.nn.Parameter(torch.ones(3)), Opaque(torch.arange(4)), whole]
    handle = pair.arrive(pair.pack(lambda: batch))
    _, _, pickled = pair.unpacker.open(handle)
    result = pair.unpacker.unpack(handle, pickled, torch.empty(1024, dtype=torch.uint8, device="meta"))
    assert [part.device.type for part in (*result[:2], result[2].value, result[3])] == ["meta"] * 4
    assert [type(part) for part in result] == [torch.Tensor, torch.nn.Parameter, Opaque, Marked]
    assert result[1].requires_grad


# ---- the tensors in whatever a batch is made of ----------------------------------------------------------


def test_tensors_are_found_in_containers_and_objects_once_each() -> None:
    tensors = [torch.zeros(number) for number in range(7)]
    tree: list[Any] = [
        {"a": tensors[0], "b": (tensors[1], [tensors[0]])},
        Opaque(tensors[2]),
        Slotted(tensors[3]),
        Point(tensors[4], 1),
        collections.OrderedDict(x=tensors[5]),
        SimpleNamespace(x={"y": tensors[6]}),
        "text",
        torch.Tensor,
    ]
    tree[0]["b"][1].append(tree)  # a cycle
    assert {id(part) for part in tensors_of(tree)} == set(map(id, tensors))
