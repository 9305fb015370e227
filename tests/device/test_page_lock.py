"""`pin_memory=True`: page-locked copies are torch's, and are made by one thread."""

from __future__ import annotations

import collections
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data._utils.pin_memory import pin_memory

from fastq_loader.device.page_lock import page_locked
from tests.conftest import run_script
from tests.support.datasets import assert_same
from tests.support.gpu import device_or_skip


class Pair(NamedTuple):
    first: Any
    second: Any


class Attributed(dict[str, Any]):
    """A mapping with an attribute, which torch keeps."""

    note = "class"


class Own:
    """An object with a `pin_memory` of its own."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.calls = 0

    def pin_memory(self) -> Own:
        self.calls += 1
        return self


class OwnPair(Pair):
    """A named tuple with a `pin_memory` of its own."""

    def pin_memory(self) -> OwnPair:
        return type(self)(self.first, "pinned")


TENSORS: list[Callable[[], torch.Tensor]] = [
    lambda: torch.arange(12.0).reshape(3, 4),
    lambda: torch.arange(12).reshape(3, 4).t(),
    lambda: torch.arange(24).reshape(1, 2, 3, 4).contiguous(memory_format=torch.channels_last),
    lambda: torch.arange(12)[::2],
    lambda: torch.arange(12)[3:7],
    lambda: torch.arange(3).expand(2, 3),
    lambda: torch.tensor(5, dtype=torch.uint8),
    lambda: torch.empty(0, 3),
    lambda: torch.empty_strided((1, 3), (7, 1)).fill_(2),
    lambda: torch.arange(3, dtype=torch.bfloat16),
    lambda: torch.tensor([1 + 2j, 3j]).conj(),
    lambda: torch.tensor([1 + 2j, 3j]).conj().imag,
    lambda: torch.nn.Parameter(torch.ones(2)),
    lambda: torch.ones(2, requires_grad=True),
    lambda: torch.arange(2.0).to_sparse(),
]
LEAVES = st.one_of(
    st.sampled_from(TENSORS).map(lambda make: make()),
    st.sampled_from(["text", b"bytes", 3, 2.5, None, range(3), frozenset({1})]),
    st.builds(Own, st.integers()),
    st.builds(OwnPair, st.integers(), st.integers()),
)


def around(parts: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    lists = st.lists(parts, max_size=3)
    dicts = st.dictionaries(st.text(max_size=2), parts, max_size=3)
    return st.one_of(
        *(lists, lists.map(tuple), dicts, st.builds(Pair, parts, parts)),
        *(lists.map(collections.deque), lists.map(collections.UserList)),
        *(dicts.map(Attributed), dicts.map(collections.OrderedDict), dicts.map(types.MappingProxyType)),
    )


BATCHES = st.recursive(LEAVES, around, max_leaves=8)


class Allocator:
    """Stands in for torch's allocator of page-locked memory.

    Attributes:
        given: the memory that it gave out.
        locked_by_torch: the tensors that were left to `torch.Tensor.pin_memory`.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.given: list[torch.Tensor] = []
        self.locked_by_torch: list[torch.Tensor] = []
        self._empty_like = torch.empty_like
        patch.setattr(torch, "empty_like", self.empty_like)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: self.by_torch(tensor))

    def empty_like(self, tensor: torch.Tensor, *, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        self.given.append(self._empty_like(tensor))
        return self.given[-1]

    def by_torch(self, tensor: torch.Tensor) -> torch.Tensor:
        self.locked_by_torch.append(tensor)
        return tensor.clone()


@given(BATCHES)
def test_a_page_locked_batch_is_torchs(batch: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        Allocator(patch)
        ours = page_locked(batch)
        expected = pin_memory(batch)  # type: ignore[no-untyped-call]
    assert_same(expected, ours)


def test_what_is_page_locked_already_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    allocator = Allocator(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor, device=None: True)
    batch = [torch.ones(2), torch.ones(3)]
    assert all(one is other for one, other in zip(page_locked(batch), batch, strict=True))
    assert not allocator.given


ONE_THREAD = """
    import os, torch
    from collections import OrderedDict, UserDict
    from fastq_loader.device.accelerator import TorchBackend
    from fastq_loader.device.page_lock import page_locked

    def threads():
        return len(os.listdir("/proc/self/task"))

    torch.set_num_threads(4)
    large = torch.empty(1 << 20)
    before = threads()
    empty_like = torch.empty_like
    torch.empty_like = lambda tensor, pin_memory=True: empty_like(tensor)
    page_locked({"fields": [large] * 3, "others": OrderedDict(one=UserDict(two=large))})
    TorchBackend.fill(None, torch.empty_like(large), 0, large.data_ptr(), large.nbytes)
    assert threads() <= before, "a copy started threads"
    torch.empty_like(large).copy_(large)
    assert threads() > before, "this torch copies with one thread, so the test shows nothing"
"""


def test_one_thread_copies_whatever_the_number_of_intra_op_threads() -> None:
    result = run_script(ONE_THREAD)
    assert result.returncode == 0, result.stderr


@pytest.mark.gpu
@given(BATCHES)
def test_a_page_locked_batch_is_torchs_on_a_gpu(batch: Any) -> None:
    with device_or_skip():
        ours, expected = page_locked(batch, "cuda"), pin_memory(batch, "cuda")  # type: ignore[no-untyped-call]
        assert_same(expected, ours)
