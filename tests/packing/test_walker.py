"""Trees: what is walked, what is left to pickle, and that each comes out of a packed batch as it went in."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.packing.spec import DEEPEST
from fastq_loader.packing.walker import (
    BATCHES_UNWALKED,
    LONGEST,
    LONGEST_LIST,
    PARTS,
    SMALL_ARRAY,
    Walker,
)
from tests.support.datasets import Opaque, assert_same
from tests.support.pair import LARGE, Pair


def test_a_batch_is_taken_apart_into_its_tree_leaves_values_and_objects() -> None:
    tensor, array, thing = torch.rand(2), np.zeros(3), Opaque(1)
    walker = Walker()
    batch = [{"x": tensor, 3: array}, ("a", 2.5, None, True, b"b"), thing, [tensor, 2**70], [1, 2]]
    fields = ("d", ("x", 3), (("L", 0), ("L", 1)))
    assert walker.walk(batch) == ("l", (fields, ("t", ("V",) * 5), "O", ("l", (("L", 0), "O")), "v"))
    assert walker.leaves == [tensor, array]
    assert walker.values == ["a", 2.5, None, True, b"b", (1, 2)]
    assert walker.objects == [thing, 2**70]
    assert len(walker.containers) == 4
    walker.clear()
    assert [walker.leaves, walker.values, walker.objects, walker.containers] == [[], [], [], set()]


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for level in range(depth):
        value = [value] if level % 2 else (value,)
    return value


shared: list[Any] = [torch.ones(1)]
cycle: list[Any] = [1]
cycle.append(cycle)
ONE_OBJECT: dict[str, tuple[Any, bool]] = {
    "one list": ([shared, 1], False),
    "a shared list": ([shared, shared], True),
    "a cycle": (cycle, True),
    "deep": (nested(DEEPEST), False),
    "too deep": (nested(DEEPEST + 1), True),
    "far too deep": (nested(2 * DEEPEST), True),
    "many fields": ({str(number): number for number in range(PARTS)}, False),
    "too many fields": ({str(number): number for number in range(PARTS + 1)}, True),
    "too many tuples": ([(1,) for _ in range(PARTS // 2 + 1)], True),
    "too many arrays": ([np.zeros(1) for _ in range(PARTS + 1)], True),
    "many tensors": ([(torch.zeros(1),) * 9] * PARTS, False),
    "a list of plain values": ([1] * LONGEST_LIST, False),
    "a list of more of them": ([1] * (LONGEST_LIST + 1), True),
    "a text": ("x" * LONGEST, False),
    "a long text": ("x" * (LONGEST + 1), True),
    "long bytes": (b"x" * (LONGEST + 1), True),
    "an array of empty texts": (np.ndarray(3, "S0"), True),
}


@pytest.mark.parametrize(("batch", "whole"), ONE_OBJECT.values(), ids=ONE_OBJECT.keys())
def test_a_batch_that_cannot_be_walked_or_is_not_worth_it_is_one_object(
    pair: Pair, batch: Any, whole: bool
) -> None:
    walker = Walker()
    assert (walker.walk(batch) == "O") is whole
    if whole:
        assert walker.objects == [batch]
        assert [walker.leaves, walker.values, walker.containers] == [[], [], set()]
    assert_same(batch, pair.trip(batch))


def test_a_long_text_among_others_is_an_object() -> None:
    walker = Walker()
    long = "x" * (LONGEST + 1)
    assert walker.walk([[None, "a", long], ["a", None], (1, long)]) == (
        "l",
        (("l", ("V", "V", "O")), "v", ("t", ("V", "O"))),
    )


def test_after_a_tree_of_many_parts_some_batches_are_not_walked() -> None:
    walker = Walker()
    walker.walk((1,) * (PARTS + 1))
    trees = [walker.walk([1, 2]) for _ in range(BATCHES_UNWALKED + 1)]
    assert trees == ["O"] * BATCHES_UNWALKED + ["v"]


def test_small_arrays_stay_in_a_pickle_and_others_are_left_out(pair: Pair) -> None:
    small, large, both = np.arange(SMALL_ARRAY // 8), np.arange(SMALL_ARRAY // 8 + 1), np.arange(3)
    read_only = np.frombuffer(b"12345678", "i4")
    handle = pair.arrive(pair.pack(lambda: [both, Opaque([small, large, both, read_only, small])]))
    assert [leaf.shape for leaf in handle.spec.leaves] == [(3,), large.shape]
    result, opaque = pair.deliver(handle)
    assert_same([small, large, both, read_only.copy(), small], opaque.value)
    assert opaque.value[2] is result
    assert opaque.value[4] is opaque.value[0]


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


@pytest.mark.parametrize(
    "values",
    [
        [],
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
