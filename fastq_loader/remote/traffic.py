"""How many bytes have come over the network: a word of shared memory for each worker of a pool.

Each word has one writer, the stand-in that has the worker's number now; its successor goes on with it. The
consumer reads all of them when it is asked for statistics, and at no other time. So a batch costs one
addition, and nothing in the consumer. Imports no torch.
"""

from __future__ import annotations

import os

from fastq_loader.system import calls

_WORD = 8


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


def create(workers: int) -> int:
    """A descriptor of memory for the words of a pool.

    Raises:
        OSError: descriptors or memory are used up.
    """
    fd = calls.memfd_create("fastq_loader traffic")
    os.ftruncate(fd, workers * _WORD)
    return fd
