"""Schedules (`schedule=`: which worker loads which batch), and the window of batches in flight.

Pure. The loader stores schedules as the user passed them; `read_schedule` also accepts their short forms.

A fixed window is torch's: batches that wait behind a late one fill it, and the workers stop. A window that
may widen keeps them busy: while the consumer waits for the next batch, the ready ones behind it do not count,
up to a number of batches and of bytes. In the next epoch the window has its least size again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fastq_loader.errors import is_int

#: In batches. The claim table has room for twice as many, and for each of the workers.
WIDEST_WINDOW = 14_335


@dataclass(frozen=True)
class Schedule:
    """Base class of schedules. `window`: limit of batches that are requested and not delivered.

    Raises:
        TypeError, ValueError: `window` is not a number of batches in its range.
    """

    window: int | None = None
    save_generators = False

    def __post_init__(self) -> None:
        if self.window is not None and not is_int(self.window):
            raise TypeError(f"{self}: window must be a number of batches, or None")
        if self.window is not None and not 1 <= self.window <= WIDEST_WINDOW:
            raise ValueError(f"{self}: window must be from 1 to {WIDEST_WINDOW} batches, or None")
        if not isinstance(self.save_generators, bool):
            raise TypeError(f"{self}: save_generators must be True or False")


@dataclass(frozen=True)
class RoundRobin(Schedule):
    """Worker k mod N loads batch k, as in torch, and each worker has one sequence of random numbers.

    Args:
        window: limit of batches that are requested and not delivered, from 1 to 14,335; each takes memory.
            None is `prefetch_factor` for each worker, as in torch. A larger window lets workers run further
            past a slow batch. Without workers it has no effect.
        save_generators: send the states of the worker's generators (torch's, `random`, numpy's, and
            those that dataset and collate function hold in attributes, and in containers of up to 100
            members, three levels deep) with each batch, so that `state_dict()` contains them and a resumed
            epoch draws the same random numbers. About 15 kB and 0.1 ms for each batch. A warning says if not
            all that they hold was searched.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.

    >>> DataLoader(range(8), num_workers=2, schedule=RoundRobin(window=8)).schedule
    RoundRobin(window=8, save_generators=False)
    """

    save_generators: bool = False


#: The schedule of a StatefulDataLoader that was given none.
LIKE_TORCHDATA = RoundRobin(save_generators=True)


@dataclass(frozen=True)
class Dynamic(Schedule):
    """Any worker takes the next batch as soon as it is free, and every batch has its own random numbers.

    Before every batch torch's CPU generator, `random`, numpy's global generator and `worker_info.seed` are
    seeded from the iteration's base seed and the batch's number. Batches are then bit-identical for any
    number of workers (also 0, where the consumer's generators are restored after each batch), any timing and
    start method, with persistent workers or without, and after a worker's death; the epochs differ. Seeding
    these three in `worker_init_fn` has no effect. Each worker draws from its own copy of a generator that the
    dataset has for itself, which the hint `PrivateGenerators` names. The order of the epoch after one that
    was broken off is the same, too, unless a user's sampler draws for each index from a global generator, or
    from one that is not its attribute. The base seed is drawn for every iteration, also with persistent
    workers.

    An iterable dataset is read as in torch, because each worker has its own part of it: its batches are
    seeded one by one, and depend on the number of workers.

    Args:
        window: as for `RoundRobin`. None is `prefetch_factor + 1` batches for each worker and, while the next
            batch is late and workers would idle, up to 16 times `prefetch_factor` for each, or 1 GiB (or a
            sixteenth of the machine's memory, if that is less); 14,335 at most.

    Raises:
        TypeError, ValueError: an argument has a wrong type, or is out of range.

    >>> loader = DataLoader(torch.arange(8), 2, shuffle=True, num_workers=2, schedule=Dynamic())
    >>> sorted(torch.cat(list(loader)).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
    """


_SHORT_FORMS: dict[str, type[Schedule]] = {"round_robin": RoundRobin, "dynamic": Dynamic}


def read_schedule(schedule: Any) -> Schedule:
    """Read and check the argument `schedule=`.

    Raises:
        ValueError: it is a string, but not a short form.
        TypeError: it is not a schedule.
    """
    if isinstance(schedule, Schedule):
        return schedule
    if isinstance(schedule, str) and schedule in _SHORT_FORMS:
        return _SHORT_FORMS[schedule]()
    raise (ValueError if isinstance(schedule, str) else TypeError)(
        f"schedule={schedule!r} is unknown: use 'round_robin', 'dynamic', RoundRobin(...) or Dynamic(...)"
    )


#: A window widens on its own up to 16 times `prefetch_factor` per worker, 1 GiB, and 1/16 of the memory.
_WIDEST, _WIDEST_BYTES, _WIDEST_SHARE = 16, 1 << 30, 16
#: Tasks sent in one message, at most, if few workers prefetch much.
_TOGETHER = 16


@dataclass
class Window:
    """Limit of the batches in flight.

    Attributes:
        least: smallest size in batches, at least 1.
        widest: size in batches up to which it grows on its own; not below `least`.
        budget: bytes of shared memory up to which it grows.
        group: number of batches that are requested together, to be sent in one message, once there is room.
        size: present size in batches.
        widens: whether it may grow.
        closed: whether the sampler is exhausted.
    """

    least: int
    widest: int = 0
    budget: int = 0
    group: int = 1
    size: int = field(init=False)
    widens: bool = field(init=False)
    closed: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.size = self.least
        self.widest = max(self.widest, self.least)
        self.widens = self.widest > self.least

    @classmethod
    def of(
        cls, schedule: Schedule, *, workers: int, prefetch: int, iterable: bool, memory_bytes: int
    ) -> Window:
        """Create the window of a schedule.

        Args:
            schedule: the schedule.
            workers: number of workers.
            prefetch: number of batches that each works ahead.
            iterable: each worker has its own part of the dataset, and no other can take over its batches.
            memory_bytes: the machine's memory.
        """
        fixed, ahead = schedule.window, prefetch * workers
        if not isinstance(schedule, Dynamic) or iterable:
            return cls(ahead if fixed is None else fixed)
        if fixed is not None:
            # While a group of batches is requested, every worker still has one in work and one queued.
            return cls(fixed, group=min(max(fixed - 2 * workers, 1), workers))
        budget = min(_WIDEST_BYTES, memory_bytes // _WIDEST_SHARE)
        widest = min(_WIDEST * ahead, WIDEST_WINDOW)
        group = max(workers, min(ahead // 4, _TOGETHER))
        return cls(min(ahead + workers, WIDEST_WINDOW), widest, budget, group)

    def reach(self, batch_bytes: float) -> int:
        """Size in batches up to which it grows, if each takes `batch_bytes` of shared memory."""
        if batch_bytes * self.widest <= self.budget:
            return self.widest
        return max(self.least, int(self.budget / batch_bytes))

    def room(self, under_way: int, unanswered: int, batch_bytes: float) -> int:
        """Number of further batches to request when the consumer is about to sleep because the next one is
        late.

        Args:
            under_way: batches requested and not delivered.
            unanswered: tasks without an answer yet.
            batch_bytes: shared memory of a batch.
        """
        more = self.least - unanswered
        if self.closed or more <= 0:
            return 0
        now = max(self.size, under_way)
        return max(min(now + more, self.reach(batch_bytes)) - now, 0)

    def widen_to(self, under_way: int) -> None:
        """Widen the window if more batches are under way than its size, now that one was requested."""
        if self.size < under_way <= self.widest:
            self.size = under_way
