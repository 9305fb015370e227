"""Encoded images and a loader with `device=`, over a late device: their bytes stay on the host, and a thread
decodes them ahead of the step."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fastq_loader import (
    DataLoader,
    IteratorInvalid,
    Prefetcher,
    ToDevice,
)
from fastq_loader.extras.images import gpu
from fastq_loader.images import DecodeError, DecodeImages, EncodedBatch
from tests.conftest import wait_until
from tests.extras.images.test_decode_images import FILES, Photos, loaded
from tests.support.alarms import Alarm, alarm_while_next_waits, ring
from tests.support.late_device import Late
from tests.support.loaders import distinct, exactly

PIXELS = DecodeImages(16)
THREAD = "fastq_loader decodes images"


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_encoded_bytes_do_not_cross(workers: int, late: Late) -> None:
    device = late()
    with DataLoader(Photos(), 5, num_workers=workers, device="cuda") as loader:
        for files, labels in exactly(len(loader), loader):
            assert type(files) is EncodedBatch
            assert PIXELS(files).shape == (len(labels), 3, 16, 16)
    assert device.copies
    assert max(device.copies) == 5 * 8  # the labels


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_decodes_what_workers_would(workers: int, late: Late) -> None:
    expected = distinct(loaded(Photos(PIXELS)))
    late()
    to_device = ToDevice("cuda", transform=PIXELS, prefetch=3)
    found = loaded(Photos(), num_workers=workers, device=to_device)
    torch.manual_seed(0)
    prefetched = list(Prefetcher(DataLoader(Photos(), 5, shuffle=True), to_device))
    for (images, labels), *others in zip(expected, found, prefetched, strict=True):
        for same_images, same_labels in others:
            assert same_images.device == to_device.target
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)


def runs() -> bool:
    """Whether a thread decodes."""
    return any(thread.name == THREAD for thread in threading.enumerate())


def on_late(dataset: Any, pixels: Any = PIXELS, **options: Any) -> DataLoader[Any]:
    device = ToDevice("cuda", transform=pixels, prefetch=options.pop("prefetch", 2))
    return DataLoader(dataset, 4, num_workers=2, device=device, **options)


def counted(monkeypatch: pytest.MonkeyPatch, before: Callable[[], object] = lambda: None) -> list[str]:
    """The names of the threads that decode from here on, one for each batch."""
    found: list[str] = []
    decode = DecodeImages.decoded

    def counting(self: DecodeImages, batch: Any) -> Any:
        found.append(threading.current_thread().name)
        before()
        return decode(self, batch)

    monkeypatch.setattr(DecodeImages, "decoded", counting)
    return found


@pytest.mark.processes
def test_errors_come_at_their_batch_with_its_name_and_the_epoch_goes_on(late: Late) -> None:
    late()
    damaged = FILES[3][: len(FILES[3]) // 2]
    files = [damaged if number == 9 else FILES[number % len(FILES)] for number in range(24)]
    batches = iter(on_late(Photos(files=files)))
    assert [next(batches)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(DecodeError, match="photo 9 cannot be decoded") as raised:
        next(batches)
    assert (raised.value.batch, raised.value.index) == (2, [8, 9, 10, 11])  # type: ignore[attr-defined]
    assert [labels[0].item() for _, labels in batches] == [12, 16, 20]


@pytest.mark.processes
def test_other_errors_of_the_thread_and_of_then_come_at_their_batch(
    late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    late()
    with pytest.raises(ValueError, match="a list without an encoded image"):
        next(iter(on_late(Photos(PIXELS))))

    def stop(batch: Any) -> Any:
        raise StopIteration(batch[1].tolist())

    with pytest.raises(RuntimeError, match=r"the transform raised StopIteration: \[0, 1, 2, 3\]"):
        next(iter(on_late(Photos(), DecodeImages(16, then=stop))))
    full = iter([lambda: None, out_of_memory])
    counted(monkeypatch, lambda: next(full, lambda: None)())
    batches = iter(on_late(Photos()))
    next(batches)
    with pytest.raises(torch.OutOfMemoryError):
        next(batches)
    assert len(list(batches)) == 4


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.processes
@pytest.mark.parametrize("persistent", [False, True])
def test_a_break_drops_what_is_not_decoded_yet(
    persistent: bool, late: Late, monkeypatch: pytest.MonkeyPatch
) -> None:
    late()
    gate, epochs = threading.Event(), list[Any]()
    # From the second batch on; but the thread of workers that do not persist ends with them.
    decoded = counted(monkeypatch, lambda: persistent and len(decoded) > 1 and gate.wait(60))
    for pixels in (None, PIXELS):
        with on_late(Photos(), pixels, persistent_workers=persistent, prefetch=4) as loader:
            torch.manual_seed(3)
            gate.clear()
            for _ in loader:
                break
            again = iter(loader)
            gate.set()
            epochs.append(distinct(images for images, _ in again))
            del again
    assert len(decoded) <= 1 + 1 + 6 or not persistent  # the first, the one that was begun, and all
    assert len(epochs[0]) == len(epochs[1])
    assert all(map(torch.equal, epochs[1], map(PIXELS, epochs[0])))
    assert wait_until(lambda: not runs(), 30)


@pytest.mark.processes
@pytest.mark.parametrize("ends", ["exhausted", "closed", "dropped"])
def test_the_thread_ends_with_its_workers(ends: str, late: Late) -> None:
    late()
    loader = on_late(Photos())
    batches = iter(loader)
    next(batches)
    assert runs()
    if ends == "exhausted":
        list(batches)
    elif ends == "closed":
        loader.close()
    del batches
    if ends == "dropped":
        del loader
        gc.collect()
    assert wait_until(lambda: not runs(), 30)


@pytest.mark.processes
def test_an_interrupt_does_not_wait_for_the_thread(late: Late, monkeypatch: pytest.MonkeyPatch) -> None:
    late()
    gate = threading.Event()
    with on_late(Photos()) as loader:
        with monkeypatch.context() as patch:
            decoded = counted(patch, lambda: gate.wait(20))
            patch.setattr(gpu, "PATIENCE", 0.1)
            batches = iter(loader)
            assert wait_until(lambda: batches.poll() or decoded, 20)
            with alarm_while_next_waits(ring), pytest.raises(Alarm):
                next(batches)
            with pytest.raises(IteratorInvalid, match="this iterator cannot go on"):
                next(batches)
            gate.set()
        assert len(list(loader)) == 6
