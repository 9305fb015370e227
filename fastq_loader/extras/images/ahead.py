"""Decoding in a thread of its own, ahead of the step.

Runs in the consumer. The thread knows no loader: it takes calls from a queue, one after the other. A call
whose ticket was dropped by its owner is not made, so an epoch that is broken off costs the batch that is
being decoded. The thread is a daemon: it neither holds up the end of the process, as an executor's does, nor
outlives the owner of its queue.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch

from fastq_loader.device.staging import CapturedCall
from fastq_loader.extras.images import gpu

#: The ticket of a call, and the call.
_Task = tuple["weakref.ref[Future[CapturedCall]]", Callable[[], Any]]


class Ahead:
    """Decodes batches in their order, in a thread that the first of them starts.

    Args:
        decode: called with a batch, on the thread.
        finish: called with the batch and the result of `decode`, on the thread that takes the batch.
    """

    def __init__(self, decode: Callable[..., Any], finish: Callable[..., Any]) -> None:
        self._decode, self._finish = decode, finish
        self._queue: SimpleQueue[_Task | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, batch: Any) -> Callable[[], Any]:
        """Decode a batch after those before it; not at all if the returned function, which waits and returns
        the result, is dropped before its turn."""
        if self._thread is None:
            name = "fastq_loader decodes images"
            self._thread = threading.Thread(target=_run, args=(self._queue,), daemon=True, name=name)
            self._thread.start()
            weakref.finalize(self, self._queue.put, None).atexit = False
        ticket: Future[CapturedCall] = Future()
        self._queue.put((weakref.ref(ticket), partial(self._decode, batch)))
        return partial(self._take, batch, ticket)

    def _take(self, batch: Any, ticket: Future[CapturedCall]) -> Any:
        return self._finish(batch, ticket.result().take())

    def close(self) -> None:
        """End the thread, after the batch that it decodes. This waits for it for seconds at most."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(gpu.PATIENCE)
            self._thread = None


def _run(queue: SimpleQueue[_Task | None]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more would compete with the step and the workers
    restoring = threading.Thread(target=torch.set_num_threads, args=(threads,))  # for threads to come
    restoring.start()
    restoring.join()
    for reference, call in iter(queue.get, None):
        if (ticket := reference()) is not None:
            try:
                ticket.set_result(CapturedCall(call))
            except BaseException as error:  # such as a panic of a plugin of pillow's: nobody may wait forever
                ticket.set_exception(error)
        del ticket, call  # they hold the batch
