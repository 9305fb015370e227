"""Trees: what is walked, what is left to pickle, and that each comes out of a packed batch as it went in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.packing.spec import DEEPEST
from fastq_loader.packing.walker import BATCHES_UNWALKED, CONTAINERS, Walker
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import LARGE, Pair, paired


@pytest.fixture
def pair() -> Iterator[Pair]:
    if not AVAILABLE:
        pytest.skip("this system has no memfd")
    with paired() as pair:
        yield pair


def test_a_batch_is_taken_apart_into_its_tree_leaves_values_and_objects() -> None:
    tensor, array, thing = torch.rand(2), np.zeros(3), Opaque(1)
    walker = Walker()
    batch = [{"x": tensor, 3: array}, ("a", 2.5, None, True, b"b"), thing, [tensor, 2**70], [1, 2]]
    assert walker.walk(batch) == (
        "l",
        (
            ("d", ("x", 3), (("L", 0), ("L", 1))),
            ("t", ("V",) * 5),
            "O",
            ("l", (("L", 0), "O")),
            ("v", 2),
        ),
    )
    assert walker.leaves == [tensor, array]
    assert walker.values == ["a", 2.5, None, True, b"b", 1, 2]
    assert walker.objects == [thing, 2**70]
    assert len(walker.containers) == 4
    walker.clear()
    assert [walker.leaves, walker.values, walker.objects, walker.containers] == [[], [], [], set()]


shared: list[Any] = [torch.ones(1)]
cycle: list[Any] = [1]
cycle.append(cycle)


def nested(depth: int) -> Any:
    value: Any = 1.5
    for _ in range(depth):
        value = (value,)
    return value


@pytest.mark.parametrize(
    ("batch", "walked"),
    [
        ([shared, 1], True),
        ([shared, shared], False),
        (cycle, False),
        (nested(DEEPEST), True),
        (nested(DEEPEST + 1), False),
        ([[torch.ones(1)] for _ in range(CONTAINERS - 1)], True),
        ([[torch.ones(1)] for _ in range(CONTAINERS)], False),
    ],
    ids=["one list", "a shared list", "a cycle", "deep", "too deep", "many lists", "too many lists"],
)
def test_a_batch_that_cannot_be_walked_or_is_not_worth_it_is_one_object(batch: Any, walked: bool) -> None:
    walker = Walker()
    assert (walker.walk(batch) == "O") is not walked
    if not walked:
        assert walker.objects == [batch]
        assert [walker.leaves, walker.values, walker.containers] == [[], [], set()]


def test_after_a_tree_of_many_containers_some_batches_are_not_walked() -> None:
    walker = Walker()
    walker.walk([[torch.ones(1)] for _ in range(CONTAINERS)])
    trees = [walker.walk([1, 2]) for _ in range(BATCHES_UNWALKED + 1)]
    assert trees == ["O"] * BATCHES_UNWALKED + [("v", 2)]


def test_a_deep_tree_comes_out_as_it_went_in(pair: Pair) -> None:
    for depth in (DEEPEST, 2 * DEEPEST):
        batch: Any = torch.tensor(depth)
        for _ in range(depth):
            batch = [batch]
        assert str(pair.trip(batch)) == str(batch)


@pytest.mark.parametrize("boxes", [3, CONTAINERS // 2, CONTAINERS, 4 * CONTAINERS])
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


@pytest.mark.parametrize(
    "values",
    [
        [],
        [1],
        [2**63, -(2**63)],
        [2**64],
        [-(2**63) - 1, 0],
        [True, 1],
        ["a", None, 2.5, b"x", False],
        [[1], 2],
        [True, 1, 1.0, 0, False, 0.0, -0.0, np.int64(1), {1: "a"}, {True: "a"}, {1.0: "a"}, {"1": "a"}],
    ],
    ids=str,
)
def test_plain_values_stay_what_they_are(pair: Pair, values: list[Any]) -> None:
    batch = {"values": values, "tuple": tuple(values), "after": 3}
    assert_same(batch, pair.trip(batch))
    assert_same(values[::-1], pair.trip(values[::-1]))


def test_keys_that_compare_equal_in_one_batch_after_the_other(pair: Pair) -> None:
    for batch in ({1: "a"}, {True: "a"}, {1.0: "a"}, {np.int64(1): "a"}, {1: "a"}, {2**70: "a"}):
        assert_same(batch, pair.trip(batch))
