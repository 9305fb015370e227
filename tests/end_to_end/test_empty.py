"""`fastq_loader.empty` in datasets and collate functions, and tensors that those keep for themselves."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, default_collate

import fastq_loader
from fastq_loader import DataLoader
from tests.conftest import held_memory
from tests.support.datasets import Made, Opaque, assert_same, describe, difference, extent, identity

IMAGE = (3, 128, 128)
WORKERS = pytest.mark.parametrize("workers", [0, 2])
Samples = list[tuple[torch.Tensor, int]]


def image(index: int) -> torch.Tensor:
    return torch.full(IMAGE, float(index))


def image_and_label(index: int) -> tuple[torch.Tensor, int]:
    return image(index), index


def stacked(position: int) -> torch.Tensor:
    """The images of a batch of four."""
    return torch.stack([image(4 * position + i) for i in range(4)])


# Collates that make their result in place


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


def stack_and_split(batch: Samples) -> list[torch.Tensor]:
    """The parts of one buffer side by side."""
    return list(stack_into_empty(batch).unbind(0))


def stack_and_wrap(batch: Samples) -> Opaque:
    return Opaque({"out": stack_into_empty(batch)})


def stack_into_numpy(batch: Samples) -> np.ndarray:
    out = fastq_loader.empty((len(batch), *IMAGE), torch.float32).numpy()
    np.stack([one.numpy() for one, _ in batch], out=out)
    return out


def stack_and_waste(batch: Samples) -> torch.Tensor:
    """Buffers that do not travel."""
    for _ in range(3):
        fastq_loader.empty((len(batch), *IMAGE), torch.float32).fill_(-7)
    return default_collate(batch)[0]


def stack_in_a_thread(batch: Samples) -> torch.Tensor:
    found: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: found.append(stack_into_empty(batch)))
    thread.start()
    thread.join()
    return found.pop()


COLLATES: dict[Callable[[Any], Any], Callable[[int], Any]] = {
    stack_into_empty: stacked,
    stack_twice: lambda k: [stacked(k) + 0.5, stacked(k)],
    stack_and_slice: lambda k: stack_and_slice([(image(4 * k + i), 0) for i in range(4)]),
    stack_and_split: lambda k: [image(4 * k + i) for i in range(4)],
    stack_and_wrap: lambda k: Opaque({"out": stacked(k)}),
    stack_into_numpy: lambda k: stacked(k).numpy(),
    stack_and_waste: stacked,
    stack_in_a_thread: stacked,
}


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("collate", COLLATES, ids=lambda collate: collate.__name__)
def test_empty_in_a_collate_gives_equal_batches_that_share_nothing(
    collate: Callable[[Any], Any], workers: int
) -> None:
    expected = [COLLATES[collate](position) for position in range(12)]
    loader = DataLoader(Made(image_and_label, 48), batch_size=4, num_workers=workers, collate_fn=collate)
    kept = []
    for position, batch in enumerate(loader):
        if collate is not stack_and_split:  # its parts share a buffer, also without workers
            assert_same(expected[position], batch)
        kept.append(batch)
    for position, batch in enumerate(kept):  # all of them at once: no memory was given away
        assert difference(plain_values(expected[position]), plain_values(batch)) is None
        if collate is stack_twice:
            (start, end), (other_start, other_end) = map(extent, batch)
            assert end <= other_start or other_end <= start


def plain_values(batch: Any) -> Any:
    """The values alone, without strides and overlaps."""
    if isinstance(batch, list):
        return [plain_values(one) for one in batch]
    if isinstance(batch, torch.Tensor):
        batch = batch.clone(memory_format=torch.contiguous_format)
    return describe(batch)


def two_images_in_empty(index: int) -> dict[str, Any]:
    first, second = (fastq_loader.empty(IMAGE, torch.float32).fill_(sign * index) for sign in (1, -1))
    return {"a": first, "b": (second, index)}


@pytest.mark.processes
@WORKERS
@pytest.mark.parametrize("batch_size", [None, 4])
def test_empty_in_a_dataset_gives_equal_batches(batch_size: int | None, workers: int) -> None:
    kept = list(DataLoader(Made(two_images_in_empty, 40), batch_size=batch_size, num_workers=workers))
    size = batch_size or 1
    for position, batch in enumerate(kept):
        indices = torch.arange(size * position, size * position + size).float()
        for images, sign in ((batch["a"], 1), (batch["b"][0], -1)):
            assert images.shape == ((size, *IMAGE) if batch_size else IMAGE)
            rows = images.reshape(size, -1)
            assert torch.equal(rows, (sign * indices)[:, None].expand_as(rows))


def empties_of_all_sorts(index: int) -> list[torch.Tensor]:
    shapes = [(), (0,), (3, 4), (16_384,), (70, 1000), (2, 3, 90, 90), torch.Size([2, 2])]
    dtypes = (torch.float32, torch.bool, torch.complex128, torch.bfloat16, torch.int64)
    return [fastq_loader.empty(shape, dtype).fill_(index) for shape in shapes for dtype in dtypes]


@pytest.mark.processes
def test_empty_of_every_shape_and_dtype_travels_and_is_torchs_outside_of_workers() -> None:
    loader = DataLoader(Made(empties_of_all_sorts, 6), batch_size=None, num_workers=2, collate_fn=identity)
    for index, batch in enumerate(loader):
        here = empties_of_all_sorts(index)
        assert_same(here, batch)
        assert all(type(tensor) is torch.Tensor and tensor.is_contiguous() for tensor in here)


# What a collate keeps


KEPT_BY_WORKER: list[torch.Tensor] = []
"""In a worker: what its collate function keeps from batch to batch."""


def keep_the_first(batch: Samples) -> list[torch.Tensor]:
    """Keep the first result for good, and ship it again with every batch."""
    out = stack_into_empty(batch)
    if not KEPT_BY_WORKER:
        KEPT_BY_WORKER.append(out)
    return [out, KEPT_BY_WORKER[0]]


def keep_the_last_three(batch: Samples) -> torch.Tensor:
    """Keep results for a while, and read them later."""
    for kept in KEPT_BY_WORKER:
        assert kept.flatten()[0] == kept.flatten()[1], "a kept tensor was overwritten"
    out = stack_into_empty(batch)
    KEPT_BY_WORKER.append(out)
    del KEPT_BY_WORKER[:-3]
    return out


@pytest.mark.processes
def test_empty_kept_by_the_worker_stays_what_it_was() -> None:
    kept = []
    for position, (fresh, first) in enumerate(
        DataLoader(Made(image_and_label, 100), 4, num_workers=1, collate_fn=keep_the_first)
    ):
        kept += [(position, fresh, first)] if position % 4 == 0 else []
        assert torch.equal(fresh, stacked(position))
        assert torch.equal(first, stacked(0)), f"batch {position} brought another first batch"
    for position, fresh, first in kept:
        assert torch.equal(fresh, stacked(position))
        assert torch.equal(first, stacked(0))


@pytest.mark.processes
def test_empty_kept_for_a_while_by_the_worker_corrupts_no_batch() -> None:
    loader = DataLoader(Made(image_and_label, 160), 4, num_workers=2, collate_fn=keep_the_last_three)
    held: collections.deque[tuple[int, torch.Tensor]] = collections.deque(maxlen=5)
    for position, batch in enumerate(loader):
        held.append((position, batch))
        for number, one in held:
            assert one[:, 0, 0, 0].tolist() == list(range(4 * number, 4 * number + 4))


@pytest.mark.processes
def test_empty_that_is_not_returned_is_used_again() -> None:
    """Three wasted buffers of 786 kB with each of 60 batches: 141 MB if they were lost."""
    held = []
    for position, batch in enumerate(
        DataLoader(Made(image_and_label, 4 * 91), 4, num_workers=2, collate_fn=stack_and_waste)
    ):
        assert batch.amax() == 4 * position + 3
        del batch
        held += [held_memory()] if position in (30, 90) else []
    assert held[1] - held[0] < 60e6


def keep_a_buffer(batch: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """Collate into one buffer for all batches, and spoil the previous batch's extra tensor."""
    if not KEPT_BY_WORKER:
        KEPT_BY_WORKER.extend([torch.empty(len(batch), *IMAGE), torch.zeros(3)])
    buffer, small = KEPT_BY_WORKER
    torch.stack(batch, out=buffer)
    small += 1
    return {"images": buffer, "count": small}


@pytest.mark.processes
def test_a_collate_that_stacks_into_the_same_buffer_changes_no_delivered_batch() -> None:
    kept = list(DataLoader(Made(image, 160), batch_size=4, num_workers=1, collate_fn=keep_a_buffer))
    for position, batch in enumerate(kept):
        assert torch.equal(batch["images"], stacked(position)), f"batch {position}"
        assert batch["count"].tolist() == [position + 1] * 3


# What a dataset keeps


class Keeper:
    """A dataset that ships one tensor, which it writes to before, in one of several manners."""

    def __init__(self, manner: Callable[[torch.Tensor], Any]) -> None:
        self.manner = manner
        self.buffer = torch.from_numpy(np.zeros((100, 400), dtype=np.float32))

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return self.manner(self.buffer.fill_(index))


MANNERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda buffer: [buffer],
    "a view of it": lambda buffer: [buffer[10:]],
    "its transpose": lambda buffer: [buffer.t()],
    "its array": lambda buffer: [buffer.numpy()],
    "another tensor on its array": lambda buffer: [torch.from_numpy(buffer.numpy())],
    "inside an object": lambda buffer: [Opaque(buffer), buffer],
}


@pytest.mark.processes
@pytest.mark.parametrize("manner", MANNERS)
def test_a_dataset_that_writes_to_its_own_tensor_changes_no_delivered_batch(manner: str) -> None:
    """torch moves the dataset's own tensor to shared memory, where later writes reach delivered batches."""
    loader = DataLoader(Keeper(MANNERS[manner]), batch_size=None, num_workers=2, collate_fn=identity)
    for index, batch in enumerate(list(loader)):
        for part in batch:
            assert np.unique(np.asarray(getattr(part, "value", part))).tolist() == [index]


@pytest.mark.processes
def test_a_dataset_does_not_see_what_the_consumer_writes() -> None:
    zeros = torch.zeros(100, 400)
    loader = DataLoader([zeros] * 30, None, num_workers=1, collate_fn=identity, persistent_workers=True)
    with loader:
        for _ in range(2):
            for batch in loader:
                assert not batch.any()
                batch.fill_(9)


class StreamOfOneBuffer(IterableDataset):
    """Yields one buffer, and spoils it after each yield."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        buffer = torch.empty(IMAGE)
        for index in range(40):
            yield buffer.fill_(index)
            buffer.fill_(-1)


@pytest.mark.processes
def test_a_stream_that_spoils_its_buffer_changes_no_delivered_batch() -> None:
    loader = DataLoader(StreamOfOneBuffer(), batch_size=None, num_workers=1)
    assert [np.unique(batch).tolist() for batch in list(loader)] == [[index] for index in range(40)]
