"""The claim table, in shared memory: which worker has claimed which shared task.

Runs in the consumer and in the workers; all of them write to the table. A shared task belongs to the worker
that claims it first. The worker need not ask the consumer, which may be in the middle of a training step and
hold the GIL. So no worker idles while there is an unclaimed task.

A word of the table stands for one ticket (an attempt at a batch). It contains the ticket's number and its
owner. To claim a ticket, a process locks the bytes of its slot in the arena's memfd. The kernel releases the
lock when its owner dies: a worker that is killed in the middle of a claim has either written its number or
claimed nothing. The length of the lock identifies the worker, so that one which is stopped in the middle of
a claim can be found. The consumer reads from the table which tasks a dead worker had claimed, and takes tasks
back by claiming them itself.
"""

from __future__ import annotations

import os
from collections import deque

from fastq_loader.ipc.messages import Task
from fastq_loader.system import locks
from fastq_loader.system.unpatched import time

#: Owner of a ticket, in the low bits of its word: 0 is nobody, `worker + 1` a worker, this the consumer.
_CONSUMER = 0xFFFF

_WHO = 16  # bits for the owner; the other 48 last for nine years of a million tickets a second

#: Seconds between two looks at a task that another worker is claiming.
_GLANCE = 50e-6

#: Words at the end of the table, one for the current ticket of each worker. The words before them are claims.
WORKERS = 4096


def slots(words: memoryview) -> int:
    """Number of claims that a table has room for."""
    return len(words) - WORKERS


class Busy(Exception):
    """Another process is claiming this ticket right now."""


class ClaimTable:
    """One process's access to the table.

    Args:
        fd: the arena's memfd; it is opened again here, because a lock belongs to an open file.
        words: the table as 64-bit words: the claims, then one word for each worker.

    Raises:
        OSError: there are no free descriptors.
    """

    def __init__(self, fd: int, words: memoryview) -> None:
        self._fd = locks.open_anew(fd)
        self._words = words
        self._size = slots(words)

    def offer(self, *tickets: int) -> None:
        """Let the workers claim tickets. Only the consumer calls this, and only when nobody can claim or look
        up the previous tickets of their slots any more."""
        for ticket in tickets:
            self._words[ticket % self._size] = ticket << _WHO

    def claim(self, ticket: int, worker: int) -> bool:
        """Claim an offered ticket for `worker`. Returns False if the ticket is taken or was never offered.

        Raises:
            Busy: another process is claiming the ticket.
        """
        return self._claim(ticket, worker + 1)

    def claim_first(self, tasks: deque[Task], worker: int) -> Task | None:
        """Claim the first of these tasks that nobody else has, and remove it, and those before it that others
        have; None without one. A task that another worker is claiming stays: that worker will have claimed it
        in a moment, or dies before. If there are only such tasks, this waits for a moment."""
        at, who = 0, worker + 1
        while at < len(tasks):
            task = tasks[at]
            try:
                claimed = self._claim(task.ticket, who)
            except Busy:
                at += 1
                continue
            del tasks[at]
            if claimed:
                return task
        if tasks:
            time.sleep(_GLANCE)
        return None

    def take_back(self, ticket: int) -> bool:
        """Withdraw a ticket from the workers. Returns False if the ticket is taken or was never offered.

        Raises:
            Busy: a worker is claiming the ticket.
        """
        return self._claim(ticket, _CONSUMER)

    def _claim(self, ticket: int, who: int) -> bool:
        at, word = ticket % self._size, ticket << _WHO
        if self._words[at] != word:
            return False
        if not locks.try_lock(self._fd, at << _WHO, who):
            raise Busy
        try:
            free: bool = self._words[at] == word
            if free:
                self._words[at] = word | who
        finally:
            locks.unlock(self._fd, at << _WHO, who)
        return free

    def claiming(self, ticket: int) -> int | None:
        """The worker that is in the middle of claiming a ticket, or None."""
        who = locks.locked_length(self._fd, ticket % self._size << _WHO)
        return who - 1 if who else None

    def on_offer(self, ticket: int) -> bool:
        """Whether a ticket was offered and is still unclaimed."""
        return self._words[ticket % self._size] == ticket << _WHO

    def holder(self, ticket: int) -> int | None:
        """The worker that has claimed a ticket, or None."""
        word = self._words[ticket % self._size]
        who = word & _CONSUMER
        return who - 1 if word >> _WHO == ticket and who not in (0, _CONSUMER) else None

    def begin(self, worker: int, ticket: int | None) -> None:
        """Record that `worker` starts on a ticket, or has answered it (None)."""
        self._words[self._size + worker] = 0 if ticket is None else ticket + 1

    def word_of(self, worker: int) -> memoryview:
        """The word that `begin` writes, for a worker that writes it itself."""
        return self._words[self._size + worker :][:1]

    def begun(self, worker: int) -> int | None:
        """The ticket that a worker is working on, or died with; None if it has no ticket."""
        word = self._words[self._size + worker]
        return word - 1 if word else None

    def close(self) -> None:
        fd, self._fd = getattr(self, "_fd", -1), -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # Its creator closes it, unless interrupted before.
        self.close()
