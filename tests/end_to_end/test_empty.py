"""`fastq_loader.empty` in datasets and collate functions, and tensors that those keep for themselves."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

import fastq_loader
from fastq_loader import DataLoader
from tests.conftest import held_memory
from tests.support.datasets import Made, Opaque, assert_same, extent, identity
from tests.support.loaders import IMAGE, WORKERS, distinct, exactly, image, image_and_label
from tests.support.thorough import thorough

pytestmark = pytest.mark.processes
Samples = list[tuple[torch.Tensor, int]]


def stacked(position: int) -> torch.Tensor:
    """The images of a batch of four."""
    return torch.stack([image(4 * position + i) for i in range(4)])


def stack_into_empty(batch: Samples) -> torch.Tensor:
    out = fastq_loader.empty((len(batch), *IMAGE), torch.float32)
    return torch.stack([one for one, _ in batch], out=out)


def stack_twice(batch: Samples) -> list[torch.Tensor]:
    first, second = (fastq_loader.empty((len(batch), *IMAGE), torch.float32) for _ in range(2))
    torch.stack([one for one, _ in batch], out=first)
    torch.stack([one + 0.5 for one, _ in batch], out=second)
    return [second, first]


def stack_and_slice(batch: Samples) -> list[torch.Tensor]:
    """Too large a buffer, of which parts travel: a head, a strided part, one that overlaps, a small one."""
    out = fastq_loader.empty((len(batch) + 3, *IMAGE), torch.float32).fill_(-1)
    torch.stack([one for one, _ in batch], out=out[: len(batch)])
    return [out[: len(batch)], out[1 : len(batch)].transpose(1, 3), out[: len(batch), 0], out[0, 0, 0]]


def stack_and_waste(batch: Samples) -> torch.Tensor:
    """Buffers that do not travel."""
    for _ in range(3):
        fastq_loader.empty((len(batch), *IMAGE), torch.float32).fill_(-7)
    return default_collate(batch)[0]


COLLATES: dict[Callable[[Any], Any], Callable[[int], Any]] = {
    stack_into_empty: stacked,
    stack_twice: lambda k: [stacked(k) + 0.5, stacked(k)],
    stack_and_slice: lambda k: stack_and_slice([(image(4 * k + i), 0) for i in range(4)]),
}


@thorough(but={"workers": 2, "collate": [stack_twice, stack_and_slice]})
@WORKERS
@pytest.mark.parametrize("collate", COLLATES, ids=lambda collate: collate.__name__)
def test_empty_in_a_collate_gives_equal_batches_that_share_nothing(
    collate: Callable[[Any], Any], workers: int
) -> None:
    expected = [COLLATES[collate](position) for position in range(8)]
    kept = [*exactly(8, DataLoader(Made(image_and_label, 32), 4, num_workers=workers, collate_fn=collate))]
    for position, batch in enumerate(kept):  # all of them at once: no memory was given away
        assert_same(expected[position], batch)
        if collate is stack_twice:
            (start, end), (other_start, other_end) = map(extent, batch)
            assert end <= other_start or other_end <= start


def test_empty_that_is_not_returned_is_used_again() -> None:
    """Three wasted buffers of 786 kB with each of 60 batches: 141 MB if they were lost."""
    held = []
    loader = DataLoader(Made(image_and_label, 4 * 91), 4, num_workers=2, collate_fn=stack_and_waste)
    for position, batch in enumerate(loader):
        assert torch.equal(batch, stacked(position))
        del batch
        held += [held_memory()] if position in (30, 90) else []
    assert held[1] - held[0] < 60e6


KEPT_BY_WORKER: list[torch.Tensor] = []
"""In a worker: what its collate function keeps from batch to batch."""


def keep_the_first(batch: Samples) -> list[torch.Tensor]:
    """Keep the first result for good, and ship it again with every batch."""
    out = stack_into_empty(batch)
    if not KEPT_BY_WORKER:
        KEPT_BY_WORKER.append(out)
    return [out, KEPT_BY_WORKER[0]]


def keep_a_buffer(batch: Samples) -> list[torch.Tensor]:
    """Collate into one buffer for all batches."""
    if not KEPT_BY_WORKER:
        KEPT_BY_WORKER.append(torch.empty(len(batch), *IMAGE))
    return [torch.stack([one for one, _ in batch], out=KEPT_BY_WORKER[0])]


@pytest.mark.parametrize("collate", [keep_the_first, keep_a_buffer])
def test_what_a_collate_keeps_and_writes_to_changes_no_delivered_batch(collate: Callable[[Any], Any]) -> None:
    held: collections.deque[tuple[int, Any]] = collections.deque(maxlen=5)
    loader = DataLoader(Made(image_and_label, 80), 4, num_workers=1, collate_fn=collate)
    for delivered in enumerate(exactly(20, loader)):
        held.append(delivered)
        for position, (fresh, *first) in held:
            assert torch.equal(fresh, stacked(position))
            assert all(torch.equal(one, stacked(0)) for one in first), f"batch {position} brought another"


MANNERS: list[Callable[[torch.Tensor], Any]] = [
    lambda buffer: [buffer],
    lambda buffer: [buffer[10:]],
    lambda buffer: [buffer.t()],
    lambda buffer: [buffer.numpy()],
    lambda buffer: [torch.from_numpy(buffer.numpy())],
    lambda buffer: [Opaque(buffer), buffer],
]


class OneBuffer(IterableDataset):
    """Ships one tensor, in several manners in turn, and writes to it after each."""

    def __iter__(self) -> Iterator[Any]:
        buffer = torch.from_numpy(np.zeros((100, 400), dtype=np.float32))
        for index in range(60):
            yield MANNERS[index % len(MANNERS)](buffer.fill_(index))
            buffer.fill_(-1)


def test_a_dataset_that_writes_to_its_own_tensor_changes_no_delivered_batch() -> None:
    """torch moves the dataset's own tensor to shared memory, where later writes reach delivered batches."""
    loader = DataLoader(OneBuffer(), batch_size=None, num_workers=1, collate_fn=identity)
    for index, batch in enumerate(distinct(loader)):
        for part in batch:
            assert np.unique(np.asarray(getattr(part, "value", part))).tolist() == [index]


def test_a_dataset_does_not_see_what_the_consumer_writes() -> None:
    zeros = torch.zeros(100, 400)
    loader = DataLoader([zeros] * 30, None, num_workers=1, collate_fn=identity, persistent_workers=True)
    with loader:
        for _ in range(2):
            for batch in exactly(30, loader):
                assert not batch.any()
                batch.fill_(9)
