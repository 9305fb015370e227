"""Where an image is cut: random crops as torchvision's `RandomResizedCrop`, and the middle for validation.

Pure: sizes and numbers in, rectangles out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from fastq_loader.errors import is_int

#: Two numbers: height and width, or a lower and an upper bound.
Pair = tuple[float, float]


class Crop(NamedTuple):
    """A rectangle in an image, in pixels."""

    top: int
    left: int
    height: int
    width: int


class Box(NamedTuple):
    """A rectangle among the pixels of an array, whose edges may lie within pixels."""

    top: float
    left: float
    height: float
    width: float


def another(seeds: Any, views: int = 0, parts: int = 0) -> Any:
    """The seed, or array of int64 seeds, of further views of a sample: their numbers are other ones.

    Args:
        views: number of the call for the sample.
        parts: how often the same image precedes in the structure that is decoded.
    """
    return (seeds + ((views * _VIEW + parts * _PART) & _63_BITS)) & _63_BITS


def numbers(seed: int) -> Iterator[float]:
    """Numbers from [0, 1) for a seed of 64 bits, without end: the same on every machine.

    The generator is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    2014).
    """
    while True:
        mixed = seed = (seed + 0x9E3779B97F4A7C15) & _64_BITS
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _64_BITS
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _64_BITS
        yield ((mixed ^ (mixed >> 31)) >> 11) / (1 << 53)


_64_BITS, _63_BITS = (1 << 64) - 1, (1 << 63) - 1
#: Any odd numbers that are no small multiples of each other and of the generator's increment.
_VIEW, _PART = 0x2545F4914F6CDD1D, 0x5851F42D4C957F2D


def random_crop(height: int, width: int, scale: Pair, ratio: Pair, drawn: Iterator[float]) -> Crop:
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
    down = min(height, max(1, round(width / ratio[0])))  # none fits: the middle
    across = min(width, max(1, round(height * ratio[1])))
    return Crop((height - down) // 2, (width - across) // 2, down, across)


class Cut(NamedTuple):
    """How a result is made from an image.

    Attributes:
        size: height and width of the image for which this was decided.
        crop: the part of it that is resized.
        shape: height and width that it is resized to.
        middle: the part of that which is the result.
        flipped: whether the result is flipped.
    """

    size: tuple[int, int]
    crop: Crop
    shape: tuple[int, int]
    middle: Crop
    flipped: bool

    @property
    def smallest(self) -> tuple[int, int]:
        """The smallest size of the image whose part need not be enlarged."""
        (height, width), crop = self.size, self.crop
        return -(-height * self.shape[0] // crop.height), -(-width * self.shape[1] // crop.width)

    def box(self, area: Box) -> Box:
        """The same part of a copy of the image, or of its mask, of any size.

        Args:
            area: the place of all of the copy in its pixels.
        """
        (height, width), crop = self.size, self.crop  # multiplied first: whole numbers stay exact
        return Box(
            area.top + crop.top * area.height / height,
            area.left + crop.left * area.width / width,
            crop.height * area.height / height,
            crop.width * area.width / width,
        )


#: For each argument, a function of its value and of all, true if it is valid; and what to give instead.
Checks = dict[str, tuple[Callable[[Any, Any], object], str]]


def check(arguments: CropRule, checks: Checks) -> None:
    """Raise ValueError if an argument is not valid, whatever its type."""
    for name, (holds, text) in checks.items():
        value, valid = getattr(arguments, name), False
        with suppress(Exception):  # it is of another type
            valid = bool(holds(value, arguments))
        if not valid:
            raise ValueError(f"DecodeImages({name}={value!r}): {text}")


def _are_sides(height: int, width: int) -> bool:
    return is_int(height) and is_int(width) and min(height, width) >= 1


def _are_ordered(limit: float, lower: float, upper: float) -> bool:
    return 0 < lower <= upper <= limit


_CHECKS: Checks = {
    "size": (lambda _, its: _are_sides(*its.shape), "give pixels, at least 1: one, or (height, width)"),
    "scale": (lambda of, _: of is None or _are_ordered(1, *of), "give 0 < lower <= upper <= 1, or None"),
    "ratio": (lambda of, _: _are_ordered(1e9, *of), "give 0 < lower <= upper"),
    "flip": (lambda flip, _: flip is None or 0 <= flip <= 1, "give a probability, or None"),
    "resize": (
        lambda side, its: side is None or (its.scale is None and is_int(side) and side >= max(its.shape)),
        "with scale=None, give at least the larger side of size; else None",
    ),
}


@dataclass(frozen=True, eq=False)
class CropRule:
    """The arguments of `DecodeImages` that say where an image is cut."""

    size: int | Sequence[int]
    scale: Pair | None = (0.08, 1.0)
    ratio: Pair = (3 / 4, 4 / 3)
    flip: float | None = None
    resize: int | None = None

    def __post_init__(self) -> None:
        check(self, _CHECKS)

    @property
    def shape(self) -> tuple[int, int]:
        """Height and width of the results. As torchvision's, a single number may stand in a list."""
        sides = [self.size] if isinstance(self.size, int) else [*self.size]
        height, width = sides * 2 if len(sides) == 1 else sides
        return height, width

    @property
    def flips(self) -> float:
        """The probability of a flip."""
        return (self.scale is not None) / 2 if self.flip is None else self.flip

    @property
    def draws(self) -> bool:
        """Whether results depend on the sample's seed."""
        return self.scale is not None or 0 < self.flips < 1

    def cut(self, height: int, width: int, seed: int) -> Cut:
        """How the result is made from an image of this size, with this seed."""
        drawn, crop, shape = numbers(seed), Crop(0, 0, height, width), self.shape
        if self.scale is None:  # as torchvision's `Resize` of the shorter side, and `CenterCrop`
            side, shorter = self.resize or max(shape), min(height, width)
            shape = int(side * height / shorter), int(side * width / shorter)
        else:
            crop = random_crop(height, width, self.scale, self.ratio, drawn)
        top, left = round((shape[0] - self.shape[0]) / 2), round((shape[1] - self.shape[1]) / 2)
        return Cut((height, width), crop, shape, Crop(top, left, *self.shape), next(drawn) < self.flips)
