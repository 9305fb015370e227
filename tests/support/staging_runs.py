"""Random runs of the staging logic over a simulated device: workers, a consumer, and what either may do."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from fastq_loader.device import staging as staging_module
from fastq_loader.device.accelerator import ToDevice
from fastq_loader.device.copies import Copies
from fastq_loader.device.pinning import PinPolicy
from fastq_loader.device.staging import DeviceSession
from fastq_loader.statistics.counters import StagingCounters
from tests.support.datasets import identity
from tests.support.simulated_device import (
    HOME,
    OTHER,
    SIDE,
    Batch,
    Breach,
    Cell,
    Memory,
    OutOfMemory,
    SimulatedDevice,
    Value,
)

BASE, SIZE = 1 << 20, 4096  # of the arena, and of a block
WINDOW = 5  # batches that workers are ahead
REFUSALS: tuple[tuple[str, ...], ...] = (
    (),
    ("register",),
    ("register later",),
    ("register later",),
    ("memory",),
)


class Interrupted(BaseException):
    """As Ctrl-C raises it, in the middle of a transform."""


def choose(seed: int) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A user's options at random, and what the device refuses or cannot do."""
    draw = random.Random(seed)
    options = {
        "prefetch": draw.choice((1, 2, 3)),
        "transform_stream": draw.choice(("consumer", "side")),
    }
    return options, draw.choice(REFUSALS)


def options_for(device: str = "cpu", **given: Any) -> ToDevice:
    """Options for whatever stands in an accelerator's place, which is not asked whether it is there."""
    options = ToDevice("cpu", **given)
    object.__setattr__(options, "target", torch.device(device))
    return options


class ThreadedTransform:
    """A transform in a thread, without the thread: each batch comes once, and is transformed late."""

    def __init__(self, run: Run) -> None:
        self.run, self.begun = run, set[tuple[int, int]]()

    def __call__(self, batch: Batch) -> Batch:
        raise Breach("it was called on the consumer's thread")

    def start_ahead(self) -> ThreadedTransform:
        self.run.threads += 1
        return self

    def begin(self, batch: Batch) -> Callable[[], Batch]:
        key = (self.run.epoch, self.run.unpacking)
        if key in self.begun:
            raise Breach(f"{key} was begun twice")
        self.begun.add(key)
        return lambda: self.run.transform(batch)

    def close(self) -> None:
        self.run.threads -= 1


class Run:
    """Some epochs of one pool, all of it drawn from a seed."""

    def __init__(self, seed: int) -> None:
        options, self.refuse = choose(seed)
        self.random = random.Random(seed)
        self.device = SimulatedDevice(seed, self.refuse)
        transform: Any = self.transform if self.random.random() < 0.6 else None
        self.threads = 0  # of a transform in a thread: how many run
        if seed % 16 == 5 and options["transform_stream"] == "consumer":
            transform = ThreadedTransform(self)
        self.options = options_for(**options, transform=transform)
        self.session = DeviceSession(self.options)
        with patch.object(staging_module, "TorchBackend", lambda device: self.device):
            mapping: Any = SimpleNamespace(base=BASE, populate=self.populate)
            unpacker: Any = SimpleNamespace(
                part=lambda handle: handle or None,
                open=lambda handle: ([], [], b""),
                unpack=lambda handle, pickled, memory: self.unpack(handle, memory),
            )
            self.staging = staging_module.Staging(self.session, unpacker, mapping)
        self.epoch = self.unpacking = -1  # what is iterated, and which batch of it is put together
        self.free: set[int] = set()
        self.used: dict[int, int] = {}  # seq → block
        self.made = 0
        self.answers: dict[int, Any] = {}
        self.failed: set[int] = set()  # batches of the epoch whose transform failed

    # ---- what the package asks of others ------------------------------------------------------

    def populate(self, offset: int, size: int) -> None:
        self.device.seconds += 1
        self.device.populated.add(BASE + offset)

    def unpack(self, handle: Any, memory: Memory) -> Batch:
        return Batch([(memory, self.tag(self.unpacking))] if handle else [])

    def transform(self, batch: Batch) -> Batch:
        """As users' transforms do, it returns something new, what it got, both, works in place, or fails."""
        if not batch.parts:
            return batch
        if self.options.transform_stream == "side":
            if self.device.current != SIDE:
                raise Breach("the transform does not run beside the step")
            if self.random.random() < 0.02:
                raise Interrupted
        if self.random.random() < 0.05:
            self.failed.add(self.unpacking)
            raise KeyError("the transform fails")
        (source, value), *_ = batch.parts
        cell = source.cell
        if self.unpacking % 4 == 0:
            self.device.write(source, lambda: ("transformed", cell.value))
            return Batch([(source, ("transformed", value))])
        try:
            made = self.device.empty(cell.nbytes)
        except OutOfMemory:
            made = Memory(self.device, Cell(cell.nbytes, self.device.current_stream()))
        self.device.write(made, lambda: ("transformed", cell.value))
        parts: list[tuple[Memory, Value]] = [(made, ("transformed", value))]
        return Batch([*parts, *batch.parts] if self.unpacking % 2 else parts)

    def tag(self, seq: int) -> Value:
        return ("batch", seq, self.epoch)

    # ---- workers ------------------------------------------------------------------------------

    def load(self, seq: int) -> None:
        """A worker writes a batch to a block that is free, or to a new one."""
        if self.free and self.random.random() < 0.9:
            offset = self.random.choice(sorted(self.free))
            self.free.discard(offset)
        else:
            offset = self.made * SIZE
            self.made += 1
        self.device.blocks[BASE + offset] = self.tag(seq)
        self.used[seq] = offset
        nbytes = self.random.choice((64, 64, 64, 128, 256))
        handle = () if self.random.random() < 0.05 else (offset, SIZE, 0, nbytes)  # (): it has no tensors
        self.answers[seq] = SimpleNamespace(used=((offset, nbytes),), handle=handle, copy=None)

    def let_go(self, offsets: list[int]) -> None:
        """The blocks are free, and somebody writes to them at once."""
        for offset in offsets:
            if offset in self.free:
                raise Breach(f"the block at {offset} is given back twice")
            self.device.blocks[BASE + offset] = "overwritten"
            self.free.add(offset)

    # ---- the consumer -------------------------------------------------------------------------

    def epochs(self, count: int, batches: int) -> None:
        for self.epoch in range(count):
            self.failed.clear()
            with suppress(Interrupted):  # it ends the iteration
                self.iterate(batches)
            last = self.epoch == count - 1
            self.let_go(self.staging.close() if last else self.staging.drain())
            left = [self.used[seq] for seq in self.answers]  # the scheduler drops these
            self.answers.clear()
            self.let_go(left)
            self.device.catch_up(self.device.current)
            for _ in range(5):  # what was abandoned must not write to memory that is the step's now
                self.use_memory()
                self.device.run(5)
        if len(self.free) != self.made:
            raise Breach(f"{self.made - len(self.free)} blocks were never given back")
        if self.threads:
            raise Breach("the transform's thread was not ended")
        staging = self.session.statistics
        if self.device.registered or staging.pinned_bytes:
            raise Breach("something is page-locked after the end")
        self.device.finish()
        if self.device.unlocked and staging.pin != "pageable":
            raise Breach(f"pin={staging.pin!r}, and some copies were not from page-locked memory")
        if (staging.copies, staging.copied_bytes) != (len(self.device.copies), sum(self.device.copies)):
            raise Breach("copies were counted wrong")
        if self.device.most > 2 * self.options.prefetch:
            raise Breach(f"{self.device.most} copies were under way at once")

    def iterate(self, batches: int) -> None:
        draw, device = self.random, self.device
        loaded = 0
        held: list[tuple[str, Batch]] = []
        last = draw.randrange(batches) if draw.random() < 0.5 else batches
        for seq in range(last):
            while loaded < min(seq + draw.randint(1, WINDOW), batches):
                self.load(loaded)
                loaded += 1
            device.run(draw.randrange(12))
            if draw.random() < 0.15:
                device.current = OTHER if device.current == HOME else HOME
            try:
                held.append((device.current, self.next(seq)))
            except (OutOfMemory, KeyError) as error:
                if isinstance(error, KeyError) and seq not in self.failed:
                    raise
                continue
            if seq in self.failed:
                raise Breach("the error of a transform is lost")
            self.read_again(held[-1:])
            self.check_locks()
            self.use_memory()
            while len(held) > 4 or (held and draw.random() < 0.6):
                del held[draw.randrange(len(held))]
            self.read_again(held)
            if draw.random() < 0.2:
                while loaded < min(seq + WINDOW, batches):
                    self.load(loaded)
                    loaded += 1
                self.poll(seq + 1)
            if draw.random() < 0.1:
                self.trim()

    def next(self, seq: int) -> Batch:
        self.let_go(self.staging.reap())
        self.unpacking = seq
        batch: Batch = self.staging.deliver(self.answers.pop(seq))
        self.begin(seq + 1)
        return batch

    def begin(self, head: int) -> None:
        for seq in range(head, head + self.options.prefetch):
            if seq in self.answers:
                self.unpacking = seq
                self.staging.begin([self.answers[seq]])
                begun = self.answers[seq].copy or not self.answers[seq].handle
                if not begun and "memory" not in self.refuse:
                    raise Breach(f"the copy of batch {seq} could not be begun ahead")

    def check_locks(self) -> None:
        """Whether something is page-locked although the driver refused some of it."""
        locked = sum(self.device.registered.values())
        if locked and self.session.statistics.pin_reason == "refused":
            raise Breach(f"{locked} bytes stayed registered when the driver refused the rest")

    def poll(self, head: int) -> None:
        """Waits for nothing; so some copies may not be begun."""
        self.let_go(self.staging.reap())
        self.device.may_wait = False
        idle = not self.device.queued_copies
        try:
            for seq in range(head, head + self.options.prefetch):
                if seq in self.answers:
                    self.unpacking = seq
                    self.staging.begin([self.answers[seq]], wait=False)
        finally:
            self.device.may_wait = True
        first = self.answers.get(head)
        if idle and first and first.handle and not (first.copy or "memory" in self.refuse):
            raise Breach("poll begins nothing")
        # To fall back takes a wait, once.
        if self.device.waited and not self.refuse:
            raise Breach("poll waited for the device")

    def read_again(self, held: list[tuple[str, Batch]]) -> None:
        """On the stream that a batch was handed out on: others are the user's to synchronise."""
        before = self.device.current
        for stream, batch in held:
            self.device.current = stream
            self.device.read(batch)
        self.device.current = before

    def use_memory(self) -> None:
        """The step allocates, writes and lets go."""
        for _ in range(self.random.randrange(3)):
            try:
                memory = self.device.empty(self.random.choice((64, 128, 256)))
            except OutOfMemory:
                return
            self.device.write(memory, lambda: "the step's")
            self.device.read(Batch([(memory, "the step's")]))

    def trim(self) -> None:
        """A free block goes back to the system; what a device has locked of it would be lost."""
        if self.free:
            offset = self.random.choice(sorted(self.free))
            self.staging.forget(offset)
            self.device.populated.discard(BASE + offset)
            if BASE + offset in self.device.registered:
                raise Breach("pages went back to the system that are locked")


def run(seed: int) -> None:
    """One random run.

    Raises:
        Breach: something was seen that must not be.
    """
    Run(seed).epochs(3, 14)


def run_buffers(seed: int) -> None:
    """One random run of the buffers of a loader without workers.

    Raises:
        Breach: something was seen that must not be.
    """
    draw = random.Random(seed)
    refuse = draw.choice(((), ("pinned",), ("pinned later",)))
    device, statistics = SimulatedDevice(seed, refuse), StagingCounters("simulated")
    copies, policy = Copies(device, 2, statistics), PinPolicy(statistics)
    policy.choose(device, in_blocks=False)
    buffers, seen, last = staging_module.Buffers(device, copies, policy, 3), dict[Any, Any](), None
    for key in range(14):
        nbytes = draw.choice((64, 64, 100, 200, 256))
        buffer = buffers.take(nbytes)
        if buffer is last or buffer.nbytes < nbytes:
            raise Breach("a buffer in use, or one that is too small")
        before, last = seen.get(buffer), buffer
        if before is not None and before.nbytes >= nbytes and before is not buffer.memory:
            raise Breach("memory was allocated that was there")
        seen[buffer] = buffer.memory
        if before is None and buffer.memory.locked != (statistics.pin == "bounce"):
            raise Breach(f"pin={statistics.pin!r}, and a buffer is the opposite")
        locked = sum(memory.nbytes for memory in seen.values() if memory.locked)
        if statistics.pinned_bytes != locked:
            raise Breach(f"{locked} bytes are page-locked, {statistics.pinned_bytes} were counted")
        buffer.memory.value = key
        buffer.copy = copies.begin(buffer.memory, nbytes, identity)
        device.run(draw.randrange(8))
        device.read(Batch([(copies.take(buffer.copy), key)]))
        if draw.random() < 0.3:
            copies.reap()
    buffers.close()
    if device.queued_copies or statistics.pinned_bytes:
        raise Breach("something is left after the end")
    device.finish()
