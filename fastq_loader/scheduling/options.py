"""What a user says about who loads which batch: `schedule=`.

Pure. The two classes are stored by the loader as they were given; `read_schedule` also takes their short
forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastq_loader.errors import is_int

#: Batches. The table of claims has room for twice as many, and for each of the workers.
WIDEST_WINDOW = 14_335


@dataclass(frozen=True)
class Schedule:
    """What both schedules have in common: `window`, the batches that may be asked for and not handed out.

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
        TypeError, ValueError: `window` or `save_generators` is not such a value.
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
    `worker_init_fn` seeds of these three has no effect; generators that it makes for the dataset's own use
    stay each worker's own. The base seed is drawn for every iteration, also with persistent workers.

    An iterable dataset is read as in torch, because each worker has a part of it to itself: its batches are
    seeded one by one, and depend on the number of workers.

    Args:
        window: as for `RoundRobin`. None is `prefetch_factor + 1` batches for each worker and, while the next
            batch is late and workers would idle, up to 16 times `prefetch_factor` for each, or 1 GiB (or a
            sixteenth of the machine's memory, if that is less); 14,335 at most.
    """


_SHORT_FORMS: dict[str, type[Schedule]] = {"round_robin": RoundRobin, "dynamic": Dynamic}


def read_schedule(schedule: Any) -> Schedule:
    """What `schedule=` means.

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
