"""System calls, which go around Python's names for them: not every Python has these."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
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


def test_a_piece_is_mapped_as_long_as_it_lives(memfd: int) -> None:
    piece = calls.MmapRegion(memfd, mmap.PAGESIZE + 8, 100)
    os.pwrite(memfd, b"seen", mmap.PAGESIZE + 8)
    view = calls.view(piece.address, 5)
    assert bytes(view) == b"seen\0"
    view[4] = 33
    assert os.pread(memfd, 5, mmap.PAGESIZE + 8) == b"seen!"
    address = piece.address
    assert mapped(address)
    del piece
    assert not mapped(address)
    with pytest.raises(MemoryError, match="no address space for"):
        calls.MmapRegion(memfd, 0, 1 << 60)


def test_parts_of_a_piece_are_unmapped_with_or_without_their_pages(memfd: int) -> None:
    page = mmap.PAGESIZE
    os.pwrite(memfd, b"x" * 4 * page, 0)
    piece = calls.MmapRegion(memfd, 0, 4 * page)
    for _ in range(2):
        piece.cut([(2 * page, page), (page, page)])
        assert piece.parts.keys() == {0, page, 2 * page, 3 * page}
    for _ in range(2):
        piece.unmap(page)
        piece.unmap(2 * page, pages=False)
    assert [mapped(piece.address + at * page) for at in range(4)] == [True, False, False, True]
    assert [os.pread(memfd, 1, at * page) for at in range(4)] == [b"x", b"\0", b"x", b"x"]
    last, address = mmap.mmap(-1, page), piece.address  # may lie where a part did
    del piece
    assert not mapped(address)
    last[0] = 1


def test_a_part_that_cannot_be_unmapped_yet_stays_until_the_piece_goes(memfd: int) -> None:
    piece = calls.MmapRegion(memfd, 0, mmap.PAGESIZE)
    library, piece._library = piece._library, Mock()  # whose munmap does not return 0
    piece.unmap(0)
    assert piece.parts.keys() == {0}
    piece._library = library


def test_on_larger_pages_no_neighbour_is_unmapped() -> None:
    assert calls._whole_pages(8, 16, page=8) == (8, 24)
    assert calls._whole_pages(9, 22, page=8) == (16, 24)


@pytest.mark.processes
@pytest.mark.parametrize("proc", [True, False])
def test_a_lock_keeps_other_processes_out(memfd: int, proc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not proc:
        monkeypatch.setattr(os, "open", Mock(side_effect=FileNotFoundError))
    assert (calls.WRITE_LOCK, calls.UNLOCK) == (fcntl.F_WRLCK, fcntl.F_UNLCK)

    def lock(kind: int, length: int) -> bytes:
        return struct.pack("hhqqi4x", kind, os.SEEK_SET, 7, length, 0)

    def set_lock(kind: int) -> None:
        calls.set_lock(fd, command, lock(kind, 3))

    def other(free: bool) -> None:
        nonlocal fd, command
        fd, command = calls.open_anew(memfd)
        found = calls.conflicting_lock(fd, command, lock(calls.WRITE_LOCK, 1))
        expected = lock(calls.UNLOCK, 1) if free else lock(calls.WRITE_LOCK, 3)
        assert found[:24] == expected[:24]  # all but whose it is
        with nullcontext() if free else pytest.raises((BlockingIOError, PermissionError)):
            set_lock(calls.WRITE_LOCK)

    fd, command = calls.open_anew(memfd)
    for kind in (calls.WRITE_LOCK, calls.UNLOCK):
        set_lock(kind)
        assert end_of(fork(partial(other, kind == calls.UNLOCK))) == 0
    os.close(fd)


@pytest.mark.processes
@sandbox.NEEDED
def test_a_call_that_a_sandbox_refuses_is_named_or_done_without(memfd: int) -> None:
    def confined() -> None:
        piece = calls.MmapRegion(memfd, 0, mmap.PAGESIZE)
        assert calls.missing() == ""
        sandbox.refuse(*sandbox.CALLS)
        assert calls.missing() == "memfd_create"
        with pytest.raises(PermissionError, match=r"memfd_create: .* sandbox, or use num_workers=0"):
            calls.memfd_create("refused")
        with pytest.raises(PermissionError, match=r"eventfd: .* sandbox, or use num_workers=0"):
            calls.wake_up()
        assert not calls.has_pidfd()
        calls.seal_length(memfd)
        calls.punch_hole(memfd, 0, mmap.PAGESIZE)
        piece.populate(piece.address, mmap.PAGESIZE)
        piece.unmap(0)
        assert not piece.parts
        calls.MmapRegion(memfd, 0, mmap.PAGESIZE)

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
    assert calls.has_pidfd()
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
