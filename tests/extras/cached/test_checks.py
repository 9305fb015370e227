"""Hits that are computed again: which, what counts as equal, and what a cache does that was wrong."""

from __future__ import annotations

import array
import collections
import dataclasses
import importlib
import itertools
import pickle
import random
import re
import sys
import warnings
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader import DataLoader, NotCached, cached
from fastq_loader.extras.cached import checks, counters
from fastq_loader.extras.cached.equal import difference
from tests.support.forking import end_of, fork

# ---- which hits -------------------------------------------------------------------------------------------


def counts() -> counters.CacheCounters:
    return counters.CacheCounters.from_buffer(bytearray(counters.NBYTES))


def process(shared: counters.CacheCounters, number: int | None = None) -> checks.Checks:
    """The checks of a new worker, or of the program, after the first hits of the cache."""
    with pytest.MonkeyPatch.context() as patch:
        info = None if number is None else SimpleNamespace(id=number)
        patch.setattr(checks, "get_worker_info", lambda: info)
        made = checks.Checks(2, shared, joins_earlier=False)
        made._firsts = checks.FIRST
        return made


def test_the_first_hit_on_each_writer_is_checked_once_in_a_program() -> None:
    shared, made = counts(), []
    shared.since = 1 << 62  # no time for other checks
    for _ in range(2):  # also by new workers of the same numbers
        workers = [process(shared, number) for number in range(40)]
        for reader, writer in itertools.product(workers, workers):
            paid = reader.due(b"key", writer.writer, 0.1)
            if paid is not None:
                made.append((reader.writer & 0xFFFF, writer.writer & 0xFFFF))
                reader.done(writer.writer, paid, 1.0)
            assert reader.due(b"key", writer.writer, 0.1) is None
    # With the first worker, whose values are those of the others, all others agree.
    assert made == [(1, number) for number in range(1, 41)] + [(number, 1) for number in range(2, 41)]


def test_workers_that_the_first_one_was_not_compared_with_are_compared_with_each_other() -> None:
    shared = counts()
    for number, writer in itertools.product((2, 3), (3, 4)):
        reader = process(shared, number)
        paid = reader.due(b"key", 2 << 16 | writer, 0.1)
        assert paid is not None
        reader.done(2 << 16 | writer, paid, 0.1)


def test_a_check_of_a_slow_value_waits_for_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr(checks.time, "monotonic_ns", lambda: int(now * 1e9))
    shared = counts()
    for _ in range(2):
        assert process(shared).due(b"key", 5 << 16, 1.0) is None
        now += 25.0
    new_worker = process(shared)
    paid = new_worker.due(b"key", 5 << 16, 1.0)
    assert paid == 1.0, "it goes on with the budget of those before it"
    new_worker.done(5 << 16, paid, 1.0)
    assert new_worker.due(b"key", 6 << 16, 1.0) is None


@given(st.integers(1, 400), st.floats(1e-4, 0.4), st.floats(1e-3, 1.0), st.floats(0.1, 3.0))
def test_later_checks_take_their_part_of_the_time_and_are_made(
    hits: int, cost: float, step: float, factor: float
) -> None:
    """`factor`: as a part of what the first call took, which may have read from a cold disk."""
    now = 1.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checks.time, "monotonic_ns", lambda: int(now * 1e9))
        shared, made = counts(), 0
        reader = process(shared)
        reader._known.add(reader.writer)
        for number in range(hits * 10):
            now += step
            paid = reader.due(b"%d" % number, reader.writer, cost)
            if paid is not None:
                made += 1
                reader.done(reader.writer, paid, cost * factor)
        assert made * cost * factor <= checks.BUDGET * (now - 1) + cost * factor + 1e-6
        possible = min(checks.BUDGET * (now - 1) / (cost * max(factor, 1)), hits * 10 / 8)
        assert made >= possible / 4 - 3


def test_short_epochs_of_new_workers_have_all_keys_checked_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, checked, shared = 1.0, set(), counts()
    monkeypatch.setattr(checks.time, "monotonic_ns", lambda: int(now * 1e9))
    for pid in range(1500):
        monkeypatch.setattr(checks.process_id, "pid", 1000 + 7 * pid)
        reader = process(shared, 0)
        for number in range(20):
            now += 0.02
            paid = reader.due(b"%d" % number, reader.writer, 0.003)
            if paid is not None:
                checked.add(number)
                reader.done(reader.writer, paid, 0.003)
    assert len(checked) == 20


# ---- equal ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Sample:
    image: Any
    label: int = 0


class Held:
    def __init__(self, value: Any) -> None:
        self.value, self.mean = value, np.arange(3.0)


class Grams(float):
    pass


class Lenient:
    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: Any) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


Pair = collections.namedtuple("Pair", "left right")


def named(scale: int, value: Any = None) -> Any:
    value = torch.zeros(2) if value is None else value
    value.scale = scale
    return value


VALUES: list[Any] = [1, 1.5, float("nan"), "a", b"b", None, True, 2j, range(3), int, len, slice(1, 2)]
VALUES += [[1, 2.0], (1,), {"a": 1}, {1, 2}, frozenset("ab"), Pair(1, np.arange(3))]
VALUES += [collections.OrderedDict(a=1), collections.deque([1, np.arange(2)]), torch.float32]
VALUES += [collections.Counter("aab")]
VALUES += [np.arange(3), np.float32(2), np.array(["a"]), np.datetime64("NaT"), np.array([1, 2], "m8[s]")]
VALUES += [np.zeros(()), np.ma.masked_array([1.0, 2.0], [True, False]), np.array([1, "a", None], object)]
VALUES += [np.array([(1, 2.0)], dtype=[("a", "i4"), ("b", "f8")]), torch.eye(3).to_sparse(), torch.zeros(0)]
VALUES += [torch.arange(3.0), torch.ones(3).half(), torch.ones(3).bfloat16()]
# Those that are not equal to their copy.
VALUES += [{float("nan"), 1}, {float("nan"): 1}, Grams("nan")]
VALUES += [Decimal("nan"), Sample(np.arange(3.0))]
VALUES += [{Held(number) for number in range(9)}, [Held({1}), {"a": {Held(2), Held(3)}}]]
VALUES += [array.array("f", [1.0, float("nan")]), [torch.strided, np.ma.masked]]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_value_equals_itself_after_its_way_through_pickle(value: Any) -> None:
    stored, fresh = (pickle.loads(pickle.dumps(value)) for _ in range(2))
    assert difference(stored, fresh) == ""


MASKED = [np.ma.masked_array([1.0, 2.0], [first, False]) for first in (True, False)]
DIFFERENCES: list[Any] = [
    *((1, 2, "value is int 1 in the cache, and int 2 now"), (1, True, "int 1 .* bool True")),
    *((1.0, 1.001, r"float 1\.001"), ([1, [2]], [1, [3]], r"value\[1\]\[0\] is int 2")),
    *(([1], [1, 2], "of 2"), ({"a": 1, "b": 2}, {"b": 2, "a": 1}, "the next part")),
    ({1.0, float("nan"), 3}, {2.0, float("nan"), 3}, r"1\.0 .* 2\.0"),
    ({"a": {"b": 1.0}}, {"a": {"b": 2.0}}, r"value\['a'\]\['b'\] is float 1\.0 .* float 2\.0"),
    (Decimal(1), Decimal(2), "str '1' .* str '2'"),
    *((np.arange(3), np.arange(4), r"int64\[3\]"), (np.arange(3), np.arange(3.0), "int64.* float64")),
    (np.array([1, np.inf]), np.array([1, -np.inf]), r"value\[1\] is inf .* -inf"),
    (np.array([1e3, 0.0]), np.array([1e3 + 1e-9, 1.0]), r"value\[1\] is 0\.0 .* 1\.0"),
    (np.zeros((2, 2)), np.array([[0, 0], [1, 0]], float), r"value\[1, 0\] is 0\.0 .* 1\.0"),
    (torch.zeros(2), torch.ones(2), r"value\[0\] is 0\.0 .* 1\.0"),
    (torch.zeros(2), torch.zeros(1, 2), r"\[2\].*\[1, 2\]"),
    (torch.zeros(2), torch.zeros(2).half(), "float32.*float16"),
    (named(1), named(2), r"value\.__dict__\['scale'\] is int 1 .* int 2"),
    (Sample(np.arange(3.0)), Sample(np.arange(3.0) + 1), r"value\.image\[0\] is 0\.0 .* 1\.0"),
    *((Held(3), Held(4), r"value\.value is int 3 .* 4"), (Pair(1, 2), Pair(1, 3), "2 .* 3")),
    (np.array([3e38, 0.3, 0.7]), np.array([3e38, 0.4, 0.6]), r"value\[1\] is 0\.3 .* 0\.4"),
    (np.array([1e9 + 1j]), np.array([1e9 + 2j]), r"value\[0\] is .*\+1j"),
    (Lenient(1), Lenient(2), r"value\.value is int 1 .* int 2"),
    *((named(1, kind()), named(2, kind()), "1 .* 2") for kind in (Grams, type("Of", (dict,), {}))),
    (collections.deque([1]), collections.deque([2]), r"value\[0\] is int 1 .* int 2"),
    (*MASKED, r"value\[0\] is 0\.0 .* 1\.0"),
    (re.compile("a" * 300), re.compile("a" * 300 + "b"), "as it is pickled"),
]


@pytest.mark.parametrize(("stored", "fresh", "where"), DIFFERENCES)
def test_a_difference_is_found_and_its_place_named(stored: Any, fresh: Any, where: str) -> None:
    with pytest.raises(AssertionError, match=where):
        raise AssertionError(difference(stored, fresh))


def test_numbers_may_differ_by_rounding() -> None:
    assert difference(0.1 + 0.2, 0.3) == ""
    row = np.array([1.0, 2.0, 3.0, 1e-9])
    assert difference(row, row * (1 + 1e-9) + 1e-9) == "", "beside the largest"
    assert difference(np.eye(3), np.eye(3) + 1e-15) == "", "by last bits"
    assert difference(np.float32(1), np.float32(1.0001)) != ""
    assert difference(torch.ones(2).half(), torch.ones(2).half() + 0.005) == ""
    assert difference(torch.ones(2).half(), torch.ones(2).half() + 0.05) != ""


def test_what_cannot_be_compared_is_given_as_stored_and_counted() -> None:
    class Closed:
        def __reduce_ex__(self, protocol: Any) -> Any:
            if comparing:
                raise ValueError("closed")
            return Closed, ()

    globals()["Closed"], Closed.__qualname__, comparing = Closed, "Closed", False
    wrapped = cached(lambda index: Closed(), limit="1MB")
    wrapped(1)
    comparing = True
    assert type(wrapped(1)) is Closed
    assert (wrapped.statistics().unchecked, wrapped.statistics().distrusted) == (1, 0)


# ---- a cache that was wrong -------------------------------------------------------------------------------


def test_a_wrong_hit_gives_the_fresh_value_and_ends_the_cache_with_one_hint() -> None:
    numbers = np.random.default_rng(0)
    wrapped = cached(lambda index: {"crop": numbers.random(3)}, limit="1MB")
    with pytest.warns(NotCached) as seen:
        values = [wrapped(1)["crop"].tolist() for _ in range(4)]
    (text,) = [str(each.message) for each in seen]
    assert text.startswith("cached: ")
    for part in ("lambda", "value['crop'][0] is 0.", "0 hits before", "version=str(root)", "check=False"):
        assert part in text
    assert seen[0].filename == __file__
    assert values == [np.random.default_rng(0).random((4, 3))[number].tolist() for number in range(4)]
    found = wrapped.statistics()
    assert (found.misses, found.hits, found.distrusted, found.stored) == (1, 0, 3, 1)


def test_a_draw_from_a_global_generator_while_checking_is_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawing = False

    def decode(index: int) -> int:
        if drawing:
            random.random()
        return index

    wrapped = cached(decode, limit="1MB")
    wrapped(1)
    drawing = True
    with pytest.warns(NotCached, match="it drew from random"):
        assert wrapped(1) == 1


def test_a_source_that_is_gone_gives_the_stored_values_and_is_said(tmp_path: Path) -> None:
    files = [tmp_path / str(number) for number in range(6)]
    for number, file in enumerate(files):
        file.write_text(str(number))
    wrapped = cached(lambda index: files[index].read_text(), limit="1MB")
    for number in range(6):
        wrapped(number)
    for file in files:
        file.unlink()
    with pytest.warns(
        NotCached, match=r"4 values in turn could not be computed again: .*No such file"
    ) as seen:
        assert [wrapped(number) for number in range(6)] == list("012345")
    assert len(seen) == 1
    assert wrapped.statistics().hits == 6


@pytest.mark.parametrize(
    ("error", "is_difference"), [(LookupError, True), (TimeoutError, False), (MemoryError, False)]
)
def test_another_error_is_raised_as_a_plain_call_raises_it(error: Any, is_difference: bool) -> None:
    fails = False

    def decode(index: int) -> int:
        if fails:
            raise error("now")
        return index

    wrapped = cached(decode, limit="1MB")
    wrapped(1)
    fails = True
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with pytest.raises(error, match="now"):
            wrapped(1)
    assert [each.category for each in seen] == [NotCached] * is_difference
    fails = False
    assert wrapped(1) == 1
    assert wrapped.statistics().hits == (not is_difference)


def test_the_mark_holds_in_all_processes_and_not_in_the_next_program(tmp_path: Path) -> None:
    path, scale = tmp_path / "values", 1

    def decode(index: int) -> int:
        return index * scale

    wrapped = cached(decode, limit="1MB", path=path)
    wrapped(3)
    scale = 2

    def child() -> None:
        with pytest.warns(NotCached):
            assert wrapped(3) == 6

    assert end_of(fork(child)) == 0
    assert wrapped(3) == 6
    assert wrapped.statistics().distrusted == 2
    scale = 1
    assert cached(decode, limit="1MB", path=path)(3) == 3, "it checks anew"


@pytest.mark.processes
def test_a_folder_of_a_module_has_one_count_of_hits_in_all_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reads_a_folder.py").write_text(
        "import functools, fastq_loader\n"
        f"@functools.partial(fastq_loader.cached, limit='1MB', path={str(tmp_path / 'values')!r})\n"
        "def decode(index): return index\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    decode: Any = importlib.import_module("reads_a_folder").decode
    for _ in range(2):
        loader = DataLoader(Called(decode), 4, num_workers=2, multiprocessing_context="spawn")
        assert torch.cat(list(loader)).tolist() == [*range(32)]
    found = decode.statistics()
    # Where a worker loses its CPU in the middle of a store, the other one may miss the value.
    assert (found.misses + found.hits, 24 <= found.hits <= 32, 16 <= found.checked < 30) == (64, True, True)
    del sys.modules["reads_a_folder"]  # closes the folder


class Called(torch.utils.data.Dataset[Any]):
    def __init__(self, decode: Any) -> None:
        self.decode = decode

    def __getitem__(self, index: int) -> Any:
        return self.decode(index)

    def __len__(self) -> int:
        return 32
