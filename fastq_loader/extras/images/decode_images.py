"""`DecodeImages`: decodes images, and crops and resizes them to one size.

Runs where it is called: in a worker, inside of a dataset's `__getitem__`; or in the consumer, on a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import interpolate

from fastq_loader import api
from fastq_loader.extras.images import crops
from fastq_loader.extras.images.crops import Crop
from fastq_loader.extras.images.decoders import Source
from fastq_loader.extras.images.encoded import Encoded, EncodedBatch

_INTERPOLATIONS = ("bilinear", "bicubic", "nearest")


@dataclass(frozen=True, eq=False)
class DecodeImages:
    """Decode images, crop and flip them at random, and resize them to one size.

    In a dataset, it takes a result of `encoded`, and returns a uint8 tensor of shape (3, height, width):

        def __getitem__(self, index):
            return pixels(encoded(self.paths[index])), self.labels[index]

    On a batch, as a loader's transform or called directly, it takes an `EncodedBatch`, and returns shape (N,
    3, height, width). The crops are the same in both cases, because the sample determines them; see
    `encoded`. In lists, tuples and dicts, pixels replace each encoded part, and the rest is unchanged.

    Args:
        size: height and width of the result, in pixels; one number for both.
        scale: bounds of a random crop's area, as a share of the image's; None: a center crop, for validation.
        ratio: bounds of a random crop's aspect ratio (width / height).
        flip: probability of a horizontal flip; by default 0.5, and 0 with `scale=None`.
        resize: with `scale=None`, length of the image's shorter side before the center crop; by default the
            larger number of `size`.
        mean, std: one number for each channel: results are (pixels / 255 - mean) / std.
        dtype: dtype of the results, if `mean` and `std` are given.
        interpolation: "bilinear" or "bicubic", both antialiased as torchvision's on tensors; or "nearest",
            for masks. A sequence has one for each encoded part of a sample.
        same_crop: whether all encoded parts of a sample have the crop and flip of the first one.
        exif: whether the orientation in an image's EXIF data is applied, before the crop.
        draft: whether a JPEG may be decoded at 1/8 to 7/8 of its size, if its crop need not be enlarged then.
            This is faster for photographs far larger than `size`; pixels differ slightly.
        then: function that is applied to the result, in which pixels have replaced the encoded images.
        device: device of the results; None: the CPU. A loader with `device=` sets it in its transform.

    Raises:
        ValueError: an argument is invalid; in a call, there is no encoded image.
        DecodeError: in a call, a file cannot be decoded; the text has its name.
        ImportError: in a call, neither simplejpeg nor pillow is installed.
    """

    size: int | tuple[int, int]
    scale: tuple[float, float] | None = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float | None = None
    resize: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    dtype: torch.dtype = torch.float32
    interpolation: str | Sequence[str] = "bilinear"
    same_crop: bool = False
    exif: bool = False
    draft: bool = False
    then: Callable[[Any], Any] | None = None
    device: torch.device | str | None = None
    _normalize: api.normalize | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        height, width = self._shape
        self._check("size", height >= 1 and width >= 1, "give pixels, at least 1")
        in_order = self.scale is None or 0 < self.scale[0] <= self.scale[1] <= 1
        self._check("scale", in_order, "give two shares, 0 < lower <= upper <= 1, or None")
        self._check("ratio", 0 < self.ratio[0] <= self.ratio[1], "give two numbers, 0 < lower <= upper")
        self._check("flip", 0 <= self._flip <= 1, "give a probability")
        valid = self.resize is None or (self.scale is None and self.resize >= max(height, width))
        self._check(
            "resize", valid, f"with scale=None, give at least the size, {max(height, width)}; else None"
        )
        self._check("std", (self.std is None) == (self.mean is None), "give both mean and std, or neither")
        modes = (self.interpolation,) if isinstance(self.interpolation, str) else tuple(self.interpolation)
        known = bool(modes) and set(modes) <= set(_INTERPOLATIONS)
        self._check("interpolation", known, f"use {', '.join(_INTERPOLATIONS)}")
        if self.mean is not None and self.std is not None:
            object.__setattr__(self, "_normalize", api.normalize(self.mean, self.std, self.dtype))

    def _check(self, name: str, holds: bool, text: str) -> None:
        if not holds:
            raise ValueError(f"DecodeImages({name}={getattr(self, name)!r}): {text}")

    @property
    def _shape(self) -> tuple[int, int]:
        return (self.size, self.size) if isinstance(self.size, int) else self.size

    @property
    def draws(self) -> bool:
        """Whether results depend on the sample's seed."""
        return self.scale is not None or 0 < self._flip < 1

    @property
    def _flip(self) -> float:
        default = 0.0 if self.scale is None else 0.5
        return default if self.flip is None else self.flip

    def on_device(self, device: torch.device) -> DecodeImages:
        """Return a copy whose results are on a device. Images are decoded on the CPU, then copied."""
        return replace(self, device=device)

    def __call__(self, batch: Any) -> Any:
        """Decode an encoded image or batch, or all of them in a structure of lists, tuples and dicts."""
        parts = list(_encoded_parts(batch))
        if not parts:
            raise ValueError(f"DecodeImages got a {type(batch).__name__} without an encoded image")
        if not isinstance(self.interpolation, str) and len(self.interpolation) != len(parts):
            text = f"a sample has {len(parts)} encoded parts"
            raise ValueError(f"DecodeImages(interpolation={self.interpolation!r}): {text}")
        of_first = _seeds(parts[0])
        decoded: list[torch.Tensor] = []
        for number, part in enumerate(parts):
            decoded.append(self._decode(part, of_first if self.same_crop else _seeds(part), number))
        result = _with_decoded(batch, iter(decoded))
        return result if self.then is None else self.then(result)

    def _decode(self, part: Encoded | EncodedBatch, seeds: Sequence[int], number: int) -> torch.Tensor:
        mode = self.interpolation if isinstance(self.interpolation, str) else self.interpolation[number]
        if isinstance(part, Encoded):
            images = self._pixels(part, seeds[0], mode)[None]
        else:
            images = torch.empty(len(part), 3, *self._shape, dtype=torch.uint8)
            for image, seed, out in zip(part, seeds, images, strict=True):
                out.copy_(self._pixels(image, seed, mode))
        if self.device is not None:
            images = images.to(self.device)
        if self._normalize is not None:
            images = self._normalize.image(images)
        return images[0] if isinstance(part, Encoded) else images

    def _pixels(self, image: Encoded, seed: int, interpolation: str) -> torch.Tensor:
        """Decode one image to uint8 of shape (3, height, width)."""
        source = Source(image, self.exif)
        api.sample_seeds.reading.used += self.draws
        drawn = crops.numbers(seed)
        whole = source.height, source.width
        if self.scale is None:
            crop, shape = Crop(0, 0, *whole), crops.shorter_side(*whole, self.resize or max(self._shape))
        else:
            crop, shape = crops.random_crop(*whole, self.scale, self.ratio, drawn), self._shape
        pixels = torch.from_numpy(source.pixels(_smallest_size(whole, crop, shape) if self.draft else None))
        top, left, height, width = crop.scaled(pixels.shape[0] / whole[0], pixels.shape[1] / whole[1])
        part = pixels[top : top + height, left : left + width].permute(2, 0, 1)[None]
        antialias = interpolation != "nearest"
        (resized,) = interpolate(part, shape, mode=interpolation, antialias=antialias)
        if self.scale is None:
            top, left, height, width = crops.middle(*shape, self._shape)
            resized = resized[:, top : top + height, left : left + width]
        flipped: torch.Tensor = resized.flip(-1) if next(drawn) < self._flip else resized
        return flipped.contiguous()


def _smallest_size(whole: tuple[int, int], crop: Crop, shape: tuple[int, int]) -> tuple[int, int]:
    """The smallest height and width of the whole image at which its crop need not be enlarged."""
    return -(-whole[0] * shape[0] // crop.height), -(-whole[1] * shape[1] // crop.width)


# ---- encoded parts of a structure -------------------------------------------------------------------


def _seeds(part: Encoded | EncodedBatch) -> Sequence[int]:
    return (part.seed_of_this_batch(),) if isinstance(part, Encoded) else part.seeds


def _encoded_parts(value: Any) -> Iterator[Encoded | EncodedBatch]:
    if isinstance(value, (Encoded, EncodedBatch)):
        yield value
    for inner in (api.members_of(value) or {}).values():
        yield from _encoded_parts(inner)


def _with_decoded(value: Any, decoded: Iterator[torch.Tensor]) -> Any:
    """Return the structure with each encoded part replaced by the next of the decoded tensors."""
    if isinstance(value, (Encoded, EncodedBatch)):
        return next(decoded)
    members = api.members_of(value)
    if members is None:
        return value
    return api.rebuilt(value, {key: _with_decoded(inner, decoded) for key, inner in members.items()})
