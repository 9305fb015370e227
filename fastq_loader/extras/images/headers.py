"""The header of an image file: its size, and which decoders can read it.

Runs where samples are read, so that `errors=` applies to a file whose header is broken already.
"""

from __future__ import annotations

import functools
import importlib
import io
import struct
from contextlib import suppress
from typing import Any, NamedTuple

#: Kinds of files: what pillow decodes; JPEG of one or three colors; the JPEG that GPUs decode.
OTHER, JPEG, BASELINE = range(3)

_START_OF_JPEG = b"\xff\xd8\xff"
#: The markers of a JPEG's frame: 0xC0 to 0xCF without three, which begin tables and extensions.
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_ADOBE = 0xEE


class DecodeError(OSError, ValueError):
    """The bytes are no image that can be decoded; the text has the name of the file.

    An OSError, as pillow's is, so that `only=OSError` tolerates damaged files as well as missing ones.
    """


class Header(NamedTuple):
    """Height and width of an image in pixels, and the kind of its file."""

    height: int
    width: int
    kind: int


def read(data: Any, name: str) -> Header:
    """Read the header of a file.

    Raises:
        DecodeError: it is no image, or has more pixels than pillow's limit.
        ImportError: pillow is not installed, and the file is no JPEG of one or three colors.
    """
    header = _of_jpeg(data) if bytes(data[:3]) == _START_OF_JPEG else None
    if header is None:
        image = opened(data, name)
        header = Header(image.height, image.width, OTHER)
    limit = _pixel_limit()
    if limit is not None and header.height * header.width > limit:
        found = f"{called(data, name)} has {header.height} x {header.width} pixels"
        raise DecodeError(f"{found}; PIL.Image.MAX_IMAGE_PIXELS allows {limit}")
    return header


def called(data: Any, name: str) -> str:
    """The name of a file for errors."""
    return name or f"an image of {len(data)} bytes"


def _of_jpeg(data: Any) -> Header | None:
    """The header of a JPEG of one or three colors; None if it is another one, or incomplete."""
    at, transform = 2, 1
    with suppress(IndexError, struct.error):
        while data[at] == 0xFF:
            marker, length = struct.unpack_from(">BH", data, at + 1)
            if marker == 0xFF:  # a byte that fills up
                at += 1
                continue
            if marker in _FRAMES:
                bits, height, width, colors = struct.unpack_from(">BHHB", data, at + 4)
                is_baseline = (marker, bits, colors, transform) == (0xC0, 8, 3, 1)
                known = height and width and colors in (1, 3)
                return Header(height, width, BASELINE if is_baseline else JPEG) if known else None
            if marker == _ADOBE and bytes(data[at + 4 : at + 9]) == b"Adobe":
                transform = data[at + 15]  # 0: the colors are RGB
            at += 2 + length
    return None


@functools.cache
def pillow() -> Any:
    """The module `PIL.Image`. Raises ImportError."""
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        text = "to decode images install pillow, and simplejpeg for speed: pip install 'fastq-loader[images]'"
        raise ImportError(text) from None


def opened(data: Any, name: str) -> Any:
    """Open a file with pillow, which reads its header. Raises DecodeError, ImportError."""
    library, text = pillow(), f"{called(data, name)} cannot be decoded"
    try:
        return library.open(io.BytesIO(data))
    except library.UnidentifiedImageError as error:  # its text has the address of the buffer
        raise DecodeError(f"{text}: it is no image that pillow knows") from error
    except Exception as error:
        raise DecodeError(f"{text}: {error}") from error


def _pixel_limit() -> int | None:
    """Twice `PIL.Image.MAX_IMAGE_PIXELS`, above which pillow raises an error."""
    try:
        limit = pillow().MAX_IMAGE_PIXELS
    except ImportError:
        limit = 1 << 26
    return None if limit is None else 2 * limit
