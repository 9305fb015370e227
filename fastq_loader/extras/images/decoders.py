"""From the bytes of an image file to its pixels, on the CPU.

Runs where `DecodeImages` is called. JPEG is decoded by simplejpeg (libjpeg-turbo) where that is installed,
and all else, and what simplejpeg refuses, by pillow. The pixels are those of pillow's
`convert("RGB")`; for baseline JPEG they differ by 0.1 of 255 in the mean.
"""

from __future__ import annotations

import functools
import importlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np

from fastq_loader.extras.images.encoded import Encoded

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

_JPEG = b"\xff\xd8\xff"
#: The tag of the orientation in EXIF data.
_ORIENTATION = 0x0112


class DecodeError(ValueError):
    """The bytes are no image that can be decoded; the text has the name of the file."""


@functools.cache
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


@functools.cache
def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        text = "to decode images install pillow, and simplejpeg for speed: pip install 'fastq-loader[images]'"
        raise ImportError(text) from None


def chosen() -> dict[str, str]:
    """The library that decodes each kind of file in this process."""
    return {"JPEG": "pillow" if _simplejpeg() is None else "simplejpeg", "other": "pillow"}


class Source:
    """An image file whose header was read, and whose pixels can be decoded.

    Args:
        image: the file.
        exif: whether the image is turned as its EXIF data says.

    Attributes:
        height, width: in pixels, at full size, after turning.

    Raises:
        DecodeError: it is no image, or has more pixels than pillow's limit.
        ImportError: no library is installed.
    """

    def __init__(self, image: Encoded, exif: bool = False) -> None:
        self._image = image
        self._opened: Any = None
        size = _jpeg_size(image.data)
        self._is_plain_jpeg = size is not None
        self._turn = _orientation(self._open()) if exif else 1
        height, width = (self._open().height, self._open().width) if size is None else size
        limit = _pixel_limit()
        if limit is not None and height * width > limit:
            text = f"{self._name} has {height} x {width} pixels; PIL.Image.MAX_IMAGE_PIXELS allows {limit}"
            raise DecodeError(text)
        self._is_on_its_side = self._turn in (5, 6, 7, 8)
        self.height, self.width = (width, height) if self._is_on_its_side else (height, width)

    def pixels(self, smallest: tuple[int, int] | None = None) -> Pixels:
        """Decode it.

        Args:
            smallest: height and width that the result must reach: a JPEG may be decoded at 1/8 to 7/8 of its
                size. None decodes at full size.

        Returns:
            uint8, shape (height, width, 3), RGB.

        Raises:
            DecodeError: it cannot be decoded.
        """
        found = self._by_simplejpeg(smallest) if self._is_plain_jpeg else None
        if found is None:
            found = self._by_pillow()
        return np.ascontiguousarray(_TURNS[self._turn](found)) if self._turn in _TURNS else found

    def _by_simplejpeg(self, smallest: tuple[int, int] | None) -> Pixels | None:
        """None for what it refuses, such as a damaged file: pillow decides, and has the better text."""
        down, across = smallest or (0, 0)
        if self._is_on_its_side:
            down, across = across, down
        try:
            found: Pixels = _simplejpeg().decode_jpeg(
                self._image.data, "RGB", min_height=down, min_width=across
            )
        except ValueError:
            return None
        return found

    def _by_pillow(self) -> Pixels:
        try:
            return np.array(self._open().convert("RGB"))
        except Exception as error:
            raise DecodeError(f"{self._name} cannot be decoded: {error}") from error

    def _open(self) -> Any:
        if self._opened is None:
            library = _pillow()
            try:
                self._opened = library.open(io.BytesIO(self._image.data))
            except library.UnidentifiedImageError as error:  # its text has the address of the buffer
                raise DecodeError(
                    f"{self._name} cannot be decoded: it is no image that pillow knows"
                ) from error
            except Exception as error:
                raise DecodeError(f"{self._name} cannot be decoded: {error}") from error
        return self._opened

    @property
    def _name(self) -> str:
        return self._image.name or f"an image of {len(self._image)} bytes"


def _jpeg_size(data: Any) -> tuple[int, int] | None:
    """Height and width of a JPEG that simplejpeg decodes to RGB; None for other files."""
    if bytes(data[:3]) != _JPEG or (library := _simplejpeg()) is None:
        return None
    try:
        height, width, colors, _ = library.decode_jpeg_header(data)
    except ValueError:
        return None
    return None if colors in ("CMYK", "YCCK") else (height, width)


def _pixel_limit() -> int | None:
    """Twice `PIL.Image.MAX_IMAGE_PIXELS`, above which pillow raises an error."""
    try:
        limit = _pillow().MAX_IMAGE_PIXELS
    except ImportError:
        limit = 1 << 26
    return None if limit is None else 2 * limit


def _orientation(opened: Any) -> int:
    try:
        return int(opened.getexif().get(_ORIENTATION, 1))
    except Exception:  # damaged EXIF data says nothing
        return 1


#: What turns the pixels upright, by the number in the EXIF data (as `PIL.ImageOps.exif_transpose`).
_TURNS: dict[int, Callable[[Pixels], Pixels]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: lambda pixels: np.rot90(pixels),
}
