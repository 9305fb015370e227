"""Where an image is cut: random crops as torchvision's `RandomResizedCrop`, and the middle for validation.

Pure: sizes and numbers in, rectangles out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastq_loader.api import is_int


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


class Cut(NamedTuple):
    """How a result is made from an image.

    Attributes:
        crop: the part of the image that is resized.
        shape: height and width that it is resized to.
        middle: the part of that which is the result.
        flipped: whether the result is flipped.
    """

    crop: Crop
    shape: tuple[int, int]
    middle: Crop
    flipped: bool

    def smallest(self, height: int, width: int) -> tuple[int, int]:
        """The smallest size of the image, of this height and width, whose part need not be enlarged."""
        crop, shape = self.crop, self.shape
        return -(-height * shape[0] // crop.height), -(-width * shape[1] // crop.width)


@dataclass(frozen=True, eq=False)
class CropRule:
    """The arguments of `DecodeImages` that say where an image is cut."""

    size: int | tuple[int, int]
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float | None = None
    resize: int | None = None

    def __post_init__(self) -> None:
        text = "give pixels, at least 1: one number, or (height, width)"
        self.check("size", lambda _: [is_int(side) and side >= 1 for side in self.shape] == [True] * 2, text)
        text = "give two shares, 0 < lower <= upper <= 1, or None"
        self.check("scale", lambda scale: scale is None or _are_ordered((*scale, 1)), text)
        text = "give two numbers, 0 < lower <= upper"
        self.check("ratio", lambda ratio: _are_ordered((*ratio, math.inf)), text)
        self.check("flip", lambda flip: flip is None or 0 <= flip <= 1, "give a probability, or None")
        least = max(self.shape)
        text = f"with scale=None, give at least the size, {least}; else None"
        valid = lambda side: side is None or (self.scale is None and is_int(side) and side >= least)  # noqa: E731
        self.check("resize", valid, text)

    def check(self, name: str, holds: Callable[[Any], bool], text: str) -> None:
        """Raise ValueError if an argument is not valid, whatever its type."""
        value = getattr(self, name)
        try:
            valid = holds(value)
        except Exception:  # it is of another type
            valid = False
        if not valid:
            raise ValueError(f"DecodeImages({name}={value!r}): {text}")

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the results."""
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def flips(self) -> float:
        """The probability of a flip."""
        default = 0.0 if self.scale is None else 0.5
        return default if self.flip is None else self.flip

    @property
    def draws(self) -> bool:
        """Whether results depend on the sample's seed."""
        return self.scale is not None or 0 < self.flips < 1

    def cut(self, height: int, width: int, seed: int) -> Cut:
        """How the result is made from an image of this size, with this seed."""
        drawn, whole = numbers(seed), (height, width)
        if self.scale is None:
            crop, shape = Crop(0, 0, *whole), shorter_side(*whole, self.resize or max(self.shape))
        else:
            crop, shape = random_crop(*whole, self.scale, self.ratio, drawn), self.shape
        return Cut(crop, shape, middle(*shape, self.shape), next(drawn) < self.flips)


def _are_ordered(numbers: tuple[float, ...]) -> bool:
    lower, upper, limit = numbers
    return 0 < lower <= upper <= limit
