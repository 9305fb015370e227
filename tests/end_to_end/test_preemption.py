"""A job that is told to end: where that was asked for, workers outlive the signal, and nothing is lost."""

from __future__ import annotations

import _thread
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset

from fastq_loader import DataLoader, Prefetcher, Processes, StatefulDataLoader, preemption
from fastq_loader.epoch import resources
from tests.conftest import running_script, wait_until
from tests.support.crimes import Slow
from tests.support.datasets import Sized
from tests.support.loaders import MANY_WORKERS
from tests.support.thorough import is_thorough, seeds, thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS]
ITEMS = 400


def loader(items: int = 100, **options: Any) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Slow(items, 0.001), 5, **{"num_workers": 2, **options})


def pids(of: StatefulDataLoader[Any]) -> list[int]:
    return [process.pid or 0 for pool in resources.of(of).pools for process in pool.processes()]


TRAINING = """
    import json, os, signal, sys, time
    import fastq_loader
    from tests.end_to_end.test_preemption import loader
    data, path = loader({items}, {options}), {path!r}
    if os.path.exists(path):
        data.load_state_dict(json.load(open(path)))
    seen = open({seen!r}, "a")
    with fastq_loader.preemption(data) as preempted:
        print("ready", flush=True)
        for number, batch in enumerate(data):
            time.sleep(0.004)
            print(*batch.tolist(), sep="\\n", file=seen, flush=True)
            while number == {last} and not preempted:
                time.sleep(0.004)
            if preempted:
                json.dump(data.state_dict(), open(path + ".new", "w"))
                os.replace(path + ".new", path)
                sys.exit(3)
"""


@seeds(1, 3)
@pytest.mark.parametrize(
    "options",
    [
        "shuffle=True, schedule='dynamic'",
        pytest.param("shuffle=True", marks=thorough()),
        pytest.param("multiprocessing_context='forkserver'", marks=thorough()),
    ],
)
def test_a_job_is_preempted_at_random_moments_and_every_sample_is_seen_once(
    options: str, seed: int, tmp_path: Path
) -> None:
    chance, path, seen = random.Random(seed), tmp_path / "state.json", tmp_path / "seen"
    for last in (50, 20, None):  # a batch at which the signal is waited for; 80 are an epoch
        source = TRAINING.format(items=ITEMS, options=options, path=str(path), seen=str(seen), last=last)
        with running_script(source, warm=True) as script:
            script.wait_for("ready")
            if last is not None:
                time.sleep(chance.uniform(0.0, 0.25))
                os.killpg(script.pid, signal.SIGTERM)
            result = script.finish()
        assert (result.returncode, result.left) == (3 if last else 0, ()), result
    assert sorted(map(int, seen.read_text().split())) == list(range(ITEMS))


@thorough(but={"start_method": "fork"})
@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_a_worker_outlives_sigterm_and_ends_with_its_loader(start_method: str) -> None:
    ours = loader(multiprocessing_context=start_method)
    with preemption(ours), ours:
        iterator = iter(ours)
        found = next(iterator).tolist()
        workers = pids(ours)
        for pid in workers * 2:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        found += [index for batch in iterator for index in batch.tolist()]
    assert found == list(range(100))
    assert wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in workers), 30)


class Forks(Sized, Dataset[int]):
    """The signal that ends a child which gets SIGTERM."""

    length = 1

    def __getitem__(self, index: int) -> int:
        end, its = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(its, b"!")
            time.sleep(30)
            os._exit(1)
        os.read(end, 1)
        os.kill(child, signal.SIGTERM)
        return -os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_what_a_worker_forks_does_not_outlive_sigterm() -> None:
    with preemption(ours := StatefulDataLoader(Forks(), num_workers=1)), ours:
        assert next(iter(ours)).item() == signal.SIGTERM


def _in_a_thread(number: int) -> None:
    thread = threading.Thread(target=signal.raise_signal, args=(number,))
    thread.start()
    thread.join()
    time.sleep(0.1)


def _in_a_child(number: int) -> int:
    code = f"import signal; signal.raise_signal({number})"
    return subprocess.run([sys.executable, "-SEc", code], stderr=subprocess.DEVNULL, check=False).returncode


def _caught(number: int) -> int:
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(number)
    return 0


#: How user code in a worker sends a signal; and the value of the sample if SIGTERM and SIGINT end no worker.
SIGNALS: dict[str, tuple[Callable[[int], Any], tuple[int | None, int | None]]] = {
    "raise_signal": (signal.raise_signal, (None, None)),
    "kill": (lambda number: os.kill(os.getpid(), number), (None, None)),
    "pthread_kill": (lambda number: signal.pthread_kill(threading.get_ident(), number), (None, None)),
    "interrupt_main": (lambda number: _thread.interrupt_main(number) or 0, (0, None)),  # type: ignore[call-arg]
    "in_a_thread": (_in_a_thread, (None, None)),
    "in_a_child": (_in_a_child, (-signal.SIGTERM, -signal.SIGINT)),
    "caught": (_caught, (None, 0)),
}


class Signals(Sized, Dataset[int]):
    """The last sample sends a signal."""

    length = 3

    def __init__(self, way: str, number: int) -> None:
        self.way, self.number = way, number

    def __getitem__(self, index: int) -> int:
        return int(SIGNALS[self.way][0](self.number)) if index == 2 else index


@thorough(but={"method": "fork", "restarts": 0})
@pytest.mark.filterwarnings("ignore::fastq_loader.WorkerReplaced")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    ("method", "restarts", "way"),
    [
        *(("fork", restarts, way) for restarts in (0, 1) for way in SIGNALS),
        *(("spawn", 0, "kill"), ("spawn", 1, "interrupt_main")),
        *(("forkserver", 0, "in_a_thread"), ("forkserver", 1, "raise_signal")),
    ],
)
def test_signals_that_user_code_sends_in_a_worker_do_what_they_do_in_torchs(
    method: str, restarts: int, way: str, number: int
) -> None:
    """Libraries that send one to their own process rely on being dead."""
    value = SIGNALS[way][1][number == signal.SIGINT]
    options: Any = {"num_workers": 1, "prefetch_factor": 1, "multiprocessing_context": method}
    ours = {"workers": Processes(max_restarts=restarts)}
    for kind, more in ((DataLoader, ours), *([(torch.utils.data.DataLoader, {})] if is_thorough else [])):
        found: list[int | None] = []
        try:
            found += map(int, kind(Signals(way, number), None, **options, **more))
        except (RuntimeError, OSError, EOFError):  # torch raises any of them
            found = [0, 1, None]
        assert found == [0, 1, value], kind


def test_grace_is_over_after_its_seconds() -> None:
    with loader(10_000, workers=Processes(grace_seconds=0.2)) as ours:
        iterator = iter(ours)
        next(iterator)
        began = time.monotonic()
        os.kill(pids(ours)[1], signal.SIGTERM)
        with pytest.raises(RuntimeError, match="exited unexpectedly"):
            list(iterator)
        assert 0.15 <= time.monotonic() - began < 15


def test_terminate_ends_a_worker_with_grace_at_once() -> None:
    """multiprocessing itself calls it when the program exits."""
    with preemption(ours := loader()), ours:
        iterator = iter(ours)
        next(iterator)
        iterator._workers[0]._popen.terminate()
        iterator._workers[0].join(30)
        assert iterator._workers[0].exitcode is not None
        with pytest.raises(RuntimeError, match="worker 0 was killed by SIGKILL"):
            list(iterator)


@pytest.mark.parametrize(("value", "error"), [(-1, ValueError), ("1", TypeError), (True, TypeError)])
def test_a_wrong_grace_is_named(value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"grace_seconds={value!r} must be"):
        Processes(grace_seconds=value)


def test_the_handlers_of_before_are_called_and_come_back() -> None:
    called: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: called.append(number))
    try:
        with loader() as ours:
            with preemption(Prefetcher(ours, "cpu")) as preempted:
                assert not preempted
                assert preempted.signal is None
                os.kill(os.getpid(), signal.SIGUSR1)
                assert preempted
            assert (preempted.signal, called) == (signal.SIGUSR1, [signal.SIGUSR1])
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            os.kill(os.getpid(), signal.SIGUSR1)
            assert (len(called), preempted.signal) == (2, signal.SIGUSR1)
            assert resources.of(ours).grace == 0
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_error_says_why_preemption_is_impossible() -> None:
    for each in ([1], DataLoader(range(4))):  # type: ignore[arg-type]
        with pytest.raises(
            TypeError, match=r"preemption\(.*make the loader a fastq_loader.StatefulDataLoader"
        ):
            preemption(each)
    raised: list[ValueError] = []

    def elsewhere() -> None:
        try:
            preemption().__enter__()
        except ValueError as error:
            raised.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "main thread" in str(raised[0])


def test_contexts_may_be_nested_and_keep_the_first_signal() -> None:
    called: list[int] = []
    numbers = signal.SIGUSR1, signal.SIGTERM
    before = [signal.signal(number, lambda number, _: called.append(number)) for number in numbers]
    try:
        with loader() as ours, preemption(ours) as outer, preemption(ours) as inner:
            with inner:
                signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGTERM)
            assert outer.signal == inner.signal == signal.SIGUSR1
        assert called == [*numbers]
        signal.raise_signal(signal.SIGTERM)
        assert called == [*numbers, signal.SIGTERM]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
