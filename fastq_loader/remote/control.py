"""What the consumer and a stand-in tell each other besides tasks and answers.

A closed set of messages travels over a pipe between the two, which nobody else has. How many bytes have come
over the network is a word of shared memory for each worker of a pool. Each word has one writer, the stand-in
that has the worker's number now; its successor goes on with it. The consumer reads all of them when it is
asked for statistics, and at no other time. So a batch costs one addition, and nothing in the consumer.
Imports no torch.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from fastq_loader.memory.blocks import Extents
from fastq_loader.remote.link import Address, Tls
from fastq_loader.system import calls

_WORD = 8


class Told(NamedTuple):
    """The first message: what a stand-in is to do.

    Attributes:
        worker, generation: the number of the worker that it is, and how many had it before.
        folder: where it binds its socket.
        space: see `workers.config.Setup`.
        consumer: process id of the consumer.
        token: the pool's.
        arena: descriptor of the memfd, with its length and whether it is mapped as a whole.
        traffic: descriptor of the words that count bytes; see `Traffic`.
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


class Traffic:
    """One process's access to the words.

    Args:
        fd: of the memory, which may be closed then.
        workers: of the pool.

    Raises:
        MemoryError: there is not enough address space.
    """

    def __init__(self, fd: int, workers: int) -> None:
        self._piece = calls.Piece(fd, 0, workers * _WORD)  # it keeps the words mapped
        self._words = calls.view(self._piece.address, workers * _WORD).cast("Q")

    def add(self, worker: int, nbytes: int) -> None:
        """So many bytes have come from a worker. Only its stand-in says so."""
        self._words[worker] += nbytes

    def of(self, worker: int) -> int:
        """Bytes that have come from a worker, and from those that had its number before."""
        return self._words[worker]


def create_traffic(workers: int) -> int:
    """A descriptor of memory for the words of a pool.

    Raises:
        OSError: descriptors or memory are used up.
    """
    fd = calls.memfd_create("fastq_loader traffic")
    os.ftruncate(fd, workers * _WORD)
    return fd
