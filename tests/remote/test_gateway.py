"""What starts stand-ins, with real programs; the stand-ins are told nothing, or wait for a place."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import pytest

import fastq_loader
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.remote import gateway as module
from fastq_loader.remote.control import Waiting
from fastq_loader.remote.gateway import Gateway, Program
from fastq_loader.system import calls
from fastq_loader.system.calls import readable
from fastq_loader.workers.backend import cores
from fastq_loader.workers.children import Child, LaunchedProcess
from tests.conftest import descendants, process_table
from tests.remote.test_control import TOLD
from tests.support.forking import end_of, fork

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

SECONDS = 20  # against hanging


class StandIn:
    """One that was started.

    Attributes:
        pipe: this end of the pipe to it.
    """

    pipe: Connection[Any, Any]

    def __init__(self, gateway: Gateway) -> None:
        self.child = Child(LaunchedProcess(lambda: self._launch(gateway)))
        self.child.start()

    def _launch(self, gateway: Gateway) -> Any:
        process, self.pipe = gateway.start()
        return process

    def waits(self, arena: Arena, folder: str) -> bool:
        """Tell it what it is; whether it says then that it waits for a place."""
        mapping = arena.mapping
        told = {"folder": folder, "consumer": os.getpid(), "arena": arena.fd, "arena_whole": mapping.whole}
        self.pipe.send(TOLD._replace(arena_length=mapping.length, traffic=arena.fd, **told))
        return self.pipe.poll(SECONDS) and self.pipe.recv() == Waiting()

    def end(self) -> None:
        """Let it go; a real one ends with the loader, and not when its pipe is closed."""
        self.pipe.close()
        self.child.kill()
        self.child.release()

    @property
    def parent(self) -> int:
        return next(entry.parent for entry in process_table() if entry.pid == self.child.pid)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena(2)
    yield arena
    arena.retire([])


@contextmanager
def opened(arena: Arena) -> Iterator[Gateway]:
    gateway = Gateway([arena.fd], "/nowhere")
    try:
        gateway.open()
        yield gateway
    finally:
        gateway.close()


@pytest.fixture
def gateway(arena: Arena) -> Iterator[Gateway]:
    with opened(arena) as gateway:
        yield gateway


def test_one_program_forks_all_stand_ins(gateway: Gateway, arena: Arena, tmp_path_factory: Any) -> None:
    (program,) = descendants()
    assert gateway.at_once == 16
    folder = tmp_path_factory.mktemp("s")
    stand_ins = [StandIn(gateway) for _ in range(3)]
    assert [one.parent for one in stand_ins] == [program] * 3
    for number, one in enumerate(stand_ins):
        (folder / str(number)).mkdir()
        assert one.waits(arena, str(folder / str(number)))
    for one in stand_ins:
        one.end()
    assert list(descendants()) == [program]


def test_one_that_nobody_tells_anything_leaves_quietly(
    capfd: pytest.CaptureFixture[str], gateway: Gateway
) -> None:
    """Others that run do not hold its pipe."""
    first, second = StandIn(gateway), StandIn(gateway)
    first.pipe.close()
    assert readable([first.child.descriptor], SECONDS)
    assert first.child.death()[0] == "exited with code 0"
    first.child.release()
    second.child.process.kill()
    assert second.pipe.poll(SECONDS)  # its end was closed in the gateway, too
    second.end()
    gateway.close()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_when_the_gateway_is_gone_stand_ins_go_on_and_new_ones_are_programs(
    number: signal.Signals, gateway: Gateway, arena: Arena, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if number == signal.SIGSTOP:
        monkeypatch.setattr("fastq_loader.workers.zygote._ANSWER", 0.1)
    (program,) = descendants()
    old = StandIn(gateway)
    os.kill(program, number)
    new = StandIn(gateway)
    assert new.parent == os.getpid()
    assert new.waits(arena, str(tmp_path))
    assert old.child.process.is_alive()
    assert program not in descendants()
    old.end()
    new.end()


def test_a_signal_between_a_request_and_its_descriptor_comes_after_them(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    (program,) = descendants()
    send = reduction.send_handle

    def interrupted(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGUSR1)
        send(*arguments)

    def interrupt(*_: object) -> None:
        raise KeyError("interrupted")

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        monkeypatch.setattr(reduction, "send_handle", interrupted)
        with pytest.raises(KeyError):
            StandIn(gateway)
    finally:
        monkeypatch.undo()
        signal.signal(signal.SIGUSR1, before)
    one = StandIn(gateway)
    assert one.parent == program
    one.end()


def test_without_process_descriptors_each_is_a_program(
    arena: Arena, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "has_pidfd", lambda: False)
    with opened(arena) as gateway:
        assert not descendants()
        assert gateway.at_once == cores()
        one = StandIn(gateway)
        assert one.parent == os.getpid()
        assert one.waits(arena, str(tmp_path))
        one.end()


def test_in_a_forked_copy_of_the_consumer_it_is_left_alone(gateway: Gateway) -> None:
    def leave() -> None:
        gateway.forget()
        multiprocessing.util._exit_function()  # type: ignore[attr-defined]

    assert end_of(fork(leave)) == 0
    StandIn(gateway).end()


def test_what_is_forked_has_neither_torch_nor_ray_and_no_second_thread() -> None:
    code = f"{module._CODE}print(*os.listdir('/proc/self/task'), *sys.modules)"
    command = [sys.executable, "-c", code, fastq_loader.__path__[0], *sys.path]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert {"fastq_loader.remote.stand_in", "zmq", "numpy"} < set(output)
    assert not {"torch", "ray", "pandas"} & set(output)
    assert len([word for word in output if word.isdigit()]) == 1


# ---- programs -----------------------------------------------------------------------------------------


def run(sentinel: int) -> int:
    """A program that ends when it is told to."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[sentinel])
    process.returncode = 0  # it is multiprocessing's to wait for
    return process.pid


def test_a_program_is_a_process_like_any_other() -> None:
    child = Child(LaunchedProcess(lambda: Program(run)))
    child.start()
    assert child.process.is_alive()
    assert child.process.daemon
    assert readable([child.descriptor, child.process.sentinel], 0) == []
    child.kill()
    assert readable([child.process.sentinel], 5)
    assert child.death()[0].startswith("was killed by SIGKILL")
    child.release()


def test_one_that_cannot_be_started_leaves_nothing() -> None:
    def fail(sentinel: int) -> int:
        raise OSError("processes are used up")

    child = Child(LaunchedProcess(lambda: Program(fail)))
    with pytest.raises(OSError, match="used up"):
        child.start()
    child.release()
