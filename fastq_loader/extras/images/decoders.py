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
import math
from collections.abc import Callable
from contextlib import suppress
from traceback import walk_tb
from typing import Any, NamedTuple

import numpy as np

from fastq_loader.extras.images import gpu
from fastq_loader.extras.images.crops import Box

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


def library(name: str) -> Any:
    """The module of a library; None if it cannot be imported."""
    return imported(name)[0]


@functools.cache
def imported(name: str) -> tuple[Any, str]:
    """The module of a library; or None, and why. It is tried once: what fails may take long."""
    try:
        return importlib.import_module(name), ""
    except ModuleNotFoundError:
        return None, "is not installed"
    except Exception as error:  # such as of a library that was built for another version of numpy
        return None, f"cannot be imported ({type(error).__name__}: {error})"


def chosen() -> dict[str, str]:
    """The library that decodes each kind of file in this process, and why: the doctor shows it."""
    others = "pillow" if library("PIL.Image") else f"none, because pillow {imported('PIL.Image')[1]}"
    found, reason = imported("simplejpeg")
    jpeg = "simplejpeg" if found else f"pillow, because simplejpeg {reason}"
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
    header, limit = _of_jpeg(data), library("PIL.Image").MAX_IMAGE_PIXELS
    if header is not None and (limit is None or header.height * header.width <= limit):
        return header
    # Of too many pixels it warns, or refuses the file.
    by_pillow: Header = _by_pillow(data, name, lambda opened: _of_opened(opened, data))
    return header or by_pillow


def _of_jpeg(data: Any) -> Header | None:
    """The header of a JPEG that simplejpeg decodes as pillow does; else None."""
    if (simplejpeg := library("simplejpeg")) is None:
        return None
    try:
        height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:  # this is no JPEG
        return None
    kind = BASELINE if colors == "YCbCr" and _is_baseline(data) else JPEG
    return Header(height, width, kind) if colors in ("YCbCr", "RGB", "Gray") else None


def _of_opened(opened: Any, data: Any) -> Header:
    in_ycbcr = (opened.format, opened.mode, opened.info.get("adobe_transform", 1)) == ("JPEG", "RGB", 1)
    return Header(opened.height, opened.width, BASELINE if in_ycbcr and _is_baseline(data) else OTHER)


def _is_baseline(data: Any) -> bool:
    """Whether the frame of a JPEG is baseline: neither progressive nor of another kind."""
    at = 2
    while at + 1 < len(data):
        if (marker := data[at + 1]) in _FRAMES:
            return bool(marker == 0xC0)
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")  # or a segment
    return False


def read_orientation(data: Any, name: str) -> int:
    """How an image has to be turned, by its EXIF data: 1 (not at all) to 8. Raises DecodeError."""
    opened, found = _by_pillow(data, name, lambda opened: opened), 1
    try:  # TIFF is turned by pillow itself
        found = 1 if opened.format == "TIFF" else int(opened.getexif().get(0x0112, 1))
    except Exception as error:
        if not _is_of_decoder(error):
            raise  # else the EXIF data are damaged, and say nothing
    return found if 1 <= found <= 8 else 1


def decode(
    data: Any, name: str, header: Header, turn: int, smallest: tuple[int, int]
) -> tuple[np.ndarray[Any, Any], Box]:
    """Decode an image.

    Args:
        data, name, header: of the file.
        turn: its orientation, or 1 for none.
        smallest: height and width that the result must reach: a JPEG may be decoded at 1/8 to 4/8 of its
            size (more takes longer than all of it). Zeros decode at full size.

    Returns:
        uint8, shape (height, width, 3), RGB, upright; and the place of the image in them: at a part of its
        size, the last row or column may lie beyond its edge in part.

    Raises:
        DecodeError: it cannot be decoded.
    """
    down, across = smallest[::-1] if turn >= 5 else smallest
    if 2 * down > header.height + 1 or 2 * across > header.width + 1:
        down = across = 0
    pixels = None
    if header.kind != OTHER and (simplejpeg := library("simplejpeg")) is not None:
        with suppress(ValueError):  # pillow decodes some files that it refuses
            pixels = simplejpeg.decode_jpeg(data, "RGB", min_height=down, min_width=across)
    if pixels is None:
        pixels = _by_pillow(data, name, lambda opened: np.array(opened.convert("RGB")))
    height, width = _exact_size(pixels.shape, header)
    upright = pixels.transpose(1, 0, 2) if turn >= 5 else pixels  # as `PIL.ImageOps.exif_transpose`
    height, width = (width, height) if turn >= 5 else (height, width)
    from_bottom, from_right = turn in (3, 4, 7, 8), turn in (2, 3, 6, 7)
    top, left = from_bottom * (upright.shape[0] - height), from_right * (upright.shape[1] - width)
    upright = upright[:: -1 if from_bottom else 1, :: -1 if from_right else 1]
    return np.ascontiguousarray(upright), Box(top, left, height, width)


def _exact_size(shape: tuple[int, ...], header: Header) -> tuple[float, float]:
    """Height and width of an image in its pixels, whose number libjpeg rounds up."""
    if shape[:2] == header[:2]:
        return shape[0], shape[1]
    for eighths in range(4, 0, -1):
        down, across = header.height * eighths / 8, header.width * eighths / 8
        if (math.ceil(down), math.ceil(across)) == shape[:2]:
            return down, across
    return shape[0], shape[1]


def _by_pillow(data: Any, name: str, wanted: Callable[[Any], Any]) -> Any:
    """Open a file with pillow, which reads its header, and return the wanted part of it."""
    pillow = library("PIL.Image")
    try:
        return wanted(pillow.open(io.BytesIO(data)))
    except Exception as error:
        if not _is_of_decoder(error):
            raise
        unknown = isinstance(error, pillow.UnidentifiedImageError)  # its text has the address of the buffer
        raise _refusal(data, name, "it is no image that pillow knows" if unknown else str(error)) from error


def _is_of_decoder(error: Exception) -> bool:
    """Whether an error says that a file is damaged. Others pass, such as a time limit that a signal handler
    raises while a file is decoded."""
    if isinstance(error, (MemoryError, TimeoutError, InterruptedError)):
        return False
    *_, (innermost, _) = walk_tb(error.__traceback__)
    is_pillows = innermost.f_globals.get("__name__", "").startswith("PIL.")
    return is_pillows or isinstance(error, (OSError, SyntaxError, ValueError, EOFError))


def _refusal(data: Any, name: str, reason: str) -> DecodeError:
    return DecodeError(f"{name or f'an image of {len(data)} bytes'} cannot be decoded: {reason}")
