"""The exceptions and warnings of this package, and how their texts show what users handed in.

Pure; runs in the consumer and in workers. What a user's own code raises keeps its own type; the classes here
are for failures of the loader itself. They derive from the type that torch's DataLoader raises in the same
place, so that existing `except` clauses hold.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import warnings
from collections.abc import Collection
from typing import Any


class InvalidTransition(RuntimeError):
    """An event met a batch, worker or block in a state whose transition table does not list it.

    >>> issubclass(InvalidTransition, RuntimeError)  # a fault of this package: please report it
    True
    """


class ProtocolError(RuntimeError):
    """Frames that are not a message of this version of the wire protocol.

    >>> issubclass(ProtocolError, RuntimeError)  # what came is counted in `LoaderStatistics.rejected_frames`
    True
    """


class WorkerDied(RuntimeError):
    """A worker process ended before it answered; torch raises a plain RuntimeError here. What may have ended
    it stands in TROUBLESHOOTING.md.

    >>> list(DataLoader(range(4), num_workers=1, collate_fn=lambda samples: os._exit(3)))
    Traceback (most recent call last):
    fastq_loader.errors.WorkerDied: ...: worker 0 exited with code 3 before it answered batch 0 (indices [0])
    """


class PoisonBatch(WorkerDied):
    """Several workers, one after the other, died while they loaded the same batch.

    >>> kept = Processes(max_restarts=3)
    >>> list(DataLoader(range(4), num_workers=1, collate_fn=lambda samples: os._exit(3), workers=kept))
    Traceback (most recent call last):
    fastq_loader.errors.PoisonBatch: batch 0 (indices [0]) was given up: 3 workers died of it, ...
    """


class BadSampleFound(RuntimeWarning):
    """A sample could not be read, and was left out or replaced; see `Replace` and `Skip`.

    >>> warnings.simplefilter("error", BadSampleFound)  # stop at the first
    """


class WorkerReplaced(RuntimeWarning):
    """A worker died or hung, and another one does its work; see `Processes`.

    >>> warnings.simplefilter("ignore", WorkerReplaced)  # `LoaderStatistics.worker_restarts` counts them
    """


class LoaderTimeout(RuntimeError):
    """No batch arrived within `timeout` seconds; torch raises a plain RuntimeError here. The text has the
    stacks of the worker, and TROUBLESHOOTING.md what a worker may wait for.

    >>> list(DataLoader(range(4), num_workers=1, timeout=0.1, collate_fn=lambda samples: time.sleep(0.5)))
    Traceback (most recent call last):
    fastq_loader.errors.LoaderTimeout: DataLoader timed out after 0.1 seconds: worker 0 ... batch 0 ...
    """


class IteratorInvalid(RuntimeError):
    """`next()` on an iterator whose workers were closed, or that a newer iterator has replaced.

    >>> loader = DataLoader(range(4), num_workers=1)
    >>> batches = iter(loader)
    >>> loader.close()
    >>> next(batches)
    Traceback (most recent call last):
    fastq_loader.errors.IteratorInvalid: ...
    """


class PinFailed(RuntimeError):
    """Host memory could not be page-locked for copies to a device, and `pin` does not allow less.

    >>> issubclass(PinFailed, RuntimeError)  # of `ToDevice("cuda", pin="register")`
    True
    """


class PinFallback(RuntimeWarning):
    """`pin="auto"` goes on with a slower way of copying to the device; `statistics()` says which and why.

    >>> warnings.simplefilter("error", PinFallback)  # no slower way without an error
    """


class LoaderHint(UserWarning):
    """A loader saw something that costs its user samples, time or memory, and that can be changed.

    Each kind comes at most once for each loader, at the line that calls `next()`; what was seen and what to
    change stands in its text. `warnings.simplefilter("ignore", fastq_loader.LoaderHint)` silences all, and a
    filter for one of the classes below one of them. As an error it costs no batch: the next call goes on.

    >>> warnings.simplefilter("ignore", LoaderHint)
    """


class SameOrder(LoaderHint):
    """A sampler with `set_epoch` gave the same shuffle in two epochs: it was not told the epoch.

    The first 32 batches are compared. Not given for an order that ascends, with `shuffle=False`, for fewer
    than 2 batches or 20 samples, where the sampler was told another epoch, or where the first of the two was
    broken off before that.

    >>> warnings.simplefilter("error", SameOrder)
    >>> sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=1, rank=0)
    >>> loader = DataLoader(range(64), 16, sampler=sampler)
    >>> epochs = [list(loader), list(loader)]
    Traceback (most recent call last):
    fastq_loader.errors.SameOrder: ...: call its set_epoch(epoch) before each epoch
    """


class DuplicateData(LoaderHint):
    """Two workers of an iterable dataset yield the same batches: its `__iter__` does not take a part for each
    worker.

    The first 8 batches of each worker are compared, at the end of an epoch or after 1,000 batches of it. Not
    given where these batches are alike among themselves, or hold less than 24 bytes.

    >>> class Stream(torch.utils.data.IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(100))
    >>> warnings.simplefilter("error", DuplicateData)
    >>> list(DataLoader(Stream(), 10, num_workers=2))
    Traceback (most recent call last):
    fastq_loader.errors.DuplicateData: Workers 0 and 1 gave the same data ...
    """


class IdleWorker(LoaderHint):
    """Some workers of an iterable dataset yielded nothing in a whole epoch, while each of the others gave 8
    batches or more: it has fewer parts than there are workers.

    >>> class Stream(torch.utils.data.IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(100 if torch.utils.data.get_worker_info().id == 0 else 0))
    >>> warnings.simplefilter("error", IdleWorker)
    >>> list(DataLoader(Stream(), 10, num_workers=2))
    Traceback (most recent call last):
    fastq_loader.errors.IdleWorker: 1 of 2 workers gave no batch in a whole epoch (worker 1): ...
    """


class TinyBatches(LoaderHint):
    """Batches are so small that their way from the workers takes longer than to load them: with
    `num_workers=0` the epoch would have taken half the time or less.

    Said at the end of an epoch of at least 1,000 batches, if it took at least five seconds longer than it had
    to. The start of the workers does not count.

    >>> warnings.simplefilter("ignore", TinyBatches)
    """


class PrivateGenerators(LoaderHint):
    """A dataset or collate function draws from generators that it has as attributes, and `schedule="dynamic"`
    lets any worker load any batch: what a batch draws from them depends on which worker loads it, and on what
    that one loaded before.

    The first batch of each worker is looked at, and 32 batches later or at the end of the epoch the hint is
    given. Of an iterable dataset each worker has a part to itself: there is no hint.

    >>> class Noise(torch.utils.data.Dataset):
    ...     def __init__(self):
    ...         self.rng = torch.Generator()
    ...     def __len__(self):
    ...         return 8
    ...     def __getitem__(self, index):
    ...         return torch.rand(3, generator=self.rng)
    >>> warnings.simplefilter("error", PrivateGenerators)
    >>> list(DataLoader(Noise(), num_workers=2, schedule="dynamic"))
    Traceback (most recent call last):
    fastq_loader.errors.PrivateGenerators: Batches drew from dataset.rng, ...
    """


class NotCached(LoaderHint):
    """The values of a function that was given to `cached` are not stored. It has drawn from torch's, Python's
    or numpy's generator, and they would be the same in every epoch; or they cannot be pickled.

    >>> warnings.simplefilter("ignore", NotCached)
    """


class MemoryPressure(LoaderHint):
    """The batches that may be loaded ahead take more than half of the memory that this process can have.

    Looked at once, when 4 batches have shown how large they are; less than 64 MiB are no pressure.

    >>> warnings.simplefilter("error", MemoryPressure)  # stop before the system ends a worker
    """


class TorchWorkers(LoaderHint):
    """torch's own workers run with `num_workers > 0`: this system or sandbox lacks what ours need.

    Batches, order, random numbers and errors are torch's, and so is the speed. Given once in a process. Also
    where `state_dict`, `diagnose` or `trace` is asked of such a loader, which has nothing to say of them.

    >>> warnings.simplefilter("ignore", TorchWorkers)  # it is known
    """


class UnpicklableError(pickle.PicklingError):
    """Something that has to travel to or from a worker cannot be pickled; the text names where it lies.

    >>> list(DataLoader(range(4), num_workers=1, collate_fn=lambda samples: open(os.devnull)))
    Traceback (most recent call last):
    fastq_loader.errors.UnpicklableError: batch (a _io.TextIOWrapper: ...) cannot be pickled: ...
    """


class WorkerTraceback(Exception):
    """The traceback of a failure inside a worker, as text: the `__cause__` of what `next()` raises.

    >>> try:
    ...     list(DataLoader(range(4), num_workers=1, collate_fn=lambda samples: 1 / 0))
    ... except ZeroDivisionError as error:
    ...     print(error.batch, type(error.__cause__).__name__)
    0 WorkerTraceback
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return "\n" + self.text


def warn_user(text: str, category: type[Warning]) -> None:
    """Warn at the line of the user's code from which this package was called, however deep that is.

    `warnings.warn` fails where stderr is closed, and not where it is None or its pipe is gone; this does not.
    """
    depth, frame = 1, sys._getframe()
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(f"{__package__}."):
        depth, frame = depth + 1, frame.f_back
    try:
        warnings.warn(text, category, stacklevel=depth)
    except ValueError:
        if not getattr(sys.stderr, "closed", False):
            raise


def add_note(error: BaseException | None, text: str) -> None:
    """Add to an error's text, where Python (from 3.11 on) and its class let one."""
    with contextlib.suppress(Exception):
        error.add_note(text)  # type: ignore[union-attr]


def is_int(value: Any) -> bool:
    """Whether an argument is a whole number; True is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_seconds(argument: str, value: Any, least: float = 0.0) -> None:
    """
    Raises:
        TypeError, ValueError: it is not so many seconds at least.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{argument}={value!r} must be a number of seconds")
    if not least <= value < math.inf:
        raise ValueError(f"{argument}={value!r} must be {least:g} seconds or more")


def checked_names(argument: str, names: Any, known: Collection[str], least: int = 0) -> list[str]:
    """The names that an argument gives, each once: at least so many of the `known` ones."""
    if isinstance(names, str):
        raise TypeError(f"{argument}={names!r} must be a collection of names: {argument}=({names!r},)")
    chosen = list(dict.fromkeys(names))
    if len(chosen) < least or set(chosen) - set(known):
        raise ValueError(f"{argument}={names!r} is not possible here: use some of {', '.join(known)}")
    return chosen


def shorten(value: Any, limit: int = 80) -> str:
    """`repr(value)` in at most `limit` characters; where that fails, what it raised."""
    try:
        text = repr(value)
    except Exception as error:  # a user's repr may do anything
        text = f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def locate(error: BaseException, **where: Any) -> None:
    """Give an exception attributes that say where it was raised, but none that it has already."""
    for name, value in where.items():
        with contextlib.suppress(Exception):  # its class refuses them
            if not hasattr(error, name):
                setattr(error, name, value)


def describe_index(index: Any) -> str:
    """The index of a batch, short enough for an error's text: a run of integers by its ends."""
    if type(index) is list and len(index) > 4 and all(type(i) is int for i in index):
        if index[-1] - index[0] + 1 == len(index) and index == list(range(index[0], index[-1] + 1)):
            return f"{index[0]}..{index[-1]}"
        return f"{index[0]}, {index[1]}, … {index[-1]}, {len(index)} in all"
    return shorten(index, 120)
