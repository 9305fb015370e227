"""Packs a batch into a handle: the tree as a layout, large leaves in blocks, small ones in a packet.

Runs in workers; `unpack` is the other side. A `TreeFlattener` takes the batch apart, and `segments_of` finds
the bytes that its leaves cover. A segment of 64 KiB or more lies in its own block, so that a loop that keeps
the labels does not keep the images; smaller segments and the pickled bytes form a packet that the consumer
copies out.

A batch that goes on to a device is laid out for one copy instead: all segments of tensors, also small ones,
lie in one block at multiples of 256 bytes. Arrays, plain values and objects stay on the host and are packed
as usual.

The segments of a handle are, in this order and as needed: the packet, the part for the device, the large
segments. See `layout` for the part of a batch that is sent only once.
"""

from __future__ import annotations

import ctypes
from typing import Any

from fastq_loader.ipc.messages import BatchHandle
from fastq_loader.memory.allocator import Allocator, Used
from fastq_loader.memory.blocks import DEVICE_ALIGNMENT, SMALLEST, device_aligned
from fastq_loader.packing import pickling
from fastq_loader.packing.flattener import (
    INLINE,
    Span,
    TreeFlattener,
    device_segments,
    segments_of,
)
from fastq_loader.packing.layout import ALIGNMENT, REMEMBERED

#: A part of a batch in a block: offset and size of the block, start of the part in it (for a packet: its
#: size), and the bytes that the batch needs, counted from the start of the block.
_Segment = tuple[int, int, int, int]


class Packer:
    """Packs the batches of one worker.

    Args:
        allocator: source of blocks; its `for_device` selects the layout for a device.
        token: the pool's token, the prefix of pickled bytes.
    """

    def __init__(self, allocator: Allocator, token: bytes) -> None:
        self._token = token
        self._allocator = allocator
        self._flattener = TreeFlattener()
        self._layout_ids: dict[tuple[Any, ...], int] = {}

    def pack(self, batch: Any) -> tuple[BatchHandle, Used]:
        """Put a batch into blocks, and mark these as packed: they are not reused before the task is finished.

        Returns:
            The handle, and the blocks of its segments, in their order.

        Raises:
            UnpicklableError: a part of the batch cannot be pickled.
            RuntimeError: the batch has a non-leaf tensor that requires grad.
            MemoryError: the arena is used up.
        """
        flattener = self._flattener
        try:
            tree = flattener.flatten(batch)
            # One pickle, in which objects still refer to the containers around them. But tensors that are no
            # leaves, such as sparse ones, go to a device only by themselves.
            if flattener.objects and not self._allocator.for_device:
                tree = flattener.whole(batch)
            pickled = None
            if flattener.objects:
                value = flattener.objects[0] if len(flattener.objects) == 1 else tuple(flattener.objects)
                pickled = pickling.dump(value, flattener.leaf_in_pickle, batch, self._allocator.for_device)
            return self._put(tree, pickled)
        finally:
            flattener.clear()

    def copy_held(self, handle: BatchHandle, used: Used) -> tuple[BatchHandle, Used]:
        """Replace blocks that user code still references by copies, in the result of `pack`. To be called
        after the worker has dropped the batch.

        Raises:
            MemoryError: the arena is used up.
        """
        copies = self._allocator.copy_held(used)
        if not copies:
            return handle, used
        segments, shipped = list(handle.segments), list(used)
        for at, (offset, need) in enumerate(used):
            if offset in copies:
                copy = copies[offset]
                segments[at] = copy.offset, copy.size, segments[at][2]
                shipped[at] = copy.offset, need
        return handle._replace(segments=tuple(segments)), shipped

    def pack_exception(self, data: bytes) -> tuple[BatchHandle, Used]:
        """Pack a pickled exception as a batch of one object, in any free block.

        Raises:
            MemoryError: there is no block for it.
        """
        return self._put("O", data, failed=True)

    def pack_text(self, text: str, out_of_memory: bool) -> BatchHandle:
        """Pack the text of an exception for which there is no block: it is sent in the message."""
        self._flattener.values += [out_of_memory, text]
        try:
            return self._put(("t", ("V", "V")), None)[0]
        finally:
            self._flattener.clear()

    def unsend(self, handle: BatchHandle) -> None:
        """Undo the bookkeeping for a handle, and the layout in it, that is not sent after all."""
        if handle.layout is not None:
            self._layout_ids.pop(handle.layout, None)

    def _put(self, tree: Any, pickled: bytes | None, failed: bool = False) -> tuple[BatchHandle, Used]:
        """Put the flattener's leaves and the pickled bytes into blocks or the packet. Returns as `pack`."""
        allocator = self._allocator
        metas, spans = segments_of(self._flattener.leaves)
        placed: dict[int, _Segment] = {}  # by offset of the block
        chosen: list[int] = []
        device_offsets: tuple[Any, ...] = ()  # one tuple of them, for a device
        if allocator.for_device and (chosen := device_segments(metas)):
            part, offsets = self._put_for_device(spans, chosen)
            device_offsets = (offsets,)
            placed[part[0]] = part
        sizes: list[int] = []
        small: list[bytes] = []
        for segment, (start, end) in enumerate(spans):
            size = end - start
            sizes.append(size)
            if chosen and segment in chosen:
                continue
            if size < SMALLEST:
                small.append(ctypes.string_at(start, size).ljust(-(-size // ALIGNMENT) * ALIGNMENT, b"\0"))
            else:
                part = self._put_large(start, size, placed)
                placed[part[0]] = part
        packet = b"".join(small)
        if pickled is not None or len(packet) > INLINE:
            # Pickled bytes are never sent through a socket, however few they are.
            sealed = [] if pickled is None else [self._token, pickled]
            part = self._put_packet([packet, *sealed], failed)
            placed, packet = {part[0]: part, **placed}, b""
        key = tree, metas, tuple(sizes), *device_offsets
        layout_id = self._layout_ids.get(key)
        layout = None if layout_id is not None else key  # which is sent, unless the consumer knows it
        if layout_id is None:
            layout_id = len(self._layout_ids)
            if layout_id < REMEMBERED:
                self._layout_ids[key] = layout_id
        segments: list[tuple[int, int, int]] = []
        used: list[tuple[int, int]] = []
        for offset, size, start, need in placed.values():
            segments.append((offset, size, start))
            used.append((offset, need))
        values = tuple(self._flattener.values)
        return BatchHandle(layout_id, layout, values, packet or None, tuple(segments)), used

    def _put_packet(self, pieces: list[bytes], failed: bool) -> _Segment:
        nbytes = sum(map(len, pieces))
        block = self._allocator.take(nbytes, failed)
        at = block.offset
        for piece in pieces:
            self._allocator.mapping.write(at, piece)
            at += len(piece)
        return block.offset, block.size, nbytes, nbytes

    def _put_large(self, start: int, nbytes: int, others: dict[int, _Segment]) -> _Segment:
        block = self._allocator.block_at(start)
        if block is not None and block.offset not in others:
            at = start - block.address
            # It already lies in a block of this task: no copy. Except for a small part of the block, because
            # the batch would keep all of it.
            if block.size // 4 <= nbytes <= block.size - at:
                block.packed = True
                return block.offset, block.size, at, at + nbytes
        block = self._allocator.take(nbytes)
        self._allocator.write(block.offset, start, nbytes)
        return block.offset, block.size, 0, nbytes

    def _put_for_device(self, spans: list[Span], chosen: list[int]) -> tuple[_Segment, tuple[int, ...]]:
        """Collect the `chosen` segments in one block: that of the largest one, or else a new one.

        Segments that lie in that block stay there, and the others are copied behind what was allocated in it.
        But all are copied if one of them is not aligned, there is no room for the others, or too many other
        bytes would be transferred along.

        Returns:
            The part of the batch that goes to the device, and the layout's `device_offsets`.
        """
        sizes = {segment: spans[segment][1] - spans[segment][0] for segment in chosen}
        whole = sum(map(device_aligned, sizes.values()))
        block = self._allocator.block_at(spans[max(chosen, key=sizes.__getitem__)][0])
        at: dict[int, int] = {}
        begin = end = 0
        if block is not None:
            first, last = block.address, block.address + block.size
            inside = [each for each in chosen if first <= spans[each][0] < spans[each][1] <= last]
            at = {segment: spans[segment][0] - first for segment in inside}
            begin = min(at.values(), default=0)
            end = max([at[each] + sizes[each] for each in inside], default=0)
            if others := sum([device_aligned(sizes[each]) for each in chosen if each not in at]):
                end = device_aligned(max(end, block.cut))
            fits = end + others <= min(block.size, begin + 2 * whole)
            if not (inside and fits) or any(start % DEVICE_ALIGNMENT for start in at.values()):
                block, at, begin, end = None, {}, 0, 0
        if block is None:
            block = self._allocator.take(whole)
        block.packed = True
        for segment in chosen:
            if segment not in at:
                at[segment] = device_aligned(end)
                end = at[segment] + sizes[segment]
                self._allocator.write(block.offset + at[segment], spans[segment][0], sizes[segment])
        self._allocator.expected = max(end - begin, 1)
        offsets = tuple([at.get(segment, begin - 1) - begin for segment in range(len(spans))])
        return (block.offset, block.size, begin, max(end, 1)), offsets
