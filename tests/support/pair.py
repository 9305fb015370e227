"""A worker and its consumer in one process: packing on one side, unpacking on the other.

The ledger, the arena and the unpacker are the consumer's, the allocator and the packer the worker's, and
every handle travels as a frame between them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from fastq_loader.ipc.messages import BATCH, TOKEN_BYTES, Answer, Handle, decode_for_consumer, encode
from fastq_loader.memory.allocator import Allocator, install
from fastq_loader.memory.arena import Arena
from fastq_loader.memory.ledger import FREE, SMALLEST, BlockLedger, device_aligned
from fastq_loader.packing.pack import Packer
from fastq_loader.packing.unpack import Unpacker
from fastq_loader.workers import main

LARGE = SMALLEST // 4 + 100  # float32 elements of a tensor that is worth a block
TOKEN = bytes(range(TOKEN_BYTES))
SPARE_BATCHES = 3  # as many batches' blocks are kept

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex32,
    torch.complex64,
    torch.complex128,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
]


def noise(nbytes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class Pair:
    """A worker and its consumer.

    Args:
        to_device: whether batches are laid out for one copy to a device.
        stream_from: bytes of a batch from which on the next one is written past the caches.
    """

    def __init__(self, to_device: bool = False, stream_from: float = math.inf) -> None:
        self.arena = Arena(1)
        self.ledger = BlockLedger()
        self.allocator = Allocator(self.arena.mapping, 0, together=to_device, stream_from=stream_from)
        self.packer = Packer(self.allocator, TOKEN)
        self.unpacker = Unpacker(self.arena, 1, TOKEN, to_device)
        self.frames: list[bytes] = []

    def pack(self, make: Callable[[], Any]) -> Answer:
        """The worker's side of one task; `make` is the dataset."""
        self.hear_releases()
        for offset, size in self.ledger.trim(SPARE_BATCHES):
            self.arena.mapping.punch(offset, size)
        self.allocator.give(self.ledger.space(0))
        self.allocator.begin(*self.ledger.grant(0))
        batch = make()
        handle, used = self.packer.pack(batch)
        self.allocator.ship([offset for offset, _ in used])
        del batch
        settled: Any = main._Worker._settle(
            SimpleNamespace(_allocator=self.allocator),  # type: ignore[arg-type]
            handle,
            used,
        )
        handle, used = settled
        fresh, returned = self.allocator.finish([offset for offset, _ in used])
        answer = Answer(0, 0, 0, BATCH, 0, 0, tuple(used), tuple(fresh), tuple(returned), handle)
        self.frames.append(encode(answer))
        decoded = decode_for_consumer(self.frames[-1])
        assert isinstance(decoded, Answer)
        return decoded

    def account(self, answer: Answer) -> Handle:
        """The consumer's ledger hears of a batch; the handle is as it was sent."""
        assert answer.handle is not None
        self.hear_releases()
        self.ledger.adopt(0, answer.fresh)
        self.ledger.give_back(0, answer.returned)
        self.ledger.fill(0, answer.used)
        self.ledger.check()
        return answer.handle

    def arrive(self, answer: Answer) -> Handle:
        """The consumer hears of a batch."""
        return self.unpacker.learn(0, self.account(answer))

    def deliver(self, handle: Handle) -> Any:
        if self.allocator.together:
            batch = put_on_device(self.unpacker, self.arena, handle)
            for offset, _ in self.unpacker.used(handle):
                self.ledger.drop(offset)
            self.ledger.check()
            return batch
        leased, copied, pickled = self.unpacker.open(handle)
        self.ledger.deliver(leased)
        batch = self.unpacker.unpack(handle, pickled)
        for offset in copied:
            self.ledger.drop(offset)
        self.ledger.check()
        return batch

    def trip(self, batch: Any) -> Any:
        return self.deliver(self.arrive(self.pack(lambda: batch)))

    def hear_releases(self) -> None:
        for offset in self.arena.released_blocks():
            self.ledger.release(offset)

    def idle(self) -> bool:
        """Whether every block is free again."""
        self.hear_releases()
        return set(self.ledger.states().values()) <= {FREE}


def put_on_device(unpacker: Unpacker, arena: Arena, handle: Handle) -> Any:
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


@contextmanager
def paired(to_device: bool = False, stream_from: float = math.inf) -> Iterator[Pair]:
    pair = Pair(to_device, stream_from)
    install(pair.allocator)
    try:
        yield pair
    finally:
        install(None)
        pair.arena.retire([])
