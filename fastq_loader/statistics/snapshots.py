"""Immutable snapshots of what devices and bad samples have counted, for users.

Pure. Snapshots of a loader and its epochs are made by `extras.insight`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # else mypy would not allow mutable subclasses
    from dataclasses import dataclass as frozen
else:
    frozen = dataclass(frozen=True)


@dataclass(frozen=True)
class BadSample:
    """A sample that could not be read.

    Attributes:
        epoch, batch: their numbers, from 0 on.
        index: its index; None in an iterable dataset.
        instead: the index of the sample that took its place; None: it was left out.
        error: the exception, as text.

    >>> BadSample(epoch=0, batch=7, index=449, instead=12, error="OSError: truncated").instead
    12
    """

    epoch: int
    batch: int
    index: Any
    instead: Any
    error: str


@frozen
class StagingStatistics:
    """Counts of copies to the device, since the loader was created unless stated otherwise.

    Attributes:
        device: name of the device.
        pin: "register" (blocks are page-locked in place), "bounce" (without workers: batches are copied to
            page-locked buffers first) or "pageable" (where neither works); "" before the first epoch.
        pin_reason: why.
        pinned_bytes: bytes of host memory that are page-locked now.
        populate_seconds: wall time spent on mapping the pages of blocks before they were locked, in seconds.
        register_seconds: wall time spent on locking pages and making page-locked buffers, in seconds.
        copies, copied_bytes: copies to the device, one for each batch with tensors, and their bytes.
        late_copies: batches delivered before their copies had ended: the device's stream waits for them.
        copy_wait_seconds: wall time that `next()` waited for a bounce buffer, in seconds.
        block_wait_seconds: wall time that `next()` waited for copies because the device was behind by twice
            `prefetch` batches, whose blocks are still in use, in seconds.

    >>> DataLoader(range(8)).statistics().staging is None  # its batches stay on the host
    True
    """

    device: str
    pin: str = ""
    pin_reason: str = ""
    pinned_bytes: int = 0
    populate_seconds: float = 0.0
    register_seconds: float = 0.0
    copies: int = 0
    copied_bytes: int = 0
    late_copies: int = 0
    copy_wait_seconds: float = 0.0
    block_wait_seconds: float = 0.0
