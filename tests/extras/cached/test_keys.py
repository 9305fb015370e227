"""Keys of calls: the same for the same arguments, and different for everything else."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.cached.keys import key_of
from tests.support.thorough import examples

PLAIN = st.recursive(
    st.one_of(st.integers(), st.text(), st.binary(), st.floats(allow_nan=False), st.none(), st.booleans()),
    lambda parts: st.lists(parts, max_size=3).map(tuple),
    max_leaves=6,
)


def typed(value: Any) -> Any:
    """With the types, because 1 == 1.0 == True."""
    parts = [typed(part) for part in value] if isinstance(value, tuple) else repr(value)
    return type(value).__name__, parts


def key(*args: Any, **kwargs: Any) -> bytes:
    return key_of(args, kwargs, "two")


@examples(100)
@given(PLAIN, PLAIN)
def test_keys_are_equal_where_arguments_are(one: Any, other: Any) -> None:
    assert (key(one) == key(other)) == (typed(one) == typed(other))


def test_names_are_part_of_the_key_and_their_order_is_not() -> None:
    assert key(1, 2, b=1, a=2) == key(1, 2, a=2, b=1)
    calls: list[Any] = [((1, 2), {}), (((1, 2),), {}), ((), {"a": (1, 2)}), ((("a", 1),), {}), ((), {"a": 1})]
    calls += [(((1, False), ("a", "flag")), {}), ((1, False), {"a": 1}), ((1,), {"a": 1, "b": False})]
    assert len({key(*args, **kwargs) for args, kwargs in calls}) == len(calls)


@pytest.mark.parametrize(
    "values",
    [
        [Path("a"), "a", b"a", ("Path", "a"), ("pathlib", "PosixPath", "a"), PurePosixPath("a")],
        [1, True, 1.0, "1", (1,), ((1,),)],
        [0.0, -0.0, 0, False, None, (), "", b""],
        [
            *(3, 3.0, True, "a", None, np.int64(3), np.uint8(3), torch.tensor(3), np.float64(2.5), 2.5),
            *(torch.tensor(2.5), np.bool_(True), np.str_("a"), np.datetime64("NaT"), np.timedelta64(3, "M")),
            *(np.timedelta64(3, "D"), np.array(3), torch.tensor(3, dtype=torch.int32), torch.tensor(4)),
        ],
    ],
    ids=["texts", "ones", "nothings", "numbers"],
)
def test_what_is_not_the_same_has_another_key(values: list[Any]) -> None:
    assert len({key(value) for value in values}) == len(values)
    assert len({key((1, value)) for value in values}) == len(values)


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, {1}, 1j, ..., object(), (1, [2]), np.zeros(1)],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_that_is_no_key_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"two\(\) was called with .* pass what identifies the sample"):
        key(value)


def test_keys_are_these_bytes_in_every_process() -> None:
    assert key((1, "ä", b"\0", 2.5, None, ("x", (Path("p"), -(10**30))))).hex() == (
        "2801000000280600000069010000007502000000c3a47301000000006700000000000004404e2802"
        "000000750100000078280200000028040000002e7507000000706174686c69627509000000506f7369"
        "78506174687501000000706cf9ffffff00000000a937a733044d93652703"
    )
