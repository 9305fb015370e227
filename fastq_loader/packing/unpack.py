"""A handle becomes a batch again: views with leases on blocks, copies of what is small.

Runs in the consumer, on the thread that calls `next()`; `pack` is the other side. A spec is compiled once,
when a worker first names it, so that the cost of a batch is the cost of its leaves. A handle that could
reach outside of its blocks is refused when it arrives.

A batch that goes on to a device is put together when its bytes are there: `part` is where they lie in the
arena, and `unpack` is given the device's memory with them. What stays on the host is copied then, so that no
view outlives the blocks, which are free again as soon as the copy to the device has run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import Handle, unseal
from fastq_loader.memory.arena import Arena
from fastq_loader.packing import pickling
from fastq_loader.packing.spec import Spec, SpecCache
from fastq_loader.packing.tensors import moved

#: Bytes of a segment that a digest reads.
_DIGESTED = 1 << 16
_from_numpy, _ndarray = torch.from_numpy, np.ndarray


class Unpacker:
    """Rebuilds the batches of one pool of workers.

    Args:
        arena: where their blocks lie.
        workers: how many there are.
        token: the pool's; nothing is unpickled that it does not stand before.
        for_device: whether batches go on to a device.
    """

    def __init__(self, arena: Arena, workers: int, token: bytes, for_device: bool = False) -> None:
        self._for_device = for_device
        self._token = token
        self._arena = arena
        _, self._end = arena.mapping.region(workers - 1)  # tables lie behind it

    def learn(self, specs: SpecCache, handle: Handle) -> tuple[Handle, tuple[tuple[int, int], ...]]:
        """The handle with its spec compiled, whether it brings the spec or only names it, and the blocks that
        it needs: (offset, bytes from its start), in the order of its segments.

        Called for every handle in the order of arrival, also for those that will be dropped: the worker
        sends a spec once. From here on the handle stands for itself, however long it waits.

        Args:
            specs: those that the worker's process has sent.
            handle: as it came.

        Raises:
            ProtocolError: the handle names a spec that the worker has not sent, or one that is none, or does
                not fit it.
        """
        if handle.spec is None:
            spec = specs.get(handle.spec_id)
            if spec is None:
                raise ProtocolError(f"a handle names spec {handle.spec_id}, which its worker has not sent")
        else:
            spec = Spec(handle.spec)
            if spec.on_device and not self._for_device:
                raise ProtocolError("a worker has packed a batch for a device, and there is none")
            specs.remember(handle.spec_id, spec, handle.spec)
        # As `_replace` does, and several times as fast.
        learned: Handle = tuple.__new__(Handle, (handle[0], spec, *handle[2:]))
        in_message = spec.small and not handle.segments and len(handle.values) == spec.values
        if in_message and len(handle.packet or b"") >= spec.packet_bytes:
            return learned, ()  # there is nothing else to fit
        return learned, self._used(learned)

    def _used(self, handle: Handle) -> tuple[tuple[int, int], ...]:
        """The blocks that a handle needs, see `learn`."""
        spec, segments, packet = handle.spec, handle.segments, handle.packet
        boxed = bool(spec.objects or (packet is None and spec.packet_bytes))  # the packet lies in a block
        expected = boxed + spec.segments, spec.values
        if (len(segments), len(handle.values)) != expected:
            found = f"{len(segments)} segments and {len(handle.values)} values"
            raise ProtocolError(f"{found} for a spec of {expected}")
        if spec.packet_bytes:
            packet_bytes = segments[0][2] if boxed else len(packet or b"")
            if packet_bytes < spec.packet_bytes:
                raise ProtocolError(f"a packet of {packet_bytes} bytes for a spec of {spec.packet_bytes}")
        used: list[tuple[int, int]] = []
        for (offset, size, start), tail in zip(segments, [0] * boxed + spec.tails, strict=True):
            need = start + tail or 1
            if offset < 0 or start < 0 or need > size or offset + size > self._end:
                raise ProtocolError(f"{need} bytes, from {start} on, in a block of {size} bytes at {offset}")
            used += ((offset, need),)
        return tuple(used)

    def part(self, handle: Handle) -> tuple[int, int, int, int] | None:
        """Where that part of a batch lies that goes to a device: offset and size of its block, bytes into
        the block, and its length; None if there is none. The handle was learnt."""
        spec: Spec = handle.spec
        if not spec.on_device:
            return None
        return (*handle.segments[-len(spec.tails)], spec.device_bytes)

    def digest(self, handle: Handle) -> tuple[bytes, int]:
        """Of what a batch holds, the first 64 KiB of each segment: the same for the same batches of two
        workers. And how many bytes these are. The handle was learnt, and its blocks were not handed out."""
        spec: Spec = handle.spec
        pieces: list[Any] = [repr(handle.values).encode(), handle.packet or b""]
        ranges = []
        if len(handle.segments) > len(spec.tails):
            ranges.append((handle.segments[0][0], handle.segments[0][2]))
        if (part := self.part(handle)) is not None:  # between its leaves lies what was there before
            begin = part[0] + part[2]
            for number, dtype, _, _, at in spec.on_device:
                ranges.append((begin + at * dtype.itemsize, spec.leaves[number].reach))
        large = handle.segments[spec.first_large :] if spec.large else ()
        for segment, (offset, _, start) in zip(spec.large, large, strict=True):
            ranges.append((offset + start, spec.sizes[segment]))
        pieces += [self._arena.mapping.read(at, min(nbytes, _DIGESTED)) for at, nbytes in ranges]
        found = hashlib.blake2b(b"".join(pieces), digest_size=16).digest()
        return found, sum(map(len, pieces))

    def open(self, handle: Handle) -> tuple[Sequence[int], Sequence[int], bytes]:
        """Facts that are needed before a batch is put together. The handle was learnt.

        Returns:
            Offsets of the blocks that the batch will have leases on, offsets of those that are copied out,
            and what `unpack` will unpickle.

        Raises:
            ProtocolError: what should be unpickled is none of this pool's pickles.
        """
        spec: Spec = handle.spec
        pickled = b""
        if spec.objects:
            offset, _, total = handle.segments[0]
            sealed = self._arena.mapping.read(offset + spec.packet_bytes, total - spec.packet_bytes)
            pickled = unseal(sealed, self._token)
        if not handle.segments:
            return (), (), pickled
        offsets, _, _ = zip(*handle.segments, strict=True)
        if not spec.large:
            return (), offsets, pickled
        return offsets[spec.first_large :], offsets[: spec.first_large], pickled

    def unpack(self, handle: Handle, pickled: bytes, memory: torch.Tensor | None = None) -> Any:
        """Put a batch together, with what `open` found.

        Args:
            handle: learnt.
            pickled: of `open`.
            memory: the part that went to a device, there; None if batches stay on the host.

        Raises:
            ProtocolError: what was unpickled is not what the spec announces.
            MemoryError: there is not enough address space for it.
            Exception: whatever unpickling a part of the batch raises.
        """
        spec: Spec = handle.spec
        segments = handle.segments
        leaves: list[Any] = spec.blank[:]
        packet: Any = handle.packet or b""
        if segments and len(segments) > spec.segments:
            packet = self._arena.mapping.read(segments[0][0], spec.packet_bytes)
        # Each in memory of its own: a loop that keeps the labels does not keep the rest.
        for number, start, end, shape, dtype in spec.dense_tensors:
            leaves[number] = _from_numpy(_ndarray(shape, dtype, bytearray(packet[start:end])))
        for number, start, end, shape, dtype in spec.dense_arrays:
            leaves[number] = _ndarray(shape, dtype, bytearray(packet[start:end]))
        for segment, start, end in spec.others:
            spec.fill(segment, bytearray(packet[start:end]), leaves)
        large = segments[spec.first_large :] if spec.large else ()
        if memory is None:
            if large:
                self._lease(spec, large, leaves)
        else:
            for segment, (offset, _, start) in zip(spec.large, large, strict=True):
                there = self._arena.mapping.read(offset + start, spec.sizes[segment])
                spec.fill(segment, bytearray(there), leaves)
            spec.fill_device(memory, leaves)
        objects = self._objects(spec, pickled, leaves, memory) if spec.objects else ()
        return spec.build(leaves, iter(handle.values), objects)

    def _lease(self, spec: Spec, large: tuple[tuple[int, int, int], ...], leaves: list[Any]) -> None:
        """Make leaves over blocks. One lease serves all leaves of a segment."""
        for at, (segment, (offset, size, start)) in enumerate(zip(spec.large, large, strict=True)):
            try:
                whole = self._arena.lease((offset, size), start, spec.sizes[segment])
            except MemoryError:
                for unleased, _, _ in large[at:]:
                    self._arena.abandon(unleased)
                raise
            single = spec.single[segment]
            if single is None:
                spec.fill(segment, whole, leaves)
            else:  # as `fill` does
                number, array, shape, dtype, strides = single
                made = _ndarray(shape, dtype, whole, 0, strides)
                leaves[number] = made if array else _from_numpy(made)

    def _objects(self, spec: Spec, pickled: bytes, leaves: list[Any], memory: torch.Tensor | None) -> Any:
        """The unpickled objects of a batch, their tensors on the device of `memory`."""
        loaded = pickling.load(pickled, leaves)
        objects = (loaded,) if spec.objects == 1 else loaded
        if type(objects) is not tuple or len(objects) != spec.objects:
            raise ProtocolError(f"{spec.objects} objects were announced, and are not there")
        return objects if memory is None else [moved(value, memory.device) for value in objects]

    def exception(self, handle: Handle) -> BaseException:
        """The exception in a handle that was learnt.

        Raises:
            ProtocolError: there is none of this pool's.
        """
        spec: Spec = handle.spec
        if spec.values == 2 and not (spec.leaves or spec.objects):  # there was no block for it
            out_of_memory, text = handle.values
            return (MemoryError if out_of_memory else RuntimeError)(str(text))
        if spec.leaves or spec.values or spec.objects != 1:
            raise ProtocolError("a batch where an exception should be")
        return pickling.load_exception(self.open(handle)[2])
