"""The file behind a cache: filled by several at once, by who is killed at any moment, full, damaged."""

from __future__ import annotations

import errno
import os
import random
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.extras.cached import store as files
from fastq_loader.extras.cached.store import Differs, Store, digest_of
from fastq_loader.extras.cached.values import decode, encode
from tests.support.forking import end_of, fork
from tests.support.thorough import examples, seeds

ABOUT = {"function": "read", "version": 1}
LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a writer may lose its CPU while it has its turn."""
    monkeypatch.setattr(files, "_PATIENCE", 30.0)


@pytest.fixture(params=["memory", "memory that cannot be mapped", "path"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """The second one is for `ulimit -v`."""

    def refuse(*_: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    with monkeypatch.context() as patch:
        if request.param == "memory that cannot be mapped":
            patch.setattr(files.mmap, "mmap", refuse)  # type: ignore[attr-defined]
        one = opened(tmp_path / "cache" if request.param == "path" else None)
    assert (one._map is not None) == (request.param == "memory")
    yield one
    one.close()


def opened(path: Path | None, limit: int = LIMIT) -> Store:
    fd = files.anonymous(ABOUT, limit) if path is None else files.at_path(str(path), ABOUT, limit)
    return Store(fd, limit, checks=path is not None)


def put(store: Store, key: Any, value: Any) -> bool:
    return store.add(digest_of(repr(key).encode()), *encode(value))


def get(store: Store, key: Any) -> Any:
    found = store.find(digest_of(repr(key).encode()))
    if found is None:
        return None
    return decode(store.head(found), lambda at, nbytes: store.read(found, at, nbytes))


def value_of(key: int) -> dict[str, Any]:
    return {"key": key, "data": np.full(key * 37 % 5000, key % 251, np.uint8)}


def check(store: Store, keys: Any) -> int:
    """Every key has its value or none; how many have one."""
    found = [(key, got) for key in keys if (got := get(store, key)) is not None]
    for key, got in found:
        expected = value_of(key)
        assert got["key"] == key
        assert np.array_equal(got["data"], expected["data"])
    return len(found)


@examples(30)
@given(st.lists(st.integers(0, 200), max_size=60))
def test_what_was_put_is_there_and_nothing_else(keys: list[int]) -> None:
    store = opened(None)
    for at, key in enumerate(keys):
        assert put(store, key, value_of(key)) == (key not in keys[:at])
    assert check(store, range(201)) == len(set(keys))
    store.close()


def test_it_is_full_when_no_room_is_left_and_keeps_what_it_has(store: Store) -> None:
    stored = [key for key in range(2000) if put(store, key, value_of(key))]
    assert LIMIT * 0.97 < store.used() <= LIMIT
    assert check(store, range(2000)) == len(stored) > 300


def test_a_table_that_is_full_takes_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_LEAST_SLOTS", 1 << 10)
    store = opened(None, 1 << 20)
    stored = [put(store, key, None) for key in range(1500)]
    assert 500 < sum(stored) < 1025
    found = [store.find(digest_of(repr(key).encode())) is not None for key in range(1500)]
    assert found == stored
    store.close()


@pytest.mark.processes
def test_processes_that_fill_it_at_once_lose_and_mix_nothing(store: Store) -> None:
    def child(seed: int) -> None:
        keys = random.Random(seed).sample(range(100), 100)
        for key in keys:
            if get(store, key) is None:
                put(store, key, value_of(key))

    for pid in [fork(partial(child, seed)) for seed in range(4)]:
        assert end_of(pid) == 0
    assert check(store, range(100)) == 100


def test_threads_of_one_process_may_fill_it_at_once(store: Store) -> None:
    def fill(start: int) -> None:
        for key in range(start, start + 60):
            put(store, key, value_of(key))

    sys.setswitchinterval(1e-6)  # they begin at once, too
    threads = [threading.Thread(target=fill, args=(start,)) for start in (0, 20, 40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sys.setswitchinterval(0.005)
    assert check(store, range(100)) == 100


def fill_and_die(store: Store, keys: range, calls: int, rng: random.Random, write: Any) -> None:
    """Be killed in the middle of a write, after so many."""
    left = [calls]

    def killing(fd: int, data: Any, at: int) -> int:
        left[0] -= 1
        if left[0] < 0:
            write(fd, bytes(data)[: rng.randrange(len(bytes(data)) + 1)], at)
            os.kill(os.getpid(), signal.SIGKILL)
        written: int = write(fd, data, at)
        return written

    files.os.pwrite = killing  # type: ignore[attr-defined]
    for key in keys:
        put(store, key, value_of(key))


@pytest.mark.processes
@seeds(1, 3)
def test_a_writer_that_is_killed_at_any_write_leaves_no_wrong_value(store: Store, seed: int) -> None:
    """Before, in the middle of and after each of its system calls."""
    rng = random.Random(seed)
    write = os.pwrite
    for first in range(0, 90, 6):
        end_of(fork(partial(fill_and_die, store, range(first, first + 6), rng.randrange(14), rng, write)))
        check(store, range(100))
    for key in range(100):
        if get(store, key) is None:
            put(store, key, value_of(key))
    assert check(store, range(100)) == 100, f"seed {seed}"


@pytest.mark.processes
def test_a_writer_that_is_stopped_in_its_turn_holds_nobody_up(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "_PATIENCE", 0.01)
    ready, said = os.pipe()

    def child() -> None:
        with store._writing() as may:
            assert may
            os.write(said, b"!")
            os.kill(os.getpid(), signal.SIGSTOP)

    pid = fork(child)
    os.read(ready, 1)
    assert not put(store, 1, value_of(1))
    assert get(store, 1) is None
    os.kill(pid, signal.SIGKILL)
    end_of(pid)
    assert put(store, 1, value_of(1))
    os.close(ready)
    os.close(said)


def test_a_full_disk_is_an_error_of_the_write_and_costs_no_value(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert put(store, 1, value_of(1))
    write, room = os.pwrite, [2000]

    def full(fd: int, data: Any, at: int) -> int:
        count = min(len(data), room[0])
        room[0] -= count
        if not count:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, bytes(data)[:count], at)

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space"):
        put(store, 100, value_of(100))
    monkeypatch.undo()
    assert check(store, [1, 100]) == 1
    assert put(store, 100, value_of(100))


# ---- files that outlive a program -------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    store = opened(tmp_path / "cache")
    for key in range(1, 40):
        assert put(store, key, value_of(key))
    store.close()
    return tmp_path / "cache"


def found_or_damaged(path: Path) -> tuple[int, int]:
    """How many of the values can be read, and how many are found and damaged; none is wrong."""
    store = opened(path)
    whole = damaged = 0
    for key in range(1, 40):
        try:
            whole += check(store, [key])
        except ValueError:
            damaged += 1
    store.close()
    return whole, damaged


@seeds(4, 20)
def test_a_damaged_file_gives_no_wrong_value(path: Path, seed: int) -> None:
    """Bytes of it were lost, or it was cut short, as after a power cut."""
    assert found_or_damaged(path) == (39, 0)
    rng, size = random.Random(seed), path.stat().st_size
    with open(path, "r+b") as file:
        if seed % 2:
            file.truncate(rng.randrange(files._SLOTS, size))
        else:
            for _ in range(30):
                file.seek(rng.randrange(files._SLOTS, size))
                file.write(bytes(rng.randrange(2000)))
    whole, _ = found_or_damaged(path)
    assert whole < 39
    store = opened(path)
    for key in range(1, 40):
        try:
            there = get(store, key) is not None
        except ValueError:
            there = False
        if not there:
            put(store, key, value_of(key))
    assert check(store, range(1, 40)) >= whole, "what was damaged is stored again"
    store.close()


def test_a_file_of_something_else_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for about, difference in (
        ({"function": "read", "version": 2}, "its version is 1, and here it is 2"),
        ({"function": "other", "version": 1}, "its function is 'read', and here it is 'other'"),
    ):
        with pytest.raises(Differs, match=difference):
            files.at_path(str(path), about, LIMIT)
    monkeypatch.setattr(files, "LAYOUT", 2)
    with pytest.raises(Differs, match="its layout is 1, and here it is 2"):
        opened(path)
    path.write_text("a text of the user's")
    with pytest.raises(Differs, match="it is not a cache"):
        opened(path)
    assert path.read_text() == "a text of the user's"


def test_a_file_without_a_header_is_begun_anew(path: Path) -> None:
    path.write_bytes(bytes(100_000))
    assert found_or_damaged(path) == (0, 0)
