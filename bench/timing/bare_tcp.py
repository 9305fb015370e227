"""A bare `recv_into`: what TCP alone lands in the consumer's memory, of batches that nobody has to make.

For each connection a program sends (`tcp_sender`), and a thread here receives into memory that it uses again
and again. Nobody orders batches, and nobody says which are wanted.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple

from bench.timing.ceiling import WARM_UP
from bench.timing.rounds import Lane, Row


class Spot(NamedTuple):
    """Where a sender runs: its address, and what its command begins with."""

    address: str
    prefix: tuple[str, ...] = ()


HERE = Spot("127.0.0.1")


@dataclass(eq=False, kw_only=True)
class BareLane(Lane):
    """The connections, and a clock for each.

    Attributes:
        batch_bytes: that a batch has.
        surroundings: what the senders need.
        spots: where they run, one for each connection.
    """

    batch_bytes: int
    surroundings: Callable[[], AbstractContextManager[Any]] = nullcontext
    spots: Callable[[], Sequence[Spot]]

    def start(self) -> None:
        self.closing.enter_context(self.surroundings())
        self._senders = [self._sender(spot) for spot in self.spots()]
        self._memory = [memoryview(bytearray(self.batch_bytes)) for _ in self._senders]
        self._threads = self.closing.enter_context(ThreadPoolExecutor(len(self._senders)))
        self._timed(self.seconds * WARM_UP)

    def block(self, part: str) -> list[Row]:
        return [self._timed(self.seconds)]

    def _sender(self, spot: Spot) -> tuple[str, int]:
        """Start one; where it listens."""
        command = [*spot.prefix, sys.executable, "-m", "bench.timing.tcp_sender"]
        command += [spot.address, str(self.batch_bytes)]
        sender = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.closing.enter_context(sender)  # which closes its standard input, and waits
        assert sender.stdout is not None, "it was started with a pipe"
        return spot.address, int(sender.stdout.readline())

    def _timed(self, seconds: float) -> Row:
        """Receive on all connections for about so long; their rates are added up."""
        receive = partial(_receive, seconds=seconds)
        counted = list(self._threads.map(receive, self._senders, self._memory))
        batches = sum(count for count, _ in counted)
        return {"batches": batches, "seconds": batches / sum(count / took for count, took in counted)}


def _receive(sender: tuple[str, int], into: memoryview, seconds: float) -> tuple[int, float]:
    """Whole batches, and the seconds that they took. The connection is made for this, and warmed up: one that
    stayed would fill the system's buffers meanwhile, over links that others use."""
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
