"""Locks on bytes of files, by their owner. Those on whole files: see `share`'s names, and traces."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from fastq_loader.system import calls, locks
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.skipif(not calls.AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = calls.memfd_create("test")
    yield fd
    os.close(fd)


@pytest.mark.processes
def test_a_lock_on_bytes_keeps_other_owners_out_until_it_is_released_or_its_owner_ends(memfd: int) -> None:
    mine = locks.open_anew(memfd)

    def other(locked: bool) -> None:
        its = locks.open_anew(memfd)
        assert locks.locked_length(its, 8) == (3 if locked else 0)
        assert locks.locked_length(its, 10) == 0
        assert locks.try_lock(its, 7, 3) is not locked
        assert locks.try_lock(its, 20, 1)

    for locked in (True, False, False):
        if locked:
            assert locks.try_lock(mine, 7, 3)
        assert end_of(fork(lambda locked=locked: other(locked))) == 0
        locks.unlock(mine, 7, 3)
    os.close(mine)
