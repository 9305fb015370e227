"""What two orders have in common at their beginning, and which orders are no shuffles."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.reading.first_indices import KEPT, FirstIndices
from tests.support.thorough import examples


def first(*batches: Any) -> FirstIndices:
    found = FirstIndices("a sampler")
    for batch in batches:
        if not found.complete:
            found.add(batch)
    return found


def descents(order: list[int]) -> int:
    return sum(after < before for before, after in pairwise(order))


def batched(order: list[int], size: int) -> list[list[int]]:
    return [order[at : at + size] for at in range(0, len(order), size)]


ORDERS = st.lists(st.integers(-3, 300), max_size=60)


@examples(100)
@given(ORDERS, ORDERS, st.integers(1, 7))
def test_an_order_repeats_what_begins_like_it_and_goes_down_twice(
    one: list[int], other: list[int], size: int
) -> None:
    for left, right in ((one, one), (one, other), (one + other, one), (one, one + other)):
        mine, its = (batched(order, size)[:KEPT] for order in (left, right))
        count = min(len(mine), len(its))
        common = list(chain.from_iterable(mine[:count]))
        same = count > 1 and mine[:count] == its[:count] and descents(common) > 1
        assert first(*mine).repeats(first(*its)) == (len(common) if same else 0)


SHUFFLE = [[3, 1], [2, 0]]


KEYS: dict[str, Any] = {
    "numpy": [[np.int64(value) for value in batch] for batch in SHUFFLE],
    "tuples": [[(value, "crop") for value in batch] for batch in SHUFFLE],
    "text": [[f"key {value}" for value in batch] for batch in SHUFFLE],
    "large": [[value << 70 for value in batch] for batch in SHUFFLE],
}


@pytest.mark.parametrize(
    "odd", [slice(2), [object], [torch.tensor(1)], ["text"], None, [{1}], [2j]], ids=repr
)
def test_an_order_with_keys_that_cannot_be_compared_is_left_alone(odd: Any) -> None:
    batches = [*SHUFFLE, odd]
    found = first(*batches)
    assert found.complete
    assert found.repeats(found) == found.repeats(first(*SHUFFLE)) == 0
