"""`Prefetcher`: copies batches of any loader to a device during the previous step.

Runs in the consumer, on the thread that calls `next()`, which fetches the batch after the one that it
delivers, and begins its copy. Our own loader with `device=` does not need it: it tracks which batches are
ready, and copies them from where its workers put them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from fastq_loader import options
from fastq_loader.device.accelerator import ToDevice
from fastq_loader.device.copies import Copy
from fastq_loader.device.staging import CapturedCall, DeviceSession
from fastq_loader.epoch import resources
from fastq_loader.epoch.fields import Owner
from fastq_loader.errors import IteratorInvalid
from fastq_loader.extras.prefetcher.staging import AheadStaging
from fastq_loader.extras.resume.state import state_of
from fastq_loader.statistics.snapshots import StagingStatistics
from fastq_loader.system.torch_names import untraced


@untraced
class Prefetcher:
    """Batches of any loader on a device, each copied there ahead of `next()`.

    It replaces NVIDIA apex's `data_prefetcher` (examples/imagenet/main_amp.py); the loop stays as it is:

        prefetcher = Prefetcher(loader, "cuda", normalize(mean, std))
        input, target = prefetcher.next()
        while input is not None:
            ...
            input, target = prefetcher.next()

    `for input, target in prefetcher` does the same, any number of times: each `iter()` begins an epoch, and
    ends the previous one. `next()` continues the epoch that was begun last, or begins the first.

    The loader may reuse the memory of a batch once the next one is requested, and need not pin it. Errors of
    the loader and of `transform` are raised after the batches that precede them, each once. The cause
    (`__cause__`) of an error raised ahead of its turn contains its traceback as text.

    It has `state_dict`, `load_state_dict` and `position` if the loader has them. They count the batches
    delivered here, where a loader other than ours alone would count the batches fetched ahead. Those are
    loaded again when the run is resumed; without workers they draw from the global generators again.

    Args:
        loader: torch's DataLoader, or any other iterable of batches.
        device: where they go: "cuda", "xpu", a torch.device. Or `ToDevice(...)` for more options: the number
            of batches fetched ahead (`prefetch`, else 1), and a transform on the consumer's stream
            (`transform_stream`, else "side"). "cpu" leaves batches on the host, and fetches none ahead.
        transform: applied to every batch on the device, for example `normalize(mean, std)`.

    Attributes:
        loader: the argument.

    Raises:
        ValueError, TypeError: an argument is invalid (the text names it, its value and the allowed ones);
            the device is unknown or absent; the loader has a device of its own.

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
        if not isinstance(device, ToDevice):
            device = ToDevice(device, prefetch=1, transform_stream="side")
        if transform is not None:
            if device.transform is not None:
                raise ValueError(f"transform={transform!r} and {device!r} are two transforms: give one")
            device = replace(device, transform=transform)
        own = options.of(loader).device if isinstance(loader, Owner) else None
        if own is not None and own.target is not None:
            raise ValueError(
                f"loader has device={own.device!r}, and prefetches itself: iterate it as it is, or make it "
                "without a device"
            )
        self.loader: Any = loader
        # For other kinds of loader; ours has the record of its epoch.
        self._record = SimpleNamespace(shown=None)
        self._options = device
        self._session = None if device.target is None else DeviceSession(device)
        self._staging: AheadStaging | None = None
        self._epoch: _PrefetchIterator | None = None
        self._end: tuple[None, ...] | None = None

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self._leave("a newer one has begun")
        batches = iter(self.loader)  # starts workers, which inherit nothing of a device not yet initialised
        if self._session is not None and self._staging is None:
            self._staging = AheadStaging(self._session)
        own = resources.of(self.loader).record if isinstance(self.loader, Owner) else None
        self._epoch = _PrefetchIterator(
            batches, self._options, self._staging, self.loader, own or self._record
        )
        return self._epoch

    def next(self) -> Any:
        """Return the next batch; at the end of the epoch, and from then on, None.

        If batches are tuples or lists, the end is a tuple of as many None, or a named tuple like theirs. The
        length is taken from the last batch, so a loader without any batch ends with a single None.
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

    def __getattr__(self, name: str) -> Any:
        # Frameworks call these two on whatever has them.
        if name in ("state_dict", "load_state_dict") and hasattr(vars(self).get("loader"), name):
            return getattr(self, f"_{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def _state_dict(self) -> dict[str, Any]:
        """The loader's state after the last batch that was delivered here."""
        shown: _Standing | None = self._record.shown
        return self.loader.state_dict() if shown is None else shown[0]()

    def _load_state_dict(self, state_dict: dict[str, Any], **options: Any) -> None:
        """Load a state into the loader; its next epoch continues from there. Ends the current epoch."""
        self._leave("a state was loaded")
        self._record.shown = None
        self.loader.load_state_dict(state_dict, **options)

    @property
    def position(self) -> Any:
        """The loader's position after the last batch that was delivered here."""
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
        """End the epoch, wait for the copies, and free page-locked memory. Batches stay valid, and the
        prefetcher can be iterated again. The loader is not closed."""
        self._leave("its prefetcher was closed")
        if self._staging is not None:
            self._staging.close()

    def __enter__(self) -> Prefetcher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _again(attempt: CapturedCall) -> Any:
    """A copy of a call's result, or its error; any number of times."""
    if attempt.error is not None:
        raise attempt.error
    return deepcopy(attempt.result)


#: A function that returns a loader's state, and its position.
_Standing = tuple[Callable[[], dict[str, Any]], Any]


@untraced
class _PrefetchIterator(Iterator[Any]):
    """One pass over a loader.

    Args:
        batches: the loader's iterator.
        options: the user's.
        staging: copies to the device; None on the host.
        loader: any loader.
        record: its `shown` is set to the loader's state and position as of the last delivered batch, if
            batches are fetched ahead. For our own loader it is the record of the epoch.
    """

    def __init__(
        self,
        batches: Iterator[Any],
        options: ToDevice,
        staging: AheadStaging | None,
        loader: Any,
        record: Any,
    ) -> None:
        self._batches = batches
        self._options = options
        self._staging = staging
        self._loader, self._record = loader, record
        self._reached = record.shown = None if staging is None else self._standing()
        self._invalid = ""  # why it cannot continue
        # For each batch fetched ahead its copy, or an error (the loader's StopIteration is one); and the
        # state and position of the loader at that point.
        self._ahead: deque[tuple[CapturedCall, _Standing | None]] = deque()

    def __next__(self) -> Any:
        if self._invalid:
            raise IteratorInvalid(f"this iteration cannot go on: {self._invalid}; iter() begins another one")
        self._invalid = "an interrupt cut a call of next() short, or another thread is in one"
        try:
            batch = self._advance()
        except Exception:
            self._invalid, self._record.shown = "", self._reached
            raise
        self._invalid, self._record.shown = "", self._reached
        return batch

    def _advance(self) -> Any:
        if self._staging is None:
            return self._options.apply_transform(next(self._batches))
        self._staging.session.refuse_capture()
        ahead = self._ahead
        # Nothing is fetched after an error before it was raised: some loaders end with one.
        while len(ahead) <= self._options.prefetch and (not ahead or ahead[-1][0].error is None):
            ahead.append((CapturedCall(self._begin, self._staging), self._standing()))
        attempt, self._reached = ahead.popleft()
        return self._staging.deliver(attempt.take())

    def _begin(self, staging: AheadStaging) -> Copy:
        return staging.begin(next(self._batches))

    def _standing(self) -> _Standing | None:
        """The loader's current state and position; None if it has none. An error of its `state_dict` is
        raised when the state is requested."""
        loader, record = self._loader, self._record
        if hasattr(record, "position"):
            if not hasattr(loader, "state_dict"):
                return dict, record.position
            return partial(_again, CapturedCall(partial(state_of, loader), record)), record.position
        if isinstance(loader, Owner) or not hasattr(loader, "state_dict"):  # ours, without a record
            return None
        return partial(_again, CapturedCall(loader.state_dict)), getattr(loader, "position", None)

    def close(self, why: str) -> None:
        """Drop the loader's iterator. Batches fetched ahead are lost."""
        self._invalid, self._batches, self._ahead = why, iter(()), deque()
