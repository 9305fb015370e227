"""Per-loader runtime state besides the arguments: counters, pools of workers, and the device session.

Runs in the consumer. Created when a loader first needs it, because frameworks create loaders without running
the constructor.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

from fastq_loader.consumer.pool import Pool
from fastq_loader.device.accelerator import ToDevice
from fastq_loader.device.staging import DeviceSession, SerialStaging
from fastq_loader.epoch.epoch import Epoch
from fastq_loader.errors import IteratorInvalid, LoaderHint
from fastq_loader.statistics.counters import Counters
from fastq_loader.system import process_id
from fastq_loader.workers import stopping

#: The attribute of a loader that has them, see `options.ATTRIBUTE`.
_ATTRIBUTE = "_fastq_loader_resources"
#: Epochs whose batches `replay` can load again.
_REMEMBERED = 16


class Resources:
    """Runtime state of one loader. Only `saved` is copied or pickled with the arguments.

    Args:
        owner: the loader; None in a copy that no loader has used yet.
        saved: the state that the next epoch resumes from, or None.

    Attributes:
        counters: the loader's counters.
        pools: the pools of workers that its iterators use.
        torchs: torch's own iterators with workers, which run where ours cannot.
        session: the device session, once an iteration has begun, or None.
        stagings: of its iterations without workers.
        current: `record` and `saved`, each or None, as one immutable tuple, so that other threads can read
            both at once.
        lock, beginning: held, and true, while an epoch of a `StatefulDataLoader` begins. A forked child has a
            lock of its own: another thread may hold that of its parent.
        hinted: kinds of hints that were issued, and are not issued again.
        chooser: chooses the number of workers of the next epoch, once `num_workers="auto"` needs it.
        bad_samples: records of samples that could not be read, if `errors=` tolerates them.
        begun: the records of the last epochs, the newest last.
        grace: seconds for which the workers of its next pools outlive a signal, see `preemption`.
        interpreters: interpreters that its next pools reuse, see `Plan`.
    """

    def __init__(self, owner: object | None = None, saved: Any = None) -> None:
        self.owner: Callable[[], Any] = (lambda: None) if owner is None else weakref.ref(owner)
        self.counters = Counters()
        self.pools: weakref.WeakSet[Pool] = weakref.WeakSet()
        self.torchs: weakref.WeakSet[Any] = weakref.WeakSet()
        self.session: DeviceSession | None = None
        self.stagings: list[SerialStaging] = []
        self.current: tuple[Epoch | None, Any] = None, saved
        self.lock, self.beginning = threading.RLock(), False
        self.hinted: set[type[LoaderHint]] = set()
        self.chooser: Any = None
        self.bad_samples: Any = None
        self.grace = 0.0
        self.interpreters: dict[str, Any] = {}
        self.begun: deque[Epoch] = deque(maxlen=_REMEMBERED)
        _all.add(self)

    @property
    def record(self) -> Epoch | None:
        """The newest epoch."""
        return self.current[0]

    @property
    def saved(self) -> Any:
        """The state that the next epoch resumes from."""
        return self.current[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return Resources, (None, self.saved)  # without an owner: a subclass may copy all attributes

    def add_torchs(self, iterator: Any) -> Any:
        """Register an iterator of torch's own, whose epochs are not recorded."""
        self.current = None, None
        if hasattr(iterator, "_shutdown_workers"):
            self.torchs.add(iterator)
        return iterator

    def running(self) -> int:
        """Number of iterators with running workers."""
        ours = sum(pool.gate.reason is None for pool in list(self.pools))
        return ours + sum(not iterator._shutdown for iterator in list(self.torchs))

    def close_pools(self, reason: str) -> None:
        """Stop all workers of the loader, and wait for workers that are in the middle of a sample."""
        for pool in list(self.pools):
            pool.close(reason)
        while self.torchs:
            iterator = self.torchs.pop()
            if not iterator._shutdown:  # else it is exhausted already
                iterator._next_data = partial(_refuse, reason)  # torch would end the epoch without an error
                iterator._shutdown_workers()
        stopping.wait(self.counters)

    def close(self, reason: str) -> None:
        """Close all pools, and release what later iterations would reuse: an interpreter of workers ends
        with the last loader that keeps it."""
        self.close_pools(reason)
        self.interpreters.clear()
        for staging in [each for each in self.stagings if each.user() is None]:
            self.stagings.remove(staging)
            staging.close()


_all: weakref.WeakSet[Resources] = weakref.WeakSet()


def _renew_locks() -> None:
    for resources in list(_all):
        resources.lock, resources.beginning = threading.RLock(), False


process_id.in_forked_children(_renew_locks)


def of(loader: Any) -> Resources:
    """The runtime state of a loader, created at first use: torchdata's subclass never calls the constructor.
    State copied with another loader's attributes is replaced, except for `saved`."""
    resources: Resources | None = vars(loader).get(_ATTRIBUTE)
    if resources is None or resources.owner() is not loader:
        saved = None if resources is None else resources.saved
        resources = vars(loader)[_ATTRIBUTE] = Resources(loader, saved)
    return resources


def forget(loader: Any) -> None:
    """Give a copy of a loader a runtime state of its own, without the original's loaded state."""
    vars(loader).pop(_ATTRIBUTE, None)


def device_session(resources: Resources, device: ToDevice | None) -> DeviceSession | None:
    """The device session, reused from epoch to epoch: a stream for each epoch would strand memory."""
    if resources.session is None and device is not None and device.target is not None:
        resources.session = DeviceSession(device)
        resources.counters.stage(resources.session.statistics)
    return resources.session


def _refuse(reason: str) -> NoReturn:
    raise IteratorInvalid(f"this iterator cannot go on: {reason}")
