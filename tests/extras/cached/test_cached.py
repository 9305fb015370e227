"""`cached`: its arguments, its calls, who shares it, and what it says."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader import DataLoader, NotCached, cached
from fastq_loader.extras.cached import cached as module
from fastq_loader.system import calls
from tests.conftest import open_descriptors


class Photos(torch.utils.data.Dataset[Any]):
    def __init__(self, length: int = 8, **options: Any) -> None:
        self.length = length
        self.decoded: list[int] = []
        self.decode = cached(self.decode, **{"limit": "10MB", **options})  # type: ignore[method-assign]

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


def read(index: int, scale: int = 1) -> np.ndarray:
    return np.full(5, index * scale)


def test_a_value_is_computed_once_and_each_call_gets_its_own() -> None:
    photos = Photos()
    first = photos.decode(3)
    first["pixels"] += 1
    second, third = photos.decode(3), photos.decode(index=3)
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

    @lambda function: cached(function, limit=1 << 20)
    def nothing(index: int) -> None:
        calls.append(index)
        if index > 3:
            raise LookupError(index)

    assert nothing(1) is nothing(1) is None
    for _ in range(2):
        with pytest.raises(LookupError, match="7"):
            nothing(7)
    assert calls == [1, 7, 7]


def test_a_function_may_call_itself() -> None:
    def fibonacci(n: int) -> int:
        return n if n < 2 else again(n - 1) + again(n - 2)

    again = cached(fibonacci, limit="1MB")
    assert again(60) == 1548008755920


@pytest.mark.parametrize(
    "draw", [torch.rand, random.random, np.random.rand], ids=["torch", "random", "numpy"]
)
def test_a_function_that_draws_is_not_stored_and_named(draw: Any) -> None:
    def augmented(index: int) -> Any:
        return index + float(draw(1) if draw is torch.rand else draw())

    wrapped = cached(augmented, limit="1MB")
    with pytest.warns(NotCached, match=r"augmented\(\) draws from .*the same in every epoch") as seen:
        values = {float(wrapped(1)) for _ in range(3)}
    assert len(values) == 3
    assert len([each for each in seen if each.category is NotCached]) == 1
    assert wrapped.statistics().random == 3
    assert wrapped.statistics().stored == 0


def test_a_value_that_cannot_be_pickled_comes_as_it_is_and_is_named() -> None:
    wrapped = cached(lambda index: lambda: index, limit="1MB")
    with pytest.warns(NotCached, match="returns a value that cannot be pickled"):
        assert wrapped(4)() == 4
    assert wrapped.statistics().refused == 1


def test_without_copies_arrays_are_read_only_and_tensors_refused() -> None:
    wrapped = cached(read, limit="1MB", copy=False)
    for _ in range(2):
        array = wrapped(3)
        assert array.tolist() == [3] * 5
        with pytest.raises(ValueError, match="read-only"):
            array += 1
    with pytest.raises(TypeError, match="tensors, which cannot be read-only: use copy=True"):
        cached(torch.tensor, limit="1MB", copy=False)(3)


# ---- arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(5, 5), ("8GB", 8 * 10**9), ("1.5 MiB", 3 << 19), ("7", 7), ("2kb", 2000), ("0.5", 500), ("0.25", 250)],
)
def test_a_limit_is_bytes_or_a_part_of_what_is_left(
    limit: Any, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "memory_bytes", lambda: 1000)
    assert module._bytes(limit, None) == expected


@pytest.mark.parametrize("limit", ["8 apples", "", "-1", 0, -5, "0", "1e99", "nan", 0.5, None, True])
def test_a_wrong_limit_is_named(limit: Any) -> None:
    is_typed = isinstance(limit, str) or type(limit) is int
    with pytest.raises(ValueError if is_typed else TypeError, match=r"limit=.* must be bytes"):
        cached(read, limit=limit)


def test_arguments_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"name='a' and path=.*give one"):
        cached(read, limit=1, name="a", path=tmp_path / "b")
    function: Any = 3
    with pytest.raises(TypeError, match="function=3 cannot be called"):
        cached(function, limit=1)
    with pytest.raises(ValueError, match="has no path"):
        cached(read, limit=1).clear()


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
    first.clear()
    assert not path.exists()


def test_a_damaged_value_is_computed_again_and_said(tmp_path: Path) -> None:
    path = tmp_path / "values"
    cached(read, limit="1MB", path=path)(1)
    with open(path, "r+b") as file:
        file.seek(-8, os.SEEK_END)
        file.write(b"\1" * 8)
    wrapped = cached(read, limit="1MB", path=path)
    with pytest.warns(UserWarning, match="read: the checksum of a value is wrong; it is computed again"):
        assert wrapped(1).tolist() == [1] * 5
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


def test_a_copy_of_a_dataset_has_the_same_cache_and_a_pickle_an_empty_one() -> None:
    photos = Photos()
    photos.decode(1)
    other = copy.deepcopy(photos)
    other.decode(1)
    other.decode(2)
    assert (photos.decoded, other.decoded) == ([1], [1, 2])
    assert other.decode.statistics().hits == 1  # type: ignore[attr-defined]
    far = pickle.loads(pickle.dumps(photos))
    assert far.decode(1)["label"] == 1
    assert (far.decoded, far.decode.statistics().hits) == ([1, 1], 0)


def test_on_another_system_a_process_has_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "AVAILABLE", False)
    photos = Photos(limit=400)
    for index in (3, 3, 4, 5, 6, 7, 8, 9):
        assert photos.decode(index)["pixels"].eq(index).all()
    counts: Any = photos.decode.statistics()  # type: ignore[attr-defined]
    assert (counts.hits, counts.misses) == (1, 7)
    assert 0 < counts.stored < 7
    assert counts.full == 7 - counts.stored
    assert counts.bytes <= 400
    assert pickle.loads(pickle.dumps(photos)).decode(3)["label"] == 3
    for place in ({"name": "a"}, {"path": "/nowhere"}):
        with pytest.raises(RuntimeError, match="name= and path= need memfd_create"):
            Photos(**place)


def test_nothing_is_left_open() -> None:
    gc.collect()
    before = len(open_descriptors())
    photos = Photos()
    photos.decode(1)
    copy.deepcopy(photos).decode(1)
    del photos
    gc.collect()  # a method refers to its object
    assert len(open_descriptors()) == before


def test_a_loader_shows_the_caches_of_its_dataset() -> None:
    photos = Photos()
    subset = torch.utils.data.Subset(torch.utils.data.ConcatDataset([photos, Photos()]), range(16))
    loader = DataLoader(subset, 4)
    for _ in range(2):
        list(loader)
    assert [(each.hits, each.misses) for each in loader.statistics().caches] == [(8, 8), (8, 8)]
    assert DataLoader(range(3)).statistics().caches == ()
