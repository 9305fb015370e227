"""Whole loaders with `device=`, over a late device: batches are torch's, each is one copy, and what is kept.

What a real device does is in test_gpu; what is here holds on any, and runs everywhere.
"""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader as TorchDataLoader

from fastq_loader import DataLoader, Prefetcher, ToDevice
from fastq_loader.memory.blocks import DEVICE_ALIGNMENT
from tests.support.datasets import (
    SAMPLES,
    Made,
    Opaque,
    Point,
    Record,
    Stream,
    alias,
    assert_same,
    identity,
    wrap,
)
from tests.support.late_device import Late, image_and_label
from tests.support.loaders import exactly
from tests.support.thorough import seeds

pytestmark = pytest.mark.processes
WORKERS = pytest.mark.parametrize("workers", [0, 2])


def configuration(draw: random.Random) -> dict[str, Any]:
    kind = draw.choice(sorted(SAMPLES))
    collate = identity if kind in ("ragged", "objects", "text") else draw.choice((None, identity, wrap))
    workers = draw.choice((0, 1, 2, 3))
    iterable = draw.random() < 0.2
    options: dict[str, Any] = {
        "dataset": Stream(kind, (7, 4, 9)) if iterable else Made(SAMPLES[kind], draw.randint(1, 17)),
        "batch_size": draw.choice((1, 2, 5)),
        "collate_fn": collate,
        "num_workers": workers,
        "drop_last": draw.random() < 0.3,
        "shuffle": None if iterable else draw.random() < 0.5,
    }
    if workers:
        options["prefetch_factor"] = draw.choice((1, 2, 4))
        options["persistent_workers"] = draw.random() < 0.5
    return options


DEVICE_CHOICES: dict[str, tuple[Any, ...]] = {
    "prefetch": (1, 2, 3),
    "transform_stream": ("consumer", "side"),
    "transform": (None, identity),
}


@seeds(1, 40)
def test_batches_are_torchs(seed: int, late: Late) -> None:
    draw = random.Random(seed)
    backend = late(seed=seed)
    options = configuration(draw)
    device = ToDevice("cuda", **{name: draw.choice(choices) for name, choices in DEVICE_CHOICES.items()})
    what = f"seed={seed}: {options} {device}"
    torch.manual_seed(seed)
    expected = TorchDataLoader(**options)
    with DataLoader(**options, device=device) as loader:
        for epoch in range(2):
            torch.manual_seed(seed + epoch)
            there = list(expected)
            torch.manual_seed(seed + epoch)
            for at, (wanted, batch) in enumerate(zip(there, loader, strict=True)):
                assert_same(wanted, batch, f"{what}, epoch {epoch}, batch {at}")
    assert not backend.registered, what


def everything(index: int) -> Any:
    values = torch.arange(12.0).reshape(3, 4) + index
    return {
        "transposed": values.t(),
        "expanded": torch.tensor([float(index)]).expand(4),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(index, dtype=torch.bfloat16),
        "bool": torch.tensor([True, False]),
        "complex": torch.complex(values, values),
        "grad": torch.ones(3).mul_(index).requires_grad_(),
        "coo": torch.eye(3).mul_(index + 1).to_sparse(),
        "csr": torch.eye(3).mul_(index + 1).to_sparse_csr(),
        "float8": values.to(torch.float8_e4m3fn),
        "array": np.full((200, 200), index, dtype=np.int32),
        "small array": np.arange(3),
        "object": Opaque({"inner": values, "text": "x"}),
        "record": Record("r", [values, index]),
        "point": Point(values, None),
        "text": "text",
        "big": 2**80,
    }


@pytest.mark.filterwarnings("ignore:.*(beta state|Sparse invariant checks).*:UserWarning")
@WORKERS
def test_every_kind_of_leaf(workers: int, late: Late) -> None:
    late()
    options: dict[str, Any] = {"batch_size": None, "collate_fn": identity, "num_workers": workers}
    with DataLoader(Made(everything, 5), device="cuda", **options) as loader:
        for expected, batch in zip(TorchDataLoader(Made(everything, 5), **options), loader, strict=True):
            assert_same(expected, batch)


@WORKERS
def test_device_memory_is_free_when_a_batch_is_dropped(
    workers: int, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, made = late(), list[Any]()
    empty = device.empty

    def watched(nbytes: int) -> torch.Tensor:
        memory = empty(nbytes)
        made.append(weakref.ref(memory))
        return memory

    monkeypatch.setattr(device, "empty", watched)
    with DataLoader(Made(image_and_label, 8), 8, num_workers=workers, device="cuda") as loader:
        for _ in exactly(1, loader):
            assert [memory() for memory in made] == [None], "only the fields have it"


@WORKERS
def test_aliases_stay_aliases(workers: int, late: Late) -> None:
    device = late()
    options: Any = {"collate_fn": alias, "num_workers": workers, "device": "cuda"}
    with DataLoader(Made(image_and_label, 8), 4, **options) as loader:
        for batch in loader:
            assert batch["a"].data_ptr() == batch["b"].data_ptr()
            batch["a"][1, 2] = -1.0
            assert batch["t"][2, 1] == batch["row"][2] == -1.0
    assert len(device.copies) == 2


@WORKERS
def test_fields_can_be_written_to_without_spoiling_what_autograd_saved(workers: int, late: Late) -> None:
    late()
    dataset = Made(lambda index: (torch.ones(3), torch.ones(3)), 2)
    for first, second in exactly(1, DataLoader(dataset, 2, num_workers=workers, device="cuda")):
        weights = torch.ones(3, requires_grad=True)
        loss = (first * weights).sum()  # saves `first`
        second.mul_(2)
        loss.backward()
        assert weights.grad is not None


@pytest.mark.parametrize(("workers", "prefetcher"), [(0, False), (2, False), (0, True)])
def test_the_sizes_of_a_packed_sequence_stay_on_the_host(workers: int, prefetcher: bool, late: Late) -> None:
    device = late()
    options: Any = {"batch_size": 2, "collate_fn": pack}
    if prefetcher:
        ours: Any = Prefetcher(TorchDataLoader(range(6), **options), "cuda")
    else:
        ours = DataLoader(range(6), num_workers=workers, device="cuda", **options)
    for expected, batch in zip(TorchDataLoader(range(6), **options), ours, strict=True):
        assert_same(tuple(expected), tuple(batch))
        data, sizes, order = [part.untyped_storage().data_ptr() for part in batch[:3]]
        assert sizes != data == order
    assert len(device.copies) == 3


def pack(samples: list[int]) -> PackedSequence:
    return pack_sequence([torch.full((sample + 1,), sample) for sample in samples], enforce_sorted=False)


def fields(index: int) -> Any:
    small = {f"field {at}": torch.full((at + 1,), float(index)) for at in range(50)}
    return {**small, "image": torch.full((100_000,), index, dtype=torch.uint8)}


@WORKERS
def test_a_batch_is_one_copy_and_its_fields_are_aligned(workers: int, late: Late) -> None:
    device = late()
    with DataLoader(Made(fields, 24), 4, num_workers=workers, device="cuda") as loader:
        for batch in loader:
            storages = {value.untyped_storage().data_ptr() for value in batch.values()}
            assert len(storages) == 1
            start = storages.pop()
            assert all((value.data_ptr() - start) % DEVICE_ALIGNMENT == 0 for value in batch.values())
        staging = loader.statistics().staging
    assert len(device.copies) == staging.copies == 6
    assert sum(device.copies) == staging.copied_bytes
    assert staging.copied_bytes < 1.1 * 24 * sum(value.nbytes for value in fields(0).values()) + 6 * 51 * 256


def staging_of(loader: DataLoader[Any]) -> Any:
    return loader.statistics().staging


def test_without_workers_buffers_are_kept(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    device = late()
    made: list[int] = []
    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", lambda nbytes: made.append(nbytes) or pinned(nbytes))
    loader = DataLoader(Made(image_and_label, 20), 2, device="cuda")
    for _ in range(5):
        next(iter(loader))
        assert len(list(loader)) == 10
    assert len(made) == 3  # prefetch + 1
    assert staging_of(loader).pinned_bytes == sum(made)
    loader.close()
    assert staging_of(loader).pinned_bytes == 0
    assert len(list(loader)) == 10


@WORKERS
def test_two_iterators_at_once_do_not_mix(workers: int, late: Late) -> None:
    late(seed=workers)
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=min(workers, 1), device="cuda")
    for at, batches in enumerate(exactly(10, zip(loader, loader, strict=True))):
        for images, labels in batches:
            assert labels.tolist() == [2 * at, 2 * at + 1]
            assert images[:, 1, 1, 1].tolist() == labels.tolist()


@pytest.mark.parametrize("workers", [0, 2, "prefetcher"])
def test_next_is_refused_while_a_graph_is_captured(workers: Any, late: Late) -> None:
    device, dataset = late(), Made(image_and_label, 20)
    if workers == "prefetcher":
        iterator: Any = iter(Prefetcher(TorchDataLoader(dataset, 2), "cuda"))
    else:
        iterator = iter(DataLoader(dataset, 2, num_workers=workers, device="cuda"))
    next(iterator)
    device.is_capturing = True
    with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
        next(iterator)
    device.is_capturing = False
    assert next(iterator)[1].tolist() == [2, 3]
