"""From the bytes of an image file to its pixels, on the CPU.

Runs where `DecodeImages` is called. simplejpeg (libjpeg-turbo) decodes JPEG where it is installed; pillow
decodes other files, and JPEG that simplejpeg refuses. The pixels equal pillow's `convert("RGB")`; for
baseline JPEG they differ by 0.1 of 255 in the mean.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np

from fastq_loader.extras.images import gpu, headers
from fastq_loader.extras.images.encoded import Encoded
from fastq_loader.extras.images.headers import DecodeError

Pixels = np.ndarray[Any, np.dtype[np.uint8]]

#: The tag of the orientation in EXIF data.
_ORIENTATION = 0x0112


@functools.cache
def _simplejpeg() -> Any:
    try:
        return importlib.import_module("simplejpeg")
    except ImportError:
        return None


def chosen() -> dict[str, str]:
    """The library that decodes each kind of file in this process, and why: the doctor shows it."""
    has_pillow = importlib.util.find_spec("PIL") is not None
    missing = "simplejpeg is not installed" if has_pillow else "neither simplejpeg nor pillow is installed"
    for_gpus, text = gpu.decoder()
    return {
        "JPEG": "simplejpeg" if _simplejpeg() else f"{'pillow' if has_pillow else 'none'}, because {missing}",
        "other files": "pillow" if has_pillow else "none, because pillow is not installed",
        "baseline JPEG on GPUs": text if for_gpus else f"as on the CPU, because {text}",
    }


class Source:
    """An image file whose header was read, and whose pixels can be decoded.

    Args:
        image: the file.
        exif: whether the image is turned as its EXIF data says.

    Attributes:
        height, width: in pixels, at full size, after turning.
        is_turned: whether the image is turned or mirrored.

    Raises:
        DecodeError: it is no image, or has more pixels than pillow's limit.
        ImportError: no library is installed.
    """

    def __init__(self, image: Encoded, exif: bool = False) -> None:
        self._image = image
        self._opened: Any = None
        height, width, kind = image.header
        self._is_plain_jpeg = kind != headers.OTHER
        self._turn = _orientation(self._open()) if exif else 1
        self.is_turned = self._turn in _TURNS
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
        fast = self._is_plain_jpeg and _simplejpeg() is not None
        found = self._by_simplejpeg(smallest) if fast else None
        if found is None:
            found = self._by_pillow()
        return np.ascontiguousarray(_TURNS[self._turn](found)) if self.is_turned else found

    def _by_simplejpeg(self, smallest: tuple[int, int] | None) -> Pixels | None:
        """None for files that it refuses, such as damaged ones: pillow decides, and has the better text."""
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
            name = headers.called(self._image.data, self._image.name)
            raise DecodeError(f"{name} cannot be decoded: {error}") from error

    def _open(self) -> Any:
        if self._opened is None:
            self._opened = headers.opened(self._image.data, self._image.name)
        return self._opened


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
