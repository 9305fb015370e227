"""Whole loaders with `device=`, over a device made of CPU memory whose copies run late (see `late_device`).

What a real device does is in test_gpu; what is here holds on any, and runs everywhere.
"""

from __future__ import annotations

import copy
import functools
import gc
import os
import pickle
import random
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset, Sampler

from fastq_loader import DataLoader, PinFailed, PinFallback, Processes, ToDevice
from fastq_loader.errors import WorkerReplaced
from fastq_loader.memory.arena import Mapping
from fastq_loader.memory.ledger import DEVICE_ALIGNMENT
from tests.conftest import descendants, of_kind, run_script, wait_until
from tests.support.datasets import (
    SAMPLES,
    Echo,
    Made,
    MapDataset,
    Opaque,
    Point,
    Record,
    Stream,
    alias,
    assert_same,
    identity,
    wrap,
)
from tests.support.late_device import POISON, LateStager, late_device

pytestmark = [
    pytest.mark.processes,
    pytest.mark.filterwarnings("ignore:This DataLoader will create:UserWarning"),  # more workers than cores
]
WORKERS = pytest.mark.parametrize("workers", [0, 2])


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LateStager]]:
    """Puts a late device in the place of every accelerator, until the test is over."""
    open_ones = []

    def start(**options: Any) -> LateStager:
        context = late_device(monkeypatch, **options)
        open_ones.append(context)
        return context.__enter__()

    yield start
    gc.collect()
    for context in reversed(open_ones):
        context.__exit__(None, None, None)


def image_and_label(index: int) -> Any:
    return torch.full((3, 96, 96), index % 251, dtype=torch.uint8), index


# ---- the same batches -------------------------------------------------------------------------------


def configuration(draw: random.Random) -> dict[str, Any]:
    """Arguments for both loaders."""
    kind = draw.choice(sorted(SAMPLES))
    collate = draw.choice((None, identity, wrap))
    if kind in ("ragged", "objects", "text"):
        collate = identity
    workers = draw.choice((0, 1, 2, 3))
    options: dict[str, Any] = {
        "dataset": Stream(kind, (7, 4, 9))
        if draw.random() < 0.2
        else Made(SAMPLES[kind], draw.randint(1, 17)),
        "batch_size": draw.choice((1, 2, 5)),
        "collate_fn": collate,
        "num_workers": workers,
        "drop_last": draw.random() < 0.3,
    }
    if not isinstance(options["dataset"], Stream):
        options["shuffle"] = draw.random() < 0.5
    if workers:
        options["prefetch_factor"] = draw.choice((1, 2, 4))
        options["persistent_workers"] = draw.random() < 0.5
    return options


def device_options(draw: random.Random) -> dict[str, Any]:
    return {
        "device": ToDevice(
            "cuda",
            prefetch=draw.choice((1, 2, 3)),
            transform_stream=draw.choice(("consumer", "side")),
            buffers=draw.choice(("fresh", "reuse")),
            pin=draw.choice(("auto", "register", "bounce", "pageable")),
            transform=draw.choice((None, identity)),
        )
    }


@pytest.mark.parametrize("seed", range(40))
def test_batches_are_torchs(seed: int, late: Callable[..., LateStager]) -> None:
    draw = random.Random(seed)
    device = late(seed=seed)
    options, staging = configuration(draw), device_options(draw)
    what = f"seed={seed}: {options} {staging}"
    torch.manual_seed(seed)
    expected = TorchDataLoader(**options)
    with DataLoader(**options, **staging) as loader:
        for epoch in range(2):
            torch.manual_seed(seed + epoch)
            there = list(expected)
            torch.manual_seed(seed + epoch)
            count = 0
            for at, batch in enumerate(loader):
                assert_same(there[at], batch, f"{what}, epoch {epoch}, batch {at}")
                count += 1
            assert count == len(there), what
    assert not device.registered, what


@WORKERS
@pytest.mark.parametrize("in_order", [True, False])
def test_batches_may_be_kept(workers: int, in_order: bool, late: Callable[..., LateStager]) -> None:
    late()
    loader = DataLoader(Made(image_and_label, 44), 4, num_workers=workers, device="cuda", in_order=in_order)
    batches = list(loader)
    labels = sorted(label for _, labels in batches for label in labels.tolist())
    assert labels == list(range(44))
    for images, indices in batches:
        for image, index in zip(images, indices.tolist(), strict=True):
            assert image.unique().tolist() == [index]


@WORKERS
def test_any_schedule_gives_the_same_bits(workers: int, late: Callable[..., LateStager]) -> None:
    found = []
    for device in (None, "cuda"):
        late()
        torch.manual_seed(3)
        loader = DataLoader(
            MapDataset("drawn", 20), 3, shuffle=True, num_workers=workers, schedule="dynamic", device=device
        )
        found.append(list(loader))
    assert_same(found[0], found[1])


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
def test_every_kind_of_leaf(workers: int, late: Callable[..., LateStager]) -> None:
    late()
    options: dict[str, Any] = {"batch_size": None, "collate_fn": identity, "num_workers": workers}
    with DataLoader(Made(everything, 5), device="cuda", **options) as loader:
        for expected, batch in zip(TorchDataLoader(Made(everything, 5), **options), loader, strict=True):
            assert_same(expected, batch)


@WORKERS
def test_aliases_stay_aliases(workers: int, late: Callable[..., LateStager]) -> None:
    device = late()
    with DataLoader(
        Made(image_and_label, 8), 4, collate_fn=alias, num_workers=workers, device="cuda"
    ) as loader:
        for batch in loader:
            assert batch["a"].data_ptr() == batch["b"].data_ptr()
            batch["a"][1, 2] = -1.0
            assert batch["t"][2, 1] == batch["row"][2] == -1.0
    assert len(device.copies) == 2


@WORKERS
def test_fields_can_be_written_to_without_spoiling_what_autograd_saved(
    workers: int, late: Callable[..., LateStager]
) -> None:
    late()
    loader = DataLoader(Made(lambda index: (torch.ones(3), torch.ones(3)), 2), 2, device="cuda")
    for first, second in loader:
        weights = torch.ones(3, requires_grad=True)
        loss = (first * weights).sum()  # saves `first`
        second.mul_(2)
        loss.backward()
        assert weights.grad is not None


# ---- one copy ---------------------------------------------------------------------------------------


def fields(index: int) -> Any:
    return {f"field {at}": torch.full((at + 1,), float(index)) for at in range(50)} | {
        "image": torch.full((100_000,), index, dtype=torch.uint8)
    }


@WORKERS
def test_a_batch_is_one_copy_and_its_fields_are_aligned(
    workers: int, late: Callable[..., LateStager]
) -> None:
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


class Watching(Dataset):
    """Two fields of which each is collated into shared memory; says how many blocks the worker took."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.full((300_000,), float(index)), torch.full((200_000,), float(-index))


def test_results_are_collated_where_they_are_copied_from(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the second batch on: the first shows how much room a batch takes."""
    from fastq_loader.memory.allocator import Allocator

    late()
    written = []
    write = Allocator.write

    def watch(self: Allocator, offset: int, source: int, nbytes: int) -> None:
        written.append(nbytes)
        write(self, offset, source, nbytes)

    monkeypatch.setattr(Allocator, "write", watch)
    report: Any = functools.partial(_report, written)
    with DataLoader(Watching(), 2, num_workers=1, collate_fn=report, device="cuda") as loader:
        counts = [batch[2] for batch in loader]
    assert max(counts) == counts[-1] <= 2  # both fields of the first batch, and nothing after it


def _report(written: list[int], samples: Any) -> Any:
    first, second = torch.utils.data.default_collate(samples)
    return first, second, len([nbytes for nbytes in written if nbytes > 100_000])


# ---- when copies begin, and when memory is free -----------------------------------------------------


@pytest.mark.parametrize("ahead", [1, 2, 3])
def test_the_next_batches_are_on_their_way_when_one_is_handed_out(
    ahead: int, late: Callable[..., LateStager]
) -> None:
    device = late()
    with DataLoader(
        Made(image_and_label, 40),
        2,
        num_workers=2,
        prefetch_factor=4,
        device=ToDevice("cuda", prefetch=ahead),
    ) as loader:
        iterator = iter(loader)
        next(iterator)
        time.sleep(0.5)  # the workers fill the window
        for at in range(1, 10):
            next(iterator)
            assert len(device.copies) >= min(at + 1 + ahead, 20) - (at == 1)
            assert len(device.copies) <= at + 1 + ahead
            time.sleep(0.05)


def test_poll_begins_copies_without_a_next(late: Callable[..., LateStager]) -> None:
    device = late()
    with DataLoader(Made(image_and_label, 40), 2, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        next(iterator)
        begun = len(device.copies)
        time.sleep(0.5)
        iterator.poll()
        assert len(device.copies) == 3 >= begun
        assert [labels.tolist() for _, labels in iterator] == [[at, at + 1] for at in range(2, 40, 2)]
        iterator.poll()  # at the end there is nothing to do, and no error


@pytest.mark.parametrize("pin", ["register", "bounce", "pageable"])
def test_memory_does_not_grow_with_the_epoch(pin: str, late: Callable[..., LateStager]) -> None:
    late()
    with DataLoader(
        Made(image_and_label, 400),
        2,
        num_workers=2,
        device=ToDevice("cuda", pin=pin),
        persistent_workers=True,
    ) as loader:
        for _ in loader:
            continue
        blocks = loader.statistics().blocks_grown
        for _ in range(2):
            for _ in loader:
                continue
        assert loader.statistics().blocks_grown <= blocks + 2
        assert blocks <= 2 * 2 + 2 + 2 * 2 + 2


def shrinking(index: int) -> torch.Tensor:
    return torch.full((400_000 if index < 20 else 90_000,), index % 256, dtype=torch.uint8)


def test_pages_go_back_to_the_system_only_when_they_are_not_locked(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the device would read the locked ones, and workers write to new ones."""
    device = late()
    punched = []
    punch = Mapping.punch

    def watch(self: Mapping, offset: int, size: int) -> None:
        punched.append(size)
        assert self.base + offset not in device.registered
        punch(self, offset, size)

    monkeypatch.setattr(Mapping, "punch", watch)
    with DataLoader(Made(shrinking, 300), 2, num_workers=2, device="cuda") as loader:
        for at, batch in enumerate(loader):
            assert batch[:, 0].tolist() == [2 * at % 256, (2 * at + 1) % 256]
            trimmed = len(punched)
        assert trimmed >= 2  # blocks of the large batches


def test_what_is_locked_stays_locked_while_batches_are_alike(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    # The consumer runs ahead of a device that is slow, and now and then everything arrives at once.
    monkeypatch.setattr(device, "wait", lambda stream, event: None)
    monkeypatch.setattr(device, "query", lambda event: bool(event.over))
    undone = []
    undo = device.unregister
    monkeypatch.setattr(device, "unregister", lambda address: (undone.append(address), undo(address)))
    options: Any = {"num_workers": 2, "device": ToDevice("cuda", prefetch=4), "prefetch_factor": 1}
    with DataLoader(Made(image_and_label, 600), 2, **options) as loader:
        iterator = iter(loader)
        for at in range(299):
            next(iterator)
            if at % 20 == 0:
                device.synchronize(device.record(device.side))
        assert undone == [0]  # that of the proof that it works


@pytest.mark.parametrize("kind", ["objects", "text"])
def test_batches_without_tensors_leave_no_blocks_behind(kind: str, late: Callable[..., LateStager]) -> None:
    device = late()
    with DataLoader(
        MapDataset(kind, 400), 2, num_workers=2, collate_fn=identity, device="cuda", persistent_workers=True
    ) as loader:
        assert len(list(loader)) == 200
        assert loader.statistics().blocks_grown < 20
    assert device.copies == []


def test_buffers_are_kept_from_epoch_to_epoch_without_workers(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    made = []
    pinned = device.pinned
    monkeypatch.setattr(device, "pinned", lambda nbytes: made.append(nbytes) or pinned(nbytes))
    loader = DataLoader(Made(image_and_label, 20), 2, device="cuda")
    for _ in range(5):
        next(iter(loader))
        assert len(list(loader)) == 10
    staging = loader.statistics().staging
    assert staging is not None
    assert len(made) == 3  # prefetch + 1
    assert staging.pinned_bytes == sum(made)
    loader.close()
    staging = loader.statistics().staging
    assert staging is not None
    assert staging.pinned_bytes == 0
    assert len(list(loader)) == 10


def test_reuse_overwrites_a_batch_after_the_next_one_was_asked_for(late: Callable[..., LateStager]) -> None:
    late()
    with DataLoader(
        Made(image_and_label, 40), 2, num_workers=2, device=ToDevice("cuda", buffers="reuse")
    ) as loader:
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(12)]
        addresses = {images.data_ptr() for images, _ in kept}
    assert len(addresses) == 3  # prefetch + 1
    assert kept[-1][1].tolist() == [22, 23]
    assert [labels.tolist() for _, labels in kept[:3]] != [[0, 1], [2, 3], [4, 5]]


# ---- ends -------------------------------------------------------------------------------------------


class Reordered(Sampler[int]):
    """Another order in each epoch."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(self.epoch).sample(range(self.size), self.size))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("beside", ["consumer", "side"])
def test_an_epoch_that_is_broken_off_leaves_nothing_under_way(
    persistent: bool, beside: str, late: Callable[..., LateStager]
) -> None:
    device = late()
    loader = DataLoader(
        Made(image_and_label, 60),
        2,
        sampler=Reordered(60),
        num_workers=2,
        persistent_workers=persistent,
        device=ToDevice("cuda", transform=identity, transform_stream=beside),
    )
    for epoch in range(4):
        loader.sampler.epoch = epoch
        order = list(loader.sampler)
        for at, (images, labels) in enumerate(loader):
            assert labels.tolist() == order[2 * at : 2 * at + 2]
            assert images[:, 0, 0, 0].tolist() == labels.tolist()
            if at == 3 + 6 * epoch:  # further each time: past what was under way when it was broken off
                break
    loader.close()
    assert not device.registered
    staging = loader.statistics().staging
    assert staging is not None
    assert staging.pinned_bytes == 0


@pytest.mark.parametrize("ending", ["close", "drop", "error"])
def test_copies_are_drained_before_memory_goes(ending: str, late: Callable[..., LateStager]) -> None:
    device = late()
    dataset = MapDataset("large", 30)
    loader = DataLoader(dataset, 2, num_workers=2, device="cuda")
    iterator = iter(loader)
    batch = next(iterator)
    time.sleep(0.3)
    iterator.poll()
    assert device._queue
    if ending == "close":
        loader.close()
    else:
        del loader, iterator
        gc.collect()
    assert not device._queue
    assert not device.registered
    assert_same([dataset[0][0], dataset[1][0]], list(batch[0]))


def test_a_loader_that_is_left_to_the_exit_ends_in_order() -> None:
    script = """
import pytest, torch
from fastq_loader import DataLoader
from tests.support.datasets import MapDataset
from tests.support.late_device import late_device
patch = pytest.MonkeyPatch()
context = late_device(patch)
context.__enter__()
loader = DataLoader(MapDataset("large", 30), 2, num_workers=2, device="cuda")
iterator = iter(loader)
print(next(iterator)[1].tolist())
"""
    result = run_script(script)
    assert (result.returncode, result.stdout.strip(), result.stderr) == (0, "[0, 1]", "")


# ---- errors -----------------------------------------------------------------------------------------


def fail_at_third(batch: Any) -> Any:
    if 4 in batch[1].tolist():
        raise KeyError("the transform fails")
    return batch


@WORKERS
@pytest.mark.parametrize("beside", ["consumer", "side"])
def test_an_error_of_the_transform_has_its_place(
    workers: int, beside: str, late: Callable[..., LateStager]
) -> None:
    late()
    loader = DataLoader(
        Made(image_and_label, 20),
        2,
        num_workers=workers,
        device=ToDevice("cuda", transform=fail_at_third, transform_stream=beside),
    )
    iterator = iter(loader)
    assert [next(iterator)[1].tolist() for _ in range(2)] == [[0, 1], [2, 3]]
    with pytest.raises(KeyError, match="the transform fails"):
        next(iterator)
    assert [labels.tolist() for _, labels in iterator] == [[at, at + 1] for at in range(6, 20, 2)]
    loader.close()


def stop(batch: Any) -> Any:
    raise StopIteration("out of the transform")


@WORKERS
def test_a_transform_cannot_end_the_epoch(workers: int, late: Callable[..., LateStager]) -> None:
    late()
    with DataLoader(
        Made(image_and_label, 4), 2, num_workers=workers, device=ToDevice("cuda", transform=stop)
    ) as loader:
        iterator = iter(loader)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="StopIteration"):
                next(iterator)


def test_a_device_without_memory_is_an_error_at_its_place(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    with DataLoader(Made(image_and_label, 30), 2, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        assert next(iterator)[1].tolist() == [0, 1]
        time.sleep(0.3)
        iterator.poll()  # two batches are there already
        allocate = device.empty
        monkeypatch.setattr(device, "empty", _no_memory)
        assert [next(iterator)[1].tolist() for _ in range(2)] == [[2, 3], [4, 5]]
        with pytest.raises(RuntimeError, match="out of memory"):
            next(iterator)
        monkeypatch.setattr(device, "empty", allocate)
        assert [labels.tolist() for _, labels in iterator] == [[at, at + 1] for at in range(8, 30, 2)]


def test_batches_that_could_not_be_copied_leave_no_blocks_behind(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    monkeypatch.setattr(device, "empty", _no_memory)
    with DataLoader(Made(image_and_label, 200), 2, num_workers=2, device="cuda") as loader:
        iterator = iter(loader)
        for _ in range(100):
            with pytest.raises(RuntimeError, match="out of memory"):
                next(iterator)
        with pytest.raises(StopIteration):
            next(iterator)
        assert loader.statistics().blocks_grown < 15


def _no_memory(nbytes: int) -> torch.Tensor:
    raise RuntimeError("CUDA out of memory")


class Deadly(Echo):
    """Writes half of its sample to shared memory and dies, the first time that it comes to one index."""

    def __init__(self, size: int, folder: Path) -> None:
        super().__init__(size)
        self.folder = folder

    def __getitem__(self, index: Any) -> Any:
        from fastq_loader import empty

        image = empty((3, 200, 200), torch.uint8)
        image[:, :100] = index
        if index == 13 and not (self.folder / "died").exists():
            (self.folder / "died").touch()
            time.sleep(0.05)
            os.kill(os.getpid(), signal.SIGKILL)
        image[:, 100:] = index
        return image, index


def test_what_a_dead_worker_left_half_written_is_never_copied(
    tmp_path: Path, late: Callable[..., LateStager]
) -> None:
    late()
    options: Any = {"workers": Processes(max_restarts=3), "schedule": "dynamic", "device": "cuda"}
    with DataLoader(Deadly(40, tmp_path), 2, num_workers=2, **options) as loader:
        with pytest.warns(WorkerReplaced):
            batches = list(loader)
        for at, (images, labels) in enumerate(batches):
            assert labels.tolist() == [2 * at, 2 * at + 1]
            assert [image.unique().tolist() for image in images] == [[2 * at], [2 * at + 1]]


@pytest.mark.parametrize("reuse", ["fresh", "reuse"])
@WORKERS
def test_a_loader_lives_through_any_number_of_failing_transforms(
    workers: int, reuse: str, late: Callable[..., LateStager]
) -> None:
    late()
    failing = {"errors": 12}

    def fail(batch: Any) -> Any:
        failing["errors"] -= 1
        if failing["errors"] >= 0:
            raise KeyError("not yet")
        return batch

    device = ToDevice("cuda", transform=fail, transform_stream="side", buffers=reuse)
    with DataLoader(Made(image_and_label, 48), 2, num_workers=workers, device=device) as loader:
        iterator = iter(loader)
        for _ in range(12):
            with pytest.raises(KeyError, match="not yet"):
                next(iterator)
        assert [labels.tolist() for _, labels in iterator] == [[at, at + 1] for at in range(24, 48, 2)]


def test_an_error_of_the_transform_does_not_keep_the_workers(late: Callable[..., LateStager]) -> None:
    late()
    loader = DataLoader(
        Made(image_and_label, 8),
        2,
        num_workers=1,
        device=ToDevice("cuda", transform=stop, transform_stream="side"),
    )
    iterator = iter(loader)
    with pytest.raises(RuntimeError, match="StopIteration"):
        next(iterator)
    gc.disable()
    try:
        del iterator, loader
        assert wait_until(lambda: not descendants(), 3)
    finally:
        gc.enable()


def test_an_interrupt_while_copies_are_drained_leaves_the_rest_to_the_next_close(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    loader = DataLoader(MapDataset("large", 40), 2, num_workers=2, device="cuda")
    iterator = iter(loader)
    next(iterator)
    time.sleep(0.3)
    iterator.poll()
    synchronize = device.synchronize
    monkeypatch.setattr(device, "synchronize", _interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    monkeypatch.setattr(device, "synchronize", synchronize)
    assert device.registered
    iterator.engine.close()
    assert not device._queue
    assert not device.registered


def _interrupted(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_a_block_is_locked_leaves_no_lock(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = late()
    register = device.register
    monkeypatch.setattr(device, "register", lambda *at: (register(*at), _interrupted()) if at[0] else None)
    monkeypatch.setattr(device, "prove", lambda: None)
    loader = DataLoader(MapDataset("large", 8), 2, num_workers=1, device="cuda")
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    loader.close()
    assert not device.registered


@WORKERS
@pytest.mark.parametrize("persistent", [False, True])
def test_what_is_set_later_holds_from_the_next_epoch_on(
    persistent: bool, workers: int, late: Callable[..., LateStager]
) -> None:
    late()
    loader = DataLoader(
        Made(image_and_label, 8),
        2,
        num_workers=workers,
        persistent_workers=persistent and workers > 0,
        device="cuda",
    )
    expected = list(TorchDataLoader(Made(image_and_label, 8), 2))
    for device, transform in (
        ("cuda", None),
        ("cuda", add_one),
        (None, None),
        ("cpu", add_one),
        ("cuda", None),
    ):
        loader.device = None if device is None else ToDevice(device, transform=transform)
        found = list(loader)
        wanted = expected if transform is None else [add_one(batch) for batch in expected]
        assert_same(wanted, found, f"{device} {transform}")
    loader.close()


@WORKERS
def test_next_is_refused_while_a_graph_is_captured(workers: int, late: Callable[..., LateStager]) -> None:
    device = late()
    with DataLoader(Made(image_and_label, 20), 2, num_workers=workers, device="cuda") as loader:
        iterator = iter(loader)
        next(iterator)
        device.is_capturing = True
        with pytest.raises(RuntimeError, match="CUDA graph is being captured"):
            next(iterator)
        device.is_capturing = False
        assert next(iterator)[1].tolist() == [2, 3]


def test_what_is_no_tensor_cannot_fail_without_workers_because_it_cannot_be_pickled(
    late: Callable[..., LateStager],
) -> None:
    late()
    unpicklable = lambda: None  # noqa: E731
    loader = DataLoader(
        Made(lambda index: (torch.tensor(index), unpicklable), 2), None, collate_fn=identity, device="cuda"
    )
    assert all(value is unpicklable for _, value in loader)


# ---- page-locking -----------------------------------------------------------------------------------


def test_auto_falls_back_and_says_so_once(late: Callable[..., LateStager]) -> None:
    late(refuse=("register",))
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=2, device="cuda")
    with pytest.warns(PinFallback, match="bounce.*refuses") as caught:
        assert [len(list(loader)) for _ in range(3)] == [10] * 3
    assert len(of_kind(caught, PinFallback)) == 1
    staging = loader.statistics().staging
    assert staging is not None
    assert (staging.pin, staging.pin_reason) == ("bounce", "the driver refuses")


def test_a_limit_is_said_once_however_many_pools_come_to_it(late: Callable[..., LateStager]) -> None:
    late()
    loader = DataLoader(
        Made(image_and_label, 20), 2, num_workers=2, device=ToDevice("cuda", pin_limit_bytes=0)
    )
    with pytest.warns(PinFallback) as caught:
        assert [len(list(loader)) for _ in range(3)] == [10] * 3
    said = of_kind(caught, PinFallback)
    assert len(said) == len({str(warning.message) for warning in said}) == 2


def test_auto_falls_back_to_the_end(late: Callable[..., LateStager]) -> None:
    late(refuse=("register", "pinned"))
    with DataLoader(Made(image_and_label, 20), 2, num_workers=2, device="cuda") as loader:
        with pytest.warns(PinFallback) as caught:
            assert len(list(loader)) == 10
        staging = loader.statistics().staging
    said = of_kind(caught, PinFallback)
    assert ["bounce" in str(warning.message) for warning in said] == [True, False]
    assert staging is not None
    assert (staging.pin, staging.pinned_bytes) == ("pageable", 0)


def test_without_page_locked_memory_batches_still_come(late: Callable[..., LateStager]) -> None:
    late(refuse=("register", "pinned"))
    loader = DataLoader(Made(image_and_label, 8), 2, device="cuda")
    first = iter(loader)
    with pytest.warns(PinFallback, match="pageable"):
        next(first)
    second = iter(loader)  # a staging of its own, that knows
    assert next(second)[1].tolist() == [0, 1]
    assert next(first)[1].tolist() == [2, 3]
    for pin in ("register", "bounce"):
        refused = DataLoader(Made(image_and_label, 8), 2, device=ToDevice("cuda", pin=pin))
        for _ in range(2):
            with pytest.raises(PinFailed, match=f"pin='{pin}' cannot be kept"):
                next(iter(refused))


def test_register_raises_rather_than_degrade(late: Callable[..., LateStager]) -> None:
    late(refuse=("register",))
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=2, device=ToDevice("cuda", pin="register"))
    for _ in range(2):
        with pytest.raises(PinFailed, match=r"pin='register' cannot be kept.*refuses"):
            iter(loader)


@pytest.mark.parametrize("pin", ["register", "auto"])
def test_the_limit_of_page_locked_bytes_is_kept(pin: str, late: Callable[..., LateStager]) -> None:
    device = late()
    limit = 300_000  # four blocks of 64 KiB
    options: Any = {"num_workers": 2, "device": ToDevice("cuda", pin=pin, pin_limit_bytes=limit)}
    with DataLoader(Made(image_and_label, 60), 2, **options) as loader:
        iterator = iter(loader)
        if pin == "register":
            with pytest.raises(PinFailed, match=f"pin_limit_bytes={limit}"):
                list(iterator)
            return
        seen = []
        with pytest.warns(PinFallback, match=f"pin_limit_bytes={limit}"):
            seen = [(sum(device.registered.values()), loader.statistics().staging) for _ in iterator]
        for registered, staging in seen:
            assert staging is not None
            assert registered <= staging.pinned_bytes <= limit
        assert seen[-1][1].pin in ("bounce", "pageable")


def test_statistics_tell_what_went_over(late: Callable[..., LateStager]) -> None:
    late()
    loader = DataLoader(Made(image_and_label, 20), 2, num_workers=2, device="cuda")
    assert loader.statistics().staging is None  # nothing was iterated
    list(loader)
    staging = loader.statistics().staging
    assert staging is not None
    assert (staging.device, staging.pin, staging.copies) == ("cpu", "register", 10)
    assert staging.copied_bytes >= 10 * 2 * (3 * 96 * 96 + 8)
    assert staging.populate_seconds > 0
    assert staging.register_seconds > 0
    assert DataLoader(Made(image_and_label, 20)).statistics().staging is None


# ---- arguments --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"device": "gpu"}, ValueError, "device='gpu' is unknown"),
        ({"device": "meta"}, ValueError, "device='meta' cannot be used"),
        ({"device": "mps"}, ValueError, "device='mps' cannot be used"),
        ({"device": 1.5}, TypeError, "device=1.5"),
    ],
)
def test_a_wrong_device_is_named(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    with pytest.raises(kind, match=text):
        DataLoader([1, 2], **options)


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="needs a torch without CUDA")
def test_an_absent_device_is_an_error_at_construction() -> None:
    with pytest.raises(ValueError, match=r"device='cuda:1' cannot be used: torch .* without CUDA"):
        DataLoader([1, 2], device="cuda:1")


@WORKERS
@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu")])
def test_the_cpu_is_no_device(device: Any, workers: int) -> None:
    with DataLoader(Made(image_and_label, 8), 2, num_workers=workers, device=device) as loader:
        for expected, batch in zip(TorchDataLoader(Made(image_and_label, 8), 2), loader, strict=True):
            assert_same(expected, batch)
        assert loader.statistics().staging is None


def add_one(batch: Any) -> Any:
    return [batch[0] + 1, batch[1]]


@WORKERS
def test_with_the_cpu_the_transform_runs_on_the_host(workers: int) -> None:
    options: Any = {"num_workers": workers, "device": ToDevice("cpu", transform=add_one)}
    with DataLoader(Made(image_and_label, 8), 2, **options) as loader:
        for images, labels in loader:
            assert images[:, 0, 0, 0].tolist() == [label + 1 for label in labels.tolist()]


def test_arguments_are_attributes_and_copies_start_anew(late: Callable[..., LateStager]) -> None:
    late()
    options: dict[str, Any] = {
        "device": ToDevice(
            "cuda",
            prefetch=3,
            transform=identity,
            transform_stream="side",
            buffers="reuse",
            pin="bounce",
            pin_limit_bytes=1 << 30,
        )
    }
    loader = DataLoader(MapDataset("tensors", 6), 2, **options)
    list(loader)
    for other in (loader, copy.copy(loader), pickle.loads(pickle.dumps(loader))):
        assert {name: getattr(other, name) for name in options} == options
    other = copy.copy(loader)
    assert other.statistics().staging is None
    assert len(list(other)) == 3


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true:UserWarning")
def test_pin_memory_is_not_needed_with_a_device(late: Callable[..., LateStager]) -> None:
    late()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader = DataLoader(MapDataset("tensors", 6), 2, device="cuda", pin_memory=True)
        assert len(list(loader)) == 3


def test_two_iterators_at_once_do_not_mix(late: Callable[..., LateStager]) -> None:
    for workers in (0, 1):
        late(seed=workers)
        loader = DataLoader(
            Made(image_and_label, 20), 2, num_workers=workers, device=ToDevice("cuda", buffers="reuse")
        )
        first, second = iter(loader), iter(loader)
        for at in range(10):
            one = next(first)
            other = next(second)
            for images, labels in (one, other):
                assert labels.tolist() == [2 * at, 2 * at + 1]
                assert images[:, 1, 1, 1].tolist() == labels.tolist()


def test_nothing_is_read_before_it_was_copied(
    late: Callable[..., LateStager], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the device here is late enough to tell: without the wait there is poison."""
    device = late()
    monkeypatch.setattr(device, "wait", lambda stream, event: None)
    monkeypatch.setattr(device, "query", lambda event: False)
    with DataLoader(Made(image_and_label, 8), 2, num_workers=1, device="cuda") as loader:
        iterator = iter(loader)
        images, _ = next(iterator)
        assert images.unique().tolist() == [POISON]
