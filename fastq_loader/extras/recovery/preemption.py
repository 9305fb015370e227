"""`preemption`: let a job save a checkpoint before the cluster terminates it.

Runs in the consumer, on the main thread. Its signal handlers only record the signal.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any

from fastq_loader.epoch import resources
from fastq_loader.epoch.fields import Resumable

#: The signals that clusters send; not every system has both.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
#: Seconds for which workers survive the signal.
_GRACE = 60.0


class preemption:
    """Detects that the job will be terminated, so that the training loop can save a checkpoint and leave:

        with fastq_loader.preemption(loader) as preempted:
            for batch in loader:
                step(batch)
                if preempted:
                    torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)
                    break

    Clusters send SIGTERM to all processes of a job, SLURM also SIGUSR1 (`--signal=USR1@60`). Workers that
    are started in the context survive SIGTERM and SIGINT for a minute, or for `Processes.grace_seconds` if
    that is longer, so that the training step can finish and its state be saved. Handlers that were installed
    before are called as well, and are restored when the context ends.

    Args:
        loaders: the loaders whose workers survive: each a `StatefulDataLoader`, or a `Prefetcher` of one.
        signals: the signals that announce the termination.

    Attributes:
        signal: the first signal that was received, or None.

    Raises:
        TypeError: an argument is not a `StatefulDataLoader`.
        ValueError: a signal cannot be handled, or this is not the main thread, on which handlers run; raised
            when the context begins.

    >>> loader = StatefulDataLoader(range(8), 2)
    >>> with preemption(loader) as preempted:
    ...     for batch in loader:
    ...         if batch[0] == 4:
    ...             signal.raise_signal(signal.SIGTERM)  # from the cluster
    ...         if preempted:
    ...             break
    >>> loader.position.batch
    3
    """

    def __init__(self, *loaders: Any, signals: Iterable[int] = _SIGNALS) -> None:
        self.signal: int | None = None
        self._loaders = [getattr(loader, "loader", loader) for loader in loaders]
        for loader in self._loaders:
            if not isinstance(loader, Resumable):
                raise TypeError(
                    f"preemption({loader!r:.80}): it has no state_dict() to be saved with; make the loader a "
                    "fastq_loader.StatefulDataLoader"
                )
        self._signals = tuple(dict.fromkeys(signals))
        self._entered = 0  # depth: only the outermost context installs handlers
        self._before: dict[int, Any] = {}

    def __enter__(self) -> preemption:
        self._entered += 1
        self._set_grace(_GRACE)
        try:
            for number in self._signals if self._entered == 1 else ():
                self._before[number] = signal.signal(number, self._handle)
        except BaseException as error:
            self.__exit__()
            if isinstance(error, OSError):
                text = (
                    f"preemption(signals={self._signals!r}): signal {number} cannot be handled; leave it out"
                )
                raise ValueError(text) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        if self._entered:
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._set_grace(0.0)

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        before: Callable[[int, FrameType | None], Any] | int | None = self._before[number]
        if callable(before):
            before(number, frame)

    def _set_grace(self, seconds: float) -> None:
        for loader in self._loaders:
            resources.of(loader).grace = seconds
