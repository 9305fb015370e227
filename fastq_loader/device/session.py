"""A loader's way to its device: what the user asked for, and what is kept from epoch to epoch.

Runs in the consumer. It keeps one side stream (a new one in each epoch would strand the memory that torch
cached for the old one), the statistics, and what is known about page-locking. The device is initialised when
the first epoch begins, after its workers were started.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastq_loader.device.backend import TorchStager
from fastq_loader.device.copies import Copies
from fastq_loader.device.pinning import Pinner, PinPolicy
from fastq_loader.statistics.counters import StagingCounters

if TYPE_CHECKING:
    from fastq_loader.device.options import ToDevice
    from fastq_loader.memory.arena import Mapping


class DeviceSession:
    """A loader's way to its device.

    Args:
        options: what the user asked for.

    Attributes:
        statistics: of everything that was copied.
    """

    def __init__(self, options: ToDevice) -> None:
        assert options.target is not None, "batches that stay on the host need no session"
        self.options = options
        self.statistics = StagingCounters(str(options.target))
        self._target = options.target
        self._policy = PinPolicy(options, self.statistics)
        self._stager: TorchStager | None = None  # once it was opened

    def open(self, mapping: Mapping | None) -> tuple[Copies, Pinner]:
        """The copies of a new pool. The first time, this initialises the device.

        Args:
            mapping: the pool's memory; None without workers.

        Raises:
            PinFailed: pin="register" was asked for and does not work.
            RuntimeError: the device cannot be initialised, with torch's text.
        """
        if self._stager is None:
            self._stager = TorchStager(self._target)
            self.statistics.device = str(self._stager.device)
        self._policy.choose(self._stager, in_blocks=mapping is not None)
        copies = Copies(self._stager, self.options, self.statistics)
        return copies, Pinner(self._stager, copies, mapping, self._policy)

    @property
    def stager(self) -> TorchStager:
        """The device, which was opened."""
        assert self._stager is not None
        return self._stager

    def refuse_capture(self) -> None:
        """Raise RuntimeError while the current stream is captured into a CUDA graph: events cannot be queried
        then, and what would be queued here would become part of the graph."""
        if self._stager is not None and self._stager.capturing():
            raise RuntimeError(
                "next() was called while a CUDA graph is being captured: take the batch before the capture, "
                "and use copy_into(static_batch) between replays"
            )
