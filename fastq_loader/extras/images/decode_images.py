"""`DecodeImages`: decodes images, and crops and resizes them to one size.

Runs where it is called: in a worker, inside of a dataset's `__getitem__`; or in the consumer, on a batch. As
the transform of a loader with workers and a device, it decodes in a thread of its own (`ahead`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fastq_loader.errors import is_int
from fastq_loader.extras.images import gpu, sample_seeds
from fastq_loader.extras.images.ahead import Ahead
from fastq_loader.extras.images.crops import Checks, CropRule, Cut, check
from fastq_loader.extras.images.decoders import BASELINE, decode, read_orientation
from fastq_loader.extras.images.encoded import Encoded, EncodedBatch
from fastq_loader.extras.transforms.transforms import members_of, normalize, rebuilt

_MODES = ("bilinear", "bicubic", "nearest")


def _are_three(*given: Any) -> bool:
    return all(len([float(value) for value in values]) == 3 for values in given)


_CHECKS: Checks = {
    "mean": (lambda mean, _: mean is None or _are_three(mean), "give three numbers, one a channel, or None"),
    "std": (
        lambda of, its: of is its.mean is None or (_are_three(its.mean, of) and all(of)),
        "with mean, give three numbers, one a channel, that are not 0; else None",
    ),
    "dtype": (lambda dtype, _: dtype.is_floating_point, "give a dtype such as torch.float16"),
    "interpolation": (lambda _, its: its.modes(1) and {*its.modes(1)} <= {*_MODES}, f"use one of {_MODES}"),
    "same_crop": (lambda value, _: isinstance(value, bool), "give True or False"),
    "exif": (lambda value, _: isinstance(value, bool), "give True or False"),
    "draft": (lambda value, _: isinstance(value, bool), "give True or False"),
    "then": (lambda then, _: then is None or callable(then), "give a function, or None"),
    "device": (lambda device, _: device is None or torch.device(device), "give a device"),
    "group_bytes": (lambda size, _: is_int(size) and size > 0, "give a number of bytes"),
}


@dataclass(frozen=True, eq=False)
class DecodeImages(CropRule):
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
            for masks. A sequence has one for each encoded part of a sample; those with "nearest" are not
            normalised.
        same_crop: whether all encoded parts of a sample have the crop and flip of the first one.
        exif: whether the orientation in an image's EXIF data is applied, before the crop.
        draft: whether a JPEG may be decoded at 1/8 to 7/8 of its size, if its crop need not be enlarged then.
            This is faster for photographs far larger than `size`; pixels differ slightly. On the CPU only.
        then: function that is applied to the result, in which pixels have replaced the encoded images.
        device: device of the results; None: the CPU. A loader with `device=` sets it in its transform. NVIDIA
            GPUs decode baseline JPEG themselves, if torchcodec (0.17 or newer) or torchvision is installed;
            the CPU decodes all else, and for other devices. `python -m fastq_loader doctor` shows the choice.
        group_bytes: bytes of decoded pixels, before the crops, that a GPU has at a time.

    Raises:
        ValueError: an argument is invalid; in a call, there is no encoded image.
        DecodeError: in a call, a file cannot be decoded; the text has its name.
        OutOfMemoryError: in a call, the device has no memory for the images.
        ImportError: in a call, neither simplejpeg nor pillow is installed.
    """

    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    dtype: torch.dtype = torch.float32
    interpolation: str | Sequence[str] = "bilinear"
    same_crop: bool = False
    exif: bool = False
    draft: bool = False
    then: Callable[[Any], Any] | None = None
    device: torch.device | str | None = None
    group_bytes: int = 512 << 20
    _normalize: normalize | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check(self, _CHECKS)
        if self.mean is not None and self.std is not None:
            vars(self)["_normalize"] = normalize(self.mean, self.std, self.dtype)

    def modes(self, parts: int) -> list[str]:
        """The interpolation of each encoded part of a sample. @private"""
        return [self.interpolation] * parts if isinstance(self.interpolation, str) else [*self.interpolation]

    # ---- on a device --------------------------------------------------------------------------

    def on_device(self, device: torch.device) -> DecodeImages:
        """Return a copy whose results are on a device."""
        copied = copy.copy(self)
        vars(copied)["device"] = device
        return copied

    def start_ahead(self) -> Ahead:
        """Begin to decode in a thread, in the order of the batches. A loader does this for its transform."""
        stream = gpu.stream_of(self.device)  # here, where the user's device is the current one
        pixels = self if stream is None else self.on_device(stream.device)
        return Ahead(pixels.decoded, pixels.result)

    # ---- a batch ------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Any:
        """Decode an encoded image or batch, or all of them in a structure of lists, tuples and dicts."""
        return self.result(batch, self.decoded(batch))

    def decoded(self, batch: Any) -> list[Tensor]:
        """Decode the encoded parts of a batch to uint8 of shape (N, 3, height, width). @private"""
        parts: list[Encoded | EncodedBatch] = []
        _with_parts(batch, lambda part: parts.append(part) or part)  # type: ignore[func-returns-value]
        if not parts:
            kind = type(batch).__name__
            raise ValueError(
                f"DecodeImages got a {kind} without an encoded image: wrap paths or bytes in encoded()"
            )
        modes, seeded = self.modes(len(parts)), parts[:1] * len(parts) if self.same_crop else parts
        if len(modes) != len(parts):
            raise ValueError(f"DecodeImages(interpolation={modes}): a sample has {len(parts)} encoded parts")
        lengths = [1 if isinstance(part, Encoded) else len(part) for part in parts]
        if self.same_crop and len({*lengths}) > 1:
            raise ValueError(f"DecodeImages(same_crop=True): the encoded parts have {lengths} images each")
        with gpu.working(self.device) as stream:
            return [
                self._decode(*each, stream) for each in zip(parts, map(_seeds, seeded), modes, strict=True)
            ]

    def result(self, batch: Any, decoded: list[Tensor]) -> Any:
        """The batch with its encoded parts replaced, for work on the current stream. @private"""
        left = zip(decoded, self.modes(len(decoded)), strict=True)
        result = _with_parts(batch, lambda part: self._finish(part, *next(left)))
        return result if self.then is None else self.then(result)

    def _finish(self, part: Encoded | EncodedBatch, images: Tensor, mode: str) -> Tensor:
        images = gpu.received(images, self.device)
        if self._normalize is not None and (mode != "nearest" or isinstance(self.interpolation, str)):
            images = self._normalize.image(images)
        return images[0] if isinstance(part, Encoded) else images

    def _decode(self, part: Encoded | EncodedBatch, seeds: Sequence[int], mode: str, stream: Any) -> Tensor:
        sample_seeds.reading.used += self.draws
        files = dict(enumerate([part] if isinstance(part, Encoded) else part))
        # CUDA has no antialiased resize of uint8.
        dtype, device = (torch.float32, stream.device) if stream else (torch.uint8, "cpu")
        images = torch.empty((len(files), 3, *self.shape), dtype=dtype, device=device)
        for group in self._groups({**files}) if stream else ():
            decoded = gpu.decode([files[at].data for at in group], stream)
            for number, pixels in zip(group, decoded, strict=False):
                del files[number]
                size = pixels.shape[1], pixels.shape[2]
                images[number] = _cut_out(pixels, size, self.cut(*size, seeds[number]), mode, dtype)
        for number, file in files.items():
            turn, (height, width, kind) = self._turn(file), file.header
            size = (width, height) if turn >= 5 else (height, width)
            cut = self.cut(*size, seeds[number])
            smallest = cut.smallest(*size) if self.draft else (0, 0)
            pixels = torch.from_numpy(decode(file.data, file.name, kind, turn, smallest)).permute(2, 0, 1)
            images[number] = _cut_out(pixels, size, cut, mode, torch.uint8)
        return images.round_().clamp_(0, 255).to(torch.uint8) if stream else images

    def _turn(self, file: Encoded) -> int:
        return read_orientation(file.data, file.name) if self.exif else 1

    def _groups(self, files: dict[int, Encoded]) -> Iterator[list[int]]:
        """The files that a GPU decodes, in groups of at most `group_bytes` of pixels."""
        left = [at for at, file in files.items() if file.header.kind == BASELINE and self._turn(file) == 1]
        while left:
            totals = accumulate(3 * files[at].header.height * files[at].header.width for at in left)
            count = max(1, sum(total <= self.group_bytes for total in totals))
            yield left[:count]
            left = left[count:]


def _cut_out(pixels: Tensor, size: tuple[int, int], cut: Cut, mode: str, dtype: torch.dtype) -> Tensor:
    """Crop, resize and flip.

    Args:
        pixels: uint8, shape (3, height, width), of an image decoded at `size` or smaller.
        cut: for an image of this size.
        dtype: of the result.
    """
    top, left, height, width = cut.crop.scaled(pixels.shape[1] / size[0], pixels.shape[2] / size[1])
    part = pixels[None, :, top : top + height, left : left + width].to(dtype)
    resized = interpolate(part, cut.shape, mode=mode, antialias=mode != "nearest")[0]
    top, left, height, width = cut.middle
    result = resized[:, top : top + height, left : left + width]
    return result.flip(-1) if cut.flipped else result


# ---- encoded parts of a structure -------------------------------------------------------------------


def _seeds(part: Encoded | EncodedBatch) -> Sequence[int]:
    return (part.seed_of_this_batch(),) if isinstance(part, Encoded) else part.seeds.tolist()


def _with_parts(value: Any, replaced: Callable[[Encoded | EncodedBatch], Any]) -> Any:
    """Return the structure with each encoded part replaced; what has none is returned as it is."""
    if isinstance(value, (Encoded, EncodedBatch)):
        return replaced(value)
    members = members_of(value) or {}
    parts = {key: _with_parts(inner, replaced) for key, inner in members.items()}
    return rebuilt(value, parts) if any(parts[key] is not members[key] for key in parts) else value
