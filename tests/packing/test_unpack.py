"""Handles: specs that are sent once, parcels, and handles that do not fit what they name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import TOKEN_BYTES, Handle
from fastq_loader.memory.allocator import Allocator
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.ledger import SMALLEST, size_class
from fastq_loader.packing.pack import ALIGNMENT, DEEPEST, INLINE, SPECS, Packer
from fastq_loader.packing.unpack import Unpacker
from tests.support.datasets import Opaque, Record, assert_same
from tests.support.pair import LARGE, TOKEN, Pair, noise, paired

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
    return put_together(pair.unpacker, pair.unpacker.learn(0, handle))


def put_together(unpacker: Unpacker, handle: Handle) -> Any:
    _, _, pickled = unpacker.open(handle)
    return unpacker.unpack(handle, pickled)


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
    assert [put_together(pair.unpacker, handle).numel() for handle in waiting] == sizes


def test_the_workers_specs_are_told_apart() -> None:
    arena = Arena(2)
    try:
        unpacker = Unpacker(arena, 2, TOKEN)
        for number in range(2):
            handle, _ = Packer(Allocator(arena.mapping, number), TOKEN).pack([number] * (number + 1))
            assert handle.spec_id == 0
            unpacker.learn(number, handle)
        for number, values in ((0, (5,)), (1, (5, 6))):
            named = unpacker.learn(number, Handle(0, None, values, None, ()))
            assert put_together(unpacker, named) == list(values)
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
        assert b"tests.support.datasets" not in pair.frames[-1]
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


def change_sizes(handle: Handle, size: Any) -> Handle:
    """One place more."""
    assert handle.spec is not None
    tree, leaves, sizes = handle.spec
    return handle._replace(spec=(tree, leaves, (*sizes, size)))


def change_tree(handle: Handle, tree: Any) -> Handle:
    """Another tree, that has the same values in it."""
    assert handle.spec is not None
    return handle._replace(spec=(("l", (handle.spec[0], tree)), *handle.spec[1:]))


def nested(tree: Any, depth: int) -> Any:
    for _ in range(depth):
        tree = ("l", (tree,))
    return tree


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
    "an array of records": lambda h: change_leaf(h, 1, dtype="i4,i4"),
    "an array of arrays": lambda h: change_leaf(h, 1, dtype="(2,2)<i2"),
    "an array of a dtype without a size": lambda h: change_leaf(h, 1, dtype="|S0"),
    "an array of voids": lambda h: change_leaf(h, 1, dtype="|V8"),
    "an array of a dtype by another name": lambda h: change_leaf(h, 1, dtype="f8"),
    "an array of a dtype that is a number": lambda h: change_leaf(h, 1, dtype=3),
    "a dtype that would be a module": lambda h: change_leaf(h, 0, dtype="onnx"),
    "a quantized dtype": lambda h: change_leaf(h, 0, dtype="quint8"),
    "a dtype that cannot be looked up": lambda h: change_leaf(h, 0, dtype=()),
    "a tensor between two elements": lambda h: change_leaf(h, 0, shape=(1,), into=4),
    "a shape of half a row": lambda h: change_leaf(h, 0, shape=(0.5,)),
    "a shape that is true": lambda h: change_leaf(h, 0, shape=(True,)),
    "a shape that is text": lambda h: change_leaf(h, 0, shape="ab"),
    "more dimensions than arrays have": lambda h: change_leaf(h, 0, shape=(1,) * 65),
    "more dimensions than can be multiplied": lambda h: change_leaf(h, 0, shape=((1 << 64) - 1,) * 100_000),
    "nothing, in dimensions beyond 64 bits": lambda h: change_leaf(h, 0, shape=(0, 1 << 40, 1 << 40)),
    "an array of nothing, beyond 64 bits": lambda h: change_leaf(h, 1, shape=(0, 1 << 40, 1 << 40)),
    "nothing, with other strides": lambda h: change_leaf(h, 0, shape=(0, 1), strides=(1,)),
    "a stride beyond 64 bits": lambda h: change_leaf(h, 0, shape=(1,), strides=((1 << 64) - 1,)),
    "an array's stride beyond 64 bits": lambda h: change_leaf(h, 1, shape=(1,), strides=(1 << 63,)),
    "as many elements as bits, in no memory": lambda h: change_leaf(h, 0, shape=(1 << 62,), strides=(0,)),
    "a place that is true": lambda h: change_leaf(h, 0, place=False),
    "a place that nobody looks at": lambda h: change_sizes(h, SMALLEST),
    "a small place that nobody looks at": lambda h: change_sizes(h, 8),
    "a size that is half": lambda h: change_sizes(h, 0.5),
    "a size below nothing": lambda h: change_sizes(h, -8),
    "two leaves of one place, one an array": lambda h: change_leaf(h, 0, place=1),
    "a tree that counts from the end": lambda h: change_tree(h, ("L", -1)),
    "a tree with a leaf that is true": lambda h: change_tree(h, ("L", True)),
    "a tree with a leaf that is half": lambda h: change_tree(h, ("L", 0.0)),
    "fewer values than none": lambda h: change_tree(h, ("v", -1)),
    "a number of values that is text": lambda h: change_tree(h, ("v", "2")),
    "a dict with a key too few": lambda h: change_tree(h, ("d", (), (("L", 0),))),
    "a dict with a key that is a dict": lambda h: change_tree(h, ("d", ({},), (("L", 0),))),
    "a dict with a key that is half": lambda h: change_tree(h, ("d", (0.5,), (("L", 0),))),
    "a list of text": lambda h: change_tree(h, ("l", "VVV")),
    "a tree too deep": lambda h: change_tree(h, nested(("l", ()), DEEPEST)),
    "a tree deeper than Python's stack": lambda h: change_tree(h, nested(("l", ()), 5000)),
    "another number of objects": lambda h: change_tree(h, "O"),
    "a spec cut short": lambda h: h._replace(spec=(h.spec or ())[:2]),
    "a spec that was never sent": lambda h: h._replace(spec=None),
}  # fmt: skip


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_handle_that_does_not_fit_is_refused(pair: Pair, lie: Callable[[Handle], Handle]) -> None:
    true = a_handle(pair)
    assert_same(["a", "b"], receive(pair, true)[5])
    with pytest.raises(ProtocolError):
        receive(pair, lie(true)._replace(spec_id=999))


#: (leaves, sizes of their places): each fits its place, and would not do all the same.
SPECS_THAT_LIE: dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    "nothing, in dimensions beyond 64 bits": ((("T", "float32", (0, 1 << 40, 1 << 40), None, 0, 0),), (0,)),
    "an array of nothing": ((("A", "<f4", (0, 1 << 40, 1 << 40), None, 0, 0),), (0,)),
    "nothing, with few strides": ((("T", "float32", (0, 1), (1,), 0, 0),), (0,)),
    "nothing, in too many dimensions": ((("T", "float32", (0,) * 70, None, 0, 0),), (0,)),
    "an element in too many dimensions": ((("T", "float32", (1,) * 70, None, 0, 0),), (4,)),
    "an array in too many dimensions": ((("A", "<f4", (1,) * 70, None, 0, 0),), (4,)),
    "a stride beyond 64 bits": ((("T", "float32", (1,), ((1 << 63) - 1,), 0, 0),), (4,)),
    "an array's stride beyond 64 bits": ((("A", "<f4", (1,), (1 << 63,), 0, 0),), (4,)),
    "as many elements as bits": ((("T", "uint8", (1 << 62,), (0,), 0, 0),), (1,)),
    "an array of as many": ((("A", "|u1", (1 << 63,), (0,), 0, 0),), (1,)),
    "a tensor between two elements": ((("T", "int32", (2,), (1,), 0, 2),), (10,)),
    "a place of half a size": ((("T", "float32", (1,), None, 0, 0),), (4.0,)),
    "a quantized dtype": ((("T", "quint8", (4,), None, 0, 0),), (4,)),
    "two leaves in no bytes": ((("T", "uint8", (0,), None, 0, 0), ("T", "uint8", (0,), None, 0, 0)), (0,)),
    "an array beside a tensor": ((("T", "uint8", (8,), None, 0, 0), ("A", "|u1", (8,), None, 0, 0)), (8,)),
    "two arrays": ((("A", "|u1", (8,), None, 0, 0), ("A", "|u1", (4,), None, 0, 0)), (8,)),
    "an array without a size": ((("A", "|S0", (4,), None, 0, 0),), (0,)),
    "an array of another byte order": ((("A", "=f4", (1,), None, 0, 0),), (4,)),
    "an array of records": ((("A", "i4,i4", (1,), None, 0, 0),), (8,)),
    "an array of arrays": ((("A", "(2,)i4", (1,), None, 0, 0),), (8,)),
    "an array of voids": ((("A", "|V8", (1,), None, 0, 0),), (8,)),
    "an array of pointers": ((("A", "|O", (1,), None, 0, 0),), (8,)),
    "a leaf of an unknown kind": ((("", "<f4", (1,), None, 0, 0),), (4,)),
    "a shape that is true": ((("T", "float32", (True,), None, 0, 0),), (4,)),
    "a leaf shorter than its place": ((("T", "float32", (1,), None, 0, 0),), (8,)),
    "a place that nobody looks at": ((("T", "float32", (1,), None, 0, 0),), (4, 0)),
}


@pytest.mark.parametrize(("leaves", "sizes"), SPECS_THAT_LIE.values(), ids=SPECS_THAT_LIE.keys())
def test_a_spec_of_leaves_that_cannot_be_is_refused(
    pair: Pair, leaves: tuple[Any, ...], sizes: tuple[Any, ...]
) -> None:
    tree = ("l", tuple(("L", number) for number in range(len(leaves))))
    with pytest.raises(ProtocolError):
        receive(pair, Handle(0, (tree, leaves, sizes), (), bytes(256), ()))


@pytest.mark.parametrize("tree", [("l", "VV"), ("l", ["V", "V"]), ("t", {0: "V"}), ("v", True), ("v", 2.0)])
def test_a_tree_of_another_kind_is_refused(pair: Pair, tree: Any) -> None:
    for values in ((), (1,), (1, 2)):
        with pytest.raises(ProtocolError):
            receive(pair, Handle(0, (tree, (), ()), values, None, ()))


def test_a_block_among_the_tables_is_refused(pair: Pair) -> None:
    handle = handle_of(pair, torch.arange(LARGE))
    _, end = pair.arena.mapping.region(0)
    size = handle.places[0][1]
    assert end + size < pair.arena.mapping.length
    with pytest.raises(ProtocolError):
        receive(pair, replace_place(handle, 0, end, size, 0))


def test_a_pickle_that_speaks_of_a_leaf_that_was_taken_away_is_refused(pair: Pair) -> None:
    handle = handle_of(pair, Opaque(torch.arange(LARGE)))
    assert handle.spec is not None
    lie = handle._replace(spec=(handle.spec[0], (), ()), places=handle.places[:1])
    with pytest.raises(ProtocolError, match="leaf 0"):
        receive(pair, lie)


def test_a_dtype_is_not_looked_up_among_the_modules(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def ask(name: str) -> None:
        raise AssertionError(f"torch was asked for {name}, and may import it")

    monkeypatch.setattr(torch, "__getattr__", ask)
    with pytest.raises(ProtocolError):
        receive(
            pair, Handle(0, (("L", 0), (("T", "not_imported", (1,), None, 0, 0),), (4,)), (), bytes(64), ())
        )


def test_an_inline_parcel_that_is_too_short_is_refused(pair: Pair) -> None:
    handle = handle_of(pair, [torch.rand(4), torch.rand(100)])
    assert handle.parcel is not None
    for parcel in (b"", handle.parcel[:100], None):
        with pytest.raises(ProtocolError):
            receive(pair, handle._replace(parcel=parcel))


def test_a_packed_exception_that_lies_is_refused(pair: Pair) -> None:
    handle, used = pair.packer.pack_exception(b"x" * 100)
    total = TOKEN_BYTES + 100
    assert used == [(0, total)]
    assert handle.places == ((0, size_class(total), total),)
    tail = handle.spec[1:] if handle.spec else ()
    for lie in (
        {"places": ((0, SMALLEST, SMALLEST + 1),)},
        {"places": ((0, SMALLEST, -1),)},
        {"places": ()},
        {"places": ((0, SMALLEST, total), (0, SMALLEST, total))},
        {"places": ((SMALLEST, SMALLEST, total),)},  # no token there
        {"spec": ("V", *tail), "values": (1,), "places": ()},
        {"spec": (("l", ("O", "V")), *tail), "values": (1,)},
        {"spec": (("l", ("O", "O")), *tail)},
    ):
        with pytest.raises(ProtocolError):
            pair.unpacker.exception(pair.unpacker.learn(0, handle._replace(**lie)))
