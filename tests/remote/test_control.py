"""What the consumer and a stand-in tell each other, and the words in which bytes are counted."""

from __future__ import annotations

import os
from multiprocessing.connection import Pipe
from typing import Any

import pytest

from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.remote.control import Dying, NoPlace, Place, Told, Traffic, Up, Waiting, create_traffic
from fastq_loader.remote.link import Address

TOLD = Told(1, 0, "/tmp/f", None, 7, bytes(16), 5, 1 << 20, True, 6, 2, True, False)


@pytest.mark.parametrize(
    "message",
    [
        TOLD,
        TOLD._replace(space=((0, 4096),)),
        Place(1, Address("::1", 80), "node"),
        NoPlace(2, "all are gone"),
        Waiting(),
        Up(7),
        Dying("of it"),
    ],
)
def test_it_arrives_as_it_was_sent(message: Any) -> None:
    one, other = Pipe()
    with one, other:
        one.send(message)
        received = other.recv()
    assert received == message
    assert type(received) is type(message)


@pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")
def test_what_a_stand_in_and_its_successor_count_is_read_by_the_consumer() -> None:
    fd = create_traffic(3)
    here, first, second = (Traffic(fd, 3) for _ in range(3))
    os.close(fd)
    assert [here.of(worker) for worker in range(3)] == [0, 0, 0]
    first.add(1, 5)
    second.add(1, 1 << 40)
    second.add(2, 7)
    assert [here.of(worker) for worker in range(3)] == [0, 5 + (1 << 40), 7]
