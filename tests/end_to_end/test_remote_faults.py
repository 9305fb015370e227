"""Workers on other machines, and those machines, die, hang and are meddled with: what comes is the same."""

from __future__ import annotations

import gc
import os
import random
import re
import signal
import socket
import threading
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from fastq_loader import DataLoader, Dynamic, LoaderTimeout, WorkerDied, WorkerReplaced
from fastq_loader.extras.remote.connection import Address
from fastq_loader.extras.remote.proxy import NoPlace, Place
from fastq_loader.extras.remote.proxy_pool import ProxyPool
from tests.conftest import running_script, wait_until
from tests.support import far_workers
from tests.support.crimes import CrimeAt, die_beside_a_child, exit_with_7, segfault, system_exit
from tests.support.datasets import Made, assert_same
from tests.support.far_workers import FarWorkers, LocalPlacement, far, far_pids
from tests.support.forking import end_of, fork
from tests.support.gates import Gated, Gates, end_timeout_when
from tests.support.loaders import MANY_WORKERS
from tests.support.thorough import thorough

pytestmark = [pytest.mark.processes, MANY_WORKERS, pytest.mark.usefixtures("warm_far_workers")]


def slowly(index: int) -> Any:
    """Samples with draws in them, after a moment."""
    time.sleep(0.002)
    return index, torch.rand(30_000), torch.rand(2)


def newest() -> LocalPlacement:
    return LocalPlacement.made[-1]


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    torch.manual_seed(5)
    given = {"batch_size": 4, "num_workers": 2, "schedule": "dynamic", "shuffle": True, **options}
    return DataLoader(Made(slowly, 160) if dataset is None else dataset, **given)


def kill_far_worker(draw: random.Random, data: DataLoader[Any]) -> None:
    if pids := far_pids(newest()):
        os.kill(draw.choice(pids), signal.SIGKILL)


def proxies(data: DataLoader[Any]) -> list[int]:
    """Where workers persist; statistics have the processes on the other machines."""
    iterator: Any = data._iterator
    return [process.pid for process in iterator._workers]


def kill_proxy(draw: random.Random, data: DataLoader[Any]) -> None:
    os.kill(draw.choice(proxies(data)), signal.SIGKILL)


def kill_node(draw: random.Random, data: DataLoader[Any]) -> None:
    assert wait_until(lambda: bool(newest().running), 60)
    newest().kill_node(draw.choice(sorted({place.node for place in list(newest().running)})))


KILLERS = [kill_far_worker, kill_proxy, kill_node]


@thorough(after=1)
@pytest.mark.parametrize("killers", [KILLERS, *([killer] for killer in KILLERS)])
def test_each_index_comes_once_and_in_order_whoever_is_killed(killers: list[Any]) -> None:
    expected = list(loader(num_workers=0))
    draw = random.Random(3)
    data = loader(num_workers=3, workers=far(nodes=2, max_restarts=1000), persistent_workers=True)
    found: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", WorkerReplaced)
        for number, batch in enumerate(data):
            found.append(batch)
            if number % 12 == 5:
                with suppress(ProcessLookupError):
                    killers[number // 12 % len(killers)](draw, data)
        assert_same(found, expected)
        assert sorted(torch.cat([batch[0] for batch in data]).tolist()) == list(range(160))
    data.close()


@thorough(after=1)
@pytest.mark.parametrize(
    ("crime", "how"),
    [(exit_with_7, "exited with code 7"), (die_beside_a_child, ""), (segfault, ""), (system_exit, "")],
)
def test_the_error_names_the_machine_of_a_dead_far_worker_and_how_it_died(crime: Any, how: str) -> None:
    data = loader(CrimeAt(crime, 5, 12), workers=far(), shuffle=False, batch_size=2)
    iterator = iter(data)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    text = rf"worker \d was lost with its process on node-0 \(pid \d+.*\): .*{how}.*batch 2"
    with pytest.raises(WorkerDied, match=text):
        next(iterator)
    data.close()


def test_a_worker_that_is_lost_between_batches_is_replaced_before_anybody_notices() -> None:
    """Between two epochs, and in the middle of one."""
    serial = loader(Made(slowly, 40), num_workers=0)
    expected = [*serial, *serial, *serial]
    data = loader(Made(slowly, 40), workers=far(), persistent_workers=True, schedule=Dynamic(window=4))
    found = list(data)
    lose_both()
    before, batches = data.statistics().wire_bytes, iter(data)
    found.append(next(batches))
    # All that may be loaded has come: five batches of four samples, with 30,000 numbers each.
    assert wait_until(lambda: data.statistics().wire_bytes - before > 5 * 4 * 30_000 * 4, 100)
    lose_both()
    found += [*batches, *data]
    data.close()
    assert_same(found, expected)


def lose_both() -> None:
    """Kill two far workers that have no task; returns when others are there."""
    assert wait_until(lambda: len(far_pids(newest())) == 2, 100)
    pids, lost = far_pids(newest()), len(newest().lost)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: len(newest().lost) == lost + 2, 100)
    assert wait_until(lambda: len(set(far_pids(newest())) - {*pids}) == 2, 100)


def test_a_lost_worker_whose_successor_would_draw_other_numbers_is_a_death() -> None:
    data = loader(Made(slowly, 40), workers=far(), schedule="round_robin", persistent_workers=True)
    list(data)
    for pid in far_pids(newest()):
        os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerDied, match="was lost with its process on node-0"):
        list(data)
    data.close()


class Nowhere(LocalPlacement):
    """Its places have nobody who listens there; without any, it fails."""

    place: Place | None = None
    given = 0

    def find(self, lost: Sequence[Place], wanted: int) -> list[Place | NoPlace]:
        if self.place is None:
            raise OSError("no machine is left")
        self.pause = 0.01
        self.given += wanted
        return [self.place] * wanted


@pytest.mark.parametrize("listens", [True, False])
def test_a_worker_that_finds_no_place_says_why(listens: bool) -> None:
    placement, text = Nowhere(), "OSError: no machine is left"
    if listens:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            placement.place, text = Place(Address(*listener.getsockname()), 4, "node-0"), "cannot be reached"
    data = loader(workers=FarWorkers(lambda: placement), num_workers=1)
    with pytest.raises(WorkerDied, match=f"found no place on another machine: .*{text}"):
        next(iter(data))
    data.close()
    assert placement.given == 3 * listens, "the third one is the last"


def test_a_forked_copy_does_not_wait_for_a_thread_that_it_lacks() -> None:
    data = loader(workers=far(), persistent_workers=True)
    next(iter(data))
    [pool] = [each for each in gc.get_objects() if type(each) is ProxyPool and not each.ended]
    held, let_go = threading.Event(), threading.Event()

    def hold() -> None:
        with pool._lock:
            held.set()
            let_go.wait(100)

    threading.Thread(target=hold).start()
    assert held.wait(100)
    os.kill(far_pids(newest())[0], signal.SIGKILL)  # its proxy says something
    assert end_of(fork(lambda: signal.alarm(100) or data.statistics())) == 0
    let_go.set()
    data.close()


def test_a_timeout_shows_the_stacks_of_the_far_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gates = Gates(tmp_path)
    end_timeout_when(lambda: gates.arrived(4), monkeypatch)
    data = loader(Gated(12, gates, {4}), workers=far(), shuffle=False, batch_size=2, timeout=600)
    iterator = iter(data)
    assert [next(iterator).tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(LoaderTimeout) as raised:
        next(iterator)
    text = r"timed out after 600 .*worker \d .*pid \d+ on node-0.*in wait_at"
    assert re.search(text, str(raised.value), re.DOTALL)
    gates.open(4)
    data.close()


def test_a_far_worker_that_was_stopped_is_replaced_after_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(far_workers, "ENDS", 0.05)  # it ends by SIGKILL alone
    data = loader(Made(slowly, 40), num_workers=1, workers=far(max_restarts=3), timeout=600)
    stopped: list[int] = []
    end_timeout_when(lambda: stopped and not data.statistics().worker_restarts, monkeypatch)
    iterator = iter(data)
    next(iterator)
    stopped += far_pids(newest())
    os.kill(stopped[0], signal.SIGSTOP)
    with pytest.warns(WorkerReplaced, match="did not answer within"):
        assert sum(1 for _ in iterator) == 9
    assert wait_until(lambda: stopped[0] not in far_pids(newest()), 60), "it was ended"


#: Begins a script.
RUNNING = """
    import os, signal, subprocess, sys
    from fastq_loader import WorkerDied
    from fastq_loader.extras.remote import connection
    from tests.end_to_end.test_remote_faults import loader
    from tests.support.far_workers import far
    connection.NOTICED_HERE = 1000
    signal.signal(signal.SIGINT, signal.default_int_handler)
    data = loader(workers=far(nodes=2))
    iterator = iter(data)
    next(iterator)
    print('running', flush=True)
"""


@thorough(after=1)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT, None])
def test_a_process_that_ends_with_an_epoch_under_way_leaves_nothing_anywhere(number: Any) -> None:
    """And Ctrl-C shows one traceback."""
    warm = number is not None  # nothing is special about an exit by a signal
    with running_script(f"{RUNNING}    {'signal.pause()' * warm}", warm=warm) as script:
        script.wait_for("running")
        if warm:
            assert len(script.processes()) >= 6
            (os.killpg if number == signal.SIGINT else os.kill)(script.pid, number)
        result = script.finish()
    assert (result.returncode, result.left) == (-number if warm else 0, ())
    assert result.stderr.count("Traceback") == result.stderr.count("\nKeyboardInterrupt")
    assert result.stderr.count("Traceback") == (number == signal.SIGINT)
    assert result.stderr == "" or number == signal.SIGINT


#: Gives a script a network of its own, which it may take down.
UNSHARED = """
    import ctypes, os, subprocess
    user = os.getuid()
    ctypes.CDLL(None).unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER, CLONE_NEWNET
    open("/proc/self/uid_map", "w").write(f"0 {user} 1")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
"""
PULLED = """
    subprocess.run(["ip", "link", "set", "lo", "down"], check=True)
    try:
        list(iterator)
    except WorkerDied as error:
        print(error)
    """


@thorough()
@pytest.mark.skipif(
    os.system("unshare -rn ip link set lo up >/dev/null 2>&1") != 0,
    reason="this system gives nobody a network of their own",
)
def test_a_cable_that_is_pulled_is_noticed() -> None:
    """Nobody says anything: the kernel asks, and gives up."""
    with running_script(UNSHARED + RUNNING + PULLED, warm=True) as script:
        result = script.finish()
    assert "Connection timed out" in result.stdout
    assert "its connection broke" in result.stdout
    assert (result.stderr, result.left) == ("", ())
