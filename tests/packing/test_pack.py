"""Packing: a batch of anything comes out of the blocks as it went in, with its aliases and its strides."""

from __future__ import annotations

import collections
import dataclasses
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fastq_loader.errors import UnpicklableError
from fastq_loader.memory.allocator import empty
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.packing.flattener import BATCHES_UNWALKED, INLINE, PARTS
from tests.support.datasets import (
    Colour,
    Count,
    FrozenRecord,
    Keyed,
    Level,
    Name,
    Opaque,
    Point,
    Record,
    Slotted,
    Tagged,
    assert_same,
)
from tests.support.pair import DTYPES, LARGE, Pair, noise, paired, random_tensor
from tests.support.thorough import examples

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


# ---- any batch --------------------------------------------------------------------------------------

_PLAIN = "? u1 i2 i8 f2 f4 f8 c8 c16 U3 S5 M8[ns] m8[D] g V3"  # foreign byte orders become native
NUMPY_DTYPES: list[Any] = [*_PLAIN.split(), [("a", "i4"), ("b", "f8", (2,))]]


# Those that ask for two dimensions leave others alone. Dimensions of size 1 have a test of their own.
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: tensor.movedim(0, -1) if tensor.dim() > 1 else tensor,
    "every other": lambda tensor: tensor[..., ::2] if tensor.dim() else tensor,
    "an inner part": lambda tensor: tensor[..., 1:] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "channels last": lambda tensor: (
        tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    ),
    "overlapping windows": lambda tensor: tensor.unfold(-1, 2, 1) if tensor.shape[-1:] > (1,) else tensor,
}


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    tensor = LAYOUTS[layout](tensor)
    if tensor.numel() and 1 not in tensor.shape:
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def tensors(shapes: Any) -> st.SearchStrategy[torch.Tensor]:
    bits = st.builds(random_tensor, shapes.map(tuple), st.sampled_from(DTYPES), st.integers(0, 1000))
    return st.builds(laid_out, bits, st.sampled_from(list(LAYOUTS)))


def random_array(shape: Any, dtype: Any, seed: int, layout: str) -> np.ndarray:
    kind = np.dtype(dtype)
    count = int(np.prod(shape, dtype=np.int64))
    if kind.kind in "USg?" or kind.char == "g":  # not every bit pattern is a value of these
        array = noise(count, seed).astype(kind).reshape(shape)
    else:
        array = noise(count * kind.itemsize, seed).view(kind).reshape(shape)
    if count and layout == "fortran":
        return np.asfortranarray(array)
    return array


def arrays(shapes: Any) -> st.SearchStrategy[np.ndarray]:
    layouts = st.sampled_from(("c", "fortran"))
    return st.builds(random_array, shapes, st.sampled_from(NUMPY_DTYPES), st.integers(0, 1000), layouts)


SMALL_SHAPES = st.lists(st.integers(0, 5), max_size=4)
FULL_SHAPES = st.lists(st.integers(1, 5), max_size=4)  # numpy has several strides for an empty array
FIELD_NAMES = st.text(st.characters(), max_size=4)
SCALARS = st.one_of(
    *(st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), FIELD_NAMES),
    st.binary(max_size=5),
    st.sampled_from((-0.0, 2**63, 2**64, -(2**63) - 1, float("nan"), Ellipsis, NotImplemented)),
)
OBJECTS: tuple[Any, ...] = (
    *(np.float32(0.1), np.int64(-1), np.bool_(True), np.str_("ä"), np.datetime64("2001-02-03")),
    *(Name("name"), Count(3), Colour.BLUE, Level.LOW, range(2, 9, 3), slice(1, None), frozenset({1, "a"})),
    *(bytearray(b"abc"), torch.float16, torch.Size([2, 3]), torch.device("cpu"), int),
    *(np.array([1, "a", None], dtype=object), np.array([{"a": 1}, None])),
    *(np.ma.array([1, 2], mask=[True, False]), np.rec.array([(1, "a")], dtype=[("x", "i4"), ("y", "U1")])),
)
LEAVES = st.one_of(SCALARS, st.sampled_from(OBJECTS), tensors(SMALL_SHAPES), arrays(FULL_SHAPES))


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.booleans() | st.floats(allow_nan=False)
    keys = FIELD_NAMES | numbers | st.none() | st.tuples(FIELD_NAMES)
    lists = st.lists(inner, max_size=4)
    named = st.dictionaries(FIELD_NAMES, inner, max_size=4)
    of_lists = [lists.map(kind) for kind in (list, tuple, Tagged, collections.deque)]
    of_dicts = [named.map(kind) for kind in (dict, collections.OrderedDict, partial(Keyed, tag="kept"))]
    of_dicts.append(named.map(partial(collections.defaultdict, list)))
    of_one = [st.builds(kind, inner) for kind in (Slotted, Opaque, partial(Point, 1))]
    of_one += [st.builds(kind, st.just("r"), inner) for kind in (Record, FrozenRecord)]
    return st.one_of(*of_lists, *of_dicts, *of_one, st.dictionaries(keys, inner, max_size=3))


BATCHES = st.recursive(LEAVES, containers, max_leaves=12)


RAND = torch.rand
LAST = torch.channels_last
STRIDED = [
    torch.arange(6).view(3, 2).t(),
    torch.arange(3)[:, None].t(),
    torch.arange(10)[::5][None],
    torch.arange(4.0).expand(1, 4),
    torch.arange(4.0).as_strided((1, 4), (77, 1)),
    *(RAND(shape).contiguous(memory_format=LAST) for shape in ((2, 1, 4, 4), (1, 3, 1, 1), (3, 1, 200, 200))),
    RAND(1, 3, 200, 200).contiguous(memory_format=LAST),
    *(torch.empty(0, 3).t(), torch.empty(0), torch.empty(4, 0, 2)),
    *(torch.tensor(3.0), torch.tensor(3.0).expand(2, 3), torch.tensor(3.0).expand(300, 300)),
    *(RAND(200, 300).t(), RAND(200, 300)[:, ::7]),
]

#: Values that are packed by themselves, neighbours that are not, and keys and values that compare equal.
PLAIN: list[Any] = [
    *([2**63, -(2**63)], [2**64], [-(2**63) - 1, 0], [True, 1], [[1], 2]),
    *(["a", None, 2.5, b"x", False], (True, 1, 1.0, 0, False, 0.0, -0.0, np.int64(1))),
    *({1: "a"}, {True: "a"}, {1.0: "a"}, {np.int64(1): "a"}, {"1": "a"}, {2**70: "a"}),
]


@examples(250)
@given(st.lists(BATCHES, min_size=1, max_size=3))
@example([[], (), {}, ((),), [[[]]], {"": {}}])
@example(list(OBJECTS))
@example(STRIDED)
@example([*PLAIN, PLAIN, PLAIN[::-1]])
def test_a_batch_of_anything_comes_out_as_it_went_in(batches: list[Any]) -> None:
    with paired() as pair:
        for batch in batches:
            assert_same(batch, pair.trip(batch))
        assert pair.idle()


# ---- the handle -------------------------------------------------------------------------------------


def test_pickled_bytes_never_travel_in_the_message(pair: Pair) -> None:
    secret = "d5c1f0d6-never-in-a-frame"
    for batch in (Opaque(secret), [Opaque(secret), torch.rand(3)], {secret[:3]: Record("x", [secret])}):
        handle = pair.handle_of(batch)
        assert handle.packet is None
        assert secret.encode() not in pair.frames[-1]
        assert b"tests.support.datasets" not in pair.frames[-1]
        assert_same(batch, pair.deliver(pair.check(handle)))


# ---- tensors that are no plain leaves ---------------------------------------------------------------


def test_what_cannot_be_pickled_is_named_and_the_next_batch_is_fine(pair: Pair) -> None:
    with pytest.raises(UnpicklableError, match=r"batch\['f'\]"):
        pair.pack(lambda: {"x": empty((LARGE,)), "f": lambda: None})
    assert_same([torch.ones(LARGE)], pair.trip([torch.ones(LARGE)]))
    assert pair.idle()


# ---- identity ---------------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class Node:
    value: Any = None
    others: list[Any] = dataclasses.field(default_factory=list)


@pytest.mark.parametrize("count", [4, LARGE])
def test_one_object_that_comes_twice_is_one_object(pair: Pair, count: int) -> None:
    tensor, array, words, items = torch.rand(count), np.zeros(count), {"a": 1}, [1, 2]
    batch = [tensor, array, words, items, (tensor, array), {"x": words, "y": items}, Node(tensor)]
    result = pair.trip(batch)
    assert_same(batch[:-1], result[:-1])
    again = (*result[4], result[5]["x"], result[5]["y"])
    assert all(one is other for one, other in zip(result, again, strict=False))
    assert result[6].value is result[0]


def test_cycles_come_out_as_cycles(pair: Pair) -> None:
    node = Node(torch.rand(3))
    node.others.append(node)
    cycle: list[Any] = [1, node]
    cycle.append(cycle)
    mapping: dict[str, Any] = {"x": torch.rand(LARGE)}
    mapping["self"] = (mapping,)
    for batch in (cycle, mapping):
        assert_same(batch, pair.trip(batch))
    gc.collect()
    assert pair.idle()


# ---- aliasing ---------------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[torch.Tensor, int, int], torch.Tensor]] = {
    "range": lambda base, start, count: base[start : start + count],
    "steps": lambda base, start, count: base[start : start + 2 * count : 2],
    "bytes": lambda base, start, count: base.view(torch.uint8)[4 * start + 4 : 4 * (start + count)],
    "halves": lambda base, start, count: base.view(torch.int16)[2 * start : 2 * start + count],
    "doubles": lambda base, start, count: base.view(torch.int64)[start // 2 : (start + count) // 2],
    "rows": lambda base, start, count: base[start // 2 : start // 2 + count // 2].view(1, -1)[:, ::3],
    "detached": lambda base, start, count: base.detach()[start : start + count],
    "one": lambda base, start, count: base[start],
}


CHOSEN = st.tuples(st.sampled_from(list(VIEWS)), st.floats(0, 0.9), st.floats(0, 0.6), st.booleans())


@examples(150)
@given(st.sampled_from((16, 2 * LARGE)), st.lists(CHOSEN, min_size=1, max_size=5), st.integers(0, 3))
def test_views_of_one_storage_alias_as_they_did(
    count: int, chosen: list[tuple[str, float, float, bool]], shift: int
) -> None:
    with paired() as pair:
        base = torch.arange(count + 4, dtype=torch.int32)[: count + shift % 2 * 2]
        if shift > 1:
            base = empty(base.shape, base.dtype).copy_(base)
        spans = [(int(start * count), max(int(part * count), 2)) for _, start, part, _ in chosen]
        batch = [VIEWS[name](base, *span) for (name, *_), span in zip(chosen, spans, strict=True)]
        wrapped = [Opaque(view) if boxed else view for view, (*_, boxed) in zip(batch, chosen, strict=True)]
        result = [getattr(item, "value", item) for item in pair.trip(wrapped)]
        for one, other in zip(batch, result, strict=True):
            assert (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
            assert torch.equal(one, other)
        # The batch of the worker lies in memory of its own here: the same writes must give the same values.
        for number, (one, other) in enumerate(zip(batch, result, strict=True)):
            one.fill_(number + 1)
            other.fill_(number + 1)
            for expected, actual in zip(batch, result, strict=True):
                assert torch.equal(expected, actual)
        del base, batch, wrapped, one, expected, result, other, actual
        pair.trip(None)  # the worker hears that nobody looks at what it made
        assert pair.idle()


def test_small_leaves_do_not_hold_blocks(pair: Pair) -> None:
    batch = pair.trip({"image": torch.rand(LARGE), "labels": torch.arange(8), "more": np.arange(INLINE // 4)})
    labels, more = batch["labels"], batch["more"]
    del batch
    assert pair.idle()
    assert labels.tolist() == list(range(8))
    assert more.tolist() == list(range(INLINE // 4))


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for level in range(depth):
        value = [value] if level % 2 else (value,)
    return value


cycle: list[Any] = [1]
cycle.append(cycle)


@pytest.mark.parametrize("boxes", [3, PARTS // 10, PARTS])
def test_a_tree_of_many_containers_comes_out_as_it_went_in(pair: Pair, boxes: int) -> None:
    tensors = [torch.full((4,), float(box)) for box in range(boxes)]
    batch = [
        {"box": tensor, "names": ("a", str(box)), "count": box, "none": None, "sizes": [box, 2**70]}
        for box, tensor in enumerate(tensors)
    ]
    batch += [torch.arange(float(LARGE)), tensors[0]]  # type: ignore[list-item]
    small = [{"x": 1.5, "words": ["a", None, True]}, torch.ones(2)]  # walked, or not
    for _ in range(BATCHES_UNWALKED + 2):
        result = pair.trip(batch)
        assert_same(batch, result)
        assert result[-1] is result[0]["box"]
        assert_same(small, pair.trip(small))
    del result
    assert pair.idle()
