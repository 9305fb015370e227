"""Rebuilds a batch from a handle: large leaves as views with leases on blocks, small ones as copies.

Runs in the consumer, on the thread that calls `next()`; `pack` is the other side. A layout is compiled once,
when a worker first sends it, so that the cost of a batch is the cost of its leaves. A handle that refers to
bytes outside of its blocks is refused when it arrives.

A batch that goes on to a device is built when its bytes are there: `part` returns their place in the arena,
and `unpack` receives the device memory that they were copied to. The leaves that stay on the host are copied
then, so that no view outlives the blocks, which are free again as soon as the copy to the device has run.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import BatchHandle, unseal
from fastq_loader.memory.arena import Arena
from fastq_loader.packing import pickling
from fastq_loader.packing.layout import REMEMBERED, BatchLayout
from fastq_loader.packing.tensors import moved

#: Bytes that a digest reads of each segment.
_DIGESTED = 1 << 16
_from_numpy, _ndarray = torch.from_numpy, np.ndarray


class Unpacker:
    """Rebuilds the batches of one pool of workers.

    Args:
        arena: the shared memory with their blocks.
        token: the pool's token; only bytes that begin with it are unpickled.
        for_device: whether batches go on to a device.
    """

    def __init__(self, arena: Arena, token: bytes, for_device: bool = False) -> None:
        self._for_device = for_device
        self._token = token
        self._arena = arena

    def check(
        self, layouts: dict[int, BatchLayout], handle: BatchHandle
    ) -> tuple[BatchHandle, tuple[tuple[int, int], ...]]:
        """Check a handle, and replace its plain layout, or the number of one, by the compiled one. Returns
        the handle, and the blocks that it needs in its order: (offset, bytes from the block's start).

        Must be called for handles in the order of arrival, even if the handle will be dropped: a worker sends
        each layout once. The returned handle depends on nothing else, however long it waits. A batch that
        lies in its handle and has a known layout needs no call: `unpack` checks it.

        Args:
            layouts: the layouts that the worker's process has sent.
            handle: the handle as received.

        Raises:
            ProtocolError: the worker has not sent the handle's layout, the layout is malformed, or the handle
                does not match it.
        """
        if handle.layout is None:
            if handle.layout_id not in layouts:
                raise ProtocolError(f"a handle names spec {handle.layout_id}, which its worker has not sent")
            layout = layouts[handle.layout_id]
        else:
            layout = BatchLayout(handle.layout)
            if layout.on_device.leaves and not self._for_device:
                raise ProtocolError("a worker has packed a batch for a device, but batches stay on the host")
            if handle.layout_id < REMEMBERED:
                layouts[handle.layout_id] = layout
        # Like `_replace`, but several times as fast.
        checked: BatchHandle = tuple.__new__(BatchHandle, (handle[0], layout, *handle[2:]))
        return checked, self._used(checked)

    def _used(self, handle: BatchHandle) -> tuple[tuple[int, int], ...]:
        """The blocks that a handle needs, see `check`. Raises ProtocolError."""
        layout, segments, packet = handle.layout, handle.segments, handle.packet
        boxed = bool(layout.objects or (packet is None and layout.packet_bytes))  # the packet lies in a block
        expected = boxed + len(layout.tails), layout.values
        if (len(segments), len(handle.values)) != expected:
            found = f"{len(segments)} segments and {len(handle.values)} values"
            raise ProtocolError(f"{found} for a spec of {expected}")
        packet_bytes = segments[0][2] if boxed else len(packet) if packet else 0
        if packet_bytes < layout.packet_bytes:
            raise ProtocolError(f"a packet of {packet_bytes} bytes for a spec of {layout.packet_bytes}")
        used: list[tuple[int, int]] = []
        for (offset, size, start), tail in zip(segments, [0] * boxed + layout.tails, strict=True):
            need = start + tail or 1
            if not (0 <= offset <= self._arena.mapping.end - size and start >= 0 and need <= size):
                raise ProtocolError(f"{need} bytes, from {start} on, in a block of {size} bytes at {offset}")
            used += ((offset, need),)
        return tuple(used)

    def part(self, handle: BatchHandle) -> tuple[int, int, int, int] | None:
        """The part of a batch that goes to a device: offset and size of its block, start in the block, and
        length. None if the batch has no such part. The handle comes from `check`."""
        layout: BatchLayout = handle.layout
        if not layout.on_device.leaves:
            return None
        return (*handle.segments[-len(layout.tails)], layout.device_bytes)

    def digest(self, handle: BatchHandle) -> tuple[bytes, int]:
        """A digest of the values, the packet and the first 64 KiB of each segment, which is equal for equal
        batches of two workers; and the number of bytes read. The handle is from `check`, not unpacked yet."""
        layout: BatchLayout = handle.layout
        pieces: list[Any] = [repr(handle.values).encode(), handle.packet or b""]
        ranges = []
        if len(handle.segments) > len(layout.tails):
            ranges.append((handle.segments[0][0], handle.segments[0][2]))
        if (part := self.part(handle)) is not None:  # the gaps between its leaves have old bytes
            begin = part[0] + part[2]
            for number, dtype, _, _, at, _ in layout.on_device.leaves:
                ranges.append((begin + at * dtype.itemsize, layout.leaves[number].reach))
        large = handle.segments[layout.first_large :] if layout.large else ()
        for (_, nbytes, _), (offset, _, start) in zip(layout.large, large, strict=True):
            ranges.append((offset + start, nbytes))
        pieces += [self._arena.mapping.read(at, min(nbytes, _DIGESTED)) for at, nbytes in ranges]
        found = hashlib.blake2b(b"".join(pieces), digest_size=16).digest()
        return found, sum(map(len, pieces))

    def open(self, handle: BatchHandle) -> tuple[Sequence[int], Sequence[int], bytes]:
        """Prepare to unpack a batch. The handle comes from `check`.

        Returns:
            Offsets of the blocks that the batch will have leases on, offsets of the blocks that are copied
            out, and the bytes that `unpack` will unpickle.

        Raises:
            ProtocolError: the pickled bytes do not begin with this pool's token.
        """
        layout: BatchLayout = handle.layout
        pickled = b""
        if layout.objects:
            offset, _, total = handle.segments[0]
            sealed = self._arena.mapping.read(offset + layout.packet_bytes, total - layout.packet_bytes)
            pickled = unseal(sealed, self._token)
        if not handle.segments:
            return (), (), pickled
        offsets, _, _ = zip(*handle.segments, strict=True)
        if not layout.large:
            return (), offsets, pickled
        return offsets[layout.first_large :], offsets[: layout.first_large], pickled

    def unpack(self, handle: BatchHandle, pickled: bytes, memory: torch.Tensor | None = None) -> Any:
        """Build a batch.

        Args:
            handle: the handle from `check`.
            pickled: the bytes from `open`.
            memory: device memory with the part for a device; None if batches stay on the host.

        Raises:
            ProtocolError: the unpickled objects do not match the layout.
            Exception: an error of unpickling.
        """
        layout: BatchLayout = handle.layout
        segments = handle.segments
        leaves: list[Any] = layout.blank[:]
        packet: Any = handle.packet or b""
        if not segments and (len(handle.values) != layout.values or len(packet) < layout.packet_bytes):
            found = f"{len(handle.values)} values and {len(packet)} bytes"
            raise ProtocolError(f"{found} for a layout of {layout.values} and {layout.packet_bytes}")
        if layout.packet_bytes and (layout.objects or handle.packet is None):  # it lies in a block
            packet = self._arena.mapping.read(segments[0][0], layout.packet_bytes)
        # Each has its own memory: a loop that keeps the labels does not keep the rest.
        pieces: list[Any] = [
            (segment, bytearray(packet[start:end]), view) for segment, start, end, view in layout.packet
        ]
        large = segments[layout.first_large :] if layout.large else ()
        for (segment, nbytes, view), (offset, size, start) in zip(layout.large, large, strict=True):
            if memory is None:  # all leaves of a segment share one lease
                pieces.append((segment, self._arena.lease((offset, size), start, nbytes), view))
            else:
                pieces.append((segment, bytearray(self._arena.mapping.read(offset + start, nbytes)), view))
        for segment, whole, view in pieces:
            if view is None:
                layout.fill(segment, whole, leaves)
            else:  # like `fill`, without its calls
                number, array, shape, dtype, strides = view
                made = _ndarray(shape, dtype, whole, 0, strides)
                leaves[number] = made if array else _from_numpy(made)
        if memory is not None:
            layout.on_device.fill(memory, leaves)
        objects: Any = ()
        if layout.objects:
            loaded = pickling.load(pickled, leaves)
            objects = (loaded,) if layout.objects == 1 else loaded
            if type(objects) is not tuple or len(objects) != layout.objects:
                raise ProtocolError(f"a spec announces {layout.objects} objects, but the pickle has others")
            if memory is not None:  # an object that is a tensor goes to the device, too
                objects = [moved(value, memory.device) for value in objects]
        return layout.build(leaves, iter(handle.values), objects)

    def exception(self, handle: BatchHandle) -> BaseException:
        """The exception in a handle from `check`.

        Raises:
            ProtocolError: the handle has no exception, or its bytes do not begin with this pool's token.
        """
        layout: BatchLayout = handle.layout
        if layout.values == 2 and not (layout.leaves or layout.objects):  # from `pack_text`
            out_of_memory, text = handle.values
            return (MemoryError if out_of_memory else RuntimeError)(str(text))
        if layout.leaves or layout.values or layout.objects != 1:
            raise ProtocolError("a batch where an exception should be")
        return pickling.load_exception(self.open(handle)[2])
