"""Decoding in a thread of its own, ahead of the step.

Runs in the consumer. The thread knows no loader: it takes calls from a queue, one after the other. A call
whose ticket was dropped by its owner is not made, so an epoch that is broken off costs the batch that is
being decoded. The thread is a daemon: it neither holds up the end of the process, nor outlives the owner of
its queue.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import cached_property, partial
from queue import SimpleQueue
from typing import Any

import torch

from fastq_loader import api
from fastq_loader.extras.images.gpu import Gpu

#: Seconds that `close` and a fork wait for the batch that is being decoded.
_PATIENCE = 2.0


class Ahead:
    """Decodes batches in their order, in a thread that the first of them starts.

    Args:
        decode: called with a batch, on the thread.
        finish: called with the batch and the result of `decode`, on the thread that takes the batch.
        target: whose turn `decode` waits for.
    """

    def __init__(
        self, decode: Callable[[Any], Any], finish: Callable[[Any, Any], Any], target: Target
    ) -> None:
        self._decode, self._finish, self._target = decode, finish, target
        self._gpu = target.gpu  # here, where the user's device is the current one
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Decode a batch after those before it; not at all if the returned function, which waits and returns
        the result, is dropped before its turn."""
        if self._thread is None:
            self._thread = threading.Thread(
                target=_run, args=(self._queue,), daemon=True, name="fastq_loader decodes images"
            )
            self._thread.start()
            weakref.finalize(self, self._queue.put, None).atexit = False
        ticket: Future[api.CapturedCall] = Future()
        self._queue.put((weakref.ref(ticket), partial(self._decode, batch)))
        finish, turn = self._finish, self._target.turn

        def take() -> Any:
            if turn._is_owned():  # type: ignore[attr-defined]  # the thread waits for this one
                raise RuntimeError("next() was called within paused(), in which no image is decoded")
            return finish(batch, ticket.result().take())

        return take

    def close(self) -> None:
        """End the thread, after the batch that it decodes. This waits for it for seconds at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_PATIENCE)
            self._thread = None


#: The ticket of a call, and the call.
_Task = tuple["weakref.ref[Future[api.CapturedCall]]", Callable[[], Any]]


def _run(queue: SimpleQueue[_Task | None]) -> None:
    torch.set_num_threads(1)  # more would compete with the step and the workers
    for reference, call in iter(queue.get, None):
        if (ticket := reference()) is not None:
            ticket.set_result(api.CapturedCall(call))
        del ticket, call  # they hold the batch


class Target:
    """The device of the results.

    Args:
        device: the device.

    Attributes:
        turn: lock that whoever decodes holds for a batch. A fork of this process waits for it, so that no
            child inherits the locks of a library in the middle of a decode.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.turn = device, threading.RLock()
        _targets.add(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return Target, (self.device,)

    @cached_property
    def gpu(self) -> Gpu | None:
        """What can decode there. Of "cuda" it is the device that is current on the thread that asks first."""
        return Gpu(self.device) if self.device.type == "cuda" and torch.version.cuda else None

    @contextmanager
    def working(self) -> Iterator[Gpu | None]:
        """Context of the decode of one batch: the GPU on whose stream it runs, or None: on the CPU."""
        with self.turn:
            if self.gpu is None:
                yield None
            else:
                with self.gpu.working():
                    yield self.gpu

    def received(self, images: torch.Tensor) -> torch.Tensor:
        """Images on the device, for work on the current stream."""
        if self.gpu is None:
            return images.to(self.device)
        images.record_stream(torch.cuda.current_stream(self.device))
        return images


_targets: weakref.WeakSet[Target] = weakref.WeakSet()
_held: list[Target] = []


def _before_fork() -> None:
    _held.extend(target for target in list(_targets) if target.turn.acquire(timeout=_PATIENCE))


def _after_fork() -> None:
    while _held:
        _held.pop().turn.release()


if hasattr(os, "register_at_fork"):  # as on every system with forks
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
