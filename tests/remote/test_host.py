"""A host and its far workers: whom it lets in, what it is told, and when each ends; proxies are played."""

from __future__ import annotations

import base64
import os
import pickle
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fastq_loader.ipc.decoding import decode_for_consumer
from fastq_loader.ipc.messages import BATCH, Answer, Epoch, Stop, Task, encode
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.blocks import FREE, SMALLEST
from fastq_loader.packing.pack import Packer
from fastq_loader.remote import connection as connections
from fastq_loader.remote import host_process
from fastq_loader.remote.connection import (
    LONGEST,
    MESSAGE,
    WELCOME,
    Address,
    Connection,
    Lost,
    Refused,
    Request,
    connect,
)
from fastq_loader.remote.far_worker import ProxySocket, SentBlocks
from fastq_loader.remote.host_process import actor_class
from tests.conftest import descendants, run_script, wait_until
from tests.support import certificates
from tests.support.forking import end_of, fork
from tests.support.invariants import states
from tests.support.pair import TOKEN
from tests.support.worker_setup import host_spec

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd"),
]

SECONDS = 30  # against hanging


def slow(index: int) -> int:
    time.sleep(60)
    return index


class Asked:
    def __getitem__(self, index: Any) -> Any:
        if index == "CUDA_VISIBLE_DEVICES":
            return "devices: " + os.environ[index]
        return slow(index) if index == "slow" else index


class Host:
    """A host that is started here, with its `process` and places."""

    def __init__(self, dataset: Any = None, **fields: Any) -> None:
        self.spec = pickle.dumps(replace(host_spec(dataset or Asked()), **fields))
        self.places: dict[int, socket.socket] = {}
        host_process.hosts.clear()
        self.address = Address("127.0.0.1", 0)
        self.first = self.place()
        (self.process,) = host_process.hosts

    def place(self, **environment: str) -> int:
        mine = str(id(self))
        place, port, number = host_process.attach(self.spec, "127.0.0.1", [0], mine, environment)
        self.places[number] = place
        self.address = Address("127.0.0.1", port)
        return number

    def connect(self, number: int | None = None) -> tuple[Connection, int]:
        """The proxy of a worker at that place, or a new one."""
        request = Request(self.place() if number is None else number, False)
        connection, frame = connect(self.address, TOKEN, request, WELCOME, MESSAGE)
        return connection, int(frame.payload)

    def report(self, number: int) -> tuple[int, bool, str]:
        pid, alive, text = connections.ask(self.address, TOKEN, Request(number, True), None, SECONDS)
        return pid, alive, text

    def close(self) -> None:
        for place in self.places.values():
            place.close()
        self.process.wait(SECONDS)


@pytest.fixture(scope="module")
def shared() -> Iterator[Host]:
    host = Host()
    yield host
    host.close()


@pytest.fixture
def host(shared: Host) -> Iterator[Host]:
    """One for all tests, each of which has places of its own."""
    yield shared
    for number in set(shared.places) - {shared.first}:
        shared.places.pop(number).close()
    assert wait_until(lambda: not descendants(shared.process.pid), SECONDS)


def tell(connection: Connection, *messages: Any) -> None:
    for message in messages:
        connection.send(MESSAGE, encode(message))


def test_a_worker_for_each_connection_answers_and_ends_when_it_is_told(host: Host) -> None:
    first, pid = host.connect(one := host.place())
    second, other = host.connect(two := host.place())
    assert {pid, other} <= descendants(host.process.pid).keys()
    links = [os.readlink(f"/proc/{other}/fd/{fd}") for fd in os.listdir(f"/proc/{other}/fd")]
    assert sum(link.startswith("socket:") for link in links) == 1, "what is others' would stay open with it"
    for connection in (first, second):
        tell(connection, Epoch(1, None), Task(1, 0, 0, 7, (), ()))
        assert connection.receive() is not None
    tell(first, Stop())
    with pytest.raises(Lost):
        first.receive()
    assert host.report(one) == (pid, False, "exited with code 0")
    assert host.report(two)[:2] == (other, True)
    for connection in (first, second):
        connection.close()
    assert wait_until(lambda: not descendants(host.process.pid), SECONDS), "its proxy is gone"


def test_a_worker_ends_with_its_place(host: Host) -> None:
    connection, pid = host.connect(place := host.place())
    host.places.pop(place).close()
    with pytest.raises(Lost):
        connection.receive()
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"), SECONDS)
    assert host.report(place) == (0, False, ""), "where the place came from it is known why"
    with pytest.raises(Refused, match="its place is gone"):
        host.connect(place)
    connection.close()


def test_another_version_is_refused_with_what_differs() -> None:
    host = Host(versions={"torch": "0.1"})
    with pytest.raises(Refused, match=r"it has .*'torch': '2.*, and the consumer \{'torch': '0.1'\}"):
        host.connect(host.first)
    host.close()


def test_silence_is_refused_in_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import fastq_loader.remote.connection as c; c.PATIENCE = 0.1")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    host = Host()
    with socket.create_connection(host.address, SECONDS) as stranger:
        assert stranger.recv(1) == b""
    host.close()


@pytest.mark.parametrize("how", ["killed", "closed"])
def test_with_it_its_workers_end(how: str) -> None:
    host = Host()
    connection, pid = host.connect(host.first)
    assert pid in descendants(host.process.pid)
    tell(connection, Epoch(1, None), Task(1, 0, 0, "slow", (), ()))
    if how == "killed":
        host.process.kill()
    else:
        host.close()
    with pytest.raises(Lost):
        connection.receive()
    assert wait_until(lambda: not os.path.exists(f"/proc/{pid}"), SECONDS)
    connection.close()
    host.close()


def test_a_worker_has_the_variables_of_its_place(host: Host) -> None:
    connection, _ = host.connect(host.place(CUDA_VISIBLE_DEVICES="3"))
    tell(connection, Epoch(1, None), Task(1, 0, 0, "CUDA_VISIBLE_DEVICES", (), ()))
    frame = connection.receive()
    assert b"devices: 3" in frame.payload
    connection.close()


@pytest.mark.skipif(not certificates.AVAILABLE, reason="there is no program openssl")
def test_with_tls_only_a_certificate_of_the_authority_is_let_in(tmp_path: Path) -> None:
    tls, others = certificates.make_tls(tmp_path), certificates.make_tls(tmp_path, "others")
    host = Host(tls=tls)
    request = Request(host.first, False)
    for wrong in (None, others):
        with pytest.raises(Lost):
            connect(host.address, TOKEN, request, WELCOME, tls=wrong)
    connection, _ = connect(host.address, TOKEN, request, WELCOME, MESSAGE, tls=tls)
    tell(connection, Epoch(1, None), Task(1, 0, 0, 1, (), ()))
    assert connection.receive() is not None
    assert connections.ask(host.address, TOKEN, Request(host.first, True), tls, SECONDS)[1]
    connection.close()
    host.close()


class Opened:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __getitem__(self, index: Any) -> Any:
        return index

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with self.path.open("a") as file:
            file.write("opened ")


def test_all_places_of_a_machine_share_one_host_that_opens_the_dataset_once(tmp_path: Path) -> None:
    host = Host(Opened(tmp_path / "log"))
    connected = [host.connect() for _ in range(3)]
    assert {pid for _, pid in connected} == descendants(host.process.pid).keys()
    assert host_process.hosts == [host.process]
    assert (tmp_path / "log").read_text() == "opened "
    for connection, _ in connected:
        connection.close()
    host.close()


def test_one_that_does_not_get_up_is_told_of(capfd: Any) -> None:
    host_process.hosts.clear()
    with pytest.raises(OSError, match="ended before it was up"):
        host_process.attach(b"no pickle", "127.0.0.1", [0], "", {})
    host_process.hosts[0].wait(SECONDS)


def test_an_actor_needs_neither_this_package_nor_torch_before_it_looks_for_a_place() -> None:
    cloudpickle = pytest.importorskip("cloudpickle")
    sent = base64.b64encode(cloudpickle.dumps(actor_class()))
    result = run_script(
        f"""
        import base64, pickle, sys
        pickle.loads(base64.b64decode({sent!r}))()
        print(sorted({{"fastq_loader", "torch", "ray"}} & set(sys.modules)))
        """
    )
    assert result[:3] == (0, "[]\n", "")


ANSWER = Answer(1, 0, 0, BATCH, 0, 0, (), (), None)
TASK = Task(1, 0, 0, [1, 2], (), ())


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


def test_only_the_bytes_of_a_batch_are_sent_and_each_segment_says_how_many(scene: Scene) -> None:
    image = torch.arange(SMALLEST, dtype=torch.int32)
    scene.load([image[100:], {1, 2}, "text"])
    handle, (packet, large) = scene.receive()
    assert handle.segments == ((0, len(packet), len(packet)), (0, len(large), 0))
    assert large == image[100:].numpy().tobytes()
    assert TOKEN in packet, "what is pickled is sealed"
    scene.load([1, torch.ones(3)])
    handle, parts = scene.receive()
    assert (handle.segments, parts) == ((), [])
    assert handle.packet


def test_blocks_serve_the_next_task_when_their_bytes_were_sent(scene: Scene) -> None:
    for at in range(20):
        scene.load(torch.full((3 * SMALLEST,), at, dtype=torch.uint8))
        _, (part,) = scene.receive()
        assert part == bytes([at]) * 3 * SMALLEST
        assert wait_until(lambda: len(scene.blocks.sent) == 1, SECONDS)
    assert scene.blocks._kept.grown == 1
    scene.blocks.begin(())
    scene.blocks.finish(())
    assert scene.states() == {FREE}


def test_what_is_on_its_way_is_not_written_to(scene: Scene) -> None:
    """Nothing is received meanwhile; two batches fit into what waits and what is on its way."""
    nbytes = 64 * SMALLEST
    for at in range(2):
        scene.load(torch.full((nbytes,), at, dtype=torch.uint8))
    assert scene.blocks._kept.grown == 2
    for at in range(2):
        _, (part,) = scene.receive()
        assert part == bytes([at]) * nbytes


def test_what_does_not_fit_raises_and_frees_its_blocks(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LONGEST, MESSAGE, 2000)
    with pytest.raises(ValueError, match="plain values do not fit"):
        scene.load([torch.zeros(SMALLEST), "x" * 3000])
    scene.socket.send(ANSWER)
    assert scene.receive() == (None, [])
    scene.blocks.begin(())
    scene.blocks.finish(())
    assert scene.states() == {FREE}


def test_messages_come_in_their_order_also_after_a_look_for_the_stop(scene: Scene) -> None:
    assert scene.socket.receive(block=False) is None
    assert not scene.socket.told_to_stop()
    said = [Epoch(1, None, 3), TASK, Stop()]
    for message in said:
        scene.tell(message)
    assert scene.socket.told_to_stop()
    assert [scene.socket.receive(block=True) for _ in said] == said


def test_a_child_of_the_dataset_that_comes_back_leaves(scene: Scene) -> None:
    def use_it() -> None:
        try:
            scene.socket.send(ANSWER)
        except SystemExit:
            os._exit(9)

    assert end_of(fork(use_it)) == 9
