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


def mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        spans = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(start <= address < end for start, end in spans)


def test_a_file_is_mapped_as_long_as_its_region_lives(memfd: int) -> None:
    region = calls.MmapRegion(memfd, 4 * mmap.PAGESIZE)
    os.pwrite(memfd, b"seen", mmap.PAGESIZE + 8)
    view = calls.view(region.address + mmap.PAGESIZE + 8, 5)
    assert bytes(view) == b"seen\0"
    view[4] = 33
    assert os.pread(memfd, 5, mmap.PAGESIZE + 8) == b"seen!"
    address = region.address
    assert mapped(address)
    del region
    assert not mapped(address)
    with pytest.raises(MemoryError, match="no address space for"):
        calls.MmapRegion(memfd, 1 << 60)


def test_parts_of_a_region_are_unmapped_with_or_without_their_pages(memfd: int) -> None:
    page = mmap.PAGESIZE
    os.pwrite(memfd, b"x" * 4 * page, 0)
    region = calls.MmapRegion(memfd, 4 * page)
    for _ in range(2):
        region.cut([(2 * page, page), (page, page)])
        assert region.parts.keys() == {0, page, 2 * page, 3 * page}
    for _ in range(2):
        region.unmap(page)
        region.unmap(2 * page, pages=False)
    assert [mapped(region.address + at * page) for at in range(4)] == [True, False, False, True]
    assert [os.pread(memfd, 1, at * page) for at in range(4)] == [b"x", b"\0", b"x", b"x"]
    last, address = mmap.mmap(-1, page), region.address  # may lie where a part did
    del region
    assert not mapped(address)
    last[0] = 1


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
    assert calls.readable([descriptor], 5) == [descriptor]
    assert end_of(pid) == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        calls.pidfd_send_signal(descriptor, signal.SIGKILL)
    with pytest.raises(ProcessLookupError):
        calls.pidfd_open(pid)
    os.close(descriptor)
