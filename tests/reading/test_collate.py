"""Collating by a shorter way, and into blocks: what torch's default collate gives, in a worker too."""

from __future__ import annotations

import math
import random
import warnings
from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import default_collate
from torch.utils.data._utils import collate as torch_collate
from torch.utils.data._utils import worker as torch_worker

from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.reading import collate
from tests.support.datasets import Level, assert_same
from tests.support.pair import LARGE, Pair, paired
from tests.support.thorough import examples, seeds

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch) -> dict[Any, Any]:
    """torch's table of collate functions, which is put back afterwards."""
    copy = dict(torch_collate.default_collate_fn_map)
    monkeypatch.setattr(torch_collate, "default_collate_fn_map", copy)
    return copy


@pytest.fixture
def pair() -> Iterator[Pair]:
    with paired() as pair:
        yield pair


def in_torchs_worker(batch: list[torch.Tensor]) -> torch.Tensor:
    """What torch's own function gives in torch's own worker process."""
    with pytest.MonkeyPatch.context() as patch:
        info = torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
        patch.setattr(torch_worker, "_worker_info", info)
        return torch_collate.collate_tensor_fn(batch)


DTYPES = (torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.complex64)
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as it is": lambda tensor: tensor,
    "transposed": lambda tensor: (
        tensor.movedim(0, -1).contiguous().movedim(-1, 0) if tensor.dim() else tensor
    ),
    "channels last": lambda tensor: (
        tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor
    ),
    "expanded": lambda tensor: tensor[..., :1].expand(tensor.shape) if tensor.dim() else tensor,
}


@examples(80)
@given(
    st.sampled_from(((), (1,), (3,), (0,), (2, 3, 4, 5), (2, 1, 4, 4), (64, 300), (3, 2, 70, 80))),
    st.lists(st.sampled_from(list(LAYOUTS)), min_size=1, max_size=3),
    st.sampled_from(DTYPES),
)
def test_tensors_are_stacked_as_in_torchs_worker(
    shape: tuple[int, ...], layouts: list[str], dtype: torch.dtype
) -> None:
    batch = [LAYOUTS[layout]((torch.randn(shape) * 9).to(dtype)) for layout in layouts]
    with paired():
        assert_same(in_torchs_worker(batch), collate.stack_tensors(batch))


def outcome(stack: Callable[[Any], Any], batch: list[Any]) -> Any:
    try:
        return stack(batch)
    except Exception as error:
        return type(error), str(error)


@pytest.mark.parametrize(
    "make",
    [
        lambda: [torch.rand(3), torch.rand(4)],
        lambda: [torch.rand(3), torch.rand(())],
        lambda: [torch.rand(2, LARGE), torch.rand(LARGE, 2)],
        lambda: [torch.rand(LARGE), torch.rand(2 * LARGE)],
        lambda: [torch.nested.nested_tensor([torch.rand(2), torch.rand(3)])] * 2,
        lambda: [torch.eye(3).to_sparse()] * 2,
    ],
    ids=["sizes", "dimensions", "large shapes", "large sizes", "nested", "sparse"],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_torch_refuses_is_refused_with_its_words(pair: Pair, make: Callable[[], Any]) -> None:
    batch = make()
    kind, text = outcome(torch_collate.collate_tensor_fn, batch)
    assert issubclass(kind, RuntimeError)
    assert outcome(collate.stack_tensors, batch) == outcome(collate.default, batch) == (kind, text)


def test_graphs_and_subclasses_go_the_way_torch_has_for_them(pair: Pair) -> None:
    class Marked(torch.Tensor):
        pass

    samples = [torch.rand(LARGE, requires_grad=True) for _ in range(2)]
    collate.stack_tensors(samples).sum().backward()
    assert samples[0].grad is not None
    marked = [torch.rand(3).as_subclass(Marked) for _ in range(2)]
    assert_same(torch.stack(marked), collate.stack_tensors(marked))


def test_torchs_functions_are_replaced_and_a_users_own_entry_stays(table: dict[Any, Any]) -> None:
    assert table[torch.Tensor] is torch_collate.collate_tensor_fn
    expected = table | {kind: ours for kind, (_, ours) in collate.STACKERS.items()}
    for _ in range(2):
        collate.install()
        assert table == expected
    own = table[torch.Tensor] = lambda batch, *, collate_fn_map=None: "own"
    collate.install()
    assert table[torch.Tensor] is own
    assert default_collate([np.zeros(2), np.zeros(2)]) == "own", "also for tensors that are made of arrays"
    del table[torch.Tensor]
    collate.install()
    assert torch.Tensor not in table


ARRAYS: dict[str, list[Any]] = {
    **{kind: [np.arange(6).reshape(2, 3).astype(kind)] * 3 for kind in ("u1", "i4", "f2", "f8", "c16", "?")},
    "large": [np.full(LARGE, i, np.float32) for i in range(2)],
    "empty": [np.zeros((0, 3))] * 2,
    "of other shapes": [np.zeros(2), np.zeros(3)],
    "of one byte order that torch has not": [np.zeros(2, ">f4")] * 2,
    "of text": [np.array("a"), np.array("b")],
    "of a subclass": [np.ma.masked_array([1.0, 2.0])] * 2,
}


NUMBERS: dict[str, list[Any]] = {
    "ints": [3, -(1 << 63), (1 << 63) - 1],
    "bools": [True, False, True],
    "floats": [1.5, -0.0, math.inf, math.nan, 5e-324],
    "ints and bools": [2, True],
    "ints and floats": [1, 2.5],
    "ints and a complex number": [1, 2j],
    "ints and numpy's": [1, np.int8(2)],
    "floats and a tensor": [1.5, torch.tensor(2.5)],
    "an enumeration's": [Level.HIGH, Level.HIGH],
    "an int of more than 63 bits": [1, 1 << 63],
    "ints and text": [1, "2"],
}


@pytest.mark.parametrize("name", [*ARRAYS, *NUMBERS])
def test_arrays_and_numbers_become_what_torch_makes_of_them(
    name: str, table: dict[Any, Any], pair: Pair
) -> None:
    samples = [{"x": value} for value in (ARRAYS | NUMBERS)[name]]
    expected = outcome(default_collate, samples)
    collate.install()
    assert_same(expected, outcome(default_collate, samples))


class Listed(list[Any]):
    """A list of one's own; it has no other constructor than its base's."""


class Short(list[Any]):
    """Says that it is longer than it is."""

    def __len__(self) -> int:
        return super().__len__() + 1


Named = namedtuple("Named", "x y")
#: What a field of sample `i` is.
FIELDS: dict[str, Callable[[int], Any]] = {
    "tensor": lambda i: torch.full((2,), float(i)),
    "view": lambda i: torch.arange(12.0).reshape(3, 4).t()[i % 4],
    "parameter": lambda i: torch.ones(2, requires_grad=True),
    "array": lambda i: np.full(3, i),
    "array of texts": lambda i: np.array("a"),
    "int": lambda i: i,
    "long": lambda i: i << 70,
    "float": lambda i: i / 3,
    "bool": lambda i: i > 1,
    "text": str,
    "int or float": lambda i: i / 2 if i % 2 else i,
    "nothing": lambda i: None,
    "set": lambda i: {i},
    "sizes": lambda i: torch.zeros(i + 1),
}
CONTAINERS: dict[str, Callable[[int, list[Any]], Any]] = {
    "tuple": lambda i, parts: tuple(parts),
    "list": lambda i, parts: parts,
    "dict": lambda i, parts: dict(enumerate(parts)),
    "named": lambda i, parts: Named(parts, i),
    "ordered": lambda i, parts: OrderedDict(enumerate(parts)),
    "default": lambda i, parts: defaultdict(int, enumerate(parts)),
    "user's dict": lambda i, parts: UserDict(enumerate(parts)),
    "subclass": lambda i, parts: Listed(parts),
    "short": lambda i, parts: Short(parts[:-1]) if i else parts,
    "tuple or list": lambda i, parts: parts if i else tuple(parts),
    "longer": lambda i, parts: (*parts, *range(i)),
    "other keys": lambda i, parts: {"x": parts, i: 0},
}
#: Users' entries in torch's table: a function tells that it was called, and how.
ENTRIES: list[tuple[Any, ...]] = [
    (),
    (),
    (tuple,),
    (Mapping,),
    ((list, set),),
    (object,),
    (int,),
    (np.ndarray,),
    (torch.Tensor,),
]


def make_samples(draws: random.Random, count: int, depth: int = 0) -> list[Any]:
    """Samples of one kind, more or less."""
    if depth == 4 or draws.random() < 0.3 * depth:
        field = FIELDS[draws.choice(list(FIELDS)[:9] if draws.random() < 0.9 else list(FIELDS))]
        return [field(i) for i in range(count)]
    usual = list(CONTAINERS)[: 3 if draws.random() < 0.5 else 9 if draws.random() < 0.8 else None]
    container = CONTAINERS[draws.choice(usual)]
    parts = [make_samples(draws, count, depth + 1) for _ in range(draws.choice((0, 1, 2, 2, 3)))]
    return [container(i, [part[i] for part in parts]) for i in range(count)]


def seen(collate_fn: Callable[[Any], Any], batch: Any, entries: tuple[Any, ...]) -> Any:
    """What comes of a batch: the result or the errors, the warnings, and the calls of users' entries."""
    calls: list[Any] = []
    given = torch_collate.default_collate_fn_map

    def own(batch: Any, *, collate_fn_map: Any) -> Any:
        calls.append((batch, collate_fn_map is given))
        if len(calls) % 3 == 0:
            raise TypeError("of the user's")
        return ["own", *batch]

    given.update(dict.fromkeys(entries, own))
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        try:
            result = collate_fn(batch)
        except Exception as error:
            result = type(error), str(error), type(error.__context__)
        finally:
            torch.set_warn_always(always)
    return result, [(each.category, str(each.message)) for each in warned], calls


@seeds(100, 300)
def test_samples_become_what_torch_makes_of_them(seed: int, table: dict[Any, Any]) -> None:
    draws = random.Random(seed)
    samples, entries = make_samples(draws, draws.choice((1, 2, 4))), draws.choice(ENTRIES)
    batch = draws.choice((list, list, list, tuple, UserList))(samples)
    before = dict(table)
    expected = seen(default_collate, batch, entries)
    table.clear()
    table.update(before)
    assert_same(expected, seen(collate.default, batch, entries), f"seed {seed}, {entries}: {samples}")


SAMPLE = {"x": torch.ones(2), "y": np.ones(2), "i": 1, "f": 0.5, "b": True}


@pytest.mark.parametrize("where", ["here", "worker", "device"])
def test_collating_goes_by_what_torchs_goes_by(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In torch's own worker, where a loader may be nested, results are shared; a mode may choose a device."""
    if where == "worker":
        monkeypatch.setattr(
            torch_worker, "_worker_info", torch_worker.WorkerInfo(id=0, num_workers=1, seed=0, dataset=None)
        )
    with torch.device("meta" if where == "device" else "cpu"):
        expected, found = (kind([SAMPLE] * 2) for kind in (default_collate, collate.default))
    looks = [[(value.device, value.is_shared()) for value in of.values()] for of in (expected, found)]
    assert looks[0] == looks[1]


@pytest.mark.parametrize("sample", [1, 1.0, True, np.ones(2), torch.ones(2)], ids=str)
def test_what_is_collated_without_workers_can_grow(sample: Any) -> None:
    """As torch's, whose tensors own their memory."""
    batch = collate.default([sample] * 3)
    assert batch.resize_(1000).shape == default_collate([sample] * 3).resize_(1000).shape
