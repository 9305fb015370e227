"""The tensors in whatever a batch is made of."""

from __future__ import annotations

import collections
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fastq_loader.packing.tensors import current_stream, is_captured, moved, tensors_of
from tests.support.datasets import Opaque, Point, Slotted

META = torch.device("meta")


def test_tensors_are_found_in_containers_and_objects_once_each() -> None:
    tensors = [torch.zeros(number) for number in range(7)]
    tree: list[Any] = [
        {"a": tensors[0], "b": (tensors[1], [tensors[0]])},
        Opaque(tensors[2]),
        Slotted(tensors[3]),
        Point(tensors[4], 1),
        collections.OrderedDict(x=tensors[5]),
        SimpleNamespace(x={"y": tensors[6]}),
        "text",
        torch.Tensor,
    ]
    tree[0]["b"][1].append(tree)  # a cycle
    assert {id(part) for part in tensors_of(tree)} == set(map(id, tensors))


ROWS = [torch.rand(2), torch.rand(3)]
WITHOUT_STRIDES: dict[str, tuple[Callable[[], torch.Tensor], list[int]]] = {
    "coo": (lambda: torch.eye(3).to_sparse(), [6, 3]),
    "csr": (lambda: torch.eye(3).to_sparse_csr(), [4, 3, 3]),
    "csc": (lambda: torch.eye(3).to_sparse_csc(), [4, 3, 3]),
    "nested": (lambda: torch.nested.nested_tensor(ROWS), [2, 3]),
    "jagged": (lambda: torch.nested.nested_tensor(ROWS, layout=torch.jagged), [5, 3]),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WITHOUT_STRIDES)
def test_tensors_without_strides_are_their_parts(name: str) -> None:
    make, sizes = WITHOUT_STRIDES[name]
    assert sorted(part.numel() for part in tensors_of(make())) == sorted(sizes)


def test_only_a_tensor_moves_and_stays_a_leaf_that_requires_grad() -> None:
    for value in ("text", None, [torch.zeros(1)]):
        assert moved(value, META) is value
    here = torch.zeros(3)
    assert moved(here, here.device) is here
    there = moved(torch.zeros(3, requires_grad=True), META)
    assert (there.device, there.requires_grad, there.is_leaf) == (META, True, True)
    assert moved(torch.zeros(3, requires_grad=True) * 2, META).grad_fn is not None


def test_the_host_has_no_streams() -> None:
    assert current_stream(torch.device("cpu")) is None
    assert not is_captured(torch.device("cpu"))
