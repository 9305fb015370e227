"""Image files of all kinds, made on the spot. Needs pillow."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np


def photograph(height: int, width: int, seed: int = 0) -> Any:
    """Smooth colours, which JPEG keeps well: uint8, shape (height, width, 3)."""
    rng = np.random.default_rng(seed)
    down, across = np.linspace(0, 1, height)[:, None, None], np.linspace(0, 1, width)[None, :, None]
    a, b, c = rng.uniform(0, 1, (3, 1, 1, 3))
    waves = 0.5 + 0.5 * np.sin(6 * (a * down + b * across + c * down * across) + rng.uniform(0, 6, 3))
    return (255 * waves).astype(np.uint8)


def file_of(pixels: Any, kind: str, mode: str | None = None, **options: Any) -> bytes:
    """The pixels as a file.

    Args:
        pixels: uint8.
        kind, options: pillow's format, and what `Image.save` takes.
        mode: pillow's mode, to which they are converted first.
    """
    from PIL import Image

    image = Image.fromarray(pixels)
    written = io.BytesIO()
    (image if mode is None else image.convert(mode)).save(written, kind, **options)
    return written.getvalue()


def _animation() -> bytes:
    from PIL import Image

    frames = [Image.fromarray(photograph(20, 30, seed)) for seed in range(3)]
    written = io.BytesIO()
    frames[0].save(written, "GIF", save_all=True, append_images=frames[1:])
    return written.getvalue()


def _deep() -> bytes:
    from PIL import Image

    written = io.BytesIO()
    Image.fromarray(np.arange(600, dtype=np.uint16).reshape(20, 30) * 100).save(written, "PNG")
    return written.getvalue()


_PIXELS = photograph(61, 83)

#: A file of each kind.
KINDS: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: file_of(_PIXELS, "JPEG"),
    "JPEG, 4:4:4": lambda: file_of(_PIXELS, "JPEG", subsampling=0),
    "JPEG, progressive": lambda: file_of(_PIXELS, "JPEG", progressive=True),
    "JPEG, grey": lambda: file_of(_PIXELS, "JPEG", mode="L"),
    "JPEG, CMYK": lambda: file_of(_PIXELS, "JPEG", mode="CMYK"),
    "PNG": lambda: file_of(_PIXELS, "PNG"),
    "PNG, alpha": lambda: file_of(_PIXELS, "PNG", mode="RGBA"),
    "PNG, palette": lambda: file_of(_PIXELS, "PNG", mode="P", transparency=3),
    "PNG, 1 bit": lambda: file_of(_PIXELS, "PNG", mode="1"),
    "PNG, 16 bit": _deep,
    "GIF, animated": _animation,
    "WebP": lambda: file_of(_PIXELS, "WEBP"),
    "BMP": lambda: file_of(_PIXELS, "BMP"),
    "TIFF": lambda: file_of(_PIXELS, "TIFF"),
}
