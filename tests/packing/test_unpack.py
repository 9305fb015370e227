"""Handles: layouts that are named, packets, and handles that do not fit what they name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BatchHandle
from fastq_loader.memory.allocator import Allocator
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.blocks import SMALLEST
from fastq_loader.packing.layout import REMEMBERED, BatchLayout
from fastq_loader.packing.pack import Packer
from fastq_loader.packing.unpack import Unpacker
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import LARGE, TOKEN, Pair, paired

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


def put_together(unpacker: Unpacker, handle: BatchHandle) -> Any:
    return unpacker.unpack(handle, unpacker.open(handle)[2])


def receive(pair: Pair, handle: BatchHandle) -> Any:
    return put_together(pair.unpacker, pair.check(handle))


# ---- layouts ------------------------------------------------------------------------------------------


def test_the_first_specs_are_remembered_and_any_later_one_comes_with_each_batch(pair: Pair) -> None:
    def sent(size: int) -> BatchHandle:
        return pair.handle_of(torch.zeros(size, dtype=torch.uint8))

    sizes = range(REMEMBERED + 9)
    pair.packer.unsend(sent(REMEMBERED))
    waiting = [pair.check(sent(size)) for size in sizes]
    assert [put_together(pair.unpacker, handle).numel() for handle in waiting] == list(sizes)
    assert {size for size in sizes if sent(size).layout is None} == {*sizes[:REMEMBERED]}
    assert len(pair.layouts) == REMEMBERED
    assert put_together(pair.unpacker, pair.check(sent(REMEMBERED - 1))).numel() == REMEMBERED - 1


def test_the_workers_specs_are_told_apart() -> None:
    arena = Arena(2)
    try:
        unpacker, layouts = Unpacker(arena, TOKEN), ({}, {})
        for number in range(2):
            handle, _ = Packer(Allocator(arena.mapping, number), TOKEN).pack((number,) * (number + 1))
            assert handle.layout_id == 0
            unpacker.check(layouts[number], handle)
        for number, values in ((0, (5,)), (1, (5, 6))):
            named, _ = unpacker.check(layouts[number], BatchHandle(0, None, values, None, ()))
            assert put_together(unpacker, named) == values
        with pytest.raises(ProtocolError, match="which its worker has not sent"):
            unpacker.check({}, BatchHandle(0, None, (5,), None, ()))
    finally:
        arena.retire([])


# ---- handles that do not fit ------------------------------------------------------------------------


def at(handle: BatchHandle, number: int, *segment: Any) -> BatchHandle:
    """The handle with another segment; None leaves a number as it is."""
    segments = list(handle.segments)
    pairs = zip(segments[number], segment, strict=True)
    segments[number] = tuple(old if new is None else new for old, new in pairs)  # type: ignore[assignment]
    return handle._replace(segments=tuple(segments))


def layout_with(handle: BatchHandle, tree: Any, *rest: Any) -> BatchHandle:
    """The handle with another tree in its layout."""
    layout = handle.layout or ()
    return handle._replace(layout=(tree, *(rest or layout[1:])))


#: Of a packet in a block, two large leaves, and an object.
LIES: dict[str, Callable[[BatchHandle], BatchHandle]] = {
    "a leaf behind the end of its block": lambda h: at(h, 1, None, None, h.segments[1][1]),
    "a leaf that begins before its block": lambda h: at(h, 1, None, None, -8),
    "a block too small for its leaf": lambda h: at(h, 1, None, SMALLEST, 0),
    "a block beyond the arena": lambda h: at(h, 1, 1 << 60, None, None),
    "a packet larger than its block": lambda h: at(h, 0, None, SMALLEST, SMALLEST + 1),
    "a packet too small for its leaves": lambda h: at(h, 0, None, SMALLEST, 3),
    "a segment too few": lambda h: h._replace(segments=h.segments[:-1]),
    "a value too few": lambda h: layout_with(h, ("l", ((h.layout or ())[0], "V"))),
    "a value too many": lambda h: h._replace(values=(*h.values, "c")),
    "more objects than there are": lambda h: layout_with(h, ("l", ((h.layout or ())[0], "O"))),
    "a layout that was never sent": lambda h: h._replace(layout=None),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_handle_that_does_not_fit_is_refused(pair: Pair, lie: Callable[[BatchHandle], BatchHandle]) -> None:
    batch = [torch.arange(LARGE), {"x": np.zeros(LARGE)}, torch.rand(4), Opaque(1), 1, ["a", "b"]]
    true = pair.handle_of(batch)
    assert_same(["a", "b"], receive(pair, true)[5])
    with pytest.raises(ProtocolError):
        receive(pair, lie(true)._replace(layout_id=999))


def test_a_pickle_that_names_a_leaf_that_was_taken_away_is_refused(pair: Pair) -> None:
    handle = pair.handle_of(Opaque(torch.arange(LARGE)))
    with pytest.raises(ProtocolError, match="leaf 0"):
        receive(pair, layout_with(handle, "O", (), ())._replace(segments=handle.segments[:1]))


def test_a_batch_in_a_message_that_does_not_fit_its_spec_is_refused(pair: Pair) -> None:
    handle = pair.handle_of([torch.rand(4), torch.rand(100)])
    assert handle.packet is not None
    known = pair.check(handle)
    for packet in (b"", handle.packet[:100], None):
        with pytest.raises(ProtocolError):
            receive(pair, handle._replace(packet=packet))
        with pytest.raises(ProtocolError):  # a known spec, without a check
            put_together(pair.unpacker, known._replace(packet=packet))
    with pytest.raises(ProtocolError):
        put_together(pair.unpacker, known._replace(values=(1,)))


def test_where_there_is_no_device_a_batch_for_one_is_refused() -> None:
    with paired(for_device=True) as pair:
        handle = pair.handle_of(torch.arange(100))
        ((offset, size, _),) = handle.segments
        for into in (size - 799, size, -1):
            with pytest.raises(ProtocolError):
                pair.check(handle._replace(segments=((offset, size, into),)))
        with pytest.raises(ProtocolError, match="packed a batch for a device"):
            Unpacker(pair.arena, TOKEN).check({}, handle)


# ---- digests ----------------------------------------------------------------------------------------

#: Batches of one tree: plain values, leaves in a packet, pickled objects, and blocks of their own.
KINDS: dict[str, Callable[[int], Any]] = {
    "values": lambda value: (value, "text", [value, 0.5]),
    "packet": lambda value: {"a": torch.full((3,), value), "b": np.array([value])},
    "packet in a block": lambda value: [torch.full((5, number), value) for number in range(1, 200)],
    "object": lambda value: Opaque((value, "x" * 1000)),
    "large": lambda value: (torch.full((LARGE,), value), 1),
}


@pytest.mark.parametrize("for_device", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_digest_is_the_same_for_the_same_data_wherever_it_lies(kind: str, for_device: bool) -> None:
    make = KINDS[kind]
    with paired(for_device=for_device) as pair:

        def digest(value: int) -> tuple[bytes, int]:
            handle = pair.arrive(pair.pack(lambda: make(value)))
            found = pair.unpacker.digest(handle)
            pair.deliver(handle)
            return found

        first, other, again = digest(1), digest(2), digest(1)
        pair.handle_of((torch.ones(LARGE), 0))  # what comes next lies in other blocks
        assert first == again == digest(1)
        assert first[0] != other[0]
        assert first[1] >= 8


Meta = tuple[Any, ...]


def leaf(
    dtype: str = "float32", shape: Any = (4,), strides: Any = None, kind: str = "T", segment: int = 0
) -> Meta:
    return kind, dtype, shape, strides, segment, 0


#: Leaves, and the sizes of their segments.
REFUSED: dict[str, tuple[tuple[Meta, ...], Any]] = {
    "more rows than its segment": ((leaf(shape=(5,)),), (16,)),
    "longer strides than its segment": ((leaf(strides=(2,)),), (16,)),
    "an array that runs backwards": ((leaf("<f4", strides=(-4,), kind="A"),), (16,)),
    "a segment without a leaf": ((leaf(),), (16, SMALLEST)),
    "an unknown dtype": ((leaf("float31"),), (16,)),
}


@pytest.mark.parametrize(("leaves", "sizes"), REFUSED.values(), ids=REFUSED.keys())
def test_a_spec_whose_leaves_do_not_cover_their_segments_is_refused(
    leaves: tuple[Meta, ...], sizes: Any
) -> None:
    with pytest.raises(ProtocolError):
        BatchLayout((("l", tuple(("L", number) for number in range(len(leaves)))), leaves, sizes))
