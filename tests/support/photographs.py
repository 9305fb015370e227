"""Image files of all kinds, made on the spot. Needs pillow."""

from __future__ import annotations

import io
import random
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


def drawn_file(draw: random.Random) -> tuple[bytes, bool]:
    """A file of a drawn kind, size and encoding, and whether it is whole: one in three is damaged."""
    kind, modes = draw.choice(
        [("JPEG", ("RGB", "L", "CMYK"))] * 4
        + [("PNG", ("RGB", "RGBA", "P", "L", "LA", "1", "I;16")), ("GIF", ("P", "L"))] * 2
        + [("WEBP", ("RGB", "RGBA")), ("BMP", ("RGB", "L", "1")), ("TIFF", ("RGB", "L", "CMYK", "I;16"))]
        + [("PPM", ("RGB", "L")), ("TGA", ("RGB", "RGBA"))]
    )
    mode = draw.choice(modes)
    options: dict[str, Any] = {}
    if kind == "JPEG":
        options = {"quality": draw.randint(20, 100), "progressive": draw.random() < 0.3}
        options["subsampling"] = draw.choice(("4:4:4", "4:2:2", "4:2:0"))
        options["optimize"] = draw.random() < 0.3
        if mode == "RGB" and draw.random() < 0.2:
            options.update(keep_rgb=True, subsampling="4:4:4")
        if draw.random() < 0.3:
            options["comment"] = draw.randbytes(draw.randint(1, 300))
    if kind == "PNG" and mode == "P" and draw.random() < 0.5:
        options["transparency"] = draw.randrange(256)
    side = draw.choice((1, 2, 8, 30, 120))
    pixels = photograph(draw.randint(1, side), draw.randint(1, side), draw.randrange(1000))
    whole = file_of(pixels, kind, None if mode == "RGB" else mode, **options)
    return (whole, True) if draw.random() < 2 / 3 else (damaged(whole, draw), False)


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """The file with some of its bytes lost, replaced or doubled."""
    data, at = bytearray(whole), draw.randrange(len(whole))
    match draw.randrange(5):
        case 0:
            del data[at:]
        case 1:
            del data[at : at + draw.randint(1, 40)]
        case 2:
            data[at : at + draw.randint(1, 40)] = bytes(draw.randint(1, 40))
        case 3:
            data[at:at] = data[: draw.randint(1, 300)]
        case _:
            for _ in range(draw.choice((1, 3, 20))):
                data[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(data)
