"""Transforms of a batch on its device: normalise images, fill the inputs of a captured step.

Runs in the consumer, on the current stream, whichever it is.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fastq_loader.packing.tensors import tensors_of
from fastq_loader.system.torch_names import foreach_copy_


@dataclass(eq=False)
class normalize:
    """Turn uint8 images into normalised floating-point ones: (x / max_value - mean) / std for each channel.

    Does in one line the work of NVIDIA apex's `data_prefetcher` (examples/imagenet/main_amp.py):

        DataLoader(..., device=ToDevice("cuda", transform=normalize(mean, std, torch.float16)))

    It may also be used in compiled and captured steps: it neither copies from the host nor waits.

    Args:
        mean, std: one number for each channel, in a list, array or tensor, for values between 0 and 1
            (torchvision's convention; apex's example has them times 255).
        dtype: of the result: torch.float16, bfloat16, float32 or float64. Intermediate values are float32
            at least.
        channels_last: whether results lie in memory with the channels last (`torch.channels_last`).
        max_value: divisor of the pixels; None is 255 for integers and 1 for floating-point images.
        which: top-level keys or positions of the images in the batch. None is every uint8 tensor of shape
            (N, C, …) with at least 3 dimensions and as many channels as `mean`.

    Raises:
        ValueError: `mean` and `std` differ in length or a `std` is 0; in a call, a batch has no image, or
            `mean` is for values up to 255, which would be divided by 255.
        TypeError: `dtype` is not floating-point, or `which` is a single name.

    >>> images = torch.full((1, 3, 2, 2), 255, dtype=torch.uint8)
    >>> normalize(mean=[0.5, 0.5, 0.5], std=[0.25, 0.25, 0.25])(images).unique()
    tensor([2.])
    """

    mean: Sequence[float]
    std: Sequence[float]
    dtype: torch.dtype = torch.float32
    channels_last: bool = False
    max_value: float | None = None
    which: Collection[str | int] | None = None

    def __post_init__(self) -> None:
        self.mean, self.std = (tuple(np.ravel(each).astype(float).tolist()) for each in (self.mean, self.std))
        if not self.mean or len(self.mean) != len(self.std):
            raise ValueError(f"mean={self.mean} and std={self.std} must have one number for each channel")
        if not all(self.std):
            raise ValueError(f"std={self.std} must not be 0: it is divided by")
        if isinstance(self.which, (str, int)):
            raise TypeError(f"which={self.which!r} must be a list of keys or positions: [{self.which!r}]")
        if not self.dtype.is_floating_point:
            raise TypeError(f"dtype={self.dtype} must be floating-point, such as torch.float16")

    def __call__(self, batch: Any) -> Any:
        """Return the batch with its images normalised and everything else unchanged.

        Args:
            batch: a tensor of shape (N, C, …), or a dict, list, tuple or named tuple of them.
        """
        if isinstance(batch, torch.Tensor):
            return self.image(batch)
        given = members_of(batch)
        if given is None:
            raise ValueError(
                f"normalize got a {type(batch).__name__}, and looks for images in dicts and lists"
            )
        parts = {key: self._part(key, value) for key, value in given.items()}
        if missing := sorted(set(self.which or ()) - parts.keys(), key=str):
            raise ValueError(f"which names {missing}, and the batch has {list(parts)}")
        if all(parts[key] is given[key] for key in given):
            raise ValueError(
                f"normalize found no uint8 image of shape (N, {len(self.mean)}, ...) among "
                f"{', '.join(map(_describe, given.values()))}: name it with which=, or check the collate_fn"
            )
        return rebuilt(batch, parts)

    def _part(self, key: Any, value: Any) -> Any:
        if self.which is not None:
            return self.image(value) if key in self.which else value
        wanted = (
            isinstance(value, torch.Tensor)
            and value.dtype is torch.uint8
            and value.dim() >= 3
            and value.shape[1] == len(self.mean)
        )
        return self.image(value) if wanted else value

    def image(self, pixels: torch.Tensor) -> torch.Tensor:
        """Normalise images of shape (N, C, …).

        Raises:
            ValueError: their number of channels differs from `mean`.
        """
        if pixels.dim() < 2 or pixels.shape[1] != len(self.mean):
            raise ValueError(
                f"normalize has {len(self.mean)} channels (mean and std), and an image of shape "
                f"{tuple(pixels.shape)} has not: images are (N, C, ...)"
            )
        limit = self._divisor(pixels)
        wide = torch.float64 if torch.float64 in (self.dtype, pixels.dtype) else torch.float32

        # On a device filled by kernels, anew for each batch: a copy from the host cannot be captured, and
        # cached tensors would belong to one stream, one graph and one mode of autograd.
        def factor(values: list[float]) -> torch.Tensor:
            shape = -1, *[1] * (pixels.dim() - 2)
            if pixels.is_cpu:
                return torch.tensor(values, dtype=wide, device="cpu").view(shape)
            parts = [torch.full((1,), value, dtype=wide, device=pixels.device) for value in values]
            return torch.cat(parts).view(shape)

        layout = torch.contiguous_format
        if self.channels_last:
            layout = torch.channels_last if pixels.dim() == 4 else torch.channels_last_3d
            if pixels.dim() not in (4, 5):
                raise ValueError(f"channels_last=True needs 4 or 5 dimensions, and got {pixels.dim()}")
        images = pixels.to(wide, memory_format=layout, copy=True)
        images.mul_(factor([1 / (limit * std) for std in self.std]))
        images.add_(factor([-mean / std for mean, std in zip(self.mean, self.std, strict=True)]))
        return images.to(self.dtype)

    def _divisor(self, pixels: torch.Tensor) -> float:
        if self.max_value is not None or pixels.dtype.is_floating_point:
            return 1.0 if self.max_value is None else self.max_value
        if max(self.mean) > 1:
            text = "normalize divides pixels by 255: divide mean and std by 255, too, or pass max_value=1"
            raise ValueError(f"mean={self.mean} is of pixels up to 255, and {text}")
        return 255.0


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"{type(value).__name__} with the keys {list(value)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def members_of(batch: Any) -> dict[Any, Any] | None:
    """Members of a container, by key or position; None if `batch` is not a container."""
    if isinstance(batch, Mapping):
        return dict(batch.items())
    return dict(enumerate(batch)) if isinstance(batch, (list, tuple)) else None


def rebuilt(batch: Any, parts: dict[Any, Any]) -> Any:
    """A container like `batch` with other members, by key or position."""
    if isinstance(batch, MutableMapping):
        like = copy.copy(batch)  # with its default factory or attributes
        like.update(parts)
        return like
    if isinstance(batch, Mapping):
        return type(batch)(parts)  # type: ignore[call-arg]
    return getattr(batch, "_make", type(batch))(parts.values())


# ---- captured steps ---------------------------------------------------------------------------------


def copy_into(static_batch: Any, batch: Any) -> None:
    """Copy a batch into the tensors that a captured step reads, between replays of a CUDA graph.

    Runs on the current stream, without waiting for the device.

    Args:
        static_batch: dicts, lists and tuples of tensors, as they were when the step was captured.
        batch: of the same structure, shapes and dtypes. Members that are not tensors in `static_batch` are
            skipped.

    Raises:
        ValueError: structure, a shape or a dtype differ (the short last batch of an epoch: use
            drop_last=True), or `static_batch` has no tensors, has tensors inside other objects, or has an
            expanded tensor; nothing was copied.

    >>> static_batch = {"image": torch.zeros(2, 3)}
    >>> copy_into(static_batch, {"image": torch.ones(2, 3), "name": ["a", "b"]})
    Traceback (most recent call last):
    ValueError: static_batch and batch differ: ...
    >>> copy_into(static_batch, {"image": torch.ones(2, 3)})
    >>> static_batch["image"].sum()
    tensor(6.)
    """
    pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
    _pair(static_batch, batch, "batch", pairs)
    if not pairs:
        raise ValueError(f"static_batch is a {_describe(static_batch)}, and has no tensors to copy into")
    with torch.no_grad():
        foreach_copy_([static for static, _ in pairs], [new for _, new in pairs], non_blocking=True)


def _pair(static: Any, new: Any, path: str, pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if isinstance(static, torch.Tensor):
        if not isinstance(new, torch.Tensor) or (static.shape, static.dtype) != (new.shape, new.dtype):
            raise _difference(static, new, path)
        if _is_expanded(static):
            raise ValueError(f"static_batch has an expanded tensor at {path}: make it contiguous()")
        pairs.append((static, new))
    elif (parts := members_of(static)) is not None:
        others, alike = members_of(new), isinstance(static, Mapping) == isinstance(new, Mapping)
        if others is None or not alike or parts.keys() != others.keys():
            raise _difference(static, new, path)
        for key, value in parts.items():
            _pair(value, others[key], f"{path}[{key!r}]", pairs)
    elif tensors_of(static):
        raise ValueError(
            f"static_batch has a {type(static).__name__} with tensors at {path}: use dicts, lists and tuples"
        )


def _is_expanded(tensor: torch.Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _difference(static: Any, new: Any, path: str) -> ValueError:
    text = f"static_batch and {path} differ: {_describe(static)} was captured, and {_describe(new)} came"
    if isinstance(static, torch.Tensor) and isinstance(new, torch.Tensor):
        same = static.dim() == new.dim() > 0 and static.shape[1:] == new.shape[1:]
        if same and len(new) < len(static):
            text += "; drop_last=True leaves out the short last batch"
    return ValueError(text)
