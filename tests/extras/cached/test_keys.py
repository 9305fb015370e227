"""Keys of calls: the same for what means the same, and different for everything else."""

from __future__ import annotations

import functools
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.cached.keys import Keys
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


def two(first: Any, second: Any = 7) -> None: ...


@examples(100)
@given(PLAIN, PLAIN)
def test_keys_are_equal_where_arguments_are(one: Any, other: Any) -> None:
    keys = Keys(two, "two")
    assert (keys.key((one,), {}) == keys.key((other,), {})) == (typed(one) == typed(other))


@examples(100)
@given(PLAIN, PLAIN)
def test_names_and_defaults_make_no_difference(first: Any, second: Any) -> None:
    keys = Keys(two, "two")
    key = keys.key((first, second), {})
    assert key == keys.key((first,), {"second": second}) == keys.key((), {"second": second, "first": first})
    assert keys.key((first,), {}) == keys.key((first, 7), {})


def test_functions_of_any_number_of_arguments_have_keys() -> None:
    def any_number(*args: Any, flag: bool = False, **others: Any) -> None: ...

    keys = Keys(any_number, "any_number")
    assert keys.key((1, 2), {"b": 1, "a": 2}) == keys.key((1, 2), {"a": 2, "b": 1, "flag": False})
    calls: list[Any] = [((1, 2), {}), (((1, 2),), {}), ((), {"a": (1, 2)}), ((("a", 1),), {}), ((), {"a": 1})]
    calls.append((((1, False), ("a", "flag")), {}))
    assert len({keys.key(*call) for call in calls}) == len(calls)
    assert Keys(max, "max").key((1, 2), {}) != Keys(max, "max").key((2, 1), {})


@pytest.mark.parametrize(
    "values",
    [
        [Path("a"), "a", b"a", ("Path", "a"), ("pathlib", "PosixPath", "a"), PurePosixPath("a")],
        [1, True, 1.0, "1", (1,), ((1,),)],
        [0.0, -0.0, 0, False, None, (), "", b""],
    ],
    ids=["texts", "ones", "nothings"],
)
def test_what_is_not_the_same_has_another_key(values: list[Any]) -> None:
    keys = Keys(two, "two")
    assert len({keys.key((value,), {}) for value in values}) == len(values)
    assert keys.key((Path("a/b"),), {}) == keys.key((Path("a") / "b",), {})


def test_numbers_of_numpy_and_torch_have_their_exact_types() -> None:
    keys = Keys(two, "two")
    values = [
        *(3, 3.0, True, "a", None, np.int64(3), np.uint8(3), torch.tensor(3), np.float64(2.5), 2.5),
        *(torch.tensor(2.5), np.bool_(True), np.str_("a"), np.datetime64("NaT"), np.timedelta64(3, "M")),
        *(np.timedelta64(3, "D"), np.array(3), torch.tensor(3, dtype=torch.int32)),
    ]
    assert len({keys.key((value,), {}) for value in values}) == len(values)
    assert len({keys.key(((1, value),), {}) for value in values}) == len(values)
    assert keys.key((np.int64(3),), {}) == keys.key((np.int64(3),), {}) != keys.key((np.int64(4),), {})
    assert (
        keys.key((torch.tensor(3),), {})
        == keys.key((torch.tensor(3),), {})
        != keys.key((torch.tensor(4),), {})
    )


def test_a_default_that_is_no_key_is_the_functions() -> None:
    transform = object()

    def read(index: int, transform: Any = transform) -> None: ...

    keys = Keys(read, "read")
    assert keys.key((1,), {}) == keys.key((), {"index": 1}) != keys.key((2,), {})
    with pytest.raises(TypeError, match=r"read\(\) was called with"):
        keys.key((1, object()), {})
    keys = Keys(lambda one=[], other=[], many={}: None, "read")
    one, other, _ = keys._defaults
    assert len({keys.key((), {}), keys.key((other,), {}), keys.key((other, one), {})}) == 3
    assert keys.key((), {"other": other}) == keys.key((), {})


def test_the_signature_is_the_wrappers_own() -> None:
    @functools.wraps(two)
    def swapped(second: Any, first: Any) -> None: ...

    keys = Keys(swapped, "two")
    assert keys.key((1, 2), {}) == keys.key((), {"second": 1, "first": 2})


@pytest.mark.parametrize(
    "value",
    [[1], {1: 2}, {1}, 1j, ..., object(), (1, [2]), np.zeros(1)],
    ids=lambda value: type(value).__name__,
)
def test_an_argument_that_is_no_key_is_named(value: Any) -> None:
    with pytest.raises(TypeError, match=r"two\(\) was called with .* pass what identifies the sample"):
        Keys(two, "two").key((value,), {})


def test_an_unknown_argument_is_an_error_with_the_name_of_the_function() -> None:
    with pytest.raises(TypeError, match=r"cached: two\(\): .*unexpected keyword argument 'third'"):
        Keys(two, "two").key((1,), {"third": 2})


def test_keys_are_these_bytes_in_every_process() -> None:
    arguments = (1, "ä", b"\0", 2.5, None, ("x", (Path("p"), -(10**30))))
    assert Keys(lambda x: 0, "x").key((arguments,), {}).hex() == (
        "2801000000280600000069010000007502000000c3a47301000000006700000000000004404e2802"
        "000000750100000078280200000028040000002e7507000000706174686c69627509000000506f7369"
        "78506174687501000000706cf9ffffff00000000a937a733044d93652703"
    )
