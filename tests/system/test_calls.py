"""System calls, which go around Python's names for them: not every Python has these."""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator

import pytest

from fastq_loader.system import calls
from tests.support import sandbox
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.skipif(not calls.AVAILABLE, reason="this system has no memfd")


@pytest.fixture
def memfd() -> Iterator[int]:
    fd = calls.memfd_create("test")
    os.ftruncate(fd, 4 * mmap.PAGESIZE)
    yield fd
    os.close(fd)


def test_a_memfd_is_sealed_and_gives_pages_back(memfd: int) -> None:
    assert os.readlink(f"/proc/self/fd/{memfd}").startswith("/memfd:test")
    assert not os.get_inheritable(memfd)
    os.pwrite(memfd, b"x" * 4 * mmap.PAGESIZE, 0)
    blocks = os.fstat(memfd).st_blocks
    calls.punch_hole(memfd, mmap.PAGESIZE, mmap.PAGESIZE)
    assert os.pread(memfd, 3, mmap.PAGESIZE) == bytes(3)
    assert os.fstat(memfd).st_blocks < blocks
    calls.seal_length(memfd)
    for length in (0, 8 * mmap.PAGESIZE):
        with pytest.raises(PermissionError):
            os.ftruncate(memfd, length)


@pytest.mark.processes
@sandbox.NEEDED
def test_a_call_that_a_sandbox_refuses_is_named_or_done_without(memfd: int) -> None:
    def confined() -> None:
        region = calls.MmapRegion(memfd, mmap.PAGESIZE)
        sandbox.refuse(*sandbox.CALLS)
        assert calls.missing() == "memfd_create"
        with pytest.raises(PermissionError, match=r"memfd_create: .* sandbox, or use num_workers=0"):
            calls.memfd_create("refused")
        with pytest.raises(PermissionError, match=r"eventfd: .* sandbox, or use num_workers=0"):
            calls.wake_up()
        calls.seal_length(memfd)
        calls.punch_hole(memfd, 0, mmap.PAGESIZE)
        region.populate(0, mmap.PAGESIZE)
        region.unmap(0)
        assert not region.parts
        calls.MmapRegion(memfd, mmap.PAGESIZE)

    assert calls.missing() == ""
    assert end_of(fork(confined)) == 0, "a child asks again"


@pytest.mark.processes
def test_a_process_is_watched_and_signalled_by_its_descriptor() -> None:
    pid = fork(signal.pause)
    descriptor = calls.pidfd_open(pid)
    assert calls.readable([descriptor], 0) == []
    calls.pidfd_send_signal(descriptor, signal.SIGKILL)
    assert calls.readable([descriptor], 60) == [descriptor]
    assert end_of(pid) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        calls.pidfd_send_signal(descriptor, signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        calls.pidfd_open(pid)
    os.close(descriptor)
