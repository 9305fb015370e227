"""`cached`: its arguments, its calls, who shares it, and what it says."""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import NotCached, cached
from fastq_loader.extras.cached import cached as of_cached
from fastq_loader.extras.cached import instances, storage
from fastq_loader.system import calls
from tests.conftest import open_descriptors

# Where a test counts computed values, no hit is checked: `test_checks.py` has the checks.


class Photos(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int = 8, **options: Any) -> None:
        self.length = length
        self.decoded: list[int] = []
        self.decode = cached(self.decode, **{"limit": "10MB", "check": False, **options})  # type: ignore[method-assign]

    def __len__(self) -> int:
        return self.length

    def decode(self, index: int) -> Any:
        """The decoded sample."""
        self.decoded.append(index)
        return {"pixels": torch.full((3, 4), float(index)), "label": index}

    def __getitem__(self, index: int) -> Any:
        sample = self.decode(index)
        sample["pixels"] += torch.rand(3, 4)
        return sample


class Scaled:
    def __init__(self, scale: Any, **options: Any) -> None:
        self.scale = scale
        self.decode: Any = cached(self.decode, limit="1MB", **options)

    def decode(self, index: int) -> Any:  # type: ignore[no-redef]
        return index * self.scale


def read(index: int, scale: int = 1) -> np.ndarray:
    return np.full(5, index * scale)


def test_a_value_is_computed_once_and_each_call_gets_its_own() -> None:
    photos = Photos()
    first = photos.decode(3)
    first["pixels"] += 1
    second, third = photos.decode(3), photos.decode(3)
    second["pixels"] *= 2
    assert photos.decoded == [3]
    assert third["pixels"].eq(3).all()
    other = Photos()
    assert other.decode(3)["label"] == 3
    assert other.decoded == [3], "each object has its own"
    counts = photos.decode.statistics()  # type: ignore[attr-defined]
    assert (counts.hits, counts.misses, counts.stored) == (2, 1, 1)
    assert counts.bytes > 48
    assert photos.decode.__doc__ == "The decoded sample."


def test_none_is_a_value_and_errors_are_raised_each_time() -> None:
    calls = []

    @functools.partial(cached, limit=1 << 20, check=False)
    def nothing(index: int) -> None:
        calls.append(index)
        if index > 3:
            raise LookupError(index)

    assert nothing(1) is nothing(1) is None
    for _ in range(2):
        with pytest.raises(LookupError, match="7"):
            nothing(7)
    assert calls == [1, 7, 7]


@pytest.mark.parametrize(
    "draw", [lambda: torch.rand(1), lambda: torch.randn(1), random.random, np.random.rand]
)
def test_a_function_that_draws_is_not_stored_and_named(draw: Any) -> None:
    def augmented(index: int) -> Any:  # every second number of `randn` has waited in the generator
        return index + float(draw())

    wrapped = cached(augmented, limit="1MB")
    with pytest.warns(NotCached, match=r"augmented\(\) draws from .*the same in every epoch") as seen:
        values = {float(wrapped(1)) for _ in range(3)}
    assert len(values) == 3
    assert [each.filename for each in seen if each.category is NotCached] == [__file__]
    assert wrapped.statistics().random == 3


def test_a_function_that_puts_the_state_back_is_stored() -> None:
    torch.randn(1)
    wrapped = cached(torch.random.fork_rng([])(torch.manual_seed), limit="1MB")
    wrapped(1)
    assert wrapped.statistics().stored == 1


def test_a_value_that_cannot_be_pickled_comes_as_it_is_and_is_named() -> None:
    wrapped = cached(lambda index: lambda: index, limit="1MB")
    with pytest.warns(NotCached, match="returns a value that cannot be pickled"):
        assert wrapped(4)() == 4
    assert wrapped.statistics().refused == 1


@pytest.mark.parametrize("place", ["memory", "path"])
@pytest.mark.parametrize("size", [5, 1 << 18])
def test_without_copies_arrays_are_read_only_and_writing_all_the_same_changes_one_value(
    place: str, size: int, tmp_path: Path
) -> None:
    where = [{} if place == "memory" else {"path": tmp_path / name} for name in "ab"]
    wrapped = cached(np.full, limit="9MB", copy=False, **where[0])  # a large value is mapped
    for _ in range(2):
        array = wrapped(size, 3.0)
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of read-only arrays
        torch.from_numpy(array[1:]).div_(2)
    assert array[:2].tolist() == [3.0, 1.5]
    assert wrapped(size, 3.0)[:2].tolist() == [3.0, 3.0]
    tensors = cached(torch.full, limit="9MB", copy=False, **where[1])
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # tensors can be written to, and torch says nothing
        for _ in range(3):
            assert tensors((size,), 3.0).div_(2)[1] == 1.5


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(5, 5), ("8GB", 8 * 10**9), ("1.5 MiB", 3 << 19), ("7", 7), ("2kb", 2000), ("0.5", 500), (".25", 250)],
)
def test_a_limit_is_bytes_or_a_part_of_what_is_left(
    limit: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage, "memory_bytes", lambda: 1000)
    assert storage.bytes_of(limit, None, is_shared=False) == expected


@pytest.mark.parametrize(
    "limit", ["8 apples", "", "-1", 0, -5, "0", "1e99", "nan", "1.5", "1.0", "0.0", 0.5, None, True]
)
def test_a_wrong_limit_is_named(limit: Any) -> None:
    with pytest.raises(ValueError, match=r"limit=.* must be bytes"):
        cached(read, limit=limit)


def test_arguments_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name='a' and path=.*give one"):
        cached(read, limit=1, name="a", path=tmp_path / "b")
    with pytest.raises(ValueError, match="path='' is no folder"):
        cached(read, limit=1, path="")
    function: Any = 3
    with pytest.raises(TypeError, match=r"function=None cannot be called; a decorator is @partial\(cached"):
        cached(limit="1MB")
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        cached(function, limit=1)
    version: Any = (1, 2)
    with pytest.raises(TypeError, match=r"cached: version=.* must be a text or a number"):
        cached(read, limit="1MB", version=version)


def test_a_limit_lower_than_a_value_is_said() -> None:
    wrapped = cached(read, limit="8")  # bytes, where gigabytes were meant
    with pytest.warns(NotCached, match=r"read\(\) .* 40 bytes, for which limit='8' is too low") as seen:
        wrapped(1)
    assert (seen[0].filename, wrapped.statistics().full) == (__file__, 1)


def test_a_full_cache_keeps_what_it_has() -> None:
    wrapped = cached(lambda index: np.zeros(1000, np.uint8), limit=10_000)
    for _ in range(2):
        for index in range(20):
            wrapped(index)
    counts = wrapped.statistics()
    assert 5 < counts.stored < 10
    assert (counts.hits, counts.full) == (counts.stored, 2 * 20 - 2 * counts.stored)
    assert counts.bytes <= 10_000


# ---- who shares it ----------------------------------------------------------------------------------------


def test_a_file_outlives_its_program_and_is_cleared(tmp_path: Path) -> None:
    path = tmp_path / "values"
    options: dict[str, Any] = {"limit": "1MB", "path": path, "version": 3}
    first = cached(read, **options)
    first(1)
    second = cached(read, **options)
    assert second(1).tolist() == [1] * 5
    assert second.statistics().hits == 1
    with pytest.raises(ValueError, match=r"path=.*its version is 3, and here it is 4.*cached.clear\(path\)"):
        cached(read, **{**options, "version": 4})
    cached.clear(path)
    assert cached(read, **{**options, "version": 4})(1).tolist() == [1] * 5
    cached.clear(path)
    assert not path.exists()


def test_a_path_is_taken_as_users_write_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("~/values", os.fsencode(tmp_path / "values")):
        cached(read, limit="1MB", path=path)(1)
        assert (tmp_path / "values").is_dir()
        cached.clear(path)
        assert not (tmp_path / "values").exists()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"No such file or directory: .*nvme/values"):
        cached(read, limit="1MB", path="nvme/values")
    assert not list(tmp_path.iterdir())


def test_a_damaged_value_is_computed_again_and_said(tmp_path: Path) -> None:
    path = tmp_path / "values"
    cached(read, limit="1MB", path=path)(1)
    with open(path / "fastq_loader.values", "r+b") as file:
        data = file.read()
        file.seek(data.index(np.full(5, 1).tobytes()))
        file.write(b"\2")
    wrapped = cached(read, limit="1MB", path=path)
    with pytest.warns(
        UserWarning, match=r"read: a value of the folder '.*' cannot be read and is computed again"
    ) as seen:
        assert wrapped(1).tolist() == [1] * 5
    assert [each.filename for each in seen] == [__file__]
    assert wrapped(1).tolist() == [1] * 5
    counts = wrapped.statistics()
    assert (counts.damaged, counts.stored, counts.hits) == (1, 1, 1)


def test_a_name_is_one_cache_and_another_function_is_refused() -> None:
    name = f"test of cached {os.getpid()}"
    first = cached(read, limit="1MB", name=name)
    first(1)
    second = cached(read, limit="1MB", name=name)
    second(1)
    assert second.statistics().hits == 1
    with pytest.raises(ValueError, match=r"name=.*holds something else"):
        cached(np.zeros, limit="1MB", name=name)
    del first, second
    assert cached(read, limit="1MB", name=name).statistics().bytes == 0


def test_a_deep_copy_and_a_pickle_of_a_dataset_have_an_empty_cache_and_a_copy_the_same() -> None:
    photos = Photos()
    photos.decode(1)
    other, far, near = copy.deepcopy(photos), pickle.loads(pickle.dumps(photos)), copy.copy(photos)
    other.length = 3
    for each in (other, far):
        assert each.decode(1)["label"] == 1
        assert (each.decoded, each.decode.statistics().hits) == ([1, 1], 0)
    assert near.decode is photos.decode
    assert copy.deepcopy(cached(read, limit=1000)).statistics().limit == 1000


def test_a_system_without_shared_memory_computes_each_value(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AVAILABLE", False)
    with pytest.warns(NotCached, match="decode: values are not stored: this system or sandbox lacks memfd"):
        photos = Photos(name="a")
    assert [photos.decode(3)["label"], photos.decode(3)["label"]] == [3, 3]
    counts: Any = photos.decode.statistics()  # type: ignore[attr-defined]
    assert (len(photos.decoded), counts.hits) == (2, 0)


class Large:
    def __init__(self) -> None:
        self.decode: Any = cached(self.decode, limit="4MB")

    def decode(self, index: int) -> np.ndarray:  # type: ignore[no-redef]
        return np.zeros(3 << 20, np.uint8)


def test_a_dataset_that_is_made_anew_frees_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its object and its cache hold each other."""
    monkeypatch.setattr(of_cached, "_LARGE", 1 << 20)
    gc.collect()
    gc.disable()
    try:
        before = len(open_descriptors())
        for _ in range(5):
            Large().decode(1)
        assert len(open_descriptors()) <= before + 1, "one descriptor for each"
    finally:
        gc.enable()


# ---- whose values these are -------------------------------------------------------------------------------


def test_a_method_works_whoever_else_has_its_object() -> None:
    alone = cached(Scaled.__dict__["decode"].__get__(Plain(4)), limit="1MB")
    assert [alone(2), alone(2), alone.statistics().hits] == [8, 8, 1]
    scaled = Scaled(3)
    decode = scaled.decode
    assert decode(2) == 6
    del scaled
    gc.collect()
    assert [decode(2), decode(3), decode.statistics().hits] == [6, 9, 1]


class Plain:
    def __init__(self, scale: int) -> None:
        self.scale = scale


def test_a_function_of_a_notebook_needs_a_version(tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "notebook"}
    exec("def decode(index): return index", namespace)
    options: dict[str, Any] = {"limit": "1MB", "path": tmp_path / "values"}
    with pytest.raises(ValueError, match=r"notebook\.decode is in no file: .* needs version="):
        cached(namespace["decode"], **options)
    assert cached(namespace["decode"], version=1, **options)(3) == 3


@pytest.mark.parametrize("place", ["path", "name"])
def test_a_function_that_travels_by_value_keeps_its_folder_and_its_name(place: str, tmp_path: Path) -> None:
    """It has no file where it arrives."""
    cloudpickle = pytest.importorskip("cloudpickle")
    options = {"path": tmp_path / "values"} if place == "path" else {"name": f"by value of {os.getpid()}"}
    wrapped = cached(lambda index: 3 * index, limit="1MB", **options)
    assert wrapped(3) == 9
    other = cloudpickle.loads(cloudpickle.dumps(wrapped))
    assert (other(3), other.statistics().hits) == (9, 1)


class InClass:
    """Its methods are cached for each object."""

    def __init__(self, scale: Any) -> None:
        self.scale = scale

    @functools.partial(cached, limit="1MB")
    def decode(self, index: int) -> Any:
        """A decoded sample."""
        return index * self.scale

    __hash__ = None  # type: ignore[assignment]


def test_a_method_may_be_cached_in_its_class() -> None:
    kind = InClass
    before = kind.decode.statistics().hits
    one, other = kind(2), kind(3)
    one.decode(1)  # it has its number
    third = copy.copy(one)
    third.scale = 5
    objects = (one, other, third)
    assert [each.decode(7) for each in objects] == [each.decode(7) for each in objects] == [14, 21, 35]
    assert one.decode.statistics().hits - before == 3
    fourth = copy.deepcopy(one)
    fourth.scale = 6
    assert [fourth.decode(7), fourth.decode(7)] == [42, 42]
    assert pickle.loads(pickle.dumps(one)).decode(7) == 14
    assert pickle.loads(pickle.dumps(kind.decode)) is kind.decode


def test_objects_have_their_numbers_before_workers_start_however_deep_they_are_held() -> None:
    held = [[[[[[InClass(3)]]]]]]
    instances.prepare(held)
    found = held[0][0][0][0][0][0]
    assert instances.number_of(found) == (instances.number_of(found)[0], False)


def test_a_method_that_is_cached_in_its_class_may_have_a_folder(tmp_path: Path) -> None:
    class Kept(Plain):
        @functools.partial(cached, limit="1MB", path=tmp_path / "values")
        def decode(self, index: int) -> int:
            return index * self.scale

    kept = Kept(2)
    assert [kept.decode(number) for _ in range(3) for number in range(8)] == [*range(0, 16, 2)] * 3
    assert Kept.decode.statistics().checked == 16, "the first ones"
    with pytest.warns(NotCached, match=r"int 14 in the cache, and int 21 now.*version=str\(root\)"):
        assert Kept(3).decode(7) == 21


def test_the_hits_of_a_second_object_are_checked_from_the_first_one_on() -> None:
    class Noisy(Plain):
        @functools.partial(cached, limit="1MB")
        def decode(self, index: int) -> float:
            return index + self.scale * noise.random()

    noise, validation, training = random.Random(1), Noisy(0), Noisy(1)
    assert [validation.decode(number) for _ in range(3) for number in range(20)] == [*range(20)] * 3
    training.decode(1)
    with pytest.warns(NotCached, match=r"There were 40 hits before"):
        assert training.decode(1) != training.decode(1)


def test_objects_that_cannot_be_told_apart_are_refused() -> None:
    class Alike:
        __slots__ = ()

        @functools.partial(cached, limit="1MB")
        def decode(self, index: int) -> int:
            return index

    with pytest.raises(
        TypeError, match=r"a method of Alike is cached in its class, whose objects have slots"
    ):
        Alike().decode(1)
    instances.prepare(Alike())


# ---- what draws -------------------------------------------------------------------------------------------


def test_a_draw_of_another_thread_is_no_reason_for_a_hint() -> None:
    drawing, done = threading.Event(), threading.Event()

    def slow(index: int) -> int:
        drawing.set()
        done.wait(30)
        return index

    def draw() -> None:
        drawing.wait(30)
        torch.rand(1)
        done.set()
        stop.wait(30)

    stop = threading.Event()
    thread = threading.Thread(target=draw)
    thread.start()
    wrapped = cached(slow, limit="1MB")
    assert [wrapped(1), wrapped(1), wrapped(1)] == [1, 1, 1]
    stop.set()
    thread.join()
    counts = wrapped.statistics()
    assert (counts.busy, counts.random, counts.stored, counts.hits) == (1, 0, 1, 1)


# ---- how much ---------------------------------------------------------------------------------------------


def test_a_part_of_the_memory_is_divided_by_the_ranks_that_do_not_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage, "memory_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert storage.bytes_of("0.5", None, is_shared=False) == 125
    assert storage.bytes_of("0.5", None, is_shared=True) == 500
    assert storage.bytes_of("500", None, is_shared=False) == 500


@pytest.mark.parametrize("place", ["path", "name"])
def test_the_first_limit_holds(place: str, tmp_path: Path) -> None:
    options: Any = {"path": tmp_path / "values"} if place == "path" else {"name": f"limits of {os.getpid()}"}
    first = cached(read, limit=90_000, **options)
    first(1)
    with pytest.warns(UserWarning, match=r"limit=4000 is not used: the cache has had 90000 bytes"):
        assert cached(read, limit=4000, **options).statistics().limit == 90_000
