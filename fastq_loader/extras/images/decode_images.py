"""`DecodeImages`: decodes images, and crops and resizes them to one size.

Runs where it is called: in a worker, inside of a dataset's `__getitem__`; or in the consumer, on a batch. As
the transform of a loader with workers and a device, it decodes in a thread of its own (`ahead`).
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fastq_loader.errors import is_int
from fastq_loader.extras.images import gpu, sample_seeds
from fastq_loader.extras.images.ahead import Ahead
from fastq_loader.extras.images.crops import Box, Checks, CropRule, Cut, another, check
from fastq_loader.extras.images.decoders import BASELINE, OTHER, decode, imported, library, read_orientation
from fastq_loader.extras.images.encoded import Encoded, EncodedBatch
from fastq_loader.extras.transforms.transforms import members_of, normalize, rebuilt

_Part = Encoded | EncodedBatch
_MODES = ("bilinear", "bicubic", "nearest")


def _are_three(*given: Any) -> bool:
    return all(len([float(value) for value in values]) == 3 for values in given)


_CHECKS: Checks = {
    "mean": (
        lambda mean, _: mean is None or (_are_three(mean) and max(mean) <= 1),
        "give three numbers, one a channel, for pixels that are divided by 255 (divide them, too), or None",
    ),
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
    `encoded`. In lists, tuples and dicts, pixels replace each encoded part, and the rest is unchanged. Each
    call for a sample, and each part that is the same image, has other crops: two calls are two views.

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
            for masks: the values of pixels, as pillow chooses them. A sequence has one for each encoded part
            of a sample; those with "nearest" are not normalised.
        same_crop: whether all encoded parts of a sample have the crop and flip of the first one: the same
            share of each, if they differ in size.
        exif: whether the orientation in an image's EXIF data is applied, before the crop.
        draft: whether a JPEG may be decoded at 1/8 to 4/8 of its size, if its crop need not be enlarged then.
            This is faster for photographs far larger than `size`; pixels differ slightly, but stay in their
            places. On the CPU only.
        then: function that is applied to the result, in which pixels have replaced the encoded images.
        device: device of the results; None: the CPU. A loader with `device=` sets it in its transform. NVIDIA
            GPUs decode baseline JPEG themselves, if torchcodec (0.17 or newer) or torchvision is installed;
            the CPU decodes all else, and for other devices. `python -m fastq_loader doctor` shows the choice.
        group_bytes: bytes of decoded pixels, before the crops, that a GPU has at a time.

    Raises:
        ValueError: an argument is invalid; in a call, there is no encoded image, or `same_crop=True` and it
            is not known which parts belong to one sample.
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
        reason = imported("simplejpeg")[1]
        if "cannot" in reason:
            warnings.warn(f"pillow decodes JPEG, which is slower: simplejpeg {reason}", stacklevel=3)
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

    def decoded(self, batch: Any) -> list[tuple[Tensor, str]]:
        """Decode the encoded parts of a batch to uint8 of shape (N, 3, height, width), each with its
        interpolation. @private"""
        parts: list[_Part] = []
        _with_parts(batch, lambda part: parts.append(part) or part)  # type: ignore[func-returns-value]
        if not parts:
            kind = type(batch).__name__
            raise ValueError(
                f"DecodeImages got a {kind} without an encoded image: wrap paths or bytes in encoded()"
            )
        found: dict[int, tuple[Tensor, str]] = {}
        seen: Counter[int] = Counter()
        with gpu.working(self.device) as stream:
            for sample in self._samples(batch, parts):
                of_sample = [parts[number] for number in sample]
                modes = self.modes(len(sample))
                if len(modes) != len(sample):
                    text = f"a sample has {len(sample)} encoded parts"
                    raise ValueError(f"DecodeImages(interpolation={modes}): {text}")
                lengths = [1 if isinstance(part, Encoded) else len(part) for part in of_sample]
                if self.same_crop and len({*lengths}) > 1:
                    raise ValueError(
                        f"DecodeImages(same_crop=True): the encoded parts have {lengths} images each"
                    )
                cuts: list[Cut] = []
                for number, part, mode in zip(sample, of_sample, modes, strict=True):
                    if not (self.same_crop and cuts):
                        seeds = [another(seed, parts=seen[id(part)]) for seed in part.seeds_of_this_batch()]
                        seen[id(part)] += 1
                        cuts = []
                    found[number] = self._decode(part, seeds, cuts, mode, stream), mode
        for part in {id(part): part for part in parts}.values() if self.draws else ():
            part.advance()
        return [found[number] for number in range(len(parts))]

    def _samples(self, batch: Any, parts: list[_Part]) -> Iterable[list[int]]:
        """The numbers of the parts of each sample. In a batch of the default collate function, they are also
        those of the batch; else each part has the place of its sample.

        Raises:
            ValueError: it is not known which parts belong to one sample.
        """
        every = [*range(len(parts))]
        at_once = not self.same_crop and isinstance(self.interpolation, str)
        places = [part.place for part in parts if isinstance(part, Encoded)]
        if at_once or len(places) < len(parts) or sample_seeds.place() in {*places} - {None}:
            return [every]
        samples: dict[Any, list[int]] = {}
        for number, place in enumerate(places):
            samples.setdefault(place, []).append(number)
        if all(place and place[-1] for place in samples) and len({place[:-1] for place in samples}) == 1:
            return samples.values()
        if self.same_crop and _may_be_a_batch(batch):
            raise ValueError(
                "DecodeImages(same_crop=True) cannot tell which images belong to one sample: decode them in "
                "the dataset, or a batch of the default collate function; or return results of encoded() "
                "from the __getitem__ that has called it, in a loader of fastq_loader"
            )
        return [every]

    def result(self, batch: Any, decoded: list[tuple[Tensor, str]]) -> Any:
        """The batch with its encoded parts replaced, for work on the current stream. @private"""
        left = iter(decoded)
        result = _with_parts(batch, lambda part: self._finish(part, *next(left)))
        return result if self.then is None else self.then(result)

    def _finish(self, part: _Part, images: Tensor, mode: str) -> Tensor:
        images = gpu.received(images, self.device)
        if self._normalize is not None and (mode != "nearest" or isinstance(self.interpolation, str)):
            images = self._normalize.image(images)
        return images[0] if isinstance(part, Encoded) else images

    def _decode(self, part: _Part, seeds: list[int], cuts: list[Cut], mode: str, stream: Any) -> Tensor:
        """Decode the images of a part.

        Args:
            seeds: of the images.
            cuts: how each of them is cut; if empty, this is decided here, by the seeds, and added.
        """
        sample_seeds.reading.used += self.draws
        files = dict(enumerate([part] if isinstance(part, Encoded) else part))
        decided = dict(enumerate(cuts))
        # CUDA has no antialiased resize of uint8.
        dtype, device = (torch.float32, stream.device) if stream else (torch.uint8, "cpu")
        images = torch.empty((len(files), 3, *self.shape), dtype=dtype, device=device)
        on_gpu = {at: file for at, file in files.items() if not cuts or cuts[at].size == file.header[:2]}
        for group in self._groups(on_gpu) if stream else ():
            decoded = gpu.decode([files[at].data for at in group], stream)
            for number, pixels in zip(group, decoded, strict=False):
                del files[number]
                size = pixels.shape[1], pixels.shape[2]
                if not cuts:
                    decided[number] = self.cut(*size, seeds[number])
                images[number] = _cut_out(pixels, Box(0, 0, *size), decided[number], mode, dtype)
        for number, file in files.items():
            turn, (height, width, kind) = self._turn(file), file.header
            if not cuts:
                size = (width, height) if turn >= 5 else (height, width)
                decided[number] = self.cut(*size, seeds[number])
            smallest = decided[number].smallest if self.draft else (0, 0)
            array, area = decode(file.data, file.name, file.header, turn, smallest)
            if not cuts and kind == OTHER:  # older versions of pillow turn TIFF after its header was read
                decided[number] = self.cut(array.shape[0], array.shape[1], seeds[number])
            pixels = torch.from_numpy(array).permute(2, 0, 1)
            images[number] = _cut_out(pixels, area, decided[number], mode, torch.uint8)
        cuts[:] = [decided[number] for number in range(len(decided))]
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


def _cut_out(pixels: Tensor, area: Box, cut: Cut, mode: str, dtype: torch.dtype) -> Tensor:
    """Crop, resize and flip.

    Args:
        pixels: uint8, shape (3, height, width).
        area: the place of the image in them.
        cut: for the image, of any size.
        dtype: of the result.
    """
    box, middle = cut.box(area), cut.middle
    rows, columns = (
        slice(middle.top, middle.top + middle.height),
        slice(middle.left, middle.left + middle.width),
    )
    if mode == "nearest":  # the pixel in which the middle of the result's pixel lies, as pillow has it
        down = _nearest(box.top, box.height, cut.shape[0], pixels.shape[1])[rows]
        across = _nearest(box.left, box.width, cut.shape[1], pixels.shape[2])[columns]
        result = pixels[:, down[:, None], across].to(dtype)
    elif all(side == int(side) for side in box):
        top, left, height, width = map(int, box)
        part = pixels[None, :, top : top + height, left : left + width].to(dtype)
        result = interpolate(part, cut.shape, mode=mode, antialias=True)[0, :, rows, columns]
    else:
        result = _resized(pixels, box, cut.shape, mode)[:, rows, columns]
    return result.flip(-1) if cut.flipped else result


def _nearest(begin: float, length: float, size: int, limit: int) -> Tensor:
    sources = begin + (torch.arange(size, dtype=torch.float64, device="cpu") + 0.5) * (length / size)
    return sources.long().clamp_(0, limit - 1)


def _resized(pixels: Tensor, box: Box, shape: tuple[int, int], mode: str) -> Tensor:
    """Resize a part whose edges lie within pixels, by pillow: torch resizes whole ones."""
    pillow: Any = library("PIL.Image")
    top, left = int(box.top), int(box.left)
    part = pixels[:, top : math.ceil(box.top + box.height), left : math.ceil(box.left + box.width)]
    image = pillow.fromarray(part.permute(1, 2, 0).contiguous().numpy())
    right, bottom = (box.left - left + box.width, box.top - top + box.height)
    edges = box.left - left, box.top - top, min(right, image.width), min(bottom, image.height)
    resized = image.resize(shape[::-1], getattr(pillow.Resampling, mode.upper()), edges)
    return torch.from_numpy(np.array(resized)).permute(2, 0, 1)


# ---- encoded parts of a structure -------------------------------------------------------------------


def _may_be_a_batch(value: Any) -> bool:
    """Whether several members of the structure have encoded parts, and none of them is one: they may be
    samples."""
    if isinstance(value, Encoded):
        return False
    with_parts = [member for member in (members_of(value) or {}).values() if _has_parts(member)]
    if len(with_parts) == 1:
        return _may_be_a_batch(with_parts[0])
    return not any(isinstance(member, Encoded) for member in with_parts)


def _has_parts(value: Any) -> bool:
    return isinstance(value, Encoded) or any(map(_has_parts, (members_of(value) or {}).values()))


def _with_parts(value: Any, replaced: Callable[[_Part], Any]) -> Any:
    """Return the structure with each encoded part replaced; what has none is returned as it is."""
    if isinstance(value, (Encoded, EncodedBatch)):
        return replaced(value)
    members = members_of(value) or {}
    parts = {key: _with_parts(inner, replaced) for key, inner in members.items()}
    return rebuilt(value, parts) if any(parts[key] is not members[key] for key in parts) else value
