"""`Prefetcher`: batches of any loader, copied to a device beside the step before.

Runs in the consumer, on the thread that calls `next()`: that asks the loader for the batch after the one that
it hands out, and begins its copy. Our own loader with `device=` needs none: it knows which batches are ready,
and copies them from where its workers put them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from fastq_loader.device.accelerator import ToDevice, can_share, read_device
from fastq_loader.device.staging import Attempt, DeviceSession, SerialStaging
from fastq_loader.errors import IteratorInvalid
from fastq_loader.statistics.snapshots import StagingStatistics
from fastq_loader.system.interrupts import raised_by_handler


class Prefetcher:
    """Batches of any loader on a device, each copied there before it is asked for.

    In the place of NVIDIA apex's `data_prefetcher` (examples/imagenet/main_amp.py) a loop stays as it is:

        prefetcher = Prefetcher(loader, "cuda", normalize(mean, std))
        input, target = prefetcher.next()
        while input is not None:
            ...
            input, target = prefetcher.next()

    `for input, target in prefetcher` does the same, as often as it is written: each `iter()` begins an epoch,
    and ends the one before. `next()` goes on with the epoch that was begun last, or begins the first.

    The loader may write to a batch again once it is asked for the next one, and need not pin its memory. Its
    errors, and those of `transform`, are raised after the batches that came before, each once. One that was
    raised ahead of its time has its traceback as its cause, as text.

    Where the loader has `state_dict`, `load_state_dict` and `position`, so has this: they count what was
    handed out here, where another kind of loader than ours counts what was asked for ahead. That is loaded
    again when the run goes on; without workers it draws from the global generators again.

    Args:
        loader: torch's DataLoader, or any other iterable of batches.
        device: where they go: "cuda", "xpu", a torch.device. Or `ToDevice(...)`, which says more: how many
            are asked for ahead (`prefetch`, else 1), and that the transform runs on the consumer's stream
            (`transform_stream`, else "side"). "cpu" leaves batches on the host, and asks for none ahead.
        transform: applied to every batch on the device, for example `normalize(mean, std)`.

    Attributes:
        loader: as it was given.

    Raises:
        ValueError, TypeError: an argument, with its name, its value and what it may be; an unknown or absent
            device, or one without `record_stream`; a loader that brings its batches to a device itself.

    >>> prefetcher = Prefetcher(DataLoader(range(4), 2), "cpu")
    >>> prefetcher.next(), prefetcher.next(), prefetcher.next()
    (tensor([0, 1]), tensor([2, 3]), None)
    """

    def __init__(
        self,
        loader: Iterable[Any],
        device: str | int | torch.device | ToDevice,
        transform: Callable[[Any], Any] | None = None,
    ) -> None:
        if short := not isinstance(device, ToDevice):
            device = ToDevice(device, prefetch=1)
        if transform is not None:
            if device.transform is not None:
                raise ValueError(f"transform={transform!r} and {device!r} are two transforms: give one")
            device = replace(device, transform=transform)
        given: Any = loader  # the class of ours stands above this room, and is known by what only it has
        own = read_device(given.device) if hasattr(loader, "_device_session") else None
        if own is not None and own.target is not None:
            raise ValueError(
                f"loader has device={own.device!r}, and prefetches itself: iterate it as it is, or set its "
                "device to None"
            )
        if device.target is not None and not can_share(device.target):
            raise ValueError(
                f"device={device.device!r} cannot be used: {device.target.type} tensors have no "
                "record_stream, which keeps memory that is let go of before its copy has run; "
                "DataLoader(..., device=...) does not need it"
            )
        if short:  # not before: an error would name what was not written
            device = replace(device, transform_stream="side")
        self.loader: Any = loader
        self._record = SimpleNamespace(
            shown=None
        )  # of an epoch of another kind of loader; ours tells it itself
        self._options = device
        self._session = None if device.target is None else DeviceSession(device)
        self._staging: SerialStaging | None = None
        self._epoch: _Pass | None = None
        self._end: tuple[None, ...] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._leave("a newer one has begun")
        batches = iter(self.loader)  # starts workers, which inherit nothing of a device that is not in use
        if self._session is not None and self._staging is None:
            self._staging = SerialStaging(self._session)
        own = self.loader._resources.record if hasattr(self.loader, "_state_of") else None
        self._epoch = _Pass(batches, self._options, self._staging, self.loader, own or self._record)
        return self._epoch

    def next(self) -> Any:
        """The next batch; at the end of the epoch, and from then on, None.

        Where batches are tuples or lists, it is a tuple of as many None; a named one where they are. How many
        is known from the batches that came before, so that a loader without any ends with a single None.
        """
        if self._epoch is None:
            iter(self)
        assert self._epoch is not None
        try:
            batch = next(self._epoch)
        except StopIteration:
            return self._end
        self._end = None
        if isinstance(batch, (tuple, list)):
            self._end = getattr(batch, "_make", tuple)((None,) * len(batch))
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The loader's, as it was when the batch that was handed out last had come."""
        shown: _Standing | None = self._record.shown
        return self.loader.state_dict() if shown is None else shown[0]()

    def load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> None:
        """Load a state into the loader, whose next epoch goes on from there. The one that was begun ends."""
        self._leave("a state was loaded")
        self._record.shown = None
        self.loader.load_state_dict(state_dict, **options)

    @property
    def position(self) -> Any:
        """The loader's, as it was when the batch that was handed out last had come."""
        shown = self._record.shown
        return self.loader.position if shown is None else shown[1]

    def statistics(self) -> StagingStatistics | None:
        """Counts of the copies so far, as an immutable snapshot; None on the host."""
        return None if self._session is None else self._session.statistics.snapshot()

    def _leave(self, why: str) -> None:
        if self._epoch is not None:
            self._epoch.close(why)
            self._epoch = None
        if self._staging is not None:
            self._staging.drain()

    def close(self) -> None:
        """End the epoch, wait for the copies, and let go of page-locked memory. Batches stay valid, and the
        prefetcher can be iterated again. The loader is not closed."""
        self._leave("its prefetcher was closed")
        if self._staging is not None:
            self._staging.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


#: A function that gives a loader's state, and its position.
_Standing = tuple[Callable[[], dict[str, Any]], Any]


class _Pass(Iterator[Any]):
    """One pass over a loader.

    Args:
        batches: the loader's iterator.
        options: the user's.
        staging: the way to the device; None on the host.
        loader: any.
        record: `shown` in it is set to where the loader stands for who reads here, if batches are asked for
            ahead. Of our own loader it is the record of the epoch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        options: ToDevice,
        staging: SerialStaging | None,
        loader: Any,
        record: Any,
    ) -> None:
        self._batches = batches
        self._options = options
        self._staging = staging
        self._loader, self._record = loader, record
        self._reached = record.shown = None if staging is None else self._standing()
        self._invalid = ""  # why it cannot go on
        # What was asked for ahead: what hands a batch out, or an error; the end of the loader is one. And
        # where the loader stood then.
        self._ahead: deque[tuple[Attempt, _Standing | None]] = deque()

    def __next__(self) -> Any:
        if self._invalid:
            raise IteratorInvalid(f"this iteration cannot go on: {self._invalid}; iter() begins another one")
        self._invalid = "an interrupt cut a call of next() short, or another thread is in one"
        try:
            batch = self._advance()
        except Exception as error:
            if not raised_by_handler(error):
                self._invalid, self._record.shown = "", self._reached
            raise
        self._invalid, self._record.shown = "", self._reached
        return batch

    def _advance(self) -> Any:
        if self._staging is None:
            return self._options.apply_transform(next(self._batches))
        self._staging.turn()
        ahead = self._ahead
        # What comes after an error is asked for when that was raised: some loaders end with one.
        while len(ahead) <= self._options.prefetch and (not ahead or ahead[-1][0].error is None):
            ahead.append((Attempt(self._begin, self._staging), self._standing()))
        attempt, self._reached = ahead.popleft()
        return attempt.take()()

    def _begin(self, staging: SerialStaging) -> Callable[[], Any]:
        return staging.begin(next(self._batches), ahead=True)

    def _standing(self) -> _Standing | None:
        """Where the loader stands now; None if it cannot say. What its `state_dict` raises is raised when
        it is asked for."""
        loader, record = self._loader, self._record
        if hasattr(record, "position"):
            return Attempt(loader._state_of, record).again, record.position
        if hasattr(loader, "_state_of") or not hasattr(loader, "state_dict"):  # it has no record of its own
            return None
        return Attempt(loader.state_dict).again, getattr(loader, "position", None)

    def close(self, why: str) -> None:
        """Let go of the loader's iterator. What was asked for ahead is lost."""
        self._invalid, self._batches = why, iter(())
