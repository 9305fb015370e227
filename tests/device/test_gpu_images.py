"""Images on a real GPU: its pixels beside pillow's, and who waits for whom."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, default_collate

from fastq_loader import DataLoader, ToDevice
from fastq_loader.extras.images import decoders, gpu
from fastq_loader.images import DecodeImages, EncodedBatch, encoded
from tests.support.gpu import MARKS, Guard, guarded, lag
from tests.support.photographs import KINDS, file_of, photograph

pytestmark = [*MARKS, pytest.mark.skipif(gpu.decoder()[0] is None, reason=gpu.decoder()[1])]
BATCH, BATCHES = 32, 8
JPEGS = [file_of(photograph(375, 500, seed), "JPEG") for seed in range(BATCH)]
#: As JPEGS, of the same sizes.
OTHERS = [file_of(255 - photograph(375, 500, seed), "JPEG") for seed in range(BATCH)]


class Photographs(Dataset[Any]):
    def __len__(self) -> int:
        return BATCH * BATCHES

    def __getitem__(self, index: int) -> Any:
        return encoded((JPEGS, OTHERS)[index // BATCH % 2][index % BATCH], str(index)), index


def batch_of(files: list[bytes]) -> EncodedBatch:
    batch: EncodedBatch = default_collate([encoded(file, str(number)) for number, file in enumerate(files)])
    return batch


def decoded_on_gpu(pixels: DecodeImages, **options: Any) -> DataLoader[Any]:
    to_device = ToDevice("cuda", transform=pixels)
    return DataLoader(Photographs(), BATCH, num_workers=2, device=to_device, **options)


@pytest.fixture
def stream() -> Any:
    """That of a GPU that has decoded before, so that its library is set up."""
    with gpu.working("cuda") as stream:
        assert gpu.decode(JPEGS, stream)
    return stream


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:2", "4:2:0"])
def test_pixels_are_the_cpus(subsampling: str) -> None:
    files = [file_of(photograph(375, 500, 3), "JPEG", subsampling=subsampling, quality=95)]
    batch = batch_of([*files, *[make() for make in KINDS.values()]])
    pixels = DecodeImages(64)
    expected, found = pixels(batch), pixels.on_device(torch.device("cuda"))(batch)
    assert found.is_cuda
    differences = (found.cpu().int() - expected.int()).abs().float().mean(dim=(1, 2, 3)).tolist()
    baseline = [file.header.kind == decoders.BASELINE for file in batch]
    assert sum(baseline) == 3
    for difference, is_decoded_there in zip(differences, baseline, strict=True):
        assert difference <= (2 if is_decoded_there else 0)


@guarded
def test_a_decode_waits_for_queued_work(guard: Guard, stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The decoder of this hardware writes at once; it is in data-centre GPUs."""
    if torch.cuda.get_device_capability() not in [(8, 0), (9, 0), (10, 0)]:
        pytest.skip("a GPU without a hardware decoder of JPEG: its decoder keeps the order")
    with gpu.working("cuda"):
        expected = torch.stack([image.long().sum() for image in gpu.decode(JPEGS, stream)])
    wrong = 0
    for _ in range(10):
        with gpu.working("cuda"):
            images = gpu.decode(JPEGS, stream)
            lag(stream)
            sums = torch.stack([image.long().sum() for image in images])
            del images  # their memory is free now, and is read later
            with monkeypatch.context() as patch:
                guard.remove(patch, gpu, "wait", lambda stream: None)
                gpu.decode(OTHERS, stream)
        wrong += not torch.equal(sums, expected)
    with guard.outcome:
        assert not wrong


@guarded
@pytest.mark.processes
def test_a_batch_is_read_after_it_was_dropped(guard: Guard, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is the thread's stream's, which uses it again only after the consumer's has read it."""
    guard.remove(monkeypatch, gpu, "received", lambda images, device: images)
    pixels = DecodeImages(224, scale=None)
    loader = decoded_on_gpu(pixels, persistent_workers=True)
    expected = [images.long().sum().item() for images, _ in loader]
    sums = []
    for images, _ in loader:
        lag(times=3)
        sums.append(images.long().sum())
        del images
    with guard.outcome:
        assert torch.stack(sums).tolist() == expected
    loader.close()


def test_groups_bound_the_memory_of_a_batch() -> None:
    def peak(group_bytes: int) -> int:
        pixels = DecodeImages(32, group_bytes=group_bytes, device="cuda")
        pixels(batch_of(JPEGS))
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        pixels(batch_of(JPEGS))
        return torch.cuda.max_memory_allocated() - before

    one = 3 * 375 * 500
    assert peak(4 * one) <= 10 * one  # also a crop in float32
    assert peak(BATCH * one) >= BATCH * one
