"""Where hosts run: what somebody who starts them has to offer.

Runs in the consumer. The rest of this folder moves batches; it does not know what a cluster is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from fastq_loader.remote.control import NoPlace, Place

#: Takes a place that has been found, or that there is none or none any more.
Found = Callable[[Place | NoPlace], None]


class Placement(Protocol):
    """Starts hosts, and finds places for workers on them, for one pool.

    None of this may wait for long, but for `close`. It is called on several threads, one at a time but for
    `close`, which comes last.
    """

    def start(self, spec: bytes, found: Found) -> None:
        """A pool starts. Hosts are to be started with `host.Host(spec, ...)`, one on each machine; places go
        to `found`."""

    def acquire(self, number: int) -> None:
        """Find a place for one worker, and call `found` with it when its host listens: in here or later, on
        any thread. Until then the worker waits, for a machine that will join perhaps; with a `NoPlace` it
        dies of it, and with the error that this may raise. The place has this number. One that is gone is
        followed by a `NoPlace`.
        """

    def release(self, number: int, why: str) -> None:
        """A place is not needed any more, or of no use. What ran there has ended, or will in a moment.

        Args:
            number: of `acquire`. Each that `found` was called with is given back once, before `close`.
            why: the connection was lost or not to be had, in words; a machine that is suspected should not be
                given out again at once. "" if it was simply not needed any more.
        """

    def death(self, number: int) -> str:
        """What is known of why a place was lost ("node 10.0.0.2 was removed"); "" for nothing. Is asked when
        the host does not answer."""

    def close(self) -> None:
        """All workers have ended: end the hosts; returns when they have. May be called after a `start` that
        failed, or without one."""
