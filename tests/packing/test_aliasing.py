"""Segments: the bytes that travel, and which leaves share them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.packing.spec import Leaf
from fastq_loader.packing.walker import contiguous_strides, device_bytes, device_segments, segments_of

BASE = torch.zeros(64, dtype=torch.int64)
VIEWS = st.builds(
    lambda dtype, start, count, step: BASE.view(dtype)[start : start + count : step],
    st.sampled_from((torch.uint8, torch.int16, torch.int64, torch.complex128)),
    st.integers(0, 32),
    st.integers(1, 32),
    st.integers(1, 3),
)


@settings(deadline=None, max_examples=200)
@given(st.lists(VIEWS, max_size=5))
def test_leaves_that_overlap_share_a_segment_and_others_do_not(views: list[torch.Tensor]) -> None:
    views = [view for view in views if view.numel()]
    metas, spans = segments_of(list(views))
    leaves = [Leaf(meta) for meta in metas]
    of_views = [segments_of([view])[1][0] for view in views]
    for leaf, (start, end) in zip(leaves, of_views, strict=True):
        first, last = spans[leaf.segment]
        assert first <= start < end <= last
        assert (leaf.start, leaf.start + leaf.reach) == (start - first, end - first)
    neighbours = {number: {number} for number in range(len(views))}
    for one, (start, end) in enumerate(of_views):
        for other, (begin, last) in enumerate(of_views):
            if start < last and begin < end:
                neighbours[one].add(other)
    for _ in views:  # what overlaps overlaps
        neighbours = {
            one: set().union(*(neighbours[other] for other in others)) for one, others in neighbours.items()
        }
    for one, leaf in enumerate(leaves):
        assert neighbours[one] == {at for at, other in enumerate(leaves) if other.segment == leaf.segment}


def test_what_only_meets_is_apart_and_arrays_share_nothing() -> None:
    tensor, array = torch.zeros(8), np.zeros(8)
    assert len(segments_of([tensor[:4], tensor[4:], tensor[2:2]])[1]) == 3
    metas, spans = segments_of([array[:5], array[3:], tensor, tensor[:1]])
    assert [meta[4] for meta in metas] == [0, 1, 2, 2]
    assert [end - start for start, end in spans] == [40, 40, 32]


@pytest.mark.parametrize(
    ("tensor", "strides", "nbytes"),
    [
        (torch.zeros(3, 4), None, 48),
        (torch.zeros(3, 4).t(), (1, 4), 48),
        (torch.zeros(10)[::3], (3,), 40),
        (torch.zeros(5).expand(100, 5), (0, 1), 20),
        (torch.zeros(1, 4).as_strided((1, 4), (77, 1)), (77, 1), 16),
        (torch.zeros(0, 3).t(), (1, 3), 0),
        (torch.tensor(1.0), None, 4),
        (torch.zeros(100, 100)[:2, 0], (100,), 404),
    ],
)
def test_a_segment_covers_what_is_referenced_and_not_the_storage(
    tensor: torch.Tensor, strides: tuple[int, ...] | None, nbytes: int
) -> None:
    ((kind, dtype, shape, steps, segment, into),), ((start, end),) = segments_of([tensor])
    assert (kind, dtype, shape, steps, segment, into) == ("T", "float32", tensor.shape, strides, 0, 0)
    assert (start, end - start) == (tensor.data_ptr(), nbytes)


def test_an_array_that_is_not_contiguous_is_replaced_by_a_copy_that_is() -> None:
    leaves = [np.arange(20).reshape(4, 5)[::2, ::-1], np.zeros((2, 3), order="F")]
    before = leaves[0].tolist()
    metas, _ = segments_of(leaves)
    assert leaves[0].flags.c_contiguous
    assert leaves[0].tolist() == before
    assert [meta[3] for meta in metas] == [None, (8, 16)]


def test_tensors_go_to_a_device_one_behind_the_other() -> None:
    leaves = [np.zeros(3), torch.zeros(100), torch.zeros(0), torch.zeros(65)]
    metas, spans = segments_of(list(leaves))
    assert device_segments(metas) == [1, 2, 3]
    assert device_bytes(spans, [1, 2, 3]) == 512 + 0 + 512


@given(st.lists(st.integers(0, 4), max_size=4))
def test_strides_are_torchs(shape: list[int]) -> None:
    assert contiguous_strides(tuple(shape)) == torch.empty(shape).stride()
