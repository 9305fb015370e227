"""Encoded images and a loader with `device=`, over a late device: their bytes stay on the host."""

from __future__ import annotations

import pytest
import torch

from fastq_loader import DataLoader, Prefetcher, ToDevice
from fastq_loader.images import DecodeImages, EncodedBatch, encoded
from tests.extras.images.test_decode_images import FILES, Photos, loaded
from tests.support.late_device import Late

PIXELS = DecodeImages(16)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_encoded_bytes_do_not_cross(workers: int, late: Late) -> None:
    device = late()
    with DataLoader(Photos(), 5, num_workers=workers, device="cuda") as loader:
        for files, labels in loader:
            assert type(files) is EncodedBatch
            assert PIXELS(files).shape == (len(labels), 3, 16, 16)
    assert device.copies
    assert max(device.copies) == 5 * 8  # the labels


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_transform_decodes_what_workers_would(workers: int, late: Late) -> None:
    expected = loaded(Photos(PIXELS))
    late()
    to_device = ToDevice("cuda", transform=PIXELS)
    found = loaded(Photos(), num_workers=workers, device=to_device)
    torch.manual_seed(0)
    prefetched = list(Prefetcher(DataLoader(Photos(), 5, shuffle=True), to_device))
    for (images, labels), *others in zip(expected, found, prefetched, strict=True):
        for same_images, same_labels in others:
            assert same_images.device == to_device.target
            assert torch.equal(images, same_images)
            assert torch.equal(labels, same_labels)


def test_images_go_to_the_device_of_the_transform() -> None:
    elsewhere = PIXELS.on_device(torch.device("meta"))
    assert (elsewhere(encoded(FILES[0])).device.type, PIXELS.device) == ("meta", None)
