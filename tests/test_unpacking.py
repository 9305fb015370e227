"""Handles: specs that are sent once, parcels, and handles that do not fit what they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.allocator import Allocator
from fastq_loader.arena import AVAILABLE, Arena
from fastq_loader.blocks import SMALLEST, size_class
from fastq_loader.errors import ProtocolError
from fastq_loader.messages import Handle
from fastq_loader.packing import ALIGNMENT, INLINE, SPECS, Packer
from fastq_loader.unpacking import Unpacker
from tests.datasets import Opaque, Record, assert_same
from tests.pair import LARGE, Pair, noise, paired

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as pair:
        yield pair


# ---- handles ----------------------------------------------------------------------------------------


def handle_of(pair: Pair, batch: Any) -> Handle:
    """A handle as it was sent."""
    return pair.account(pair.pack(lambda: batch))


def receive(pair: Pair, handle: Handle) -> Any:
    learned = pair.unpacker.learn(0, handle)
    pair.unpacker.blocks(learned)
    return pair.unpacker.unpack(learned)


def test_a_spec_is_sent_once(pair: Pair) -> None:
    shapes = [(3,), (4,), (3,), (4,)]
    handles = [handle_of(pair, {"x": torch.rand(shape), "n": 1}) for shape in shapes]
    assert [handle.spec is None for handle in handles] == [False, False, True, True]
    assert handles[0].spec_id == handles[2].spec_id != handles[1].spec_id
    assert [receive(pair, handle)["x"].shape for handle in handles] == shapes
    same = handle_of(pair, {"x": torch.rand(3), "n": 2**40})
    assert same.spec is None
    for other in ({"x": torch.rand(3).double(), "n": 1}, {"y": torch.rand(3), "n": 1}, (torch.rand(3), 1)):
        assert handle_of(pair, other).spec is not None


def test_many_specs_are_forgotten_on_both_sides_alike(pair: Pair) -> None:
    def go(size: int) -> bool:
        handle = handle_of(pair, torch.zeros(size, dtype=torch.uint8))
        assert receive(pair, handle).shape == (size,)
        return handle.spec is not None

    assert all(go(size) for size in range(SPECS))
    assert not any(go(size) for size in range(SPECS))
    assert go(SPECS)
    assert sum(go(size) for size in range(SPECS + 1)) > 0
    for size in (1, 2, 500, 1, 2, 501, 1, 2):
        go(size)
    assert len(pair.unpacker._specs[0]) == len(pair.packer._specs) == SPECS


def test_a_spec_is_remembered_until_the_batches_that_name_it_are_put_together(pair: Pair) -> None:
    # Handles wait in the reorder ring while the next ones arrive and bring their specs.
    def arrive(size: int) -> Handle:
        return pair.unpacker.learn(0, handle_of(pair, torch.zeros(size, dtype=torch.uint8)))

    for size in range(SPECS):
        arrive(size)
    sizes = [0, 1, 2, *range(SPECS, SPECS + 4)]
    waiting = [arrive(size) for size in sizes]
    assert [pair.unpacker.unpack(handle).numel() for handle in waiting] == sizes


def test_the_workers_specs_are_told_apart() -> None:
    arena = Arena(2)
    try:
        unpacker = Unpacker(arena, 2)
        for number in range(2):
            handle, _ = Packer(Allocator(arena.mapping, number)).pack([number] * (number + 1))
            assert handle.spec_id == 0
            unpacker.learn(number, handle)
        for number, values in ((0, (5,)), (1, (5, 6))):
            named = unpacker.learn(number, Handle(0, None, values, None, ()))
            assert unpacker.unpack(named) == list(values)
    finally:
        arena.retire([])


def test_small_leaves_travel_in_the_message_and_more_of_them_in_one_block(pair: Pair) -> None:
    inline = handle_of(pair, [torch.arange(4), np.arange(3), "word"])
    assert inline.places == ()
    assert inline.parcel is not None
    assert len(inline.parcel) == 2 * ALIGNMENT
    assert inline.values == ("word",)
    limit = [torch.zeros(INLINE // 4, dtype=torch.uint8) for _ in range(4)]
    assert handle_of(pair, limit).places == ()
    over = handle_of(pair, [*limit, torch.zeros(1)])
    assert over.parcel is None
    assert [(size, into) for _, size, into in over.places] == [(SMALLEST, INLINE + ALIGNMENT)]
    none = handle_of(pair, ["word", 1])
    assert (none.parcel, none.places) == (None, ())


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, SMALLEST - 1), max_size=12))
def test_parcels_of_every_size(sizes: list[int]) -> None:
    with paired() as pair:
        batch = [torch.from_numpy(noise(size, size)) for size in sizes]
        for extra in ((), (Opaque(1),)):
            result = pair.trip([*batch, *extra])
            assert all(map(torch.equal, batch, result))
            assert all(leaf.data_ptr() % 8 == 0 for leaf in result[: len(batch)] if leaf.numel())
        assert pair.idle()


def test_pickled_bytes_never_travel_in_the_message(pair: Pair) -> None:
    secret = "d5c1f0d6-never-in-a-frame"
    for batch in (Opaque(secret), [Opaque(secret), torch.rand(3)], {secret[:3]: Record("x", [secret])}):
        handle = handle_of(pair, batch)
        assert handle.parcel is None
        assert secret.encode() not in pair.frames[-1]
        assert b"tests.datasets" not in pair.frames[-1]
        assert_same(batch, pair.deliver(pair.unpacker.learn(0, handle)))


def test_the_size_of_a_batch_is_that_of_its_leaves(pair: Pair) -> None:
    handle = handle_of(pair, [torch.zeros(3), np.zeros(LARGE), "word"])
    assert pair.unpacker.learn(0, handle).spec.nbytes == 12 + 8 * LARGE


# ---- handles that lie -------------------------------------------------------------------------------


def a_handle(pair: Pair) -> Handle:
    """A parcel in a block, two large leaves, an object and three values."""
    return handle_of(
        pair, [torch.arange(LARGE), {"x": np.zeros(LARGE)}, torch.rand(4), Opaque(1), 1, ["a", "b"]]
    )


def replace_place(handle: Handle, at: int, *place: int) -> Handle:
    return handle._replace(places=(*handle.places[:at], place, *handle.places[at + 1 :]))


def change_leaf(handle: Handle, at: int, **changes: Any) -> Handle:
    assert handle.spec is not None
    tree, leaves, sizes = handle.spec
    fields = ("kind", "dtype", "shape", "strides", "place", "into")
    leaf = dict(zip(fields, leaves[at], strict=True)) | changes
    spec = (tree, (*leaves[:at], tuple(leaf.values()), *leaves[at + 1 :]), sizes)
    return handle._replace(spec=spec)


LIES: dict[str, Callable[[Handle], Handle]] = {
    "a leaf behind the end of its block": lambda h: replace_place(h, 1, *h.places[1][:2], h.places[1][1]),
    "a leaf that begins before its block": lambda h: replace_place(h, 1, h.places[1][0], h.places[1][1], -8),
    "a block too small for its leaf": lambda h: replace_place(h, 1, h.places[1][0], SMALLEST, 0),
    "a block of negative size": lambda h: replace_place(h, 1, h.places[1][0], -SMALLEST, 0),
    "a block beyond the arena": lambda h: replace_place(h, 1, 1 << 60, h.places[1][1], 0),
    "a block before the arena": lambda h: replace_place(h, 1, -SMALLEST, h.places[1][1], 0),
    "a parcel larger than its block": lambda h: replace_place(h, 0, h.places[0][0], SMALLEST, SMALLEST + 1),
    "a parcel too small for its leaves": lambda h: replace_place(h, 0, h.places[0][0], SMALLEST, 3),
    "a parcel beyond the arena": lambda h: replace_place(h, 0, 1 << 60, SMALLEST, h.places[0][2]),
    "a place too few": lambda h: h._replace(places=h.places[:-1]),
    "two places too few": lambda h: h._replace(places=h.places[:-2]),
    "a place too many": lambda h: h._replace(places=(*h.places, h.places[-1])),
    "no places": lambda h: h._replace(places=()),
    "a value too few": lambda h: h._replace(values=h.values[:-1]),
    "a value too many": lambda h: h._replace(values=(*h.values, "c")),
    "no values": lambda h: h._replace(values=()),
    "a leaf with more rows than its place": lambda h: change_leaf(h, 0, shape=(LARGE + 1,)),
    "a leaf with longer strides than its place": lambda h: change_leaf(h, 0, strides=(2,)),
    "a leaf far into its place": lambda h: change_leaf(h, 0, into=8),
    "a leaf before its place": lambda h: change_leaf(h, 0, into=-8),
    "an array with longer strides than its place": lambda h: change_leaf(h, 1, strides=(16,)),
    "an array that runs backwards": lambda h: change_leaf(h, 1, strides=(-8,)),
    "a leaf of negative size": lambda h: change_leaf(h, 0, shape=(-1,)),
    "more strides than dimensions": lambda h: change_leaf(h, 0, strides=(1, 1)),
    "an unknown dtype": lambda h: change_leaf(h, 0, dtype="float31"),
    "a dtype that is none": lambda h: change_leaf(h, 0, dtype="nn"),
    "an array of an unknown dtype": lambda h: change_leaf(h, 1, dtype="<q7"),
    "an array of objects": lambda h: change_leaf(h, 1, dtype="|O"),
    "a leaf on a place that is not there": lambda h: change_leaf(h, 0, place=9),
    "a leaf of an unknown kind": lambda h: change_leaf(h, 0, kind="Q"),
    "a tree with a leaf that is not there": lambda h: h._replace(spec=(("L", 7), *(h.spec or ())[1:])),
    "a tree of an unknown kind": lambda h: h._replace(spec=(("x", ()), *(h.spec or ())[1:])),
    "a tree that is a number": lambda h: h._replace(spec=(3, *(h.spec or ())[1:])),
    "a spec cut short": lambda h: h._replace(spec=(h.spec or ())[:2]),
    "a spec that was never sent": lambda h: h._replace(spec=None),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_handle_that_does_not_fit_is_refused(pair: Pair, lie: Callable[[Handle], Handle]) -> None:
    true = a_handle(pair)
    assert_same(["a", "b"], receive(pair, true)[5])
    with pytest.raises(ProtocolError):
        receive(pair, lie(true)._replace(spec_id=999))


def test_an_inline_parcel_that_is_too_short_is_refused(pair: Pair) -> None:
    handle = handle_of(pair, [torch.rand(4), torch.rand(100)])
    assert handle.parcel is not None
    for parcel in (b"", handle.parcel[:100], None):
        with pytest.raises(ProtocolError):
            receive(pair, handle._replace(parcel=parcel))


def test_a_packed_exception_that_lies_is_refused(pair: Pair) -> None:
    handle, used = pair.packer.pack_exception(b"x" * 100)
    assert used == [(0, 100)]
    assert handle.places == ((0, size_class(100), 100),)
    with pytest.raises(ProtocolError):
        pair.unpacker.exception(handle._replace(places=((0, SMALLEST, SMALLEST + 1),)))
    with pytest.raises(ProtocolError):
        pair.unpacker.exception(handle._replace(places=((0, SMALLEST, -1),)))
