"""The exceptions and warnings of this package, and helpers that format values for their texts.

Pure; runs in the consumer and in workers. Exceptions raised by a user's own code keep their type; the classes
here are for failures of the loader itself. They derive from the type that torch's DataLoader raises in the
same place, so that existing `except` clauses still work.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import sys
import warnings
from collections.abc import Collection, Mapping
from typing import Any, NoReturn


class InvalidTransition(RuntimeError):
    """An event that the transition table does not allow in the current state of a batch, worker or block.

    >>> issubclass(InvalidTransition, RuntimeError)  # a fault of this package: please report it
    True
    """


class Transitions(dict[tuple[str, str], str]):
    """(state, event) → next state. Looking up an event that its state does not allow raises
    InvalidTransition.

    Args:
        what: whose states they are, for the error's text.
        table: state → event → next state.
    """

    def __init__(self, what: str, table: Mapping[str, Mapping[str, str]]) -> None:
        rows = table.items()
        super().__init__({(state, event): to for state, moves in rows for event, to in moves.items()})
        self._what = what

    def __missing__(self, step: tuple[str, str]) -> NoReturn:
        raise InvalidTransition("{} is {}: event {!r} is not allowed".format(self._what, *step))


class ProtocolError(RuntimeError):
    """Frames that are not a message of this version of the wire protocol.

    >>> issubclass(ProtocolError, RuntimeError)  # what came is counted in `LoaderStatistics.rejected_frames`
    True
    """


class WorkerDied(RuntimeError):
    """A worker process ended before it answered; torch raises a plain RuntimeError here. TROUBLESHOOTING.md
    lists the likely causes.

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
    """A sample could not be read, and was skipped or replaced; see `Skip` and `Replace`.

    >>> warnings.simplefilter("error", BadSampleFound)  # stop at the first
    """


class WorkerReplaced(RuntimeWarning):
    """A worker died or hung, and was replaced by a new one; see `Processes`.

    >>> warnings.simplefilter("ignore", WorkerReplaced)  # `LoaderStatistics.worker_restarts` counts them
    """


class LoaderTimeout(RuntimeError):
    """No batch arrived within `timeout` seconds; torch raises a plain RuntimeError here. The text contains
    the worker's stacks; TROUBLESHOOTING.md lists what a worker may be waiting for.

    >>> list(DataLoader(range(4), num_workers=1, timeout=0.1, collate_fn=lambda samples: time.sleep(0.5)))
    Traceback (most recent call last):
    fastq_loader.errors.LoaderTimeout: DataLoader timed out after 0.1 seconds: worker 0 ...
    """


class IteratorInvalid(RuntimeError):
    """`next()` was called on an iterator whose workers were closed, or that a newer iterator has replaced.

    >>> loader = DataLoader(range(4), num_workers=1)
    >>> batches = iter(loader)
    >>> loader.close()
    >>> next(batches)
    Traceback (most recent call last):
    fastq_loader.errors.IteratorInvalid: ...
    """


class PinFailed(RuntimeError):
    """A device's driver refused to page-lock host memory. Loaders go on without; see `PinFallback`.

    >>> issubclass(PinFailed, RuntimeError)
    True
    """


class PinFallback(RuntimeWarning):
    """Host memory cannot be page-locked, so copies to the device are slower; `statistics()` says why.

    >>> warnings.simplefilter("error", PinFallback)  # no slower way without an error
    """


class LoaderHint(UserWarning):
    """A loader detected an avoidable loss of samples, time or memory.

    Each kind is issued at most once per loader, at the line that calls `next()`; its text says what was
    detected and what to change. `warnings.simplefilter("ignore", fastq_loader.LoaderHint)` silences all
    hints; a filter for one of the classes below silences that kind. If a filter turns a hint into an error,
    no batch is lost: the next call goes on.

    >>> warnings.simplefilter("ignore", LoaderHint)
    """


class SameOrder(LoaderHint):
    """A DistributedSampler repeats its shuffle: its `epoch` is that of an earlier epoch, of which at least 32
    batches were delivered. Call its `set_epoch` before each epoch.

    Checked for torch's sampler and this package's samplers, unless one of the two epochs was resumed.

    >>> warnings.simplefilter("error", SameOrder)
    >>> sampler = torch.utils.data.DistributedSampler(range(64), num_replicas=1, rank=0)
    >>> loader = DataLoader(range(64), 2, sampler=sampler)
    >>> epochs = [list(loader), list(loader)]
    Traceback (most recent call last):
    fastq_loader.errors.SameOrder: ...: call its set_epoch(epoch) before each epoch
    """


class DuplicateData(LoaderHint):
    """Two workers of an iterable dataset yield the same batches: its `__iter__` does not split the data among
    the workers.

    The first 8 batches of each worker are compared, at the end of an epoch or after 1,000 batches of it.
    There is no hint if these batches are alike among themselves, or contain less than 24 bytes.

    >>> class Stream(torch.utils.data.IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(100))
    >>> warnings.simplefilter("error", DuplicateData)
    >>> list(DataLoader(Stream(), 10, num_workers=2))
    Traceback (most recent call last):
    fastq_loader.errors.DuplicateData: Workers 0 and 1 gave the same data ...
    """


class IdleWorker(LoaderHint):
    """Some workers of an iterable dataset yielded nothing in a whole epoch, while each of the others yielded
    8 batches or more: the dataset has fewer parts than there are workers.

    >>> class Stream(torch.utils.data.IterableDataset):
    ...     def __iter__(self):
    ...         return iter(range(100 if torch.utils.data.get_worker_info().id == 0 else 0))
    >>> warnings.simplefilter("error", IdleWorker)
    >>> list(DataLoader(Stream(), 10, num_workers=2))
    Traceback (most recent call last):
    fastq_loader.errors.IdleWorker: 1 of 2 workers gave no batch in a whole epoch (worker 1): ...
    """


class TinyBatches(LoaderHint):
    """Batches are so small that their transport from the workers takes longer than loading them: with
    `num_workers=0` the epoch would have taken half the time or less.

    Issued at the end of an epoch of at least 1,000 batches that took at least five seconds longer than
    necessary. The start of the workers does not count.

    >>> warnings.simplefilter("ignore", TinyBatches)
    """


class PrivateGenerators(LoaderHint):
    """A dataset has a generator as an attribute, and `schedule="dynamic"` lets any worker load any batch: the
    numbers that a batch draws from it depend on which worker loads it, and on what that worker loaded before.
    Draw from the global generator of torch, Python or numpy.

    Each worker looks at the dataset's own attributes when it starts. The hint is issued after 32 batches or
    at the end of the epoch. An iterable dataset does not get it, because each worker reads its own part.

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
    fastq_loader.errors.PrivateGenerators: dataset.rng: each worker has its own copy ...
    """


class PinnedCopies(LoaderHint):
    """The copies of `pin_memory=True` to page-locked memory take more than 5 % of an epoch, on the thread of
    the training step; with `device=` batches are copied to the device beside the step.

    Issued at the end of an epoch that spent a second or more on them, with the expected gain, if that is 5 %
    or more.

    >>> warnings.simplefilter("ignore", PinnedCopies)
    """


class NotCached(LoaderHint):
    """The values of a function passed to `cached` are not stored: it drew from torch's, Python's or numpy's
    generator, so that cached values would repeat in every epoch; its values cannot be pickled; one is larger
    than the whole cache; or the system lacks shared memory. Or a stored value is not what computing it again
    gives, or it can no longer be computed.

    >>> warnings.simplefilter("ignore", NotCached)
    """


class MemoryPressure(LoaderHint):
    """The batches that may be loaded ahead take more than half of the memory available to this process.

    Checked once, after 4 batches, whose size is then known; less than 64 MiB is never reported.

    >>> warnings.simplefilter("error", MemoryPressure)  # stop before the system ends a worker
    """


class TorchWorkers(LoaderHint):
    """torch's own iterators run: this system or sandbox lacks a call that our workers need, or a library has
    patched torch's loader. Or ours run, and the patch has no effect on them: torch's iterators lack an
    argument of the loader, or its loaded state.

    With torch's iterators, batches, order, random numbers, errors and speed are torch's. Issued once in a
    process, and whenever `state_dict`, `diagnose` or `trace` of such a loader is called: these have no record
    of them.

    >>> warnings.simplefilter("ignore", TorchWorkers)  # it is known
    """


class UnpicklableError(pickle.PicklingError):
    """An object that has to be sent to or from a worker cannot be pickled; the text says where it is.

    >>> list(DataLoader(range(4), num_workers=1, collate_fn=lambda samples: open(os.devnull)))
    Traceback (most recent call last):
    fastq_loader.errors.UnpicklableError: batch (a _io.TextIOWrapper: ...) cannot be pickled: ...
    """


class WorkerTraceback(Exception):
    """The traceback of a failure inside a worker, as text: the `__cause__` of the error that `next()` raises.

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

    `warnings.warn` fails if stderr is closed (but not if it is None, or its pipe is broken); this does not.
    """
    depth, frame = 1, sys._getframe()
    libraries = f"{__package__}.", "torch.utils.data.dataloader"  # whose `__iter__` may call ours
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(libraries):
        depth, frame = depth + 1, frame.f_back
    try:
        warnings.warn(text, category, stacklevel=depth)
    except ValueError:
        if not getattr(sys.stderr, "closed", False):
            raise


def add_note(error: BaseException | None, text: str) -> None:
    """Append a note to an error that has no such note, if Python (3.11 or later) and its class allow it."""
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):  # an error may come through two processes
            error.add_note(text)  # type: ignore[union-attr]


def is_int(value: Any) -> bool:
    """Whether the value is an int; a bool is not."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_seconds(argument: str, value: Any, least: float = 0.0) -> None:
    """Check that an argument is a finite number of seconds, at least `least`.

    Raises:
        TypeError, ValueError: it is not.
    """
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{argument}={value!r} must be a number of seconds")
    if not least <= value < math.inf:
        raise ValueError(f"{argument}={value!r} must be {least:g} seconds or more")


def checked_names(argument: str, names: Any, known: Collection[str], least: int = 0) -> list[str]:
    """The names in an argument, without duplicates. Raises unless there are at least `least` of them, and all
    of them are `known`."""
    if isinstance(names, str):
        raise TypeError(f"{argument}={names!r} must be a collection of names: {argument}=({names!r},)")
    chosen = list(dict.fromkeys(names))
    if len(chosen) < least or set(chosen) - set(known):
        raise ValueError(f"{argument}={names!r} is not possible here: use some of {', '.join(known)}")
    return chosen


def shorten(value: Any, limit: int = 80) -> str:
    """`repr(value)` in at most `limit` characters; if `repr` fails, the type of the error. Of an exception
    its type and text: the `repr` of an OSError lacks the name of the file."""
    try:
        text = f"{type(value).__name__}: {value}" if isinstance(value, BaseException) else repr(value)
    except Exception as error:  # a user's repr may do anything
        text = f"<repr failed: {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 3] + "..."


def locate(error: BaseException, **where: Any) -> None:
    """Set attributes on an exception that say where it was raised; existing ones are not overwritten."""
    for name, value in where.items():
        with contextlib.suppress(Exception):  # its class may refuse attributes
            if not hasattr(error, name):
                setattr(error, name, value)


def describe_index(index: Any) -> str:
    """The index of a batch, shortened for an error's text: a run of integers by its first and last."""
    if type(index) is list and len(index) > 4 and all(type(i) is int for i in index):
        if index[-1] - index[0] + 1 == len(index) and index == list(range(index[0], index[-1] + 1)):
            return f"{index[0]}..{index[-1]}"
        return f"{index[0]}, {index[1]}, ... {index[-1]}, {len(index)} in all"
    return shorten(index, 120)
