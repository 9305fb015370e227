"""Batches that go to a device: laid out in one block by the worker, put together from one piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import Handle
from fastq_loader.memory.allocator import empty
from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.memory.ledger import DEVICE_ALIGNMENT, SMALLEST
from fastq_loader.packing.unpack import Unpacker
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import DTYPES, TOKEN, Pair, noise, paired

pytestmark = [
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired(to_device=True) as pair:
        yield pair


def tensor(nbytes: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    whole = -(-nbytes // dtype.itemsize) * dtype.itemsize
    if not whole:
        return torch.empty(0, dtype=dtype)
    if dtype is torch.bool:
        return torch.from_numpy(noise(whole, seed) % 2 == 1)
    return torch.from_numpy(noise(whole, seed)).view(dtype)


FIELDS = st.lists(
    st.tuples(
        st.integers(0, 3 * SMALLEST),
        st.sampled_from(DTYPES),
        st.sampled_from(("private", "block", "view", "array", "text")),
    ),
    max_size=6,
)


@settings(deadline=None, max_examples=200)
@given(st.lists(FIELDS, min_size=1, max_size=4))
def test_any_fields_from_anywhere(batches: list[Any]) -> None:
    with paired(to_device=True) as pair:
        for number, fields in enumerate(batches):
            expected = [made(field, at + 100 * number, False) for at, field in enumerate(fields)]
            answer = pair.pack(
                lambda fields=fields, number=number: [
                    made(field, at + 100 * number, True) for at, field in enumerate(fields)
                ]
            )
            handle = pair.arrive(answer)
            check_layout(handle)
            assert_same(expected, pair.deliver(handle))
        assert pair.idle()


def made(field: Any, seed: int, in_worker: bool) -> Any:
    nbytes, dtype, where = field
    content = tensor(nbytes, dtype, seed)
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


def check_layout(handle: Handle) -> None:
    spec = handle.spec
    starts = [start for start in spec.starts if start >= 0]
    assert all(start % DEVICE_ALIGNMENT == 0 for start in starts)
    assert len({place for place, start in enumerate(spec.starts) if start >= 0}) == len(starts)
    tensors = [leaf.place for leaf in spec.leaves if not leaf.array]
    assert {place for place, start in enumerate(spec.starts) if start >= 0} == set(tensors)


def test_everything_is_in_one_block_and_stays_where_it_was_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[int] = []
    write = pair.allocator.write

    def watch(offset: int, source: int, nbytes: int) -> None:
        written.append(nbytes)
        write(offset, source, nbytes)

    monkeypatch.setattr(pair.allocator, "write", watch)

    def make(new: Any = empty) -> Any:
        return {
            "image": new((300_000,), dtype=torch.uint8).fill_(1),
            "mask": new((200_000,), dtype=torch.uint8).fill_(2),
            "label": torch.arange(7),
        }

    for batch in range(4):
        written.clear()
        handle = pair.arrive(pair.pack(make))
        assert len(handle.places) == 1
        assert written == ([300_000, 200_000, 56] if batch == 0 else [56])
        assert_same(make(torch.empty), pair.deliver(handle))
    assert len(pair.ledger) <= 4


def test_one_large_result_leaves_room_for_labels(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Already in the first batch: most have one tensor that counts, and labels."""
    written: list[int] = []
    write = pair.allocator.write
    monkeypatch.setattr(
        pair.allocator,
        "write",
        lambda offset, source, nbytes: (written.append(nbytes), write(offset, source, nbytes)),
    )
    pair.deliver(
        pair.arrive(pair.pack(lambda: (empty((1_000_000,), torch.uint8).fill_(3), torch.arange(64))))
    )
    assert written == [512]


def test_what_lies_between_is_not_copied_for_ever(pair: Pair) -> None:
    """A small field behind a large temporary: the part that is copied is not much larger than the fields."""

    def make() -> Any:
        first = empty((70_000,), torch.uint8).fill_(1)
        temporary = empty((900_000,), torch.uint8).fill_(9)
        last = empty((70_000,), torch.uint8).fill_(2)
        del temporary
        return first, last

    for _ in range(3):
        handle = pair.arrive(pair.pack(make))
        part = pair.unpacker.part(handle)
        assert part is not None
        assert part[3] <= 2 * 140_000 + 2 * DEVICE_ALIGNMENT
        first, last = pair.deliver(handle)
        assert (first.unique().tolist(), last.unique().tolist()) == ([1], [2])


def test_what_the_dataset_keeps_is_shipped_in_a_copy(pair: Pair) -> None:
    kept = []

    def make() -> Any:
        kept.append(empty((100_000,), torch.uint8).fill_(len(kept)))
        return kept[-1], torch.arange(3)

    for number in range(3):
        handle = pair.arrive(pair.pack(make))
        for tensor in kept:
            tensor.fill_(77)
        assert pair.deliver(handle)[0].unique().tolist() == [number]


def beside(kind: str) -> Any:
    """A large tensor, a small one that is not in its block, and something else that is."""
    whole = empty((400_000,), torch.uint8).fill_(1)
    label = torch.full((9,), 5)
    if kind == "array":
        return whole, empty((70_000,), torch.uint8).fill_(2).numpy(), label
    if kind == "views":
        return (
            whole[:100_000].fill_(3),
            whole[200_001:300_001].fill_(4),
            whole[300_017:300_100].fill_(6),
            label,
        )
    kept.append(empty((70_000,), torch.uint8).fill_(7))
    return whole, label


kept: list[torch.Tensor] = []


@pytest.mark.parametrize("kind", ["array", "views", "kept"])
def test_what_lies_beside_a_tensor_in_its_block_is_not_overwritten(kind: str, pair: Pair) -> None:
    kept.clear()
    for _ in range(4):
        result = pair.deliver(pair.arrive(pair.pack(lambda: beside(kind))))
        if kind == "array":
            assert np.unique(result[1]).tolist() == [2]
        elif kind == "views":
            assert [part.unique().tolist() for part in result[:3]] == [[3], [4], [6]]
        assert result[-1].tolist() == [5] * 9
        assert all(tensor.unique().tolist() == [7] for tensor in kept)


def test_blocks_are_free_again_when_all_that_was_cut_from_them_is_gone(pair: Pair) -> None:
    def make() -> Any:
        for _ in range(40):
            temporaries = [empty((100_000,), torch.uint8) for _ in range(2)]
            del temporaries
        return torch.arange(3)

    for _ in range(3):
        pair.trip(make())
        pair.deliver(pair.arrive(pair.pack(make)))
    assert len(pair.ledger) <= 6


def test_arrays_and_objects_stay_on_the_host(pair: Pair) -> None:
    batch = [np.arange(100_000), np.arange(5), Opaque([torch.arange(4), "x"]), torch.arange(6), b"bytes"]
    answer = pair.pack(lambda: batch)
    handle = pair.arrive(answer)
    assert [start >= 0 for start in handle.spec.starts] == [False, False, True, True]
    result = pair.deliver(handle)
    assert_same(batch, result)
    assert pair.idle()
    assert result[0].flags.writeable


def test_a_batch_without_tensors_has_no_part(pair: Pair) -> None:
    handle = pair.arrive(pair.pack(lambda: ["a", np.arange(3)]))
    assert pair.unpacker.part(handle) is None
    assert_same(["a", np.arange(3)], pair.deliver(handle))


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


def test_a_batch_of_empty_tensors(pair: Pair) -> None:
    batch = [torch.empty(0), torch.empty(0, 3, dtype=torch.int8), torch.empty(2, 0).t()]
    assert_same(batch, pair.trip(batch))
    assert pair.idle()


def test_where_there_is_no_device_such_a_batch_is_refused(pair: Pair) -> None:
    answer = pair.pack(lambda: torch.arange(3))
    assert answer.handle is not None
    with pytest.raises(ProtocolError, match="packed a batch for a device"):
        Unpacker(pair.arena, 1, TOKEN).learn(0, answer.handle)


@pytest.mark.parametrize(
    ("starts", "text"),
    [
        ((8,), "begins 8 bytes into"),
        ((-2,), "begins -2 bytes into"),
        ((True,), "begins True bytes into"),
        ((1 << 62,), "bytes into"),
        (("0",), "malformed|begins '0'"),
        ((), "malformed"),
        ((0, 0), "malformed"),
    ],
)
def test_a_part_that_cannot_be_is_refused(pair: Pair, starts: Any, text: str) -> None:
    answer = pair.pack(lambda: torch.arange(3))
    assert answer.handle is not None
    spec = (*answer.handle.spec[:3], starts)
    with pytest.raises(ProtocolError, match=text):
        pair.unpacker.learn(0, answer.handle._replace(spec=spec))


def test_an_array_in_the_part_is_refused(pair: Pair) -> None:
    answer = pair.pack(lambda: np.arange(3))
    assert answer.handle is not None
    spec = (*answer.handle.spec, (0,))
    with pytest.raises(ProtocolError, match="an array that goes to the device"):
        pair.unpacker.learn(0, answer.handle._replace(spec=spec))


def test_a_part_beyond_its_block_is_refused(pair: Pair) -> None:
    answer = pair.pack(lambda: torch.arange(100))
    assert answer.handle is not None
    ((offset, size, _),) = answer.handle.places
    for into in (size - 799, size, -1):
        with pytest.raises(ProtocolError):
            pair.unpacker.learn(0, answer.handle._replace(places=((offset, size, into),)))
