"""Leaves as views of device memory: the same as one view of each, by few calls."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.memory.blocks import device_aligned
from fastq_loader.packing.layout import BatchLayout

DTYPES = ("float32", "int64", "uint8", "bool", "complex64", "bfloat16")
SHAPES = st.one_of(
    st.tuples(st.integers(0, 90)),
    st.tuples(st.integers(0, 9), st.sampled_from([1, 8, 10])),
    st.sampled_from([(), (3, 1, 64), (5, 0)]),
)


def layout_of(leaves: Iterable[tuple[str, Any]]) -> tuple[BatchLayout, torch.Tensor]:
    """The layout of leaves of these dtypes and shapes, and memory with other bytes in each."""
    metas, sizes, offsets, end = [], [], [], 0
    for number, (dtype, shape) in enumerate(leaves):
        metas.append(("T", dtype, shape, None, number, 0))
        sizes.append(torch.empty(shape, dtype=getattr(torch, dtype)).nbytes)
        offsets.append(end)
        end += device_aligned(sizes[-1])
    tree = ("l", tuple(("L", number) for number in range(len(metas))))
    memory = (torch.arange(device_aligned(max(end, 1))) * 31 % 2).to(torch.uint8)  # also as bool
    return BatchLayout((tree, tuple(metas), tuple(sizes), tuple(offsets))), memory


def views(layout: BatchLayout, memory: torch.Tensor) -> list[torch.Tensor]:
    leaves = layout.blank[:]
    layout.on_device.fill(memory, leaves)
    return leaves


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=12))
def test_each_is_a_view_of_its_place(leaves: list[tuple[str, Any]]) -> None:
    layout, memory = layout_of(leaves)
    for view, leaf in zip(views(layout, memory), layout.on_device.leaves, strict=True):
        expected = memory.view(leaf.dtype).as_strided(leaf.shape, leaf.strides, leaf.at)
        assert torch.equal(view, expected)
        assert (view.dtype, view.shape, view.stride()) == (leaf.dtype, leaf.shape, leaf.strides)
        assert not view.numel() or view.data_ptr() == expected.data_ptr()
        assert (view._version, view._base, view.requires_grad) == (0, None, False)


@pytest.mark.parametrize("shape", [(64,), (), (3, 5)], ids=["rows", "numbers", "rows that do not fit"])
def test_a_field_that_is_written_to_changes_no_others_version(shape: Any) -> None:
    first, second = views(*layout_of([("float32", shape)] * 2))
    first.add_(1)
    assert (first._version, second._version) == (1, 0)
