"""Specs: how a batch is made with one, and which are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.packing.spec import ALIGNMENT, REMEMBERED, SPEC_BYTES, Spec, SpecCache, aligned

Meta = tuple[Any, ...]


def tensor(dtype: Any = "float32", shape: Any = (4,), strides: Any = None, **others: Any) -> Meta:
    return (others.get("kind", "T"), dtype, shape, strides, others.get("segment", 0), others.get("start", 0))


def array(dtype: Any = "<f4", shape: Any = (4,), strides: Any = None, **others: Any) -> Meta:
    return tensor(dtype, shape, strides, kind="A", **others)


def spec_of(*leaves: Meta, sizes: Any, tree: Any = None, offsets: Any = None) -> Spec:
    tree = ("l", tuple(("L", number) for number in range(len(leaves)))) if tree is None else tree
    return Spec((tree, leaves, sizes) if offsets is None else (tree, leaves, sizes, offsets))


def made(spec: Spec, *buffers: Any) -> list[Any]:
    leaves: list[Any] = [None] * len(spec.leaves)
    for segment, buffer in enumerate(buffers):
        spec.fill(segment, buffer, leaves)
    return leaves


def test_leaves_are_made_over_the_bytes_of_their_segment() -> None:
    words = bytearray(np.arange(8, dtype="<i8"))
    cases: list[tuple[Meta, list[Any]]] = [
        (tensor("int64", (2, 4)), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (tensor("int64", (2, 2), (1, 6)), [[0, 6], [1, 7]]),
        (tensor("uint64", (8,)), list(range(8))),
        (array("<i8", (2, 4)), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (array("<i8", (4, 2), (8, 32)), [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ]
    for meta, values in cases:
        (leaf,) = made(spec_of(meta, sizes=(64,)), bytearray(words))
        assert type(leaf) is (np.ndarray if meta[0] == "A" else torch.Tensor)
        assert leaf.tolist() == values
        leaf[0] = 9
    shared = spec_of(tensor("int64", (8,)), tensor("int16", (2,), start=8), sizes=(64,))
    whole, part = made(shared, bytearray(words))
    part[1] = 1
    assert whole.tolist() == [0, 1 + (1 << 16), 2, 3, 4, 5, 6, 7]
    for strides in (None, (9,) * 64 + (1, 4)):
        (many,) = made(spec_of(tensor("int64", (1,) * 64 + (4, 2), strides), sizes=(64,)), bytearray(words))
        assert many.shape == (1,) * 64 + (4, 2)
    (empty,) = made(spec_of(tensor(shape=(0, 3), strides=(1, 5)), sizes=(0,)), bytearray())
    assert (empty.shape, empty.stride()) == ((0, 3), (1, 5))


def test_small_segments_are_laid_out_one_behind_the_other_and_large_ones_apart() -> None:
    spec = spec_of(
        tensor(shape=(3,)),
        tensor("uint8", (SMALLEST,), segment=1),
        array("<i2", (1,), segment=2),
        tensor("bfloat16", (2,), segment=3),
        sizes=(12, SMALLEST, 2, 4),
    )
    assert [(number, start, end) for number, start, end, *_ in spec.dense_tensors] == [(0, 0, 12)]
    assert [part[:3] for part in spec.dense_arrays] == [(2, ALIGNMENT, ALIGNMENT + 2)]
    assert spec.others == [(3, 2 * ALIGNMENT, 2 * ALIGNMENT + 4)]
    assert (spec.parcel_bytes, spec.large, spec.tails) == (3 * ALIGNMENT, [1], [SMALLEST])
    assert spec.nbytes == SMALLEST + 18
    assert [aligned(nbytes) for nbytes in (0, 1, 64, 65)] == [0, 64, 64, 128]


def test_the_part_for_a_device_is_cut_into_leaves_of_their_own() -> None:
    spec = spec_of(
        tensor(shape=(3,)),
        array(segment=1),
        tensor("int16", (2, 2), (1, 2), segment=2),
        sizes=(12, 16, 8),
        offsets=(256, -1, 0),
    )
    assert (spec.device_bytes, spec.tails, len(spec.dense_arrays)) == (268, [268], 1)
    memory = torch.zeros(272, dtype=torch.uint8)
    leaves: list[Any] = [None] * 3
    memory[:8].view(torch.int16)[:] = torch.arange(4)
    memory[256:268].view(torch.float32)[:] = 1.5
    spec.fill_device(memory, leaves)
    assert (leaves[0].tolist(), leaves[1]) == ([1.5] * 3, None)
    assert leaves[2].tolist() == [[0, 2], [1, 3]]
    assert leaves[0]._version == 0
    leaves[2].zero_()
    assert leaves[0]._version == 0, "autograd takes what it saved of one field for overwritten"


def test_the_tree_is_built_of_leaves_values_and_objects() -> None:
    tree = ("d", ("a", 2), (("t", (("L", 1), "V", "O")), ("l", ("v", "O", ("l", ()), ("L", 0)))))
    spec = spec_of(tensor(), tensor(segment=1), tree=tree, sizes=(16, 16))
    assert (spec.values, spec.objects) == (2, 2)
    built = spec.build(["x", "y"], iter([1, (2, 3)]), ["first", "second"])
    assert built == {"a": ("y", 1, "first"), 2: [[2, 3], "second", [], "x"]}


LENGTHS = st.sampled_from((1, 20_000, 90_000, REMEMBERED))


@given(st.lists(st.tuples(st.integers(0, 9), LENGTHS, st.booleans()), max_size=30))
def test_a_consumer_has_every_spec_that_its_worker_remembers(packed: list[tuple[int, int, bool]]) -> None:
    worker, consumer = SpecCache(), SpecCache()
    for number, (key, length, arrives) in enumerate(packed):
        plain = (key, "k" * length)
        if plain in worker:
            continue
        worker.remember(plain, number, plain)
        assert (plain in worker) == (length < REMEMBERED), "the newest is remembered, if it fits at all"
        if arrives:
            consumer.remember(number, plain, plain)
        else:
            worker.forget(plain)
        assert all(consumer[at] == spec for spec, at in worker.items())
        for specs in (worker, consumer.values()):
            assert sum(len(text) + SPEC_BYTES for _, text in specs) <= REMEMBERED


def test_the_oldest_specs_are_forgotten_and_each_counts_for_more_than_its_bytes() -> None:
    cache = SpecCache()
    for number in range(REMEMBERED // SPEC_BYTES):
        cache.remember(number, number, "V")
    assert REMEMBERED // SPEC_BYTES // 2 < len(cache) < REMEMBERED // SPEC_BYTES
    newest = list(range(REMEMBERED // SPEC_BYTES))[-len(cache) :]
    cache.remember("too large", 0, "k" * REMEMBERED)
    assert list(cache) == newest


#: Leaves, and the sizes of their segments.
REFUSED: dict[str, tuple[tuple[Meta, ...], Any]] = {
    "more rows than its segment": ((tensor(shape=(5,)),), (16,)),
    "fewer rows than its segment": ((tensor(),), (20,)),
    "longer strides than its segment": ((tensor(strides=(2,)),), (16,)),
    "an array that runs backwards": ((array(strides=(-4,)),), (16,)),
    "a segment that is not there": ((tensor(segment=9),), (16,)),
    "a segment without a leaf": ((tensor(),), (16, SMALLEST)),
    "an unknown dtype": ((tensor("float31"),), (16,)),
    "an array of an unknown dtype": ((array("<q7"),), (16,)),
    "a leaf cut short": ((tensor()[:5],), (16,)),
}


@pytest.mark.parametrize(("leaves", "sizes"), REFUSED.values(), ids=REFUSED.keys())
def test_a_spec_whose_leaves_do_not_cover_their_segments_is_refused(
    leaves: tuple[Meta, ...], sizes: Any
) -> None:
    with pytest.raises(ProtocolError):
        spec_of(*leaves, sizes=sizes)


@pytest.mark.parametrize("short", [(), ("V",), ("V", ()), None, 3], ids=str)
def test_what_is_no_spec_is_refused(short: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed spec"):
        Spec(short)
