"""Pixels of image files of all kinds are pillow's; damaged files are refused by name."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from fastq_loader.extras.images.decoders import DecodeError, Source
from fastq_loader.extras.images.encoded import Encoded
from tests.support.photographs import KINDS, file_of, photograph

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")


def by_pillow(data: bytes, exif: bool = False) -> Any:
    opened = Image.open(io.BytesIO(data))
    return np.asarray((ImageOps.exif_transpose(opened) if exif else opened).convert("RGB"))


@pytest.mark.parametrize("name", KINDS)
def test_pixels_are_pillows(name: str) -> None:
    data = KINDS[name]()
    expected, source = by_pillow(data), Source(Encoded(data, name))
    ours = source.pixels()
    assert (source.height, source.width, 3) == ours.shape == expected.shape
    assert ours.flags.writeable
    difference = np.abs(ours.astype(int) - expected).mean()
    assert difference <= (2 if data[:2] == b"\xff\xd8" else 0)


@pytest.mark.parametrize("turn", range(1, 9))
def test_images_are_turned_as_pillow_turns_them(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(photograph(40, 60), "JPEG", exif=exif)
    expected, source = by_pillow(data, exif=True), Source(Encoded(data), exif=True)
    ours = source.pixels()
    assert (source.height, source.width, 3) == ours.shape == expected.shape
    assert np.abs(ours.astype(int) - expected).mean() <= 2
    assert np.array_equal(Source(Encoded(data)).pixels().shape, (40, 60, 3))


@pytest.mark.parametrize("turn", [1, 6])
def test_a_photograph_is_decoded_at_a_part_of_its_size(turn: int) -> None:
    pytest.importorskip("simplejpeg")
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(photograph(800, 1200), "JPEG", exif=exif)
    source = Source(Encoded(data), exif=True)
    height, width = (1200, 800) if turn == 6 else (800, 1200)
    assert (source.height, source.width) == (height, width)
    found = source.pixels((height // 4, width // 4)).shape
    assert found == (height // 4, width // 4, 3)


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("damage", ["cut", "no image", "empty"])
def test_damaged_files_are_refused_by_name(
    kind: str, damage: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "pillow":
        monkeypatch.setattr("fastq_loader.extras.images.decoders._simplejpeg", lambda: None)
    whole = file_of(photograph(64, 64), kind)
    data = {"cut": whole[: len(whole) // 2], "no image": b"hello" * 99, "empty": b""}[damage]
    with pytest.raises(DecodeError, match=r"holiday[.]jpg cannot be decoded"):
        Source(Encoded(data, "holiday.jpg")).pixels()


def test_a_file_without_a_name_is_told_by_its_size() -> None:
    with pytest.raises(DecodeError, match="an image of 3 bytes cannot be decoded"):
        Source(Encoded(b"abc"))


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_more_pixels_than_pillow_allows_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(photograph(40, 60), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    with pytest.warns(Image.DecompressionBombWarning) if kind == "PNG" else pytest.MonkeyPatch.context():
        Source(Encoded(data))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1199)
    with pytest.raises(DecodeError, match=r"large|MAX_IMAGE_PIXELS"):
        Source(Encoded(data, "large"))
