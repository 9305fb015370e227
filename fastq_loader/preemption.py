"""`preemption`: a job that is told to end saves where it stands first.

Runs in the consumer, on the main thread: the handlers of its signals only note what has come, and stop the
dispatch of new batches.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

#: What clusters send; not every system has both.
_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))


class preemption:
    """Notes that the job is to end, for a loop that then saves a checkpoint and leaves:

        with fastq_loader.preemption(loader) as preempted:
            for batch in loader:
                step(batch)
                if preempted:
                    torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, path)
                    break

    Clusters send SIGTERM to all processes of a job, SLURM also SIGUSR1 (`--signal=USR1@60`). Workers go on
    for `Processes.grace_seconds`, so that the training step can end and its state be saved. From the signal
    on, workers get no new batches but the one that is next. Handlers that were set before are called as well,
    and are back when the context ends.

    Args:
        loaders: whose workers need load nothing more; a `Prefetcher` stands for its loader.
        signals: that announce the end.

    Attributes:
        signal: the first one that came; None: none has.

    Raises:
        TypeError: something is no loader of this package.
        ValueError: a signal cannot be handled, or this is not the main thread, whose handlers they would be;
            where the context begins.

    >>> loader = DataLoader(range(8), 2)
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
            if not hasattr(loader, "_resources"):
                raise TypeError(f"preemption({loader!r:.80}): it is no fastq_loader.DataLoader or Prefetcher")
        self._signals = tuple(dict.fromkeys(signals))
        self._entered = 0  # contexts that are open: its own handler is none that was set before
        self._before: dict[int, Any] = {}

    def __enter__(self) -> preemption:
        self._entered += 1
        try:
            for number in self._signals if self._entered == 1 else ():
                self._before[number] = signal.signal(number, self._handle)
        except BaseException as error:
            self.__exit__(None, None, None)
            if isinstance(error, OSError):
                text = (
                    f"preemption(signals={self._signals!r}): signal {number} cannot be handled; leave it out"
                )
                raise ValueError(text) from error
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._entered -= 1
        if self._entered:
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._hold(False)

    def __bool__(self) -> bool:
        return self.signal is not None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = self.signal or number
        self._hold(True)
        before: Callable[[int, FrameType | None], Any] | int | None = self._before[number]
        if callable(before):
            before(number, frame)

    def _hold(self, hold: bool) -> None:
        for loader in self._loaders:
            for engine in list(loader._resources.engines):
                engine.hold(hold)
