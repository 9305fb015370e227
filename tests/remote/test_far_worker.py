"""What a host is told, and a far worker's blocks and its end of the connection; its proxy is played."""

from __future__ import annotations

import os
import pickle
import socket
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fastq_loader.ipc.decoding import decode_for_consumer
from fastq_loader.ipc.messages import BATCH, Answer, Epoch, Stop, Task, encode
from fastq_loader.memory.arena import AVAILABLE, Arena
from fastq_loader.memory.blocks import FREE, SMALLEST
from fastq_loader.packing.pack import Packer
from fastq_loader.remote.connection import LONGEST, MESSAGE, Connection
from fastq_loader.remote.far_worker import HostSpec, ProxySocket, SentBlocks
from tests.conftest import wait_until
from tests.support.forking import end_of, fork
from tests.support.pair import TOKEN
from tests.support.worker_setup import host_spec

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

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
        assert frame is not None
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
        return set(self.blocks._pool.states().values())

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
        assert wait_until(lambda: len(scene.blocks.sent) == 1, 5)
    assert scene.blocks._pool.grown == 1
    scene.blocks.begin(())
    scene.blocks.finish(())
    assert scene.states() == {FREE}


def test_what_is_on_its_way_is_not_written_to(scene: Scene) -> None:
    """Nothing is received meanwhile; two batches fit into what waits and what is on its way."""
    nbytes = 64 * SMALLEST
    for at in range(2):
        scene.load(torch.full((nbytes,), at, dtype=torch.uint8))
    assert scene.blocks._pool.grown == 2
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


def test_it_leaves_when_the_proxy_is_gone(scene: Scene) -> None:
    scene.ends[1].close()
    with pytest.raises(SystemExit):
        scene.socket.receive(block=True)


@pytest.mark.processes
def test_a_child_of_the_dataset_that_comes_back_leaves(scene: Scene) -> None:
    def use_it() -> None:
        try:
            scene.socket.send(ANSWER)
        except SystemExit:
            os._exit(9)

    assert end_of(fork(use_it)) == 9


@pytest.mark.processes
def test_an_answer_for_nobody_ends_the_process(scene: Scene) -> None:
    def answer() -> None:
        scene.ends[1].shutdown(socket.SHUT_RDWR)
        scene.socket._send((b"", [], []))

    assert end_of(fork(answer)) == 1


def test_it_arrives_with_what_was_defined_in_a_function() -> None:
    factor = 3
    spec: HostSpec = pickle.loads(pickle.dumps(host_spec(lambda index: factor * index, dynamic=True)))
    plan = spec.setup.plan
    assert plan.payload.open()["dataset"](2) == 6
    assert (spec.setup.token, spec.path) == (TOKEN, tuple(sys.path))
    assert not plan.shared_tasks, "the proxy claims"
    assert TOKEN.hex() not in repr(spec)
    assert {"Python", "torch", "numpy"} < spec.versions.keys()
