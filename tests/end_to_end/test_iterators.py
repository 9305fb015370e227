"""Rows I1 to I5: several iterators, and those that are left or have ended."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fastq_loader import DataLoader
from fastq_loader.errors import LoaderTimeout
from fastq_loader.workers import stopping
from fastq_loader.workers.main import WorkerLoop
from tests.conftest import descendants, held_memory, open_descriptors, wait_until
from tests.support.crimes import CrimeAt, Rows, dawdle, ignore_sigterm_and_hang
from tests.support.gates import LIMIT, Gated, Gates, end_timeout_when
from tests.support.loaders import EIGHT, PERSISTENT, WORKERS, numbers
from tests.support.thorough import is_thorough, thorough

pytestmark = pytest.mark.processes

POOLS = pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])


def eight(workers: int, persistent: bool = False) -> DataLoader[int]:
    return DataLoader(range(8), batch_size=2, num_workers=workers, persistent_workers=persistent)


def all_workers_end() -> bool:
    return wait_until(lambda: not descendants(), LIMIT)


@WORKERS
def test_i1_two_iterators_are_independent(workers: int) -> None:
    loader = eight(workers)
    first, second = iter(loader), iter(loader)
    assert next(first).tolist() == [0, 1]
    assert next(first).tolist() == [2, 3]
    assert numbers(second) == EIGHT
    assert numbers(first) == EIGHT[2:]
    assert [(a.tolist(), b.tolist()) for a, b in zip(loader, loader, strict=True)] == [(b, b) for b in EIGHT]


def test_i2_a_second_iteration_of_a_persistent_loader_ends_the_first_with_an_error() -> None:
    """So nested loops never lose batches silently."""
    with eight(2, persistent=True) as loader:
        first = iter(loader)
        assert next(first).tolist() == [0, 1]
        second = iter(loader)
        assert next(second).tolist() == [0, 1]
        with pytest.raises(RuntimeError, match="this iterator ended when a newer iteration"):
            next(first)
        assert numbers(second) == EIGHT[1:]
        assert numbers(loader) == EIGHT


def test_i3_hundreds_of_breaks_keep_nothing() -> None:
    # Batches of 800 kB: 150 that stay would be 120 MB.
    with DataLoader(Rows(16, 100_000), batch_size=2, num_workers=2, persistent_workers=True) as loader:

        def break_at_once(times: int) -> None:
            for _ in range(times):
                for batch in loader:
                    assert batch[:, [0, -1]].tolist() == [[0, 0], [1, 1]]
                    break

        break_at_once(50)
        before = len(open_descriptors())
        memory = held_memory()
        break_at_once(950 if is_thorough else 60)
        assert len(open_descriptors()) <= before
        assert held_memory() - memory < 64_000_000
        assert [batch[:, 0].tolist() for batch in loader] == [[2 * i, 2 * i + 1] for i in range(8)]


def broken_off(loader: DataLoader[int]) -> None:
    for batch in loader:
        assert batch.tolist() == [0, 1]
        break


def failed(loader: DataLoader[int]) -> None:
    with suppress(ZeroDivisionError):
        for _ in loader:
            raise ZeroDivisionError


def wrapped_and_closed(loader: DataLoader[int]) -> None:
    generator = (batch for batch in loader)
    assert next(generator).tolist() == [0, 1]
    assert len(descendants()) >= 2
    generator.close()


@thorough(but={"persistent": False, "leave": broken_off})
@pytest.mark.parametrize("leave", [broken_off, failed, wrapped_and_closed, iter])
@PERSISTENT
def test_i3_iterators_that_are_left_keep_no_worker(leave: Callable[[Any], Any], persistent: bool) -> None:
    loader = eight(2, persistent)
    for _ in range(10 if is_thorough else 3):
        leave(loader)
    gc.collect()
    if persistent:
        assert len(descendants()) == 2
    else:
        assert all_workers_end()
    assert numbers(loader) == EIGHT


@thorough(after=1)
@pytest.mark.parametrize("crime", [ignore_sigterm_and_hang, dawdle])
def test_i3_close_ends_workers_that_hang(
    crime: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = tmp_path / "begun"

    def commit(index: int) -> None:
        begun.touch()
        crime(index)

    monkeypatch.setattr(stopping, "ORDERLY", 0.1)
    loader = DataLoader(CrimeAt(commit, at=1), num_workers=2)
    iterator = iter(loader)
    assert next(iterator).tolist() == [0]
    assert wait_until(begun.exists, LIMIT)
    loader.close()
    assert wait_until(lambda: not descendants(), LIMIT)


@thorough(but={"workers": 2})
@pytest.mark.parametrize("workers", [1, 2])
def test_i3_i4_an_epoch_after_a_break_drops_late_answers_and_waits_for_no_other(
    workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only for what was begun: all other samples wait at gates that are shut."""
    gates, begun = Gates(tmp_path), range(1, workers + 1)
    dataset = Gated(40, gates, range(1, 40))

    def look_until_its_message_is_there(loop: Any) -> bool:
        goes_on = looks(loop)
        while (tmp_path / "open-1").exists() and loop._reader.epochs < 2:
            goes_on = looks(loop)  # a worker that reads it later loads one sample more
        return goes_on

    looks = WorkerLoop._look_ahead
    monkeypatch.setattr(WorkerLoop, "_look_ahead", look_until_its_message_is_there)
    arguments: dict[str, Any] = {"persistent_workers": True, "multiprocessing_context": "fork"}
    with DataLoader(dataset, num_workers=workers, prefetch_factor=8, **arguments) as loader:
        assert next(iter(loader)).tolist() == [0]
        for sample in begun:
            gates.expect(sample)
        second = iter(loader)
        gates.open(*begun)
        assert next(second).tolist() == [0]
        assert not gates.arrived(workers + 9)
        gates.open(*range(40))
        assert numbers(second) == [[sample] for sample in range(1, 40)]
        assert loader.statistics().stale_answers >= 1


@pytest.mark.parametrize("schedule", ["round_robin", "dynamic"])
def test_i5_iteration_goes_on_after_a_timeout(schedule: Any, tmp_path: Path) -> None:
    """Two are certain, by the clock. On a busy machine there are others, which lose nothing either."""
    gates, found, late = Gates(tmp_path), list[int](), 0
    iterator = iter(DataLoader(Gated(6, gates, {2}), num_workers=2, timeout=0.3, schedule=schedule))
    while len(found) < 6:
        began = time.monotonic()
        try:
            found.append(next(iterator).item())
        except LoaderTimeout:
            assert time.monotonic() - began > 0.29, "each call waits for the whole of it"
            late += len(found) == 2
            if late == 2:
                gates.open(2)
    assert found == list(range(6))
    assert late >= 2
    assert next(iterator, None) is None


def wait_with_a_thread(samples: list[Gates]) -> None:
    Thread(target=samples[0].wait_at, args=("side",), daemon=True).start()
    samples[0].wait_at("here")


def test_i5_a_timeout_shows_the_stacks_of_user_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gates = Gates(tmp_path)
    end_timeout_when(lambda: gates.arrived("side") and gates.arrived("here"), monkeypatch)
    loader = DataLoader([gates], num_workers=1, timeout=600, collate_fn=wait_with_a_thread)  # type: ignore[arg-type]
    with loader:
        with pytest.raises(LoaderTimeout) as raised:
            next(iter(loader))
        gates.open("side", "here")
    assert str(raised.value).partition("stacks:\n")[2].count("in wait_at\n") == 2


@thorough(but={"persistent": True})
@POOLS
def test_a_closed_loader_works_again_and_an_iterator_that_it_cut_off_says_so(
    workers: int, persistent: bool
) -> None:
    loader = eight(workers, persistent)
    loader.close()
    for _ in range(2):
        with loader:
            assert numbers(loader) == EIGHT
            assert all_workers_end() if not persistent else len(descendants()) == 2
            iterator = iter(loader)
            assert next(iterator).tolist() == [0, 1]
        assert all_workers_end()
        if workers:
            with pytest.raises(RuntimeError, match="its loader was closed"):
                next(iterator)
