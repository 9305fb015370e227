"""Which worker has claimed which shared task: a table in shared memory.

Runs in the consumer and in the workers; all of them write to it. A shared task belongs to the worker that
claims it first. The worker need not ask the consumer, which may be in the middle of a training step and hold
the GIL. So no worker idles while there is an unclaimed task.

A word of the table stands for one ticket (an attempt at a batch). It holds the ticket's number and who has
it. A claim is made under a lock on bytes of the arena's memfd, the slot's. It is an open-file-description
lock (without /proc, one of the process), which the kernel releases when its holder dies: a worker that is
killed in the middle of a claim either has left its name or has claimed nothing. The length of the lock says
whose it is, so a worker that was stopped there can be found. The consumer reads from the table what a dead
worker had claimed, and takes tasks back by claiming them itself.
"""

from __future__ import annotations

import errno
import os
import struct

from fastq_loader.system.calls import UNLOCK as _UNLOCK
from fastq_loader.system.calls import WRITE_LOCK as _WRITE
from fastq_loader.system.calls import conflicting_lock, open_anew, set_lock

#: Who has a ticket, in the low bits of its word: 0 is unclaimed, then come the workers.
_CONSUMER = 0xFFFF

_FLOCK = struct.Struct("hhqqi4x")  # type, whence, start, length, pid

_WHO = 16  # bits of a word; the ticket has the rest, which at a million batches a second is nine years

#: Words at the end of the table for what each worker works on; the others are claims.
WORKERS = 4096


def slots(words: memoryview) -> int:
    """How many claims a table has room for."""
    return len(words) - WORKERS


class Busy(Exception):
    """Another process is claiming this ticket right now."""


class ClaimTable:
    """One process's access to the table.

    Args:
        fd: the arena's memfd; it is opened anew, because a lock belongs to an open file.
        words: the table, 64 bits each: the claims, and then a word for each worker.

    Raises:
        OSError: descriptors are used up.
    """

    def __init__(self, fd: int, words: memoryview) -> None:
        self._fd, self._command = open_anew(fd)
        self._words = words
        self._size = slots(words)

    def offer(self, ticket: int) -> None:
        """Let the workers claim a ticket. Only the consumer offers, and only when the ticket that stood in
        the slot can neither be claimed nor asked for any more."""
        self._words[ticket % self._size] = ticket << _WHO

    def claim(self, ticket: int, worker: int) -> bool:
        """Claim a ticket that was offered, for `worker`; False: it is not unclaimed.

        Raises:
            Busy: another process is claiming it.
        """
        return self._claim(ticket, worker + 1)

    def take_back(self, ticket: int) -> bool:
        """Let no worker claim a ticket any more; False: it is not unclaimed.

        Raises:
            Busy: a worker is claiming it.
        """
        return self._claim(ticket, _CONSUMER)

    def _claim(self, ticket: int, who: int) -> bool:
        at, word = ticket % self._size, ticket << _WHO
        if self._words[at] != word:
            return False
        try:
            set_lock(self._fd, self._command, _FLOCK.pack(_WRITE, 0, at << _WHO, who, 0))
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise Busy from None
            raise
        try:
            free: bool = self._words[at] == word
            if free:
                self._words[at] = word | who
        finally:
            set_lock(self._fd, self._command, _FLOCK.pack(_UNLOCK, 0, at << _WHO, who, 0))
        return free

    def claiming(self, ticket: int) -> int | None:
        """The worker that is in the middle of claiming a ticket; None if none is."""
        mine = _FLOCK.pack(_WRITE, 0, ticket % self._size << _WHO, 1, 0)
        kind, _, _, who, _ = _FLOCK.unpack(conflicting_lock(self._fd, self._command, mine))
        return None if kind == _UNLOCK else who - 1

    def on_offer(self, ticket: int) -> bool:
        """Whether a ticket was offered and is unclaimed."""
        return self._words[ticket % self._size] == ticket << _WHO

    def holder(self, ticket: int) -> int | None:
        """The worker that has claimed a ticket; None if none has."""
        word = self._words[ticket % self._size]
        who = word & _CONSUMER
        return who - 1 if word >> _WHO == ticket and who not in (0, _CONSUMER) else None

    def begin(self, worker: int, ticket: int | None) -> None:
        """`worker` starts to work on a ticket, or has given its answer (None)."""
        self._words[self._size + worker] = 0 if ticket is None else ticket + 1

    def begun(self, worker: int) -> int | None:
        """The ticket that a worker works on, or died at; None if there is none."""
        word = self._words[self._size + worker]
        return word - 1 if word else None

    def close(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Whoever made it closes it, unless an interrupt came before.
        self.close()
