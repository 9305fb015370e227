"""A loader's way to its device: what the user asked for, and what is kept from epoch to epoch.

Runs in the consumer. Kept are one side stream (a new one for each epoch would strand the memory that torch
cached for the old one) and what was found out about page-locking. The device is initialised when the first
epoch begins, after its workers were started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fastq_loader.device.backend import TorchStager, can_share, parse
from fastq_loader.device.copies import Copies
from fastq_loader.device.pinning import PIN_MODES, Blocks, Pinner
from fastq_loader.errors import PinFallback, check_choice, is_int, warn_user
from fastq_loader.statistics import StagingCounters, StagingStatistics

STREAMS = ("consumer", "side")  # of `transform_stream`
BUFFERS = ("fresh", "reuse")  # of `device_buffers`


class DeviceOptions(NamedTuple):
    """What the user asked for; see `DataLoader`.

    Attributes:
        device: where batches go.
        ahead: batches that are copied before they are asked for.
        transform: applied to every batch there, or None.
        beside: the transform runs on the side stream.
        reuse: batches are copied to the same memory in turn.
        pin: how host memory is page-locked. `pin_limit`: bytes of it at most, or None.
    """

    device: torch.device
    ahead: int
    transform: Callable[[Any], Any] | None
    beside: bool
    reuse: bool
    pin: str
    pin_limit: int | None


def read_options(
    device: Any,
    device_prefetch: Any,
    device_transform: Any,
    transform_stream: Any,
    device_buffers: Any,
    pin: Any,
    pin_limit_bytes: Any,
) -> DeviceOptions | None:
    """What the user's arguments come to; None: batches stay on the host. Initialises no device.

    Raises:
        TypeError, ValueError: an argument, with its name, its value and what it may be.
    """
    parsed = parse(device)
    check_choice("transform_stream", transform_stream, STREAMS)
    check_choice("device_buffers", device_buffers, BUFFERS)
    check_choice("pin", pin, PIN_MODES)
    if not is_int(device_prefetch) or device_prefetch < 1:
        raise ValueError(f"device_prefetch={device_prefetch!r} must be a number of batches, at least 1")
    if pin_limit_bytes is not None and (not is_int(pin_limit_bytes) or pin_limit_bytes < 0):
        raise ValueError(f"pin_limit_bytes={pin_limit_bytes!r} must be a number of bytes, or None for any")
    if device_transform is not None and not callable(device_transform):
        raise TypeError(f"device_transform={device_transform!r} must be a function of a batch, or None")
    if device_transform is not None and device is None:
        raise ValueError(
            "device_transform needs a device: set device='cuda', or device='cpu' to apply it on the host"
        )
    if parsed is None:
        return None
    if transform_stream == "side" and not can_share(parsed):
        raise ValueError(
            f"transform_stream='side' cannot be used with device={device!r}: {parsed.type} tensors have no "
            "record_stream, which keeps what the side stream made while another stream reads it; "
            "transform_stream='consumer' does not need it"
        )
    return DeviceOptions(
        parsed,
        device_prefetch,
        device_transform,
        transform_stream == "side",
        device_buffers == "reuse",
        pin,
        pin_limit_bytes,
    )


class DeviceSession:
    """A loader's way to its device.

    Args:
        options: what the user asked for.

    Attributes:
        counters: of everything that went over.
    """

    def __init__(self, options: DeviceOptions) -> None:
        self.options = options
        self.counters = StagingCounters()
        self._stager: TorchStager | None = None  # once it was opened
        self._refused: dict[str, str] = {}
        self._said: set[str] = set()

    def open(self, blocks: Blocks | None) -> tuple[Copies, Pinner]:
        """The copies of a new pool. The first time, this initialises the device.

        Args:
            blocks: the pool's memory; None without workers.

        Raises:
            PinFailed: pin="register" was asked for and does not work.
            RuntimeError: the device cannot be initialised, with torch's text.
        """
        options = self.options
        stager = self._stager or open_stager(options.device)
        shares = can_share(options.device)
        copies = Copies(stager, options.ahead, options.reuse, self.counters, time.monotonic, shares)
        pinner = Pinner(
            stager,
            copies,
            blocks,
            options.pin,
            options.pin_limit,
            options.ahead + 1,
            self._refused,
            self.counters,
            self.say,
            time.monotonic,
        )
        if self._stager is None:
            pinner.prove()
        self._stager = stager
        return copies, pinner

    @property
    def stager(self) -> TorchStager:
        """The device, which was opened."""
        assert self._stager is not None
        return self._stager

    def snapshot(self) -> StagingStatistics:
        """What went over."""
        device = self.options.device if self._stager is None else self._stager.device
        return self.counters.snapshot(str(device))

    def say(self, text: str) -> None:
        """Warn, once."""
        if text not in self._said:
            self._said.add(text)
            warn_user(text, PinFallback)

    def refuse_capture(self) -> None:
        """Raise RuntimeError while the current stream is captured into a CUDA graph: events cannot be asked
        then, and what would be queued here would become part of the graph."""
        if self._stager is not None and self._stager.capturing():
            raise RuntimeError(
                "next() was called while a CUDA graph is being captured: take the batch before the capture, "
                "and use copy_into(static_batch) between replays"
            )

    def finish(self, batch: Any) -> Any:
        """Apply the user's transform, on the stream that is current."""
        return apply(self.options.transform, batch)


def apply(transform: Callable[[Any], Any] | None, batch: Any) -> Any:
    """What a `device_transform` makes of a batch.

    Raises:
        RuntimeError: it raised StopIteration, which out of `next()` would end the epoch without a word.
        Exception: whatever else it raises.
    """
    if transform is None:
        return batch
    try:
        return transform(batch)
    except StopIteration as stopped:
        raise RuntimeError(f"device_transform raised StopIteration: {stopped}") from stopped


def open_stager(device: torch.device) -> TorchStager:
    """The device behind the protocol; here, so that there is one place where a simulated one can stand."""
    return TorchStager(device)
