"""A far worker: whom it lets in, what it sends, and when it ends; its proxy is played."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.extras.remote import connection as connections
from fastq_loader.extras.remote import far_worker as module
from fastq_loader.extras.remote.connection import (
    LONGEST,
    MESSAGE,
    WELCOME,
    Address,
    Connection,
    Lost,
    Request,
    ask_for_stacks,
    connect,
)
from fastq_loader.extras.remote.far_worker import ProxySocket, SentBlocks
from fastq_loader.ipc.messages import BATCH, Answer, BeginEpoch, Stop, Task, decode_for_consumer, encode
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.blocks import FREE, SMALLEST
from fastq_loader.packing.pack import Packer
from fastq_loader.workers.zygote import Zygote
from tests.conftest import wait_until
from tests.support.far_workers import Far, far_zygote, warm
from tests.support.invariants import states
from tests.support.pair import TOKEN
from tests.support.worker_setup import far_setup

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("warm_far_workers"),
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

SECONDS = 30  # against hanging
EPOCH, TASK = BeginEpoch(1, None), Task(1, 0, 0, 7, ())


def slow(index: int) -> int:
    time.sleep(60)
    return index


class Asked:
    def __getitem__(self, index: Any) -> Any:
        if index == "slow":
            return slow(index)
        if isinstance(index, str):  # the path of a file for the process id of a child
            if not (child := os.fork()):
                time.sleep(2 * SECONDS)
                os._exit(0)
            Path(index).write_text(str(child))
        return index


class Started:
    """A far worker that is started here, from what this process has imported."""

    def __init__(self, zygote: Zygote | None = None, **fields: Any) -> None:
        self.far = Far(zygote or warm[0], pickle.dumps(replace(far_setup(Asked()), **fields)))
        self.address = Address("127.0.0.1", self.far.started())

    def connect(self) -> Connection:
        """Its proxy's connection."""
        return connect(self.address, TOKEN, Request(False), WELCOME, MESSAGE)[0]

    def stacks(self) -> str:
        return ask_for_stacks(self.address, TOKEN, SECONDS)

    def end(self) -> str:
        """How it has ended by itself."""
        assert wait_until(lambda: self.far.child.process.exitcode is not None, SECONDS)
        return self.far.child.death()[0]


@pytest.fixture
def started() -> Iterator[Started]:
    started = Started()
    yield started
    started.far.close()


@contextmanager
def patched(name: str, value: Any) -> Iterator[Started]:
    """One that was started with another constant."""
    where = module if hasattr(module, name) else connections
    with patch.object(where, name, value):
        zygote = far_zygote()
    started = Started(zygote)
    yield started
    started.far.close()
    zygote.close()


def tell(connection: Connection, *messages: Any) -> None:
    for message in messages:
        connection.send(MESSAGE, encode(message))


def test_it_answers_one_proxy_and_ends_when_it_is_told(started: Started) -> None:
    connection = started.connect()
    with pytest.raises(Lost):
        started.connect()
    tell(connection, EPOCH, TASK)
    assert connection.receive() is not None
    tell(connection, Stop())
    with pytest.raises(Lost):
        connection.receive()
    assert started.end() == "exited with code 0"
    connection.close()


@pytest.mark.parametrize("index", [7, "slow"])
def test_it_ends_with_its_proxy_also_in_the_middle_of_a_batch(index: Any) -> None:
    with patched("_OUTLIVES", SECONDS if index == 7 else 0.3) as started:
        connection = started.connect()
        tell(connection, EPOCH, TASK._replace(index=index))
        if index == 7:
            assert connection.receive() is not None
        else:
            assert wait_until(lambda: "in slow" in started.stacks(), SECONDS)
        connection.close()
        assert started.end() == f"exited with code {0 if index == 7 else 1}"


@pytest.mark.parametrize("has_a_proxy", [False, True])
def test_it_ends_quietly_at_an_interrupt(started: Started, has_a_proxy: bool) -> None:
    """Ctrl-C reaches all processes of a terminal; the consumer shows its traceback."""
    connection = started.connect() if has_a_proxy else None
    waits = "in receive" if has_a_proxy else "in get"
    # Other threads wait, too: for that of the worker's `run`.
    assert wait_until(
        lambda: any("in _become" in one and waits in one for one in started.stacks().split("hread 0x")),
        SECONDS,
    )
    os.kill(started.far.child.pid, signal.SIGINT)
    assert started.end() == "exited with code 0"
    if connection is not None:
        connection.close()


def test_another_version_is_refused_with_what_differs() -> None:
    with pytest.raises(ProtocolError, match=r"has .*'torch': '2.*, and the consumer {'torch': '0.1'}"):
        Started(versions={"torch": "0.1"})


def test_a_silent_client_is_refused_in_time_but_not_a_silent_proxy() -> None:
    with patched("PATIENCE", 2.0) as started:
        connection = started.connect()
        with socket.create_connection(started.address, SECONDS) as stranger:
            assert stranger.recv(1) == b""
        tell(connection, EPOCH, TASK)
        assert connection.receive() is not None
        connection.close()


def test_a_child_of_the_dataset_does_not_keep_the_connection(started: Started, tmp_path: Path) -> None:
    connection, file = started.connect(), tmp_path / "pid"
    tell(connection, EPOCH, TASK._replace(index=str(file)))
    assert connection.receive() is not None
    started.far.child.process.kill()
    connection.settimeout(SECONDS)
    with pytest.raises(Lost) as caught:
        connection.receive()
    os.kill(int(file.read_text()), signal.SIGKILL)
    assert "timed out" not in str(caught.value)
    connection.close()


ANSWER = Answer(1, 0, 0, BATCH, 0, 0, (), (), None)


class Scene:
    def __init__(self, for_device: bool = False) -> None:
        self.arena = Arena(1)
        self.blocks = SentBlocks(self.arena, for_device)
        self.packer = Packer(self.blocks, TOKEN)
        mine, other = self.ends = socket.socketpair()
        self.socket = ProxySocket(Connection(mine, MESSAGE), self.blocks)
        self.proxy = Connection(other, MESSAGE)

    def load(self, batch: Any) -> None:
        self.blocks.begin(())
        handle, used = self.packer.pack(batch)
        del batch
        handle, used = self.packer.copy_held(handle, used)
        self.blocks.finish(used)
        self.socket.send(ANSWER._replace(handle=handle))

    def receive(self) -> tuple[Any, list[bytes]]:
        frame = self.proxy.receive()
        answer = decode_for_consumer(frame.payload)
        assert isinstance(answer, Answer)
        assert answer.fresh == answer.returned == (), "its blocks are none of the consumer's"
        parts = []
        for _, nbytes, _ in answer.handle.segments if answer.handle else ():
            parts.append(bytearray(nbytes))
            self.proxy.receive_body(memoryview(parts[-1]))
        assert frame.body == sum(map(len, parts))
        return answer.handle, [bytes(part) for part in parts]

    def tell(self, message: Any) -> None:
        self.proxy.send(MESSAGE, encode(message))

    def states(self) -> set[str]:
        return set(states(self.blocks._kept).values())

    def close(self) -> None:
        self.socket.finish()
        for end in self.ends:
            end.close()
        self.arena.retire([])


@pytest.fixture
def scene() -> Iterator[Scene]:
    scene = Scene()
    yield scene
    scene.close()


def test_blocks_that_are_on_their_way_are_not_written_to(scene: Scene) -> None:
    """Nothing is received meanwhile; two batches fit into what waits and what is on its way."""
    nbytes = 64 * SMALLEST
    for at in range(2):
        scene.load(torch.full((nbytes,), at, dtype=torch.uint8))
    assert scene.blocks._kept.grown == 2
    for at in range(2):
        _, (part,) = scene.receive()
        assert part == bytes([at]) * nbytes


def test_a_batch_that_does_not_fit_raises_and_frees_its_blocks(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LONGEST, MESSAGE, 2000)
    with pytest.raises(ValueError, match="plain values do not fit"):
        scene.load([torch.zeros(SMALLEST), "x" * 3000])
    scene.socket.send(ANSWER)
    assert scene.receive() == (None, [])
    scene.blocks.begin(())
    scene.blocks.finish(())
    assert scene.states() == {FREE}
