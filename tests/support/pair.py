"""A worker and its consumer in one process: packing on one side, unpacking on the other.

The pool, the arena and the unpacker are the consumer's, the allocator and the packer the worker's, and
every handle travels as a frame between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from fastq_loader.ipc.messages import BATCH, TOKEN_BYTES, Answer, BatchHandle, decode_for_consumer, encode
from fastq_loader.memory.allocator import Allocator, install
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.blocks import FREE, SMALLEST, BlockOwner, device_aligned
from fastq_loader.memory.pool import BlockPool
from fastq_loader.packing.layout import BatchLayout
from fastq_loader.packing.pack import Packer
from fastq_loader.packing.unpack import Unpacker
from tests.support.invariants import check_pool, states
from tests.support.simulation import Loaded

LARGE = SMALLEST // 4 + 100  # float32 elements of a tensor that is worth a block
TOKEN = bytes(range(TOKEN_BYTES))
SPARE_BATCHES = 3  # as many batches' blocks are kept

_NAMES = """
    bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64
    complex32 complex64 complex128 float8_e4m3fn float8_e5m2
"""
DTYPES: list[torch.dtype] = [getattr(torch, name) for name in _NAMES.split()]


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Any bit pattern, NaN with its payload among them."""
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    if dtype == torch.bool:
        return torch.from_numpy(noise(count, seed) > 127).view(shape)
    return torch.from_numpy(noise(count * dtype.itemsize, seed)).view(dtype).view(shape)


class CountingAllocator(Allocator):
    """Says what a worker copies into blocks.

    Attributes:
        copied: bytes of each copy.
    """

    copied: list[int]

    def write(self, offset: int, source: int, nbytes: int) -> None:
        self.copied.append(nbytes)
        super().write(offset, source, nbytes)


class Pair:
    """A worker and its consumer.

    Args:
        for_device: whether batches are laid out for one copy to a device.
        nontemporal_from: bytes of a batch from which on the next one is written with non-temporal stores.
    """

    def __init__(self, for_device: bool = False, nontemporal_from: float = math.inf) -> None:
        self.arena = Arena(1)
        self.ledger = BlockPool(self.arena)
        self.allocator = CountingAllocator(
            self.arena.mapping, 0, for_device=for_device, nontemporal_from=nontemporal_from
        )
        self.copied = self.allocator.copied = []
        self.packer = Packer(self.allocator, TOKEN)
        self.unpacker = Unpacker(self.arena, TOKEN, for_device)
        self.layouts: dict[int, BatchLayout] = {}
        self.frames: list[bytes] = []

    def pack(self, make: Callable[[], Any]) -> Loaded:
        """The worker's side of one task; `make` is the dataset."""
        self.hear_releases()
        self.ledger.trim(SPARE_BATCHES)
        self.allocator.free_ranges(self.ledger.space(0))
        self.allocator.begin(self.ledger.grant(BlockOwner(0)))
        batch = make()
        handle, used = self.packer.pack(batch)
        del batch
        handle, used = self.packer.copy_held(handle, used)
        fresh, returned = self.allocator.finish(used)
        self.frames.append(encode(Answer(0, 0, 0, BATCH, 0, 0, tuple(fresh), tuple(returned), handle)))
        decoded = decode_for_consumer(self.frames[-1])
        assert isinstance(decoded, Answer)
        return Loaded(*decoded).put_into(used)

    def account(self, answer: Loaded) -> BatchHandle:
        """The consumer's pool hears of a batch; the handle is as it was sent."""
        assert answer.handle is not None
        self.hear_releases()
        self.ledger.accept(0, answer.used, answer.fresh, answer.returned)
        check_pool(self.ledger)
        return answer.handle

    def handle_of(self, batch: Any) -> BatchHandle:
        """A handle as it was sent."""
        return self.account(self.pack(lambda: batch))

    def arrive(self, answer: Loaded) -> BatchHandle:
        """The consumer hears of a batch."""
        handle, used = self.unpacker.check(self.layouts, self.account(answer))
        assert used == answer.used
        return handle

    def check(self, handle: BatchHandle) -> BatchHandle:
        """A handle that is ready to be unpacked."""
        return self.unpacker.check(self.layouts, handle)[0]

    def deliver(self, handle: BatchHandle) -> Any:
        if self.allocator.for_device:
            batch = put_on_device(self.unpacker, self.arena, handle)
            self.ledger.drop(offset for offset, _, _ in handle.segments)
            check_pool(self.ledger)
            return batch
        leased, copied, pickled = self.unpacker.open(handle)
        self.ledger.deliver(leased)
        batch = self.unpacker.unpack(handle, pickled)
        self.ledger.drop(copied)
        check_pool(self.ledger)
        return batch

    def run(self, make: Callable[[], Any]) -> Any:
        """One task, from the dataset to what the user gets."""
        return self.deliver(self.arrive(self.pack(make)))

    def trip(self, batch: Any) -> Any:
        return self.run(lambda: batch)

    def hear_releases(self) -> None:
        self.ledger.collect()

    def idle(self) -> bool:
        """Whether every block is free again."""
        self.hear_releases()
        return set(states(self.ledger).values()) <= {FREE}


def put_on_device(unpacker: Unpacker, arena: Arena, handle: BatchHandle) -> Any:
    """What the consumer does with a batch that goes to a device, which is memory like any other here."""
    _, _, pickled = unpacker.open(handle)
    memory = torch.full((256,), 0xEE, dtype=torch.uint8)
    part = unpacker.part(handle)
    if part is not None:
        offset, _, into, nbytes = part
        memory = torch.full((device_aligned(max(nbytes, 1)),), 0xEE, dtype=torch.uint8)
        copied = bytearray(arena.mapping.memory[offset + into : offset + into + nbytes])
        memory[:nbytes] = torch.frombuffer(copied, dtype=torch.uint8) if copied else 0
    return unpacker.unpack(handle, pickled, memory)


def offset_of(pair: Pair, tensor: torch.Tensor) -> int:
    """Where a tensor lies in the arena."""
    return tensor.data_ptr() - pair.arena.mapping.base


@contextmanager
def paired(for_device: bool = False, nontemporal_from: float = math.inf) -> Iterator[Pair]:
    pair = Pair(for_device, nontemporal_from)
    install(pair.allocator)
    try:
        yield pair
    finally:
        install(None)
        pair.arena.retire([])
