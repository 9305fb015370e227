"""What the consumer and a stand-in tell each other."""

from __future__ import annotations

from multiprocessing.connection import Pipe
from typing import Any

import pytest

from fastq_loader.remote.control import Dying, NoPlace, Place, Told, Up, Waiting
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
