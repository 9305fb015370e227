"""The messages that a worker receives, in their order.

Runs in a worker, on its main thread. A subclass reads the frames: from the socket of a worker on the
consumer's machine, or from the connection of one on another machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import ClassVar

from fastq_loader.ipc.messages import Bundle, Message, ToWorker, decode_for_worker
from fastq_loader.system import process_id


class Inbox(ABC):
    """Base class of a worker's sockets. A child that user code forks there ends when it uses one."""

    #: The error of decoding after which a frame is dropped; others are raised.
    dropped: ClassVar[tuple[type[Exception], ...]] = ()

    def __init__(self) -> None:
        self._pid = process_id.current()
        self._frames: deque[bytes] = deque()  # received and not read yet

    @abstractmethod
    def _frame(self, block: bool) -> bytes | None:
        """The next frame that arrives. Without `block`, None if none has arrived."""

    @abstractmethod
    def send(self, message: Message) -> None:
        """Send a message to the consumer."""

    def receive(self, block: bool) -> ToWorker | None:
        """The next message. Without `block`, None if nothing is waiting."""
        if process_id.pid != self._pid:
            process_id.stay_in(self._pid)
        while (frame := self._frames.popleft() if self._frames else self._frame(block)) is not None:
            try:
                message = decode_for_worker(frame)
            except self.dropped:
                continue
            if not isinstance(message, Bundle):
                return message
            self._frames.extendleft(reversed(message.frames))
        return None
