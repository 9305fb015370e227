"""Batches on their way to a device: page-lock, copy beside the step, hand out on the consumer's stream.

Runs in the consumer, on the thread that calls `next()`: a thread of its own would fight for the GIL, and
break the capture of CUDA graphs. A `DeviceSession` is kept from epoch to epoch. It has one side stream (a new
one in each epoch would strand the memory that torch cached for the old one), the statistics, and what is
known about page-locking. `Staging` serves one pool of workers, whose batches lie in blocks, ready for one
copy each; `SerialStaging` does the same without workers.

The order in a call of `next()`: find the copies that have run, whose blocks are free again; take the head,
whose copy was begun before, or begin it; let the consumer's stream wait for that copy; begin the copies of
the next `prefetch` batches, so far as they are ready; hand out.

What fails before it is asked for waits for its turn (`Attempt`) without its frames. They would keep the
caller, and so the loader that the error waits in: dropped in the middle of an epoch, it would live on until
the garbage collector comes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from copy import deepcopy
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch

from fastq_loader.device.accelerator import ToDevice, TorchStager
from fastq_loader.device.copies import Copies, Memory
from fastq_loader.device.pinning import Buffer, Pinner, PinPolicy, Source
from fastq_loader.errors import UnpicklableError, WorkerTraceback
from fastq_loader.ipc.messages import Answer
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.blocks import device_aligned
from fastq_loader.packing import pickling
from fastq_loader.packing.spec import Spec, SpecCache
from fastq_loader.packing.tensors import cloned, moved, tensors_of
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.packing.walker import Walker, device_segments, segments_of
from fastq_loader.statistics.counters import StagingCounters
from fastq_loader.system.interrupts import refuse_interrupt


class EarlierTraceback(WorkerTraceback):
    """Where something failed before it was asked for, as text: the `__cause__` of its error."""


class Attempt:
    """A call that is made here and now, whose result is asked for later.

    Args:
        call: made with these arguments.

    Attributes:
        result: of the call, until it is asked for. `error`: what it raised instead.
    """

    def __init__(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.error: Exception | None = None
        try:
            self.result = call(*arguments)
        except Exception as error:
            refuse_interrupt(error)
            text = "".join(traceback.format_exception(error))
            # Past the class's own `__setattr__`: it may be a frozen dataclass.
            BaseException.__setattr__(error, "__context__", None)
            BaseException.__setattr__(error, "__cause__", EarlierTraceback(text))
            self.error = error.with_traceback(None)

    def again(self) -> Any:
        """A copy of what the call returned, or its error; as often as it is asked for."""
        if self.error is not None:
            raise self.error
        return deepcopy(self.result)

    def take(self) -> Any:
        """Return or raise what the call did. It is forgotten here."""
        (result, self.result), (error, self.error) = (self.result, None), (self.error, None)
        try:
            if error is not None:
                raise error
            return result
        finally:
            del error  # it holds this frame by its traceback


class DeviceSession:
    """A loader's way to its device.

    Args:
        options: what the user asked for.

    Attributes:
        statistics: of everything that was copied.
    """

    def __init__(self, options: ToDevice) -> None:
        self.options = options
        self.statistics = StagingCounters(str(options.target))
        self._policy = PinPolicy(options.pin, options.pin_limit_bytes, self.statistics)

    @cached_property
    def stager(self) -> TorchStager:
        """The device, which the first use initialises.

        Raises:
            RuntimeError: it cannot be, with torch's text.
        """
        assert self.options.target is not None, "batches that stay on the host need no session"
        stager = TorchStager(self.options.target)
        self.statistics.device = str(stager.device)
        return stager

    def open(self, mapping: Mapping | None) -> tuple[Copies, Pinner]:
        """The copies of a new pool.

        Args:
            mapping: the pool's memory; None without workers.

        Raises:
            PinFailed: pin="register" was asked for and does not work.
            RuntimeError: see `stager`.
        """
        self._policy.choose(self.stager, in_blocks=mapping is not None)
        prefetch = self.options.prefetch
        copies = Copies(self.stager, prefetch, self.statistics)
        return copies, Pinner(self.stager, copies, mapping, self._policy, buffers=prefetch + 1)

    def refuse_capture(self) -> None:
        """Raise RuntimeError while the current stream is captured into a CUDA graph: events cannot be queried
        then, and what would be queued here would become part of the graph."""
        if "stager" in vars(self) and self.stager.capturing():
            raise RuntimeError(
                "next() was called while a CUDA graph is being captured: take the batch before the capture, "
                "and use copy_into(static_batch) between replays"
            )


class _Stage:
    """Base class of both kinds.

    Args:
        session: the loader's.
        mapping: the pool's memory; None without workers.
    """

    def __init__(self, session: DeviceSession, mapping: Mapping | None) -> None:
        self._session = session
        self._options = session.options
        self._beside = session.options.transform_stream == "side"
        self._copies, self._pinner = session.open(mapping)

    def _finish(self, key: int, build: Callable[[Memory], Any]) -> Any:
        """The batch whose copy was begun."""
        copy = self._copies.take(key)
        return build(copy.memory) if copy.result is None else copy.result.take()

    def _no_memory(self) -> torch.Tensor:
        """For a batch of which nothing is copied."""
        return torch.empty(0, dtype=torch.uint8, device=self._session.stager.device)


class Staging(_Stage):
    """The copies of one pool of workers.

    Args:
        session: the loader's.
        unpacker: of the pool.
        mapping: the pool's memory.
    """

    def __init__(self, session: DeviceSession, unpacker: Unpacker, mapping: Mapping) -> None:
        super().__init__(session, mapping)
        self._unpacker = unpacker
        self._free: list[int] = []  # blocks of batches that were handed out, and that no copy reads

    @property
    def ahead(self) -> int:
        """Batches that are copied before they are asked for."""
        return self._options.prefetch

    def reap(self) -> list[int]:
        """Offsets of blocks that may be written again since they were asked for last."""
        return self._freed(self._copies.reap())

    def _freed(self, offsets: list[int]) -> list[int]:
        free, self._free = self._free + offsets, []
        return free

    def begin(self, answers: Iterable[Answer], wait: bool = True) -> None:
        """Begin the copies of these batches, where that is still to be done; with `wait`, also where an older
        copy has to be waited for. One that cannot be begun is tried again when it is its turn, where its
        error has a place; those behind it wait, so that transforms are called in the order of the batches."""
        for answer in answers:
            if not wait and (self._copies.full or self._pinner.busy):
                return
            if answer.seq not in self._copies:
                if (source := self._source(answer)) is None:
                    return
                try:
                    self._copy(answer, source)
                except Exception as error:
                    refuse_interrupt(error)
                    return

    def _source(self, answer: Answer) -> Source | None:
        """Where the part of a batch lies that goes to the device; None if nothing does."""
        assert answer.handle is not None
        part = self._unpacker.part(answer.handle)
        return None if part is None else Source(*part)

    def _copy(self, answer: Answer, source: Source) -> None:
        buffer, build = self._pinner.prepare(source), partial(self._build, answer)
        then = partial(Attempt, build) if self._beside else None
        buffer.copy = self._copies.begin(answer.seq, buffer.memory, source.nbytes, _blocks(answer), then)

    def _build(self, answer: Answer, memory: torch.Tensor) -> Any:
        assert answer.handle is not None
        pickled = self._unpacker.open(answer.handle)[2]
        return self._options.apply_transform(self._unpacker.unpack(answer.handle, pickled, memory))

    def deliver(self, answer: Answer) -> Any:
        """The batch of an answer, on the device, ready for what is queued on the current stream from here on.

        Raises:
            ProtocolError: what should be unpickled is none of this pool's pickles.
            Exception: whatever unpickling, or the user's transform, raises.
            RuntimeError: the device's memory is used up, or it failed; with torch's text.
        """
        source = self._source(answer)
        if source is None:
            self._free += _blocks(answer)
            return self._build(answer, self._no_memory())
        if answer.seq not in self._copies:
            try:
                self._copy(answer, source)
            except BaseException:
                self._free += _blocks(answer)
                raise
        return self._finish(answer.seq, partial(self._build, answer))

    def drain(self) -> list[int]:
        """Wait for every copy, and forget what was not handed out: the scheduler frees its blocks.

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


def _blocks(answer: Answer) -> tuple[int, ...]:
    return tuple(offset for offset, _ in answer.used)


#: Where a segment starts and ends, and its offset in a batch for the device.
_Segment = tuple[int, int, int]


class _Walker(Walker):
    """Lets tensors of a graph pass, which only workers cannot hand over."""

    @staticmethod
    def is_leaf(value: Any) -> bool:
        return not getattr(value, "requires_grad", False) and pickling.is_leaf(value)


def _copied(value: Any) -> Any:
    """A copy of an object, or itself where it cannot be copied, as a lock or an open file."""
    try:
        return deepcopy(value)
    except Exception as error:
        refuse_interrupt(error)
        return value


class SerialStaging(_Stage):
    """The same without workers: each batch is put together in a buffer, and its copy begins at once.

    Args:
        session: the loader's.
    """

    def __init__(self, session: DeviceSession) -> None:
        super().__init__(session, None)
        self._walker = _Walker()
        self._specs = SpecCache()
        self._batches = 0
        # One that was begun ahead is put together when it is handed out, and so are those that follow it:
        # transforms are called in the order of the batches.
        self._deferred = False

    @classmethod
    def of(cls, session: DeviceSession, idle: list[SerialStaging]) -> SerialStaging:
        """One of `idle`, which no iteration uses any more, or a new one."""
        while idle:
            staging = idle.pop()
            if staging._session is session:
                staging.drain()  # an interrupt may have left a batch behind
                return staging
            staging.close()
        return cls(session)

    def drain(self) -> None:
        """Wait for every copy, and forget what was not handed out."""
        self._deferred = False
        self._copies.drain()

    def close(self) -> None:
        """Wait for every copy, and let the buffers go."""
        self.drain()
        self._pinner.close()

    def stage(self, batch: Any) -> Any:
        """A batch with its tensors on the device, ready for what is queued on the current stream from here
        on. Arrays, values and objects without tensors stay the objects they are.

        Raises:
            UnpicklableError: an object with tensors in it cannot be pickled, which is how they are found.
            Exception: whatever the user's transform raises.
            RuntimeError: the device's memory is used up, or it failed; with torch's text.
        """
        self.turn()
        return self.begin(batch)()

    def turn(self) -> None:
        """The next batch is asked for.

        Raises:
            RuntimeError: while a CUDA graph is captured.
        """
        self._session.refuse_capture()
        self._copies.reap()

    def begin(self, batch: Any, ahead: bool = False) -> Callable[[], Any]:
        """Begin the copy of a batch. What is returned hands it out, as `stage` does.

        Args:
            batch: as in `stage`.
            ahead: the loader goes on before it is handed out, and may write to it then: all that can be
                copied is copied here and now. It may also never be handed out: its memory is shared with the
                stream of the copies, so that its next owner writes to it after the copy.

        Raises:
            UnpicklableError, RuntimeError: as in `stage`.
        """
        try:
            segments, nbytes, build, beside = self._pack(batch, ahead)
        finally:
            self._walker.clear()
        if not segments:
            return lambda: build(self._no_memory())
        self._batches += 1
        buffer, then = self._fill_buffer(nbytes, segments), partial(Attempt, build) if beside else None
        buffer.copy = copy = self._copies.begin(self._batches, buffer.memory, nbytes, (), then)
        if ahead:
            self._session.stager.share(copy.memory, self._session.stager.side)
        return partial(self._finish, self._batches, build)

    def _pack(self, batch: Any, ahead: bool) -> tuple[list[_Segment], int, Callable[[Memory], Any], bool]:
        """Take a batch apart.

        Returns:
            The segments that go to the device, and how many bytes they take there; how the batch is put
            together when they are there, and whether that can be done on the side stream.
        """
        walker, apply_transform = self._walker, self._options.apply_transform
        tree = walker.walk(batch)
        values, objects = walker.values, [self._carry(value, ahead) for value in walker.objects]
        # What is on the device already was made on the consumer's stream.
        device = self._session.stager.device
        there = any(tensor.device == device for tensor in tensors_of(walker.objects))
        # The user's own, unless the loader goes on; in the walker's list arrays are made contiguous.
        leaves = [
            leaf.copy("K") if ahead and isinstance(leaf, np.ndarray) else leaf for leaf in walker.leaves
        ]
        metas, spans = segments_of(walker.leaves)
        segments: list[_Segment] = []
        offsets, nbytes = [-1] * len(spans), 0
        for segment in device_segments(metas):
            segments.append((*spans[segment], nbytes))
            offsets[segment] = nbytes
            nbytes += device_aligned(spans[segment][1] - spans[segment][0])
        plain = (tree, metas, tuple([end - start for start, end in spans]), tuple(offsets))
        spec = self._specs.get(plain)
        if spec is None:
            spec = Spec(plain)
            self._specs.remember(plain, spec, plain)

        beside = self._beside and bool(segments) and not (there or self._deferred)
        self._deferred = ahead and not beside

        def build(memory: torch.Tensor) -> Any:
            spec.fill_device(memory, leaves)
            arrived = [carried(leaves, memory.device) for carried in objects]
            return apply_transform(spec.build(leaves, iter(values), arrived))

        return segments, spec.device_bytes, build, beside

    def _carry(self, value: Any, ahead: bool) -> Callable[[list[Any], torch.device], Any]:
        """How an object of a batch is made again: of its own parts on the device, if it has tensors."""
        if isinstance(value, torch.Tensor):  # sparse, of a subclass, that requires grad, …
            # Nothing waits for the copy of one that is page-locked: it is moved from memory of its own.
            own = cloned(value) if ahead or value.device != self._session.stager.device else value
            return lambda leaves, device: moved(own, device)
        has_tensors = False

        def add_leaf(leaf: Any) -> int:
            nonlocal has_tensors
            has_tensors = has_tensors or isinstance(leaf, torch.Tensor)
            return self._walker.add_leaf(leaf)

        data = b""
        try:
            data = pickling.dump(value, add_leaf, for_device=True)
        except UnpicklableError:
            if has_tensors:
                raise
        if has_tensors:
            return lambda leaves, device: pickling.load(data, leaves)
        kept = _copied(value) if ahead else value
        return lambda leaves, device: kept

    def _fill_buffer(self, nbytes: int, segments: list[_Segment]) -> Buffer:
        """A buffer with these segments in it."""
        stager = self._session.stager
        buffer = self._pinner.buffer(nbytes)
        assert buffer is not None, "where there are no blocks, there is always a buffer"
        for start, end, offset in segments:
            if size := end - start:
                stager.fill(buffer.memory[offset : offset + size], stager.view(start, size), size)
        return buffer
