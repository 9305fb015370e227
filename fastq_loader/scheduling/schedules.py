"""Schedules (`schedule=`: who loads which batch), and how many batches may be under way.

Pure. The schedules are stored by the loader as they were given; `read_schedule` also takes their short forms.

A fixed window is torch's: batches that wait behind a late one fill it, and the workers stop. One that
may widen goes by what the workers still have to do: while the consumer waits for the next batch, those that
are ready behind it do not count, up to a number of batches and of bytes. When the consumer need not wait any
more, the window shrinks back to its least, slowly, because the next late batch is seldom far.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastq_loader.errors import is_int

#: Batches. The table of claims has room for twice as many, and for each of the workers.
WIDEST_WINDOW = 14_335


@dataclass(frozen=True)
class Schedule:
    """Base class of schedules. `window`: the batches that may be asked for and not handed out.

    Raises:
        TypeError, ValueError: `window` is no such number.
    """

    window: int | None = None

    def __post_init__(self) -> None:
        if self.window is None:
            return
        if not is_int(self.window):
            raise TypeError(f"{self}: window must be a number of batches, or None")
        if not 1 <= self.window <= WIDEST_WINDOW:
            raise ValueError(f"{self}: window must be from 1 to {WIDEST_WINDOW} batches, or None")


@dataclass(frozen=True)
class RoundRobin(Schedule):
    """Batch k is worker k mod N's, as in torch, and each worker has one sequence of random numbers.

    Args:
        window: batches that may be asked for and not handed out, from 1 to 14,335; memory for as many is the
            price. None is `prefetch_factor` for each worker, as in torch. A larger one lets workers run
            further past a slow batch. Without workers it has no effect.
        save_generators: send the states of the worker's generators (torch's, `random`, numpy's, and those
            that dataset and collate function have as attributes) with each batch, so that `state_dict()` has
            them and a resumed epoch draws the same random numbers. About 15 kB and 0.1 ms for each batch.

    Raises:
        TypeError, ValueError: an argument is not such a value.

    >>> DataLoader(range(8), num_workers=2, schedule=RoundRobin(window=8)).schedule
    RoundRobin(window=8, save_generators=False)
    """

    save_generators: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.save_generators, bool):
            raise TypeError(f"{self}: save_generators must be True or False")


@dataclass(frozen=True)
class Dynamic(Schedule):
    """Any worker takes the next batch as soon as it is free, and every batch has its own random numbers.

    Before every batch torch's CPU generator, `random`, numpy's global generator and `worker_info.seed` are
    seeded from the iteration's base seed and the batch's number. The batches are then the same bits for any
    number of workers (also 0, where the consumer's generators are put back after each batch), any timing and
    start method, with persistent workers or without, and after a worker's death; the epochs differ. What
    `worker_init_fn` seeds of these three has no effect; generators that the dataset has for its own use stay
    each worker's own without `reseed`. After an epoch that was broken off the order of the next is the same,
    too; but not where a user's sampler draws for each index from a global generator, or from one that it does
    not have as an attribute. The base seed is drawn for every iteration, also with persistent workers.

    An iterable dataset is read as in torch, because each worker has a part of it to itself: its batches are
    seeded one by one, and depend on the number of workers.

    Args:
        window: as for `RoundRobin`. None is `prefetch_factor + 1` batches for each worker and, while the next
            batch is late and workers would idle, up to 16 times `prefetch_factor` for each, or 1 GiB (or a
            sixteenth of the machine's memory, if that is less); 14,335 at most.
        reseed: seed before every batch also the generators of torch (of the CPU), `random` and numpy that
            dataset and collate function have as attributes, or that objects in these have, when the batch
            begins. A thousand objects are looked at.

    Raises:
        TypeError, ValueError: an argument is not such a value.

    >>> loader = DataLoader(torch.arange(8), 2, shuffle=True, num_workers=2, schedule=Dynamic())
    >>> sorted(torch.cat(list(loader)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """

    reseed: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.reseed, bool):
            raise TypeError(f"{self}: reseed must be True or False")


_SHORT_FORMS: dict[str, type[Schedule]] = {"round_robin": RoundRobin, "dynamic": Dynamic}


def read_schedule(schedule: Any) -> Schedule:
    """Read and check the argument `schedule=`.

    Raises:
        ValueError: it is a string without a meaning.
        TypeError: it is no schedule.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in _SHORT_FORMS:
        return _SHORT_FORMS[schedule]()
    raise (ValueError if isinstance(schedule, str) else TypeError)(
        f"schedule={schedule!r} is unknown: use 'round_robin', 'dynamic', RoundRobin(...) or Dynamic(...)"
    )


#: A window widens on its own up to 16 times what the workers prefetch, 1 GiB, and 1/16 of the memory.
_WIDEST, _WIDEST_BYTES, _WIDEST_SHARE = 16, 1 << 30, 16
#: Of few workers that prefetch much, so many tasks go out in one message.
_TOGETHER = 16
#: After as many batches as this many windows hold, none of them late, it gives up a quarter of its growth.
_CALM_WINDOWS = 4


@dataclass
class Window:
    """How many batches may be under way.

    Attributes:
        least: in batches, at least 1.
        widest: in batches, up to which it grows on its own; not below `least`.
        budget: bytes of shared memory up to which it grows.
        group: batches that are asked for together, to be sent in one message.
        size: in batches, now.
        widens: whether it may grow.
        closed: the sampler has nothing more.
    """

    least: int
    widest: int = 0
    budget: int = 0
    group: int = 1
    size: int = field(init=False)
    widens: bool = field(init=False)
    closed: bool = field(init=False, default=False)
    _calm: int = field(init=False, default=0)  # batches delivered since it last changed

    def __post_init__(self) -> None:
        self.size = self.least
        self.widest = max(self.widest, self.least)
        self.widens = self.widest > self.least

    @classmethod
    def of(
        cls, schedule: Schedule, *, workers: int, prefetch: int, iterable: bool, memory_bytes: int
    ) -> Window:
        """The window of a schedule.

        Args:
            workers: how many there are.
            prefetch: batches that each works ahead.
            iterable: each worker has its own part of the dataset, and no other can take over its batches.
            memory_bytes: of the machine.
        """
        fixed, ahead = schedule.window, prefetch * workers
        if not isinstance(schedule, Dynamic) or iterable:
            return cls(ahead if fixed is None else fixed)
        if fixed is not None:
            # While a group of batches is asked for, every worker still has one at work and one to come.
            return cls(fixed, group=min(max(fixed - 2 * workers, 1), workers))
        budget = min(_WIDEST_BYTES, memory_bytes // _WIDEST_SHARE)
        widest = min(_WIDEST * ahead, WIDEST_WINDOW)
        group = max(workers, min(ahead // 4, _TOGETHER))
        return cls(min(ahead + workers, WIDEST_WINDOW), widest, budget, group)

    def reach(self, batch_bytes: float) -> int:
        """Up to how many batches it grows, where each takes so many bytes of the shared memory."""
        if batch_bytes * self.widest <= self.budget:
            return self.widest
        return max(self.least, int(self.budget / batch_bytes))

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
        more = self.least - unanswered
        if self.closed or more <= 0:
            return 0
        now = max(self.size, under_way)
        return max(min(now + more, self.reach(batch_bytes)) - now, 0)

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
