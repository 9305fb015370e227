"""Signals, threads and forks in the middle of a call."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler

from fastq_loader import DataLoader, Dynamic, IteratorInvalid, Processes, RoundRobin
from fastq_loader.consumer.pool import Pool
from fastq_loader.epoch.serial import SerialIterator
from fastq_loader.ipc.sockets import ConsumerSocket
from fastq_loader.scheduling.schedules import Schedule
from fastq_loader.workers import stopping
from tests.conftest import running_script, wait_until
from tests.support.alarms import Alarm, alarm_after, alarm_while_next_waits, ring
from tests.support.datasets import Made
from tests.support.gates import LIMIT, Gated, Gates, is_inside
from tests.support.loaders import collector_off
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("kind", "persistent"),
    [(TimeoutError, False), (KeyboardInterrupt, True), (Alarm, True), (SystemExit, False)],
)
@thorough(but={"persistent": True, "kind": KeyboardInterrupt})
def test_an_alarm_while_next_waits_loses_nothing(
    kind: type[BaseException], persistent: bool, tmp_path: Path
) -> None:
    """And is not kept until the sample has come: that waits at its gate. (torch's loader loses the batch that
    it receives in that moment, and then waits for it for ever.)"""

    def handler(signum: int, frame: Any) -> None:
        raise kind

    gates = Gates(tmp_path)
    loader: Any = DataLoader(Gated(4, gates, {0}), num_workers=2, persistent_workers=persistent)
    iterator = iter(loader)
    for _ in range(2):
        with alarm_while_next_waits(handler), pytest.raises(kind):
            next(iterator)
    gates.open(0)
    assert [batch.item() for batch in iterator] == list(range(4))
    loader._iterator = None


@pytest.mark.parametrize(
    ("workers", "before", "events", "every", "goes_on"),
    [
        (0, 0, ("call", "c_return"), 1, lambda: not is_inside(SerialIterator._draw)),
        (0, 2, ("call", "c_return"), 1, lambda: True),
        (1, 0, ("call",), 12, lambda: False),  # few of these places are in the wait
        pytest.param(1, 0, ("call",), 1, lambda: is_inside(ConsumerSocket.wait), marks=thorough()),
    ],
    ids=["no workers", "no workers, usual", "some calls", "each call"],
)
def test_an_alarm_at_any_call_of_next_loses_no_batch(
    workers: int, before: int, events: tuple[str], every: int, goes_on: Callable[[], bool]
) -> None:
    """Where a function of ours begins, and where one in C has returned: Python runs handlers there. The
    iterator goes on after an alarm at the first of these places, and after those where `goes_on` says so;
    after any other it may say that it cannot."""
    for place in itertools.count(1, every):
        calls, must_go_on = 0, place == 1

        def ring_there(frame: FrameType, event: str, _: Any) -> None:
            nonlocal calls, must_go_on
            if event in events and frame.f_globals["__name__"].startswith("fastq_loader"):
                calls += 1
                if calls == place:  # noqa: B023
                    must_go_on = must_go_on or goes_on()
                    signal.raise_signal(signal.SIGALRM)

        loader = DataLoader(range(6), None, num_workers=workers)
        iterator = iter(loader)
        found = list(itertools.islice(iterator, before))
        # An alarm in the finalizer of an earlier iterator would be reported, not raised.
        with alarm_after(60, ring), suppress(Alarm), collector_off():
            sys.setprofile(ring_there)
            try:
                found.append(next(iterator))
            finally:
                sys.setprofile(None)
        with nullcontext() if must_go_on else suppress(IteratorInvalid):
            found += iterator
            assert found == list(range(6)), f"an alarm at call {place}"
            assert loader.statistics().batches == 6
        if calls < place:
            break
    assert place > (6 if before else 30)


def cannot_go_on(iterator: Iterator[Any]) -> None:
    for _ in range(3):
        with pytest.raises(IteratorInvalid, match="cannot go on"):
            next(iterator)


class RaisesLater(Sampler[int]):
    """A handler raises in the middle of the sampler, which is a generator and ends by that."""

    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        for index in range(8):
            if index == 5:
                signal.raise_signal(signal.SIGALRM)
            yield index


@thorough(but={"schedule": Dynamic(window=4)})
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("schedule", [RoundRobin(window=4), Dynamic(window=4)])
def test_an_alarm_inside_a_sampler_is_not_the_end_of_the_epoch(workers: int, schedule: Schedule) -> None:
    batches: list[int] = []
    iterator = iter(DataLoader(range(8), None, False, RaisesLater(), num_workers=workers, schedule=schedule))
    with alarm_after(60, ring), pytest.raises(Alarm):
        batches.extend(iterator)
    cannot_go_on(iterator)
    assert batches == list(range(len(batches)))


class RaisesWhenOpened:
    """An object in a batch: a handler raises while it is unpickled in the consumer."""

    def __reduce__(self) -> Any:
        return signal.raise_signal, (signal.SIGALRM,)


def test_an_alarm_while_a_batch_is_put_together_is_not_that_batchs_error() -> None:
    loader = DataLoader(range(4), None, num_workers=1, collate_fn=lambda index: RaisesWhenOpened())
    iterator = iter(loader)
    with alarm_after(60, ring), pytest.raises(Alarm):
        next(iterator)
    cannot_go_on(iterator)


def test_without_workers_an_index_that_was_being_loaded_is_loaded_again() -> None:
    rang = []

    def load(index: int) -> int:
        if index == 3 and not rang:
            rang.append(index)
            signal.raise_signal(signal.SIGALRM)
        return index

    iterator = iter(DataLoader(range(6), None, collate_fn=load))
    with alarm_after(60, ring):
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(Alarm):
            next(iterator)
        assert list(iterator) == [3, 4, 5]


@pytest.mark.parametrize("collate", [False, True])
def test_an_exception_of_a_handler_counts_as_that_of_the_code_that_it_strikes(collate: bool) -> None:
    """Unlike a KeyboardInterrupt: it stands at the position of the batch."""

    def load(index: int) -> int:
        if index == 3:
            signal.raise_signal(signal.SIGALRM)
        return index

    def handler(signum: int, frame: Any) -> None:
        raise TimeoutError("the watchdog's")

    data: Any = range(6) if collate else Made(load, 6)
    iterator = iter(DataLoader(data, None, collate_fn=load if collate else None))
    with alarm_after(60, handler):
        assert [next(iterator) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(TimeoutError, match="the watchdog's") as caught:
            next(iterator)
        assert caught.value.batch == 3  # type: ignore[attr-defined]
        assert list(iterator) == [4, 5]


@pytest.mark.parametrize("workers", [0, 2])
def test_statistics_never_waits(workers: int, tmp_path: Path) -> None:
    gates, waits = Gates(tmp_path), ConsumerSocket.wait if workers else Gates.wait_at
    with DataLoader(Gated(2, gates, {0}), num_workers=workers) as loader:
        thread = threading.Thread(target=next, args=(iter(loader),))
        thread.start()
        gates.expect(0)
        assert wait_until(lambda: is_inside(waits, thread), LIMIT)
        assert loader.statistics().epochs == 1
        repr(loader)
        assert thread.is_alive(), "next() was to wait meanwhile"
        gates.open(0)
        thread.join()


def test_a_handler_may_ask_for_statistics_and_close_the_loader(tmp_path: Path) -> None:
    gates = Gates(tmp_path)
    loader = DataLoader(Gated(4, gates, {0}), num_workers=1)

    def close(signum: int, frame: FrameType | None) -> None:
        assert loader.statistics().epochs == 1
        loader.close()
        gates.open(0)

    iterator = iter(loader)
    with alarm_while_next_waits(close), pytest.raises(RuntimeError, match="its loader was closed"):
        next(iterator)
    loader.close()


def test_a_handler_that_takes_a_batch_itself_loses_none(tmp_path: Path) -> None:
    gates = Gates(tmp_path)
    iterator = iter(DataLoader(Gated(4, gates, {0}), num_workers=1))
    taken: list[int] = []

    def take(signum: int, frame: FrameType | None) -> None:
        gates.open(0)
        taken.append(next(iterator).item())

    with alarm_while_next_waits(take):
        taken.append(next(iterator).item())
    taken += [batch.item() for batch in iterator]
    assert taken == [0, 1, 2, 3]


@thorough(but={"persistent": True})
@pytest.mark.parametrize("persistent", [False, True])
def test_threads_that_share_an_iterator_see_every_batch_and_the_end(persistent: bool) -> None:
    def take(iterator: Iterator[Any]) -> list[list[int]]:
        return [batch.tolist() for batch in iterator]

    loader = DataLoader(range(400), 2, num_workers=2, persistent_workers=persistent)
    with ThreadPoolExecutor(6) as threads:
        for _ in range(3):
            seen = list(threads.map(take, [iter(loader)] * 6))
            assert sorted(chain.from_iterable(seen)) == torch.arange(400).reshape(-1, 2).tolist()
    loader.close()


#: Called once in this process, by the last of Python's own hooks after a fork, where exceptions are lost.
_in_fork: list[Callable[[], None]] = []
os.register_at_fork(after_in_parent=lambda: _in_fork and _in_fork.pop()())

MODES: dict[str, dict[str, Any]] = {
    "fork": {},
    "restarts": {"workers": Processes(max_restarts=3)},
    "spawn": {"multiprocessing_context": "spawn", "persistent_workers": True},
    "dynamic": {"schedule": "dynamic"},
    "serial": {"num_workers": 0},
}


class Masked:
    """Samples: the signals that are blocked where they are loaded."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> int:
        return len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))


@pytest.mark.parametrize("mode", ["fork", "restarts"])
def test_an_interrupt_during_a_fork_is_raised(mode: str) -> None:
    """torch's loader, as Python, prints it and goes on. Workers have no signal blocked by it."""
    loader = DataLoader(Masked(), 4, **{"num_workers": 1, **MODES[mode]})
    with alarm_after(LIMIT, ring):
        _in_fork.append(partial(signal.raise_signal, signal.SIGALRM))
        with pytest.raises(Alarm):
            iter(loader)
    assert torch.cat(list(loader)).tolist() == [Masked()[0]] * 12


class Large(Masked):
    """Samples that lie in shared memory."""

    def __getitem__(self, index: int) -> torch.Tensor:  # type: ignore[override]
        return torch.zeros(20_000)


def test_nothing_dies_by_python_code_where_an_interrupt_would_be_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Python handles signals at the entry of a finalizer and of a callback of weak references, too."""
    monkeypatch.setattr(stopping, "_INSTANT", LIMIT)  # no worker is left to a thread
    stopping.wait()  # for other tests' workers
    entered: list[str] = []

    def note(frame: FrameType, event: str, _: Any) -> None:
        is_open, code = signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ()), frame.f_code
        if is_open and event == "call" and code.co_name in ("__del__", "_remove", "remove"):
            entered.append(f"{code.co_filename}: {code.co_name}")

    loader = DataLoader(Large(), 4, num_workers=1)
    with collector_off():
        for epoch in range(4):
            for _ in loader:
                sys.setprofile(note if epoch else None)
        sys.setprofile(None)
    assert entered == []


@pytest.mark.parametrize("thread", [threading.main_thread, threading.current_thread])
def test_an_interrupt_while_a_loop_is_left_is_raised_after_it(
    thread: Callable[[], threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's loader, whose finalizer ends the workers, too, prints it and goes on. A signal of the process
    may come to a thread that does not block it."""
    close = Pool.close

    def interrupted_close(pool: Pool, *arguments: Any) -> None:
        def interrupt() -> None:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
            signal.pthread_kill(thread().ident or 0, signal.SIGALRM)

        sender = threading.Thread(target=interrupt)
        sender.start()
        sender.join()
        close(pool, *arguments)

    loader = DataLoader(range(8), 4, num_workers=1)

    def leave() -> list[int]:
        for _ in loader:
            break
        return list(range(9))

    monkeypatch.setattr(Pool, "close", interrupted_close)
    with alarm_after(LIMIT, ring), pytest.raises(Alarm):
        leave()
    assert wait_until(lambda: not multiprocessing.active_children(), LIMIT)
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())


def interrupted(mode: str, count: int) -> list[str]:
    """Interrupt epochs that many times; what has swallowed an interrupt."""
    lost: list[str] = []
    sys.unraisablehook = lambda it: lost.append(repr(it.object))
    moments = random.Random(0)
    with DataLoader(Masked(), 4, **{"num_workers": 2, **MODES[mode]}) as loader:
        assert len(list(loader)) == 3  # an interpreter is up
        for _ in range(count):
            before = len(lost)
            with suppress(Alarm), alarm_after(moments.uniform(1e-4, 0.1), ring):
                while len(lost) == before:
                    assert len(list(loader)) == 3
    return lost


@pytest.mark.parametrize("mode", MODES)
@thorough(but={"mode": "restarts"})
def test_interrupts_at_random_moments_are_all_raised(mode: str) -> None:
    """And leave nothing behind. In a program of its own: hypothesis has a callback of the collector."""
    text = f"""
        from tests.end_to_end.test_hard_knocks import interrupted
        if __name__ == "__main__":
            print(interrupted({mode!r}, 30))
    """
    with running_script(text) as script:
        result = script.finish()
    assert (result.returncode, result.left) == (0, ()), result
    assert result.stdout == "[]\n", result
