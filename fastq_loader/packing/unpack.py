"""A handle becomes a batch again: views with leases on blocks, copies of what is small.

Runs in the consumer, on the thread that calls `next()`; `packing` is the other side. A spec is compiled
once, when a worker first names it (see `specs`), so that the cost of a batch is the cost of its leaves.
Nothing that a handle says is believed: whatever could reach outside of its block is refused when it arrives.

A batch that goes on to a device is put together when its bytes are there: `part` is where they lie in the
arena, and `unpack` is given the device's memory with them. What stays on the host is copied then, so that no
view outlives the blocks, which are free again as soon as the copy has run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from fastq_loader.errors import ProtocolError
from fastq_loader.ipc.messages import Handle, unseal
from fastq_loader.memory.allocator import TYPESTR
from fastq_loader.memory.arena import Arena
from fastq_loader.packing import pickling
from fastq_loader.packing.pack import SPECS
from fastq_loader.packing.spec import Spec, cut
from fastq_loader.packing.tensors import moved

_from_numpy, _ndarray = torch.from_numpy, np.ndarray


class Unpacker:
    """Rebuilds the batches of one pool of workers.

    Args:
        arena: where their blocks lie.
        workers: number of workers.
        token: the pool's; nothing is unpickled that it does not stand before.
        to_device: whether batches go on to a device.
    """

    def __init__(self, arena: Arena, workers: int, token: bytes, to_device: bool = False) -> None:
        self._to_device = to_device
        self._token = token
        self._arena = arena
        _, self._end = arena.mapping.region(workers - 1)  # tables lie behind it
        self._specs: list[dict[int, Spec]] = [{} for _ in range(workers)]

    def learn(self, worker: int, handle: Handle) -> Handle:
        """The handle with its spec compiled, whether it brings the spec or only names it.

        Called for every handle in the order of arrival, also for those that will be dropped: the worker
        sends a spec once. From here on the handle stands for itself, however long it waits.

        Raises:
            ProtocolError: the handle names a spec that the worker has not sent, or one that is none, or does
                not fit it.
        """
        specs = self._specs[worker]
        if handle.spec is None:
            spec = specs.get(handle.spec_id)
            if spec is None:
                raise ProtocolError(f"worker {worker} names spec {handle.spec_id}, which it has not sent")
        else:
            spec = Spec(handle.spec)
            if spec.bound and not self._to_device:
                raise ProtocolError(f"worker {worker} has packed a batch for a device, and there is none")
            specs[handle.spec_id] = spec
            if len(specs) > SPECS:
                del specs[next(iter(specs))]
        self._check(spec, handle)
        return Handle(handle.spec_id, spec, handle.values, handle.parcel, handle.places)

    def forget(self, worker: int) -> None:
        """Another process has this number from here on: it numbers its specs anew."""
        self._specs[worker] = {}

    def _check(self, spec: Spec, handle: Handle) -> None:
        places, parcel = handle.places, handle.parcel or b""
        boxed = bool(spec.objects or (handle.parcel is None and spec.parcel_bytes))  # it lies in a block
        bound = bool(spec.bound)
        if len(places) != len(spec.large) + boxed + bound or len(handle.values) != spec.values:
            raise ProtocolError(
                f"{len(places)} places and {len(handle.values)} values for a spec of "
                f"{len(spec.large) + boxed + bound} and {spec.values}"
            )
        if not boxed and len(parcel) < spec.parcel_bytes:
            raise ProtocolError(f"a parcel of {len(parcel)} bytes for a spec of {spec.parcel_bytes}")
        for number, (offset, size, into) in enumerate(places, -boxed - bound):
            if offset < 0 or size < 0 or offset + size > self._end:
                raise ProtocolError(f"{size} bytes at {offset} lie outside the workers' parts of the arena")
            if number == -1 and bound:
                if not 0 <= into <= size - spec.device_bytes:
                    raise ProtocolError(f"{spec.device_bytes} bytes {into} bytes into a block of {size}")
            elif number < 0:
                if not spec.parcel_bytes <= into <= size:
                    raise ProtocolError(f"a parcel of {into} bytes in a block of {size}")
            elif not 0 <= into <= size - spec.sizes[spec.large[number]]:
                raise ProtocolError(f"a leaf {into} bytes into a block of {size} does not fit")

    def used(self, handle: Handle) -> tuple[tuple[int, int], ...]:
        """The blocks (offset, bytes needed) that a handle lies in. It was learnt."""
        spec: Spec = handle.spec
        places = handle.places
        first = len(places) - len(spec.large)
        boxed = first - bool(spec.bound)
        parcels = [(offset, max(total, 1)) for offset, _, total in places[:boxed]]
        parts = [(offset, max(into + spec.device_bytes, 1)) for offset, _, into in places[boxed:first]]
        large = zip(places[first:], spec.large, strict=True)
        return (*parcels, *parts, *[(offset, into + spec.sizes[place]) for (offset, _, into), place in large])

    def part(self, handle: Handle) -> tuple[int, int, int, int] | None:
        """Where that part of a batch lies that goes to a device: offset and size of its block, bytes into
        the block, and its length; None if there is none. The handle was learnt."""
        spec: Spec = handle.spec
        if not spec.bound:
            return None
        offset, size, into = handle.places[-1 - len(spec.large)]
        return offset, size, into, spec.device_bytes

    def open(self, handle: Handle) -> tuple[list[int], list[int], bytes]:
        """What has to be known before a batch is put together. The handle was learnt.

        Returns:
            Offsets of the blocks that the batch will have leases on, offsets of those that are copied out,
            and what `unpack` will unpickle.

        Raises:
            ProtocolError: what should be unpickled is none of this pool's pickles.
        """
        spec: Spec = handle.spec
        pickled = b""
        if spec.objects:
            offset, _, total = handle.places[0]
            sealed = self._arena.mapping.look(offset + spec.parcel_bytes, total - spec.parcel_bytes)
            pickled = unseal(bytes(sealed), self._token)
        offsets = [offset for offset, _, _ in handle.places]
        copied = len(offsets) - len(spec.large)
        return offsets[copied:], offsets[:copied], pickled

    def unpack(self, handle: Handle, pickled: bytes, memory: torch.Tensor | None = None) -> Any:
        """Put a batch together, with what `open` found.

        Args:
            handle: learnt.
            pickled: of `open`.
            memory: the part that went to a device, there; None if batches stay on the host.

        Raises:
            ProtocolError: what was unpickled is not what the spec speaks of.
            MemoryError: there is not enough address space for it.
            Exception: whatever unpickling a part of the batch raises.
        """
        spec: Spec = handle.spec
        places = handle.places
        leaves: list[Any] = [None] * len(spec.leaves)
        if len(places) - len(spec.large) == bool(spec.bound):
            parcel: Any = handle.parcel or b""
        else:
            offset = places[0][0]
            parcel = self._arena.mapping.look(offset, spec.parcel_bytes)
        # Each in memory of its own: who keeps the labels does not keep the rest.
        for number, start, end, shape, dtype in spec.tensors:
            leaves[number] = _from_numpy(_ndarray(shape, dtype, bytearray(parcel[start:end])))
        for number, start, end, shape, dtype in spec.arrays:
            leaves[number] = _ndarray(shape, dtype, bytearray(parcel[start:end]))
        for place, start, end in spec.small:
            cut(spec, place, bytearray(parcel[start:end]), leaves)
        large = places[len(places) - len(spec.large) :]
        for number, (place, (offset, size, delta)) in enumerate(zip(spec.large, large, strict=True)):
            if memory is None:
                try:
                    self._look(spec, place, (offset, size), delta, leaves)
                except MemoryError:
                    for unseen, _, _ in large[number:]:
                        self._arena.abandon(unseen)
                    raise
            else:
                cut(
                    spec,
                    place,
                    bytearray(self._arena.mapping.look(offset + delta, spec.sizes[place])),
                    leaves,
                )
        if memory is not None:
            spec.look(memory, leaves)
        objects: Any = ()
        if spec.objects:
            loaded = pickling.load(pickled, leaves)
            objects = (loaded,) if spec.objects == 1 else loaded
            if type(objects) is not tuple or len(objects) != spec.objects:
                raise ProtocolError(f"{spec.objects} objects were announced, and are not there")
            if memory is not None:
                objects = tuple([moved(value, memory.device) for value in objects])
        return spec.build(leaves, iter(handle.values), objects)

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

    def _look(self, spec: Spec, place: int, block: tuple[int, int], delta: int, leaves: list[Any]) -> None:
        """Leaves over a block. One lease serves all leaves of the place."""
        members = spec.members[place]
        leaf = spec.leaves[members[0]]
        lease = self._arena.lease
        if len(members) == 1 and leaf.array:
            leaves[members[0]] = lease(block, delta, leaf.shape, leaf.dtype.str, leaf.strides)
        elif len(members) == 1 and leaf.strides is None and leaf.dtype in TYPESTR:
            array = lease(block, delta, leaf.shape, TYPESTR[leaf.dtype])
            leaves[members[0]] = torch.from_numpy(array)
        else:
            whole = torch.from_numpy(lease(block, delta, (spec.sizes[place],), "|u1"))
            for number in members:
                leaves[number] = spec.leaves[number].within(whole)
