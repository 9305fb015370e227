"""What a user says about batches on a device: the argument `device`.

Runs in the consumer. Nothing in here initialises a device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from fastq_loader.device.backend import can_share, parse
from fastq_loader.device.pinning import PIN_MODES
from fastq_loader.errors import is_int

_CHOICES = {"transform_stream": ("consumer", "side"), "pin": PIN_MODES}


@dataclass(frozen=True)
class ToDevice:
    """Batches arrive on a device; `device="cuda"` is short for `ToDevice("cuda")`.

    Args:
        device: torch's accelerator ("cuda", "cuda:1", "xpu", a torch.device), whatever its kind, through
            `torch.Stream` and `torch.Event`. "cpu" leaves batches on the host, and applies `transform` there.
            It is initialised after the workers of the first epoch were started. `pin_memory` is not needed
            with it.
        prefetch: batches that are copied before they are asked for, at least 1.
        transform: applied to every batch on the device, for example `normalize(mean, std)`.
        transform_stream: "consumer" applies it on the stream that is current in `next()`; "side" on that of
            the copies, beside the step before, and needs a device whose tensors have `record_stream`. Either
            is called in the order of the batches. "side" also for some that come next and are never handed
            out, where an epoch is broken off: how many depends on what has come.
        pin: how host memory is page-locked. "register" locks the workers' blocks where they are; "bounce"
            copies batches to a few locked buffers first; "pageable" locks nothing; "auto" takes the first of
            these that works, with a `PinFallback` warning. `statistics()` says which it is and why.
        pin_limit_bytes: bytes that may be page-locked; None is any number.

    Attributes:
        target: the accelerator; None: batches stay on the host.

    Raises:
        ValueError, TypeError: an argument, with its name, its value and what it may be; an unknown or absent
            device.
    """

    device: str | int | torch.device
    prefetch: int = 2
    transform: Callable[[Any], Any] | None = None
    transform_stream: str = "consumer"
    pin: str = "auto"
    pin_limit_bytes: int | None = None
    target: torch.device | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.device is None:
            raise TypeError("ToDevice(None): name a device; 'cpu' leaves batches on the host")
        target = parse(self.device)
        object.__setattr__(self, "target", target)
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                self._refuse(ValueError, name, f"use one of {', '.join(map(repr, allowed))}")
        if not is_int(self.prefetch) or self.prefetch < 1:
            self._refuse(ValueError, "prefetch", "it must be a number of batches, at least 1")
        limit = self.pin_limit_bytes
        if limit is not None and (not is_int(limit) or limit < 0):
            self._refuse(ValueError, "pin_limit_bytes", "it must be a number of bytes, or None for any")
        if self.transform is not None and not callable(self.transform):
            self._refuse(TypeError, "transform", "it must be a function of a batch, or None")
        if target is not None and self.transform_stream == "side" and not can_share(target):
            self._refuse(
                ValueError,
                "transform_stream",
                f"{target.type} tensors have no record_stream, which keeps what the side stream made while "
                "another stream reads it; transform_stream='consumer' does not need it",
            )

    def _refuse(self, kind: type[Exception], name: str, why: str) -> None:
        raise kind(f"ToDevice({self.device!r}, {name}={getattr(self, name)!r}): {why}")

    def apply_transform(self, batch: Any) -> Any:
        """The batch as the user's transform returns it, on the stream that is current.

        Raises:
            RuntimeError: it raised StopIteration, which out of `next()` would end the epoch silently.
            Exception: whatever else it raises.
        """
        if self.transform is None:
            return batch
        try:
            return self.transform(batch)
        except StopIteration as stopped:
            raise RuntimeError(f"the transform raised StopIteration: {stopped}") from stopped


def read_device(device: Any) -> ToDevice | None:
    """What `device=` means; None: batches stay on the host as they are.

    Raises:
        ValueError, TypeError: it is not a device, or an unknown or absent one.
    """
    return device if device is None or isinstance(device, ToDevice) else ToDevice(device)
