"""`DecodeImages`: decodes images, and crops and resizes them to one size.

Runs where it is called: in a worker, inside of a dataset's `__getitem__`; or in the consumer, on a batch. As
the transform of a loader with workers and a device, it decodes in a thread of its own (`ahead`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.functional import interpolate

from fastq_loader import api
from fastq_loader.extras.images import headers
from fastq_loader.extras.images.ahead import Ahead, Target
from fastq_loader.extras.images.crops import CropRule, Cut
from fastq_loader.extras.images.decoders import Source
from fastq_loader.extras.images.encoded import Encoded, EncodedBatch
from fastq_loader.extras.images.gpu import Gpu

_INTERPOLATIONS = ("bilinear", "bicubic", "nearest")


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
    _normalize: api.normalize | None = field(default=None, init=False, repr=False)
    _target: Target | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "std"):
            text = "give three numbers, one for each channel, or None"
            self.check(
                name, lambda values: values is None or len([float(each) for each in values]) == 3, text
            )
        self.check("std", lambda std: (std is None) == (self.mean is None), "give mean and std, or neither")
        self.check("std", lambda std: std is None or all(std), "it is divided by: give no 0")
        self.check("dtype", lambda dtype: dtype.is_floating_point, "give a dtype such as torch.float16")
        text = f"use {', '.join(_INTERPOLATIONS)}"
        valid = lambda _: len(self._modes) > 0 and {*self._modes} <= {*_INTERPOLATIONS}  # noqa: E731
        self.check("interpolation", valid, text)
        for name in ("same_crop", "exif", "draft"):
            self.check(name, lambda value: isinstance(value, bool), "give True or False")
        self.check("then", lambda then: then is None or callable(then), "give a function, or None")
        self.check("group_bytes", lambda size: api.is_int(size) and size > 0, "give a number of bytes")
        self.check("device", lambda device: device is None or bool(torch.device(device)), "give a device")
        if self.mean is not None and self.std is not None:
            object.__setattr__(self, "_normalize", api.normalize(self.mean, self.std, self.dtype))
        if self.device is not None:
            object.__setattr__(self, "_target", Target(torch.device(self.device)))

    @property
    def _modes(self) -> tuple[str, ...]:
        return (self.interpolation,) if isinstance(self.interpolation, str) else tuple(self.interpolation)

    def _modes_of(self, parts: list[Any]) -> tuple[str, ...]:
        return self._modes * len(parts) if isinstance(self.interpolation, str) else self._modes

    # ---- on a device --------------------------------------------------------------------------

    def on_device(self, device: torch.device) -> DecodeImages:
        """Return a copy whose results are on a device."""
        return replace(self, device=device)

    def start_ahead(self) -> Ahead:
        """Begin to decode in a thread, in the order of the batches. A loader does this for its transform."""
        assert self._target is not None, "results go to a device"
        return Ahead(self.decoded, self.result, self._target)

    def paused(self) -> AbstractContextManager[object]:
        """Context in which no other thread decodes with this object."""
        return nullcontext() if self._target is None else self._target.turn

    # ---- a batch ------------------------------------------------------------------------------

    def __call__(self, batch: Any) -> Any:
        """Decode an encoded image or batch, or all of them in a structure of lists, tuples and dicts."""
        return self.result(batch, self.decoded(batch))

    def decoded(self, batch: Any) -> list[torch.Tensor]:
        """Decode the encoded parts of a batch to uint8 of shape (N, 3, height, width). @private"""
        parts = list(_encoded_parts(batch))
        if not parts:
            raise ValueError(f"DecodeImages got a {type(batch).__name__} without an encoded image")
        if not isinstance(self.interpolation, str) and len(self._modes) != len(parts):
            text = f"a sample has {len(parts)} encoded parts"
            raise ValueError(f"DecodeImages(interpolation={self.interpolation!r}): {text}")
        modes = self._modes_of(parts)
        of_first = _seeds(parts[0])
        seeds = [of_first if self.same_crop else _seeds(part) for part in parts]
        if self._target is None:
            return [self._decode(*each, None) for each in zip(parts, seeds, modes, strict=True)]
        with self._target.working() as gpu:
            return [self._decode(*each, gpu) for each in zip(parts, seeds, modes, strict=True)]

    def result(self, batch: Any, decoded: list[torch.Tensor]) -> Any:
        """The batch with its encoded parts replaced, for work on the current stream. @private"""
        parts = list(_encoded_parts(batch))
        one_for_each = not isinstance(self.interpolation, str)
        are_masks = [one_for_each and mode == "nearest" for mode in self._modes_of(parts)]
        finished = [self._finish(*each) for each in zip(parts, decoded, are_masks, strict=True)]
        result = _with_decoded(batch, iter(finished))
        return result if self.then is None else self.then(result)

    def _finish(self, part: Encoded | EncodedBatch, images: torch.Tensor, is_mask: bool) -> torch.Tensor:
        if self._target is not None:
            images = self._target.received(images)
        if self._normalize is not None and not is_mask:
            images = self._normalize.image(images)
        return images[0] if isinstance(part, Encoded) else images

    def _decode(
        self, part: Encoded | EncodedBatch, seeds: Sequence[int], mode: str, gpu: Gpu | None
    ) -> torch.Tensor:
        api.sample_seeds.reading.used += self.draws
        files = dict(enumerate([part] if isinstance(part, Encoded) else part))
        shape = len(files), 3, *self.shape
        if gpu is None:
            images = torch.empty(shape, dtype=torch.uint8)
        else:  # CUDA has no antialiased resize of uint8
            images = torch.empty(shape, dtype=torch.float32, device=gpu.device)
            for group in [*self._groups(files)]:
                for number, pixels in zip(group, gpu.decode([files[at] for at in group]), strict=False):
                    del files[number]
                    height, width = pixels.shape[1:]
                    cut = self.cut(height, width, seeds[number])
                    images[number] = _cut_out(pixels, (height, width), cut, mode, torch.float32)
        for number, file in files.items():
            source = Source(file, self.exif)
            size = source.height, source.width
            cut = self.cut(*size, seeds[number])
            array = source.pixels(cut.smallest(*size) if self.draft else None)
            images[number] = _cut_out(torch.from_numpy(array).permute(2, 0, 1), size, cut, mode, torch.uint8)
        return images if gpu is None else images.round_().clamp_(0, 255).to(torch.uint8)

    def _groups(self, files: dict[int, Encoded]) -> Iterator[list[int]]:
        """The files that a GPU decodes, in groups of at most `group_bytes` of pixels."""
        group: list[int] = []
        left = self.group_bytes
        for number, file in files.items():
            height, width, kind = file.header
            if kind == headers.BASELINE and not (self.exif and Source(file, exif=True).is_turned):
                left -= 3 * height * width
                if left < 0 and group:
                    yield group
                    group, left = [], self.group_bytes - 3 * height * width
                group.append(number)
        if group:
            yield group


def _cut_out(
    pixels: torch.Tensor, size: tuple[int, int], cut: Cut, mode: str, dtype: torch.dtype
) -> torch.Tensor:
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
