"""The reorder window: how many batches may be asked for and not handed out, all in all.

Pure. A fixed window is torch's: batches that wait behind a late one fill it, and the workers stop. One that
may widen goes by what the workers still have to do: while the consumer waits for the next batch, those that
are ready behind it do not count, up to a number of batches and of bytes. When the consumer need not wait any
more, the window shrinks back to its least, slowly, because the next late batch is seldom far.
"""

from __future__ import annotations

from typing import NamedTuple

from fastq_loader.scheduling.options import WIDEST_WINDOW, Dynamic, Schedule

#: A window widens on its own up to 16 times what the workers prefetch, 1 GiB, and 1/16 of the memory.
_WIDEST, _WIDEST_BYTES, _WIDEST_SHARE = 16, 1 << 30, 16
#: Of few workers that prefetch much, so many tasks go out in one message.
_TOGETHER = 16
#: After as many batches as this many windows hold, none of them late, it gives up a quarter of its growth.
_CALM_WINDOWS = 4


class WindowLimits(NamedTuple):
    """How wide a window may be.

    Attributes:
        least: in batches, at least 1.
        widest: in batches, up to which it grows on its own.
        budget_bytes: of shared memory, up to which it grows.
        group: batches that are asked for together, to be sent in one message.
    """

    least: int
    widest: int
    budget_bytes: int = 0
    group: int = 1

    @classmethod
    def of(
        cls, schedule: Schedule, *, workers: int, prefetch: int, iterable: bool, memory_bytes: int
    ) -> WindowLimits:
        """What a schedule comes to.

        Args:
            workers: how many there are.
            prefetch: batches that each works ahead.
            iterable: each worker has its own part of the dataset, and no other can take over its batches.
            memory_bytes: of the machine.
        """
        fixed, ahead = schedule.window, prefetch * workers
        if not isinstance(schedule, Dynamic) or iterable:
            size = ahead if fixed is None else fixed
            return cls(size, size)
        if fixed is not None:
            # While a group of batches is asked for, every worker still has one at work and one to come.
            return cls(fixed, fixed, 0, min(max(fixed - 2 * workers, 1), workers))
        budget_bytes = min(_WIDEST_BYTES, memory_bytes // _WIDEST_SHARE)
        widest = min(_WIDEST * ahead, WIDEST_WINDOW)
        group = max(workers, min(ahead // 4, _TOGETHER))
        return cls(min(ahead + workers, WIDEST_WINDOW), widest, budget_bytes, group)


class Window:
    """How many batches may be under way.

    Args:
        least: in batches, at least 1.
        widest: up to which it grows; None: it stays at `least`.
        budget: bytes of shared memory up to which it grows.
        group: batches that are asked for together, to be sent in one message.

    Attributes:
        size: in batches, now.
        widens: whether it may grow.
        closed: the sampler has nothing more.
    """

    def __init__(self, least: int, widest: int | None = None, budget: int = 0, group: int = 1) -> None:
        self.size = self.least = least
        self.group = group
        self.widest = least if widest is None else max(widest, least)
        self.budget = budget
        self.widens = self.widest > self.least
        self._calm = 0  # batches delivered since it last changed
        self.closed = False

    def begin_epoch(self) -> None:
        self.closed = False

    def close(self) -> None:
        """The sampler has nothing more, and is not asked again in this epoch: to ask for every free place at
        every batch would be 100 million calls while a window of 14,335 batches empties."""
        self.closed = True

    def room(self, under_way: int, unanswered: int, batch_bytes: float) -> int:
        """How many more batches to ask for, now that the consumer is about to sleep because the next one is
        late.

        Args:
            under_way: batches asked for and not handed out; more than `size` where it has just shrunk.
            unanswered: tasks that the workers have still to answer.
            batch_bytes: what a batch takes of the shared memory.
        """
        if self.closed:
            return 0
        now = max(self.size, under_way)
        wider = min(now + self.least - unanswered, self.widest)
        if batch_bytes > 0:
            wider = min(wider, int(self.budget / batch_bytes))
        return max(wider - now, 0)

    def widen_to(self, under_way: int) -> None:
        """A batch was asked for, and so many are under way now: more than the window is wide widens it."""
        if self.size < under_way <= self.widest:
            self.size = under_way
            self._calm = 0

    def delivered(self, under_way: int) -> int:
        """A batch was handed out. Returns how many to ask for now; 0 until it is a group, and when the
        sampler has nothing more.

        Args:
            under_way: batches asked for and not handed out.
        """
        if self.size != self.least:
            self._calm += 1
            if self._calm >= _CALM_WINDOWS * self.size:
                self._calm = 0
                self.size -= -(-(self.size - self.least) // 4)
        room = self.size - under_way
        return room if room >= self.group and not self.closed else 0
