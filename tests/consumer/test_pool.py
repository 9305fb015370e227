"""A pool with real processes, where signals, odd sizes, the collector and forks meet."""

from __future__ import annotations

import os
import signal
import threading
import weakref
from collections.abc import Iterator

import pytest

from fastq_loader import DataLoader
from fastq_loader.system import process_id
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.processes


class Signalling:
    """A sampler during which a signal comes."""

    signals = False

    def __iter__(self) -> Iterator[int]:
        yield 0
        if self.signals:
            signal.raise_signal(signal.SIGALRM)
        yield from range(1, 8)


def test_a_signal_handler_may_close_the_loader_while_an_epoch_starts() -> None:
    sampler = Signalling()
    loader = DataLoader(range(8), None, sampler=sampler, num_workers=2, persistent_workers=True)
    assert list(loader) == list(range(8))
    sampler.signals = True
    before = signal.signal(signal.SIGALRM, lambda signum, frame: loader.close())
    try:
        batches = iter(loader)
        with pytest.raises(RuntimeError, match="its loader was closed"):
            next(batches)
    finally:
        signal.signal(signal.SIGALRM, before)
    sampler.signals = False
    assert list(loader) == list(range(8))
    loader.close()


def test_the_collector_closes_nothing_in_a_child_that_was_just_forked() -> None:
    """It may run there before anything of ours knows of the fork; a thread that it starts ends the child."""
    loader = DataLoader(range(4), num_workers=1)
    iterator = iter(loader)

    def drop() -> None:
        nonlocal iterator
        process_id.pid = os.getppid()
        pool = weakref.ref(iterator.pool)
        del iterator
        assert pool() is None
        assert threading.active_count() == 1

    assert end_of(fork(drop)) == 0
    assert len(list(iterator)) == 4
