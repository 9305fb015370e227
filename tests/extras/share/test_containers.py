"""Shared lists, tuples and dicts are read as those that they replace."""

from __future__ import annotations

import copy
import math
import operator
import pickle
from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.share.columns import column_of
from fastq_loader.extras.share.containers import SharedMapping, SharedSequence
from tests.support.thorough import examples


class Colour(IntEnum):
    RED = 1


class Name(str):
    pass


def same(one: Any, other: Any) -> bool:
    """Of the same types, all the way down, and the same values."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return math.copysign(1, one) == math.copysign(1, other) and (one == other or one != one)
    return bool(one == other)


SCALARS = {
    "int": st.integers(-(2**63), 2**63 - 1),
    "large int": st.integers(),
    "float": st.floats(allow_nan=False),
    "text": st.text(max_size=5),
    "surrogates": st.text(st.characters(categories=["Cs"]), max_size=2),
    "bytes": st.binary(max_size=5),
    "bool": st.booleans(),
    "none": st.none(),
    "subclass": st.sampled_from([Colour.RED, Name("a")]),
    "set": st.frozensets(st.integers(), max_size=2),
}
ANY_SCALAR = st.one_of(*SCALARS.values())


def of(items: Any) -> Any:
    return st.one_of(
        st.lists(items, max_size=3),
        st.tuples(items, items),
        st.fixed_dictionaries({"a": items, "b": items}),
        st.dictionaries(st.text(max_size=2), items, max_size=2),
        st.tuples(),
    )


ONE_KIND = st.sampled_from(sorted(SCALARS)).flatmap(lambda kind: SCALARS[kind])
VALUES = st.one_of(
    *(st.lists(kind, max_size=9) for kind in SCALARS.values()),
    st.lists(st.tuples(SCALARS["text"], SCALARS["int"]), max_size=9),
    st.lists(st.lists(SCALARS["float"], max_size=4), max_size=9),
    st.lists(of(ONE_KIND), max_size=6),
    st.lists(st.recursive(ANY_SCALAR, of, max_leaves=6), max_size=6),
)


@examples(100)
@given(VALUES)
def test_every_value_comes_back_as_it_was(values: list[Any]) -> None:
    column = column_of(values)
    assert len(column) == len(values)
    assert all(same(column[at], value) for at, value in enumerate(values))


@examples(100)
@given(VALUES, st.booleans(), st.integers(-12, 12), st.slices(9))
def test_a_sequence_is_read_like_what_it_replaces(
    values: list[Any], is_tuple: bool, at: int, part: slice
) -> None:
    plain: Any = tuple(values) if is_tuple else values
    shared = SharedSequence(plain, 0)
    assert isinstance(shared, Sequence)
    assert same(shared[:], plain)
    assert same(shared[part], plain[part])
    assert same([*shared], [*plain])
    assert same([*reversed(shared)], [*reversed(plain)])
    assert len(shared) == len(plain)
    assert bool(shared) == bool(plain)
    for read in (lambda of: of[at], lambda of: of[np.int64(at)], lambda of: of["a"], lambda of: of[1.0]):
        told: list[Any] = []
        for each in (plain, shared):
            try:
                told.append(read(each))
            except (IndexError, TypeError) as error:
                told.append(type(error))
        assert same(*told)
    assert (shared == plain) is (plain == shared) is (shared == SharedSequence(plain, 0)) is True
    assert shared != [*plain, 1]
    assert (shared == (list if is_tuple else tuple)(plain)) is False
    assert same(shared + plain, plain + plain)
    assert all(value in shared and shared.count(value) == plain.count(value) for value in plain)
    assert all(shared.index(value) == plain.index(value) for value in plain)
    assert copy.deepcopy(shared) is copy.copy(shared) is shared
    assert same(pickle.loads(pickle.dumps(shared, 5))[:], plain)


@examples(100)
@given(st.lists(st.integers(0, 3), max_size=3), st.lists(st.integers(0, 3), max_size=3))
def test_sequences_compare_like_lists(one: list[int], other: list[int]) -> None:
    for compare in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
        for left in (one, SharedSequence(one, 0)):
            for right in (other, SharedSequence(other, 0)):
                assert compare(left, right) is compare(one, other)


KEYS = st.one_of(
    st.text(max_size=3),
    st.integers(-3, 3),
    st.floats(-3, 3),
    st.booleans(),
    st.none(),
    st.binary(max_size=2),
    st.tuples(st.text(max_size=1), st.integers(0, 2)),
)


@examples(100)
@given(st.dictionaries(KEYS, ANY_SCALAR, max_size=9), KEYS)
def test_a_mapping_is_read_like_a_dict(plain: dict[Any, Any], key: Any) -> None:
    shared = SharedMapping(plain, 0)
    assert isinstance(shared, Mapping)
    assert same(dict(shared), plain)
    assert same(list(shared.items()), list(plain.items()))
    for each in (key, *plain):
        assert (each in shared) is (each in plain)
        assert same(shared.get(each, "no"), plain.get(each, "no"))
    assert (shared == plain) is (plain == shared) is True
    assert (shared == {**plain, "more": 1}) is False
    with pytest.raises(KeyError, match=r"^'not there'$"):
        shared["not there"]
    with pytest.raises(TypeError, match="unhashable"):
        shared[[]]
    again = pickle.loads(pickle.dumps(shared, 5))
    assert same(dict(again), plain)
    assert copy.deepcopy(shared) is shared


def test_keys_that_share_a_digest_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fastq_loader.extras.share.containers._digest", lambda key: 7)
    shared = SharedMapping({"a": 1, "b": 2}, 0)
    assert (shared["a"], shared["b"], shared.get("c")) == (1, 2, None)


def test_numbers_of_several_types_keep_their_types() -> None:
    for values in ([1, 2.5, 3], [2.5, 1], [True, 2], [0.5, True], [1, None, 2.5]):
        assert same(SharedSequence(values, 0)[:], values)
