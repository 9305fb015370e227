"""Batches on their way to a device: page-lock, copy beside the step, hand out on the consumer's stream.

Runs in the consumer, on the thread that calls `next()`: a thread of its own would fight for the GIL, and
break the capture of CUDA graphs. `Staging` serves one pool of workers, whose batches lie in blocks, ready for
one copy each; `SerialStaging` does the same without workers.

The order in a call of `next()`: look which copies have run, whose blocks are free again; take the head, whose
copy was begun before, or begin it; let the consumer's stream wait for that copy; begin the copies of the next
`prefetch` batches, so far as they are ready; hand out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fastq_loader.device.copies import Copy
from fastq_loader.device.pinning import Blocks, Buffer, Place
from fastq_loader.device.session import DeviceSession
from fastq_loader.errors import ProtocolError, UnpicklableError
from fastq_loader.ipc.messages import Answer
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.ledger import device_aligned
from fastq_loader.packing import pickling
from fastq_loader.packing.aliasing import bound_places, extents_of
from fastq_loader.packing.pack import SPECS, Walker
from fastq_loader.packing.spec import Spec
from fastq_loader.packing.tensors import moved
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.system.interrupts import refuse_interrupt


class Staging:
    """The copies of one pool of workers.

    Args:
        session: the loader's.
        unpacker: of the pool.
        mapping: the pool's memory.
    """

    def __init__(self, session: DeviceSession, unpacker: Unpacker, mapping: Mapping) -> None:
        self._session = session
        self._unpacker = unpacker
        self._copies, self._pinner = session.open(Blocks(mapping.base, mapping.populate))
        self._free: list[int] = []  # blocks of batches that were handed out and of which nothing is under way

    @property
    def ahead(self) -> int:
        """Batches that are copied before they are asked for."""
        return self._session.options.prefetch

    def turn(self) -> list[int]:
        """The next batch is asked for.

        Returns:
            Offsets of blocks that may be written again.
        """
        self._copies.turn()
        return self.reap()

    def reap(self) -> list[int]:
        """Offsets of blocks that may be written again since they were asked for last."""
        return self._freed(self._copies.reap())

    def _freed(self, over: Iterable[tuple[int, ...]]) -> list[int]:
        free, self._free = self._free, []
        for offsets in over:
            free += offsets
        return free

    def begin(self, answers: Iterable[Answer], wait: bool = True) -> None:
        """Begin the copies of these batches, where that is still to be done; with `wait`, also where an older
        copy has to be waited for. One that cannot be begun is tried again when it is its turn, where its
        error has a place."""
        for answer in answers:
            if not wait and (self._copies.full or self._pinner.busy):
                return
            if answer.seq not in self._copies and self._unpacker.part(_handle(answer)) is not None:
                try:
                    self._copy(answer)
                except Exception as error:
                    refuse_interrupt(error)
                    return

    def _copy(self, answer: Answer) -> Copy:
        handle = _handle(answer)
        part = self._unpacker.part(handle)
        assert part is not None
        offset, size, into, nbytes = part
        source, buffer = self._pinner.source(Place(offset, size, into, nbytes))
        blocks = tuple(offset for offset, _ in answer.used)

        def finish(memory: torch.Tensor) -> Any:
            return self._session.finish(self._build(answer, memory))

        then = _attempt(finish) if self._session.options.transform_stream == "side" else None
        copy = self._copies.begin(answer.seq, source, nbytes, blocks, then)
        if buffer is not None:
            self._pinner.sent(buffer, copy)
        return copy

    def _build(self, answer: Answer, memory: torch.Tensor) -> Any:
        handle = _handle(answer)
        return self._unpacker.unpack(handle, self._unpacker.open(handle)[2], memory)

    def deliver(self, answer: Answer) -> Any:
        """The batch of an answer, on the device, ready for what is queued on the current stream from here on.

        Raises:
            ProtocolError: the answer does not speak of a batch.
            Exception: whatever unpickling, or the user's transform, raises.
            RuntimeError: the device's memory is used up, or it failed; with torch's text.
        """
        blocks = [offset for offset, _ in answer.used]
        if self._unpacker.part(_handle(answer)) is None:  # nothing of it goes over
            self._free += blocks
            nothing = torch.empty(0, dtype=torch.uint8, device=self._session.stager.device)
            return self._session.finish(self._build(answer, nothing))
        if answer.seq not in self._copies:
            try:
                self._copy(answer)
            except BaseException:
                self._free += blocks
                raise
        copy = self._copies.take(answer.seq)
        if self._session.options.transform_stream == "side":
            return _result(copy)
        return self._session.finish(self._build(answer, copy.memory))

    def drain(self) -> list[int]:
        """Wait for every copy, and forget what was not handed out: its blocks are somebody else's to free.

        Returns:
            Offsets of the blocks of batches that were handed out.
        """
        return self._freed(self._copies.drain())

    def forget(self, offset: int) -> None:
        """The pages of a block are about to go back to the system."""
        self._pinner.forget(offset)

    def close(self) -> list[int]:
        """The pool ends: wait for every copy, and undo every page-lock. Returns what `drain` returns."""
        offsets = self.drain()
        self._pinner.close()
        return offsets


def _handle(answer: Answer) -> Any:
    if answer.handle is None:
        raise ProtocolError("an answer without a batch")
    return answer.handle


def _attempt(build: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, Exception | None]]:
    """`build`, with its error beside its result: it has a place, which is not where it runs."""

    def attempt(memory: Any) -> tuple[Any, Exception | None]:
        try:
            return build(memory), None
        except Exception as error:
            refuse_interrupt(error)
            return None, error

    return attempt


def _result(copy: Copy) -> Any:
    """What `_attempt` has come to, which the copy forgets: an error holds the frames that look at it."""
    (batch, error), copy.result = copy.result, (None, None)
    try:
        if error is not None:
            raise error
        return batch
    finally:
        del batch, error


class _Walker(Walker):
    """Lets tensors pass that only workers cannot hand over: those of a graph."""

    @staticmethod
    def is_leaf(value: Any) -> bool:
        return not getattr(value, "requires_grad", False) and pickling.is_leaf(value)


class SerialStaging:
    """The same without workers: each batch is put together in a buffer, and its copy begins at once.

    Args:
        session: the loader's.
    """

    def __init__(self, session: DeviceSession) -> None:
        self._session = session
        self._copies, self._pinner = session.open(None)
        self._walker = _Walker()
        self._specs: dict[Any, Spec] = {}
        self._batches = 0

    @classmethod
    def of(cls, session: DeviceSession, idle: list[SerialStaging]) -> SerialStaging:
        """One of `idle`, which no iteration uses any more, or a new one."""
        while idle:
            staging = idle.pop()
            if staging._session is session:
                return staging
            staging.close()
        return cls(session)

    def close(self) -> None:
        """Wait for every copy, and let the buffers go."""
        self._copies.drain()
        self._pinner.close()

    def stage(self, batch: Any) -> Any:
        """A batch with its tensors on the device, ready for what is queued on the current stream from here
        on. Arrays, values and objects without tensors stay the objects they are.

        Raises:
            UnpicklableError: an object with tensors in it cannot be pickled, which is how they are found.
            Exception: whatever the user's transform raises.
            RuntimeError: the device's memory is used up, or it failed; with torch's text.
        """
        self._copies.turn()
        self._copies.reap()
        try:
            put_together = self._take_apart(batch)
        finally:
            self._walker.clear()
        return put_together()

    def _take_apart(self, batch: Any) -> Callable[[], Any]:
        walker = self._walker
        tree = walker.walk(batch)
        values, objects = walker.values, [self._carry(value) for value in walker.objects]
        leaves = list(walker.leaves)
        metas, extents = extents_of(walker.leaves)
        bound = bound_places(metas)
        starts, nbytes = [-1] * len(extents), 0
        for place in bound:
            starts[place] = nbytes
            nbytes += device_aligned(extents[place][1] - extents[place][0])
        spec = self._spec(tree, metas, tuple([end - start for start, end in extents]), tuple(starts))

        def build(memory: torch.Tensor) -> Any:
            spec.look(memory, leaves)
            there = [carried(leaves, memory.device) for carried in objects]
            return self._session.finish(spec.build(leaves, iter(values), there))

        if not bound:
            return lambda: build(torch.empty(0, dtype=torch.uint8, device=self._session.stager.device))
        buffer = self._gather(extents, bound, starts, nbytes)
        return lambda: self._send(buffer, spec.device_bytes, build)

    def _spec(self, *key: Any) -> Spec:
        spec = self._specs.get(key)
        if spec is None:
            spec = self._specs[key] = Spec(key)
            if len(self._specs) > SPECS:
                del self._specs[next(iter(self._specs))]
        return spec

    def _carry(self, value: Any) -> Callable[[list[Any], torch.device], Any]:
        """How an object of a batch is made again: of its own parts on the device, if it has tensors."""
        if isinstance(value, torch.Tensor):  # sparse, of a subclass, that requires grad, …
            return lambda leaves, device: moved(value, device)
        found: list[Any] = []

        def add_leaf(leaf: Any) -> int:
            found.append(leaf)
            return self._walker.add_leaf(leaf)

        try:
            data = pickling.dump(value, add_leaf, storages_stay=True)
        except UnpicklableError:
            if any(isinstance(leaf, torch.Tensor) for leaf in found):
                raise
            return lambda leaves, device: value
        if not any(isinstance(leaf, torch.Tensor) for leaf in found):
            return lambda leaves, device: value
        return lambda leaves, device: pickling.load(data, leaves)

    def _gather(
        self, extents: list[tuple[int, int]], bound: list[int], starts: list[int], nbytes: int
    ) -> Buffer:
        stager = self._session.stager
        buffer = self._pinner.buffer(max(nbytes, 1))
        assert buffer is not None, "where there are no blocks, there is always a buffer"
        for place in bound:
            start, end = extents[place]
            if end > start:
                there = buffer.memory[starts[place] : starts[place] + end - start]
                stager.fill(there, stager.view(start, end - start), end - start)
        return buffer

    def _send(self, buffer: Buffer, nbytes: int, build: Callable[[torch.Tensor], Any]) -> Any:
        key = self._batches = self._batches + 1
        then = _attempt(build) if self._session.options.transform_stream == "side" else None
        copy = self._copies.begin(key, buffer.memory, nbytes, (), then)
        self._pinner.sent(buffer, copy)
        self._copies.take(key)
        return build(copy.memory) if then is None else _result(copy)
