"""Where an image is cut: random crops as torchvision's `RandomResizedCrop`, and the middle for validation.

Pure: sizes and numbers in, rectangles out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple


class Crop(NamedTuple):
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int

    def scaled(self, down: float, across: float) -> Crop:
        """The rectangle in the same image at another size, `down` and `across` times as large."""
        if down == across == 1:
            return self
        top, left = round(self.top * down), round(self.left * across)
        bottom, right = round((self.top + self.height) * down), round((self.left + self.width) * across)
        return Crop(top, left, max(1, bottom - top), max(1, right - left))


def numbers(seed: int) -> Iterator[float]:
    """Numbers from [0, 1) for a seed of 64 bits, without end: the same on every machine.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014).
    """
    state = seed
    while True:
        state = (state + 0x9E3779B97F4A7C15) & _64_BITS
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
        yield ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


_64_BITS = (1 << 64) - 1


def random_crop(
    height: int, width: int, scale: tuple[float, float], ratio: tuple[float, float], drawn: Iterator[float]
) -> Crop:
    """A crop of random area and aspect ratio, by the rule of torchvision's `RandomResizedCrop`.

    Args:
        height, width: of the image.
        scale: bounds of the crop's area, as a share of the image's.
        ratio: bounds of the crop's width divided by its height; drawn evenly on a logarithmic scale.
        drawn: numbers from [0, 1).
    """
    low, high = math.log(ratio[0]), math.log(ratio[1])
    for _ in range(10):
        area = height * width * (scale[0] + (scale[1] - scale[0]) * next(drawn))
        aspect = math.exp(low + (high - low) * next(drawn))
        across, down = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < across <= width and 0 < down <= height:
            top = int((height - down + 1) * next(drawn))
            return Crop(top, int((width - across + 1) * next(drawn)), down, across)
    return _middle_of_ratio(height, width, ratio)


def _middle_of_ratio(height: int, width: int, ratio: tuple[float, float]) -> Crop:
    across, down = width, height
    if width / height < ratio[0]:
        down = round(width / ratio[0])
    elif width / height > ratio[1]:
        across = round(height * ratio[1])
    return Crop((height - down) // 2, (width - across) // 2, down, across)


def shorter_side(height: int, width: int, size: int) -> tuple[int, int]:
    """Height and width of an image whose shorter side becomes `size`, as torchvision's `Resize(size)`."""
    if width <= height:
        return int(size * height / width), size
    return size, int(size * width / height)


def middle(height: int, width: int, size: tuple[int, int]) -> Crop:
    """The middle of an image that is at least of this size, as torchvision's `CenterCrop`."""
    return Crop(round((height - size[0]) / 2), round((width - size[1]) / 2), *size)
