"""What the consumer and a stand-in tell each other besides tasks and answers: a closed set of messages.

They travel over a pipe between the two, which nobody else has. Imports no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from fastq_loader.memory.blocks import Extents
from fastq_loader.remote.encryption import Tls
from fastq_loader.remote.link import Address


class Told(NamedTuple):
    """The first message: what a stand-in is to do.

    Attributes:
        worker, generation: the number of the worker that it is, and how many had it before.
        folder: where it binds its socket.
        space: see `workers.config.Setup`.
        consumer: process id of the consumer.
        token: the pool's.
        arena: descriptor of the memfd, with its length and whether it is mapped as a whole.
        traffic: descriptor of the words that count bytes; see there.
        workers: of the pool.
        shared_tasks, for_device: see `workers.config.Plan`.
        tls: encrypts connections, or None.
    """

    worker: int
    generation: int
    folder: str
    space: Extents | None
    consumer: int
    token: bytes
    arena: int
    arena_length: int
    arena_whole: bool
    traffic: int
    workers: int
    shared_tasks: bool
    for_device: bool
    tls: Tls | None = None


class Place(NamedTuple):
    """Somewhere where a worker may run.

    Attributes:
        number: no other place of the pool has it.
        address: of the host there.
        node: what that machine is called.
        environment: variables for the worker, see `Request`.
    """

    number: int
    address: Address
    node: str
    environment: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it


class NoPlace(NamedTuple):
    """A place is gone, and with it the far worker. To a stand-in that has not had this place: there is none,
    and none will come.

    Attributes:
        number: see `Place`.
        why: in words.
    """

    number: int
    why: str


class Waiting(NamedTuple):
    """The stand-in waits for a place. `why`: the one before is of no use; "" at first."""

    why: str = ""


class Up(NamedTuple):
    """The far worker is up, with this process id there."""

    pid: int


class Dying(NamedTuple):
    """The stand-in is about to exit, because its far worker is lost or was not to be had."""

    why: str
