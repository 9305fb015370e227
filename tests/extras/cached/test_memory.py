"""The values of a cache, in memory and in a folder: filled by several at once, by who is killed, and full."""

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

from fastq_loader.extras.cached import folder, memory, values
from fastq_loader.extras.cached.memory import BUSY, FULL, STORED, Memory
from fastq_loader.system import locks
from tests.support.forking import end_of, fork
from tests.support.thorough import seeds

LIMIT = 1 << 20


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a writer may lose its CPU while it has its turn."""
    monkeypatch.setattr(memory, "PATIENCE", 30.0)


def opened(place: str, path: Path, limit: int = LIMIT) -> Memory:
    if place == "memory":
        return Memory(memory.create(limit))
    return folder.open_at(str(path / "values"), {"function": "read", "version": 1}, limit)


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Memory]:
    store = opened(request.param, tmp_path)
    yield store
    os.close(store.fd)
    store.fd = -1


def put(store: Any, key: Any, value: Any) -> str:
    return str(store.add(repr(key).encode(), values.encode(value)))


def get(store: Any, key: Any) -> Any:
    found = store.get(repr(key).encode(), True)
    return None if found is None else values.decode(found)


def value_of(key: int) -> dict[str, Any]:
    return {"key": key, "data": np.full(key * 37 % 5000, key % 251, np.uint8)}


def check(store: Any, keys: Any) -> int:
    """Every key has its value or none; how many have one."""
    found = [(key, got) for key in keys if (got := get(store, key)) is not None]
    for key, got in found:
        assert got["key"] == key
        assert np.array_equal(got["data"], value_of(key)["data"])
    return len(found)


@pytest.mark.parametrize(("nbytes", "share"), [(20, 0.1), (1000, 0.8), (150_000, 0.97)])
@pytest.mark.parametrize("place", ["memory", "folder"])
def test_values_can_use_their_share_of_a_limit(place: str, nbytes: int, share: float, tmp_path: Path) -> None:
    store = opened(place, tmp_path, 20 * LIMIT if nbytes > 1000 else LIMIT)
    number = 0
    while (stored := put(store, number, np.full(nbytes, number % 251, np.uint8))) == STORED:
        number += 1
    used, count, limit = store.usage()
    assert (stored, count) == (FULL, number)
    assert number * nbytes >= share * limit >= share * used
    for key in range(number):
        assert get(store, key)[0] == key % 251
    assert os.fstat(store.fd).st_blocks * 512 < 1.1 * limit + (1 << 16), "the index included"


def test_threads_of_one_process_may_fill_it_at_once(store: Memory) -> None:
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


def fill_and_die(store: Memory, keys: range, calls: int, rng: random.Random, write: Any) -> None:
    """Store the keys; SIGKILL strikes within a write, after so many calls. A call may write a part only."""
    left = [calls]

    def killing(fd: int, pieces: Any, at: int) -> int:
        left[0] -= 1
        data = b"".join(pieces) if isinstance(pieces, list) else pieces
        nbytes = len(data)  # the kernel writes a word at once
        nbytes = rng.choice([0, 8]) if nbytes == 8 else rng.randrange(nbytes + 1)
        written: int = write(fd, data[:nbytes] if left[0] < 0 or data is not pieces else data, at)
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return written

    memory.os.pwrite = memory.os.pwritev = killing  # type: ignore[attr-defined]
    for key in keys:
        put(store, key, value_of(key))


@pytest.mark.processes
@seeds(1, 5)
def test_a_writer_that_is_killed_at_any_write_leaves_no_wrong_value(store: Memory, seed: int) -> None:
    """Before, in the middle of and after each of its system calls."""
    rng = random.Random(seed)
    for first in range(0, 90, 6):
        end_of(fork(partial(fill_and_die, store, range(first, first + 6), rng.randrange(30), rng, os.pwrite)))
        check(store, range(100))
    for key in range(100):
        if get(store, key) is None:
            assert put(store, key, value_of(key)) == STORED
    assert check(store, range(100)) == 100, f"seed {seed}"


@pytest.mark.processes
def test_a_writer_that_is_stopped_in_its_turn_holds_nobody_up(
    store: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.01)
    ready, said = os.pipe()

    def child() -> None:
        locks.lock_file(locks.open_anew(store.fd))
        os.write(said, b"!")
        os.kill(os.getpid(), signal.SIGSTOP)

    pid = fork(child)
    os.read(ready, 1)
    assert put(store, 1, value_of(1)) == BUSY
    assert get(store, 1) is None
    os.kill(pid, signal.SIGKILL)
    end_of(pid)
    assert put(store, 1, value_of(1)) == STORED
    os.close(ready)
    os.close(said)


def test_room_is_given_back_where_a_write_fails(store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    put(store, 1, value_of(1))
    before = store.usage()

    def full(fd: int, pieces: Any, at: int) -> int:
        os.pwrite(fd, pieces[0], at)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    with pytest.raises(OSError, match="No space"):
        put(store, 100, value_of(100))
    monkeypatch.undo()
    assert store.usage() == before
    assert check(store, [1, 100]) == 1
    assert put(store, 100, value_of(100)) == STORED


def interrupted(store: Any, rounds: int, seed: int) -> None:
    """Interrupts at any moment while values are stored and read, and a handler that stores and reads."""

    def handler(*_: Any) -> None:
        put(store, 10**6, value_of(3))
        get(store, 0)
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, handler)
    rng = random.Random(seed)
    for key in range(rounds):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 1e-3))
            put(store, key, value_of(key % 100))
            get(store, key)
            signal.setitimer(signal.ITIMER_REAL, 0)
        except KeyboardInterrupt:
            signal.setitimer(signal.ITIMER_REAL, 0)


def left_usable(store: Any) -> None:
    """After interrupts, also of the first use in a fork, another process finds the store free while the
    one that was interrupted lives."""

    def other(seed: int) -> None:
        assert put(store, f"other {seed}", value_of(7)) == STORED

    def child(seed: int) -> None:
        interrupted(store, 8 if seed else 300, seed)
        assert end_of(fork(partial(other, seed))) == 0

    for seed in range(20):
        assert end_of(fork(partial(child, seed))) == 0
        assert get(store, f"other {seed}")["key"] == 7


@pytest.mark.processes
def test_an_interrupt_at_any_moment_leaves_no_lock(store: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "PATIENCE", 0.001)  # of the handler, for what it has interrupted
    left_usable(store)
