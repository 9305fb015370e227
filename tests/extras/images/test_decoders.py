"""Pixels of image files of all kinds are pillow's; damaged files are refused by name."""

from __future__ import annotations

import functools
import io
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fastq_loader.extras.images import decode_images, decoders, gpu
from fastq_loader.extras.images.decoders import DecodeError
from fastq_loader.images import DecodeImages, encoded
from tests.support.photographs import KINDS, file_of, photograph

Image = pytest.importorskip("PIL.Image")
ImageOps = pytest.importorskip("PIL.ImageOps")


def by_us(data: bytes, exif: bool = False, name: str = "", smallest: Any = (0, 0)) -> Any:
    """Our pixels, after the size in the header, turned as the pixels are."""
    header = height, width, _ = decoders.read_header(data, name)
    turn = decoders.read_orientation(data, name) if exif else 1
    size = (width, height) if turn >= 5 else (height, width)
    return size, decoders.decode(data, name, header, turn, smallest)[0]


def by_pillow(data: bytes, exif: bool = False) -> Any:
    opened = Image.open(io.BytesIO(data))
    return np.asarray((ImageOps.exif_transpose(opened) if exif else opened).convert("RGB"))


@pytest.mark.parametrize("name", KINDS)
def test_pixels_are_pillows(name: str) -> None:
    data = KINDS[name]()
    expected, (size, ours) = by_pillow(data), by_us(data)
    assert (*size, 3) == ours.shape == expected.shape
    assert ours.flags.writeable
    difference = np.abs(ours.astype(int) - expected).mean()
    assert difference <= (2 if data[:2] == b"\xff\xd8" else 0)


@pytest.mark.parametrize("turn", range(10))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF"])
def test_images_are_turned_as_pillow_turns_them(kind: str, turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(photograph(40, 60), kind, exif=exif)
    for upright in (True, False):  # pillow turns TIFF in any case
        expected, (size, ours) = by_pillow(data, upright), by_us(data, upright)
        assert (*size, 3) == ours.shape == expected.shape
        assert np.abs(ours.astype(int) - expected).mean() <= 2


@pytest.mark.parametrize(("turn", "height", "width"), [(1, 800, 1200), (6, 1200, 800)])
def test_a_photograph_is_decoded_at_a_part_of_its_size(turn: int, height: int, width: int) -> None:
    pytest.importorskip("simplejpeg")
    exif = Image.Exif()
    exif[0x0112] = turn
    data = file_of(photograph(800, 1200), "JPEG", exif=exif)
    for least, share in ((4, 4), (1.5, 1)):  # more than a half takes longer than all of it
        size, found = by_us(data, exif=True, smallest=(height // least, width // least))
        assert (size, found.shape) == ((height, width), (height // share, width // share, 3))


@pytest.mark.parametrize("library", ["simplejpeg", "pillow"])
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
@pytest.mark.parametrize("damage", ["cut", "no image", "empty"])
def test_damaged_files_are_refused_by_name(
    kind: str, damage: str, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library == "pillow":
        without(monkeypatch, "simplejpeg")
    whole = file_of(photograph(64, 64), kind)
    data = {"cut": whole[: len(whole) // 2], "no image": b"hello" * 99, "empty": b""}[damage]
    with pytest.raises(DecodeError, match=r"holiday[.]jpg cannot be decoded"):
        by_us(data, name="holiday.jpg")


def without(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    find, absent = decoders.imported, (None, "is not installed")
    monkeypatch.setattr(decoders, "imported", lambda name: absent if name == missing else find(name))


@pytest.mark.parametrize("name", KINDS)
def test_without_simplejpeg_pixels_are_pillows_to_the_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = KINDS[name]()
    kind = decoders.read_header(data, "").kind
    without(monkeypatch, "simplejpeg")
    assert np.array_equal(by_us(data)[1], by_pillow(data))
    assert (decoders.read_header(data, "").kind == decoders.BASELINE) == (kind == decoders.BASELINE)
    without(monkeypatch, "PIL.Image")
    with pytest.raises(ImportError, match="need pillow"):
        encoded(data)


@pytest.mark.parametrize("error", [TimeoutError, InterruptedError, MemoryError, RuntimeError])
def test_a_time_limit_and_a_lack_of_memory_are_no_damage(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:  # as a signal handler does
        raise error("too long")

    file = encoded(file_of(photograph(8, 8), "PNG"))
    monkeypatch.setattr(Image.Image, "convert", stop)
    with pytest.raises(error, match="too long") as raised:
        DecodeImages(4)(file)
    assert type(raised.value) is error


def test_a_simplejpeg_that_does_not_load_is_tried_once_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def load(name: str) -> Any:
        tried.append(name)
        raise ValueError("numpy.dtype size changed")

    data = file_of(photograph(8, 8), "JPEG")
    find = functools.cache(decoders.imported.__wrapped__)
    monkeypatch.setattr(decoders, "library", lambda name: Image if name == "PIL.Image" else find(name)[0])
    monkeypatch.setattr(decoders, "imported", find)
    monkeypatch.setattr(decode_images, "imported", find)
    monkeypatch.setattr(decoders.importlib, "import_module", load)
    with pytest.warns(UserWarning, match=r"simplejpeg cannot be imported \(ValueError: numpy.dtype"):
        pixels = DecodeImages(4)
    assert pixels(encoded(data)).shape == pixels(encoded(data)).shape == (3, 4, 4)
    assert tried == ["simplejpeg"]
    monkeypatch.setattr(decoders, "imported", lambda name: (Image, "") if name == "PIL.Image" else find(name))
    assert "numpy.dtype size changed" in decoders.chosen()["JPEG"]


def test_a_file_without_a_name_is_told_by_its_size() -> None:
    with pytest.raises(DecodeError, match="an image of 3 bytes cannot be decoded"):
        encoded(b"abc")


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_more_pixels_than_pillow_allows_are_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = file_of(photograph(40, 60), kind)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1200)
    with pytest.warns(Image.DecompressionBombWarning, match="2400 pixels"):
        encoded(data)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1199)
    with pytest.raises(DecodeError, match=r"^large cannot be decoded: .*(MAX_IMAGE_PIXELS|exceeds limit)"):
        encoded(data, "large")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    encoded(data)


class Library:
    """A decoder for GPUs."""

    ImageReadMode = SimpleNamespace(RGB="RGB")

    @staticmethod
    def decode_jpeg(files: Any, mode: str, device: str) -> Any:
        return [f"{file} in {mode} on {device}" for file in files]


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({"torchcodec": "0.17.0", "torchvision": "0.29.0"}, "torchcodec 0.17.0"),
        ({"torchcodec": "0.16.1", "torchvision": "0.29.0+cu130"}, "torchvision 0.29.0+cu130"),
        ({"torchcodec": "0.17 broken", "torchvision": "0.20.1"}, "torchvision 0.20.1"),
        ({}, "torchcodec cannot be loaded: ModuleNotFoundError"),
        ({"torchcodec": "0.9", "torchvision": "1 broken"}, "9 is older than 0.17 and torchvision cannot"),
    ],
)
def test_the_decoder_of_gpus_is_chosen_by_what_loads(
    versions: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> type[Library]:
        package = name.partition(".")[0]
        if package not in versions:
            raise ModuleNotFoundError(f"No module named {package!r}")
        if "broken" in versions[package]:
            raise OSError("libtorch_cuda.so: cannot open shared object file")
        return Library

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(gpu.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(gpu.importlib, "import_module", load)
    decode, text = gpu.decoder.__wrapped__()
    assert expected in text
    if "cannot" in expected:
        assert decode is None
        return
    assert decode is not None
    assert decode(["a"], device="cuda:1") == ["a in RGB on cuda:1"]
