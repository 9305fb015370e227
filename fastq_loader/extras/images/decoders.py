"""An image file's header and pixels, on the CPU.

The header is read where samples are read, so that `errors=` applies to a file whose header is broken already;
the pixels where `DecodeImages` is called. simplejpeg (libjpeg-turbo) reads JPEG where it is installed; pillow
reads other files, and those that simplejpeg refuses. The pixels equal pillow's `convert("RGB")`; for baseline
JPEG they differ by 0.1 of 255 in the mean.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np

from fastq_loader.extras.images import gpu

#: Kinds of files: what pillow decodes; JPEG that simplejpeg decodes; the JPEG that GPUs decode, too.
OTHER, JPEG, BASELINE = range(3)

#: The markers of a JPEG's frame: 0xC0 to 0xCF without three, which begin tables and extensions.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}


class DecodeError(OSError, ValueError):
    """The bytes are no image that can be decoded; the text has the name of the file. It is an OSError, as
    pillow's is, so that `only=OSError` tolerates damaged files as well as missing ones."""


class Header(NamedTuple):
    """Height and width of an image in pixels, and the kind of its file."""

    height: int
    width: int
    kind: int


@functools.cache
def library(name: str) -> Any:
    """The module of a library; None if it cannot be imported."""
    with suppress(ImportError):
        return importlib.import_module(name)
    return None


def chosen() -> dict[str, str]:
    """The library that decodes each kind of file in this process, and why: the doctor shows it."""
    others = "pillow" if library("PIL.Image") else "none, because pillow is not installed"
    jpeg = "simplejpeg" if library("simplejpeg") else "pillow, because simplejpeg is not installed"
    return {
        "JPEG": jpeg if others == "pillow" else others,
        "other files": others,
        "baseline JPEG on GPUs": gpu.decoder()[1],
    }


def read_header(data: Any, name: str) -> Header:
    """Read the header of a file.

    Raises:
        DecodeError: it is no image, or has more pixels than pillow's limit.
        ImportError: pillow is not installed.
    """
    if library("PIL.Image") is None:
        raise ImportError("images need pillow, and simplejpeg for speed: pip install 'fastq-loader[images]'")
    header = _of_jpeg(data) or _by_pillow(data, name, lambda opened: _of_opened(opened, data))
    limit = library("PIL.Image").MAX_IMAGE_PIXELS
    if limit is not None and header.height * header.width > 2 * limit:  # as pillow refuses files
        raise _refusal(data, name, f"it has more than twice the {limit} pixels of PIL.Image.MAX_IMAGE_PIXELS")
    return header


def _of_jpeg(data: Any) -> Header | None:
    """The header of a JPEG that simplejpeg decodes as pillow does; else None."""
    try:
        height, width, colors, _ = library("simplejpeg").decode_jpeg_header(data)
    except (AttributeError, ValueError):  # it is not installed, or this is no JPEG
        return None
    kind = BASELINE if colors == "YCbCr" and _is_baseline(data) else JPEG
    return Header(height, width, kind) if colors in ("YCbCr", "RGB", "Gray") else None


def _of_opened(opened: Any, data: Any) -> Header:
    in_ycbcr = (opened.format, opened.mode, opened.info.get("adobe_transform", 1)) == ("JPEG", "RGB", 1)
    return Header(opened.height, opened.width, BASELINE if in_ycbcr and _is_baseline(data) else OTHER)


def _is_baseline(data: Any) -> bool:
    """Whether the frame of a JPEG is baseline: neither progressive nor of another kind."""
    at = 2
    with suppress(IndexError):
        while (marker := data[at + 1]) not in _FRAMES:  # a byte that fills up, or a segment
            at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        return bool(marker == 0xC0)
    return False


def read_orientation(data: Any, name: str) -> int:
    """How an image has to be turned, by its EXIF data: 1 (not at all) to 8. Raises DecodeError."""
    opened, found = _by_pillow(data, name, lambda opened: opened), 1
    with suppress(Exception):  # damaged EXIF data says nothing; and TIFF is turned by pillow itself
        found = 1 if opened.format == "TIFF" else int(opened.getexif().get(0x0112, 1))
    return found if 1 <= found <= 8 else 1


def decode(data: Any, name: str, kind: int, turn: int, smallest: tuple[int, int]) -> np.ndarray[Any, Any]:
    """Decode an image.

    Args:
        data, name, kind: of the file.
        turn: its orientation, or 1 for none.
        smallest: height and width that the result must reach: a JPEG may be decoded at 1/8 to 7/8 of its
            size. Zeros decode at full size.

    Returns:
        uint8, shape (height, width, 3), RGB, upright.

    Raises:
        DecodeError: it cannot be decoded.
    """
    down, across = smallest[::-1] if turn >= 5 else smallest
    pixels: Any = None
    with suppress(AttributeError, ValueError):  # without simplejpeg, or if it refuses a file, pillow decodes
        if kind != OTHER:
            pixels = library("simplejpeg").decode_jpeg(data, "RGB", min_height=down, min_width=across)
    if pixels is None:
        pixels = _by_pillow(data, name, lambda opened: np.array(opened.convert("RGB")))
    upright = pixels.transpose(1, 0, 2) if turn >= 5 else pixels  # as `PIL.ImageOps.exif_transpose`
    rows, columns = -1 if turn in (3, 4, 7, 8) else 1, -1 if turn in (2, 3, 6, 7) else 1
    return np.ascontiguousarray(upright[::rows, ::columns])


def _by_pillow(data: Any, name: str, wanted: Callable[[Any], Any]) -> Any:
    """Open a file with pillow, which reads its header, and return the wanted part of it."""
    pillow = library("PIL.Image")
    try:
        return wanted(pillow.open(io.BytesIO(data)))
    except Exception as error:
        unknown = isinstance(error, pillow.UnidentifiedImageError)  # its text has the address of the buffer
        raise _refusal(data, name, "it is no image that pillow knows" if unknown else str(error)) from error


def _refusal(data: Any, name: str, reason: str) -> DecodeError:
    return DecodeError(f"{name or f'an image of {len(data)} bytes'} cannot be decoded: {reason}")
