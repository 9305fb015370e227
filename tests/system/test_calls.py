"""System calls, which go around Python's names for them: not every Python has these."""

from __future__ import annotations

import errno
import mmap
import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

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


def test_a_part_that_cannot_be_unmapped_yet_stays_until_the_region_goes(memfd: int) -> None:
    region = calls.MmapRegion(memfd, mmap.PAGESIZE)
    library, region._library = region._library, Mock()  # whose munmap does not return 0
    region.unmap(0)
    assert region.parts.keys() == {0}
    region._library = library


def test_on_larger_pages_no_neighbour_is_unmapped() -> None:
    assert calls._whole_pages(8, 16, page=8) == (8, 24)
    assert calls._whole_pages(9, 22, page=8) == (16, 24)


@pytest.mark.processes
@sandbox.NEEDED
def test_a_call_that_a_sandbox_refuses_is_named_or_done_without(memfd: int) -> None:
    def confined() -> None:
        region = calls.MmapRegion(memfd, mmap.PAGESIZE)
        assert calls.missing() == ""
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

    assert end_of(fork(confined)) == 0


def test_a_wait_is_over_in_time_or_when_something_is_readable() -> None:
    wake = calls.wake_up()
    began = time.monotonic()
    assert calls.readable([wake, -1], 0.02) == []
    assert 0.01 < time.monotonic() - began < 1
    calls.wake(wake)
    calls.wake(wake)
    assert calls.readable([-1, wake], None) == calls.readable([wake], float("inf")) == [wake]
    os.close(wake)


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


def test_what_the_c_library_lacks_is_an_error() -> None:
    with pytest.raises(OSError, match="no_such_call") as caught:
        calls._call("no_such_call", 1)
    assert caught.value.errno == errno.ENOSYS


def test_a_thread_says_how_long_it_waited_for_a_cpu(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    assert calls.waited_for_cpu(str(file)) == 0, "not every kernel has it"
    file.write_text("260552102 72123 91\n")
    assert calls.waited_for_cpu(str(file)) == 72123
    file.write_text("off")
    assert calls.waited_for_cpu(str(file)) == 0


def test_a_descriptor_is_sent_without_waiting_for_an_answer(memfd: int) -> None:
    end, other = socket.socketpair()
    with other:
        with end:
            other.send(b"answer to something else")
            calls.send_descriptor(end.fileno(), memfd)
            received = calls.receive_descriptor(other.fileno())
            assert end.recv(24) == b"answer to something else"
        with open(received, "rb") as file:
            assert os.path.sameopenfile(file.fileno(), memfd)
        with pytest.raises(EOFError):
            calls.receive_descriptor(other.fileno())
