"""A bare `recv_into`: what TCP alone lands in the consumer's memory, of batches that nobody has to make.

For each connection a program sends (`tcp_sender`), and a thread here receives into memory that it uses again
and again. Nobody orders batches, and nobody says which are wanted.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from time import perf_counter

from bench.timing.ceiling import WARM_UP
from bench.timing.rounds import Lane, Row


@dataclass(eq=False, kw_only=True)
class BareLane(Lane):
    """The connections, and a clock for each.

    Attributes:
        batch_bytes: that a batch has.
    """

    batch_bytes: int
    connections: int

    def start(self) -> None:
        self._senders = [self._sender() for _ in range(self.connections)]
        self._memory = [memoryview(bytearray(self.batch_bytes)) for _ in self._senders]
        self._threads = self.closing.enter_context(ThreadPoolExecutor(len(self._senders)))
        self._timed(self.seconds * WARM_UP)

    def block(self, part: str) -> list[Row]:
        return [self._timed(self.seconds)]

    def _sender(self) -> tuple[str, int]:
        """Start one; where it listens."""
        command = [sys.executable, "-m", "bench.timing.tcp_sender", str(self.batch_bytes)]
        sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.closing.enter_context(sender)  # which closes its standard input, and waits
        assert sender.stdout is not None, "it was started with a pipe"
        return "127.0.0.1", int(sender.stdout.readline())

    def _timed(self, seconds: float) -> Row:
        """Receive on all connections for about so long; their rates are added up."""
        receive = partial(_receive, seconds=seconds)
        counted = list(self._threads.map(receive, self._senders, self._memory))
        batches = sum(count for count, _ in counted)
        return {"batches": batches, "seconds": batches / sum(count / took for count, took in counted)}


def _receive(sender: tuple[str, int], into: memoryview, seconds: float) -> tuple[int, float]:
    """Whole batches, and the seconds that they took. The connection is made for this, and warmed up: one that
    stayed would fill the system's buffers meanwhile."""
    with socket.create_connection(sender) as connection:
        _take(connection, into, seconds * WARM_UP)
        return _take(connection, into, seconds)


def _take(connection: socket.socket, into: memoryview, seconds: float) -> tuple[int, float]:
    taken, started = 0, perf_counter()
    while (took := perf_counter() - started) < seconds or not taken:
        received = 0
        while received < len(into):
            count = connection.recv_into(into[received:], 0, socket.MSG_WAITALL)
            if not count:
                raise EOFError("its sender has ended")
            received += count
        taken += 1
    return taken, took
