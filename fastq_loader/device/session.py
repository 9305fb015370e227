"""A loader's way to its device: what the user asked for, and what is kept from epoch to epoch.

Runs in the consumer. Kept are one side stream (a new one for each epoch would strand the memory that torch
cached for the old one) and what was found out about page-locking. The device is initialised when the first
epoch begins, after its workers were started.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

from fastq_loader.device.backend import TorchStager, can_share
from fastq_loader.device.copies import Copies
from fastq_loader.device.options import ToDevice
from fastq_loader.device.pinning import Blocks, Pinner
from fastq_loader.errors import PinFallback, warn_user
from fastq_loader.statistics import StagingCounters, StagingStatistics


class DeviceSession:
    """A loader's way to its device.

    Args:
        options: what the user asked for.

    Attributes:
        counters: of everything that went over.
    """

    def __init__(self, options: ToDevice) -> None:
        assert options.target is not None, "batches that stay on the host need no session"
        self.options = options
        self._device = options.target
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
        stager = self._stager or open_stager(self._device)
        shares = can_share(self._device)
        copies = Copies(
            stager, options.prefetch, options.buffers == "reuse", self.counters, time.monotonic, shares
        )
        pinner = Pinner(
            stager,
            copies,
            blocks,
            options.pin,
            options.pin_limit_bytes,
            options.prefetch + 1,
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
        device = self._device if self._stager is None else self._stager.device
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
    """What a transform for the device makes of a batch.

    Raises:
        RuntimeError: it raised StopIteration, which out of `next()` would end the epoch without a word.
        Exception: whatever else it raises.
    """
    if transform is None:
        return batch
    try:
        return transform(batch)
    except StopIteration as stopped:
        raise RuntimeError(f"the transform raised StopIteration: {stopped}") from stopped


def open_stager(device: torch.device) -> TorchStager:
    """The device behind the protocol; here, so that there is one place where a simulated one can stand."""
    return TorchStager(device)
