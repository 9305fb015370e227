"""A device without a device: streams as queues that a seed drives, and memory that is handed out again.

What is queued runs when the seed says so, in any order that streams and events allow. So a copy reads what
its source holds when it runs, a read sees what memory holds by then, and memory without an owner is allocated
again at once. A wait that is missing shows: `Breach`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from fastq_loader.errors import PinFailed

SIDE, HOME, OTHER = "side", "home", "other"
Value = Hashable


class Breach(AssertionError):
    """A rule was broken, as seen by the device."""


class OutOfMemory(RuntimeError):
    """The device has no memory left, for now."""


@dataclass(eq=False)
class Token:
    """A place in a stream's queue."""

    over: bool = False


@dataclass(eq=False)
class Event:
    """What was queued on a stream when it was recorded."""

    token: Token


@dataclass(eq=False)
class Cell:
    """A piece of device memory.

    Attributes:
        home: the stream that it was allocated on.
        value: what it holds.
        shared: the other streams that it is read on.
    """

    nbytes: int
    home: str
    value: Value = "never written"
    shared: set[str] = field(default_factory=set)


class Memory:
    """An owner's name for a cell; when the last one is gone, the device allocates the cell again."""

    def __init__(self, device: SimulatedDevice, cell: Cell) -> None:
        self._device = device
        self.cell = cell

    def __del__(self) -> None:
        self._device.freed(self.cell)


@dataclass(eq=False)
class Host:
    """Host memory that a copy may read from. `address`: of a block; None: a buffer, which may be `locked`."""

    nbytes: int
    address: int | None = None
    locked: bool = False
    value: Value = "never filled"


class Batch(NamedTuple):
    """What a consumer reads: memories, and what each should hold."""

    parts: list[tuple[Memory, Value]]


class SimulatedDevice:
    """See `accelerator.TorchBackend` for what the methods promise.

    Args:
        seed: of what runs when.
        refuse: what does not work: "register", "register later" (from the third block on), "pinned", "pinned
            later" (from the second buffer on), and "memory" (now and then the device has none).

    Attributes:
        current: the consumer's stream.
        blocks: what the blocks hold, by address; workers write to it.
        populated: addresses of blocks whose pages are there. `registered`: address → bytes.
        unlocked: copies from memory that was not page-locked.
        copies: bytes of the copies from the host. `queued_copies`: how many have not run. `most`: the most
            there were of those.
        buffers: how many were to be page-locked.
        seconds: of the host's clock: it ticks at every step that is waited for, and when pages are locked.
        may_wait: whether the host may wait for an event now. `waited`: it did although it may not.
    """

    def __init__(self, seed: int, refuse: tuple[str, ...] = ()) -> None:
        self.device = "meta"  # for tensors that nobody reads
        self.side = SIDE
        self.current = HOME
        self.blocks: dict[int, Value] = {}
        self.populated: set[int] = set()
        self.registered: dict[int, int] = {}
        self.unlocked = 0
        self.copies: list[int] = []
        self.most = 0
        self.seconds = self.buffers = 0
        self.may_wait = True
        self.waited = False
        self.queued_copies = 0
        self._refuse = refuse
        self._asked_in_vain: set[str] = set()
        self._random = random.Random(seed)
        self._queues: dict[str, deque[Token | Callable[[], None]]] = {
            stream: deque() for stream in (SIDE, HOME, OTHER)
        }
        self._cells: list[tuple[Cell, list[Token]]] = []  # free ones, and what has to run before

    # ---- running what is queued ---------------------------------------------------------------

    def run(self, most: int) -> bool:
        """Run up to `most` of what is queued; whether anything could."""
        ran = False
        first = self._random.choice((SIDE, HOME, OTHER))  # one that is ahead of the others for a while
        for _ in range(most):
            ready = [stream for stream, queue in self._queues.items() if queue and self._may_run(queue[0])]
            if not ready:
                break
            stream = first if first in ready and self._random.random() < 0.8 else self._random.choice(ready)
            action = self._queues[stream].popleft()
            if not isinstance(action, Token):
                action()
            ran = True
        return ran

    def catch_up(self, stream: str) -> None:
        """Run what is queued on one stream, and nothing else."""
        queue = self._queues[stream]
        while queue and self._may_run(queue[0]):
            action = queue.popleft()
            if not isinstance(action, Token):
                action()

    def _may_run(self, action: Token | Callable[[], None]) -> bool:
        return not isinstance(action, Token) or action.over

    def finish(self) -> None:
        """Run everything."""
        while self.run(100):
            continue
        if any(self._queues.values()):
            raise Breach("streams wait for each other")

    def queue(self, action: Callable[[], None]) -> None:
        """On the current stream."""
        self._queues[self.current].append(action)

    # ---- what users do ------------------------------------------------------------------------

    def read(self, batch: Batch) -> None:
        """Queue a read of a batch."""
        for memory, value in batch.parts:
            self.queue(partial(_expect, memory.cell, value))

    def write(self, memory: Memory, value: Callable[[], Value]) -> None:
        """Queue a kernel that writes."""
        cell = memory.cell
        self.queue(lambda: setattr(cell, "value", value()))

    def freed(self, cell: Cell) -> None:
        tokens = [self._mark(stream) for stream in cell.shared - {cell.home}]
        cell.shared = set()
        self._cells.append((cell, tokens))

    # ---- the protocol -------------------------------------------------------------------------

    def clock(self) -> float:
        return self.seconds

    def current_stream(self) -> str:
        return self.current

    def capturing(self) -> bool:
        return False

    def prove(self) -> None:
        if "register" in self._refuse:
            self._refused("register")

    def empty(self, nbytes: int) -> Memory:
        if "memory" in self._refuse and self._random.random() < 0.1:
            raise OutOfMemory
        for at in reversed(range(len(self._cells))):
            cell, tokens = self._cells[at]
            if cell.home == self.current and cell.nbytes >= nbytes and all(token.over for token in tokens):
                del self._cells[at]
                return Memory(self, cell)
        return Memory(self, Cell(nbytes, self.current))

    def copy_async(self, memory: Memory, source: Host, nbytes: int) -> None:
        cell, queue = memory.cell, self._queues[SIDE]
        address = source.address
        registered = address in self.registered
        self.unlocked += not (registered or source.locked)
        self.copies.append(nbytes)
        self.queued_copies += 1
        self.most = max(self.most, self.queued_copies)

        def copy() -> None:
            self.queued_copies -= 1
            if registered and address not in self.registered:
                raise Breach(f"the block at {address} was unregistered before its copy ran")
            value = source.value if address is None else self.blocks[address]
            _write(cell, nbytes, source.nbytes, value)

        queue.append(copy)

    def _mark(self, stream: str) -> Token:
        token = Token()
        self._queues[stream].append(lambda: setattr(token, "over", True))
        return token

    def record(self, stream: str) -> Event:
        return Event(self._mark(stream))

    def wait(self, stream: str, event: Event) -> None:
        self._queues[stream].append(event.token)

    def query(self, event: Event) -> bool:
        self.run(self._random.randrange(3))
        return event.token.over

    def synchronize(self, event: Event) -> None:
        self.waited = self.waited or not (self.may_wait or event.token.over)
        while not event.token.over:
            self.seconds += 1
            if not self.run(1):
                raise Breach("what is waited for never comes")

    def share(self, memory: Any, stream: str) -> None:
        if isinstance(memory, Memory):
            memory.cell.shared.add(stream)
        else:
            # What a transform made on the side stream; None where it failed. A tuple: it runs in a thread.
            batch = memory[0] if type(memory) is tuple else memory
            for part, _ in batch.parts if batch else ():
                part.cell.shared.add(stream)

    def on_side(self, call: Callable[[], Any]) -> Any:
        before, self.current = self.current, SIDE
        try:
            return call()
        finally:
            self.current = before

    def _refused(self, what: str) -> None:
        if what in self._asked_in_vain:
            raise Breach(f"{what} was tried again")
        self._asked_in_vain.add(what)
        raise PinFailed("refused")

    def register(self, address: int, nbytes: int) -> None:
        if "register later" in self._refuse and len(self.registered) == 2:
            self._refused("register")
        if address in self.registered or address not in self.populated:
            raise Breach(f"the block at {address} is registered already, or its pages are not there")
        self.registered[address] = nbytes
        self.seconds += 1

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def pinned(self, nbytes: int) -> Host:
        self.seconds += 1
        self.buffers += 1
        if "pinned" in self._refuse or (self.buffers > 1 and "pinned later" in self._refuse):
            self._refused("pinned")
        return Host(nbytes, locked=True)

    def pageable(self, nbytes: int) -> Host:
        return Host(nbytes)

    def fill(self, memory: Host, start: int, address: int, nbytes: int) -> None:
        """The address is the value, in runs of `Prefetcher`."""
        memory.value = address

    def view(self, address: int, nbytes: int) -> Host:
        return Host(nbytes, address)


def _expect(cell: Cell, value: Value) -> None:
    if cell.value != value:
        raise Breach(f"{value} was expected, and {cell.value} is there")


def _write(cell: Cell, nbytes: int, most: int, value: Value) -> None:
    if nbytes > min(cell.nbytes, most):
        raise Breach(f"{nbytes} bytes were copied from {most} to {cell.nbytes}")
    cell.value = value
