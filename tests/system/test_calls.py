"""System calls, through Python's names for them and around those that are missing."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import signal
import struct
import time
from collections.abc import Iterator

import pytest

from fastq_loader.system import calls
from tests.support.forking import end_of, fork

pytestmark = pytest.mark.skipif(not calls.AVAILABLE, reason="this system has no memfd")


@pytest.fixture(params=["Python's names", "without them"], autouse=True)
def _headers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a Python that was built with old headers."""
    if request.param == "without them":
        for name in ("memfd_create", "eventfd", "pidfd_open"):
            monkeypatch.delattr(os, name, raising=False)
        monkeypatch.delattr(signal, "pidfd_send_signal", raising=False)


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


def test_a_piece_is_mapped_as_long_as_it_lives(memfd: int) -> None:
    piece = calls.Piece(memfd, mmap.PAGESIZE + 8, 100)
    os.pwrite(memfd, b"seen", mmap.PAGESIZE + 8)
    assert calls.ctypes.string_at(piece.address, 4) == b"seen"
    piece.punch()
    assert calls.ctypes.string_at(piece.address, 4) == bytes(4)
    with open("/proc/self/maps") as maps:
        assert f"{piece.address - 8:x}-" in maps.read()
    address = piece.address
    del piece
    with open("/proc/self/maps") as maps:
        assert f"{address - 8:x}-" not in maps.read()
    with pytest.raises(MemoryError, match="find no address space"):
        calls.Piece(memfd, 0, 1 << 60)


def test_a_lock_belongs_to_an_open_file(memfd: int) -> None:
    other = os.open(f"/proc/self/fd/{memfd}", os.O_RDWR)
    lock, unlock = (
        struct.pack("hhqqi4x", kind, os.SEEK_SET, 7, 1, 0) for kind in (calls.WRITE_LOCK, calls.UNLOCK)
    )
    assert (calls.WRITE_LOCK, calls.UNLOCK) == (fcntl.F_WRLCK, fcntl.F_UNLCK)
    calls.set_lock(memfd, lock)
    with pytest.raises((BlockingIOError, PermissionError)):  # EAGAIN, EACCES
        calls.set_lock(other, lock)
    calls.set_lock(memfd, unlock)
    calls.set_lock(other, lock)
    os.close(other)


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


def test_where_there_is_no_pidfd_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(errno.ENOSYS, "not in this sandbox")

    monkeypatch.setattr(calls, "pidfd_open", refuse)
    assert not calls.has_pidfd()


def test_what_the_c_library_lacks_is_an_error() -> None:
    with pytest.raises(OSError, match="no_such_call") as caught:
        calls._call("no_such_call", 1)
    assert caught.value.errno == errno.ENOSYS
