"""The arena: leases that live as long as their views, memory that goes back, and children of a fork."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastq_loader.memory.arena import AVAILABLE, Arena, Mapping
from fastq_loader.memory.blocks import PAGE, SMALLEST
from fastq_loader.system.calls import MmapRegion
from tests.conftest import wait_until
from tests.support.forking import end_of, fork
from tests.support.simulated_fork import Fork
from tests.support.thorough import examples

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")

BLOCK = (0, SMALLEST)
FLOATS = SMALLEST // 4
PAGES = SMALLEST // PAGE  # of a block


@contextmanager
def opened(workers: int = 2) -> Iterator[Arena]:
    arena = Arena(workers)
    try:
        yield arena
    finally:
        arena.retire([])


@pytest.fixture
def arena() -> Iterator[Arena]:
    with opened() as arena:
        yield arena


def floats(arena: Arena, block: tuple[int, int] = BLOCK) -> torch.Tensor:
    """A leased tensor over all of a block."""
    return torch.from_numpy(arena.lease(block, 0, block[1])).view(torch.float32)


def blocks(count: int) -> list[tuple[int, int]]:
    return [(at * SMALLEST, SMALLEST) for at in range(count)]


def pages(fd: int) -> int:
    """Pages of memory behind a memfd, by its map of data and holes."""
    found = end = 0
    with suppress(OSError):  # no data beyond `end`
        while True:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            found += (end - start) // PAGE
    return found


def mapped(fd: int) -> int:
    """Bytes of this process's addresses that lead to a memfd."""
    inode = str(os.fstat(fd).st_ino)
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if line.split()[4] == inode and "memfd" in line]
    return sum(int(end, 16) - int(start, 16) for start, end in spans)


# ---- leases -----------------------------------------------------------------------------------------


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "the tensor": lambda tensor: tensor,
    "a slice": lambda tensor: tensor[5:6],
    "a numpy array": lambda tensor: tensor.numpy()[3:],
    "an array over an array": lambda tensor: np.ndarray((3,), np.int16, tensor.numpy()),
    "dlpack": lambda tensor: torch.from_dlpack(tensor),
    "what autograd saved": lambda tensor: torch.ones((), requires_grad=True) * tensor,
}


@pytest.mark.parametrize("make", VIEWS.values(), ids=VIEWS.keys())
def test_a_block_is_in_use_while_there_is_a_view(arena: Arena, make: Callable[[torch.Tensor], Any]) -> None:
    tensor = floats(arena)
    view = make(tensor)
    del tensor
    assert arena.released_blocks() == []
    del view
    assert arena.released_blocks() == [0]
    assert arena.released_blocks() == []


# ---- the end ----------------------------------------------------------------------------------------


@examples(15)
@given(st.sets(st.integers(0, 11)), st.permutations(range(12)), st.booleans())
def test_a_retired_arena_is_the_blocks_that_are_held(kept: set[int], order: list[int], seen: bool) -> None:
    arena = Arena(1)
    fd = os.dup(arena.fd)
    try:
        tensors = {at: floats(arena, blocks(12)[at]).fill_(at) for at in order}
        assert pages(fd) >= 12 * PAGES
        for at in set(order) - kept:
            del tensors[at]
        assert set(arena.released_blocks()) == {at * SMALLEST for at in set(order) - kept}
        child = Fork() if seen else None
        for _ in range(2):
            arena.retire([blocks(12)[at] for at in order if at in kept])
        assert not arena.released
        del arena  # the leases keep it
        assert mapped(fd) == len(kept) * SMALLEST
        assert pages(fd) == len(kept) * PAGES
        for at in [at for at in order if at in kept]:
            corner = tensors.pop(at)[:3]
            assert mapped(fd) == (len(tensors) + 1) * SMALLEST
            assert (corner == at).all()
            del corner
            assert mapped(fd) == len(tensors) * SMALLEST, "a dying lease kept its addresses"
            assert pages(fd) == (len(kept) if seen else len(tensors)) * PAGES
        if child is not None:
            child.die()
    finally:
        os.close(fd)


@pytest.mark.parametrize("step", ["cut", "punch", "unmap"])
def test_a_lease_that_dies_on_another_thread_while_the_loader_closes_leaves_nothing(
    step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(1)
    fd = os.dup(arena.fd)
    tensors = [floats(arena).fill_(1)]
    other = floats(arena, blocks(2)[1]).fill_(2)
    of = Mapping if step == "punch" else MmapRegion
    original = getattr(of, step)

    def dies(*arguments: Any, **options: Any) -> None:
        tensors.clear()
        original(*arguments, **options)

    monkeypatch.setattr(of, step, dies)
    arena.retire(blocks(2))
    tensors.clear()
    assert (mapped(fd), pages(fd)) == (SMALLEST, PAGES)
    assert (other == 2).all()
    os.close(fd)


# ---- the file and its mapping -----------------------------------------------------------------------


@contextmanager
def limited(limit: int, nbytes: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(limit)
    resource.setrlimit(limit, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(limit, (soft, hard))


@pytest.mark.parametrize("limit", [resource.RLIMIT_AS, resource.RLIMIT_FSIZE], ids=["address space", "files"])
def test_no_room_at_all_is_an_error_that_leaves_nothing_open(limit: int) -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(OSError, match=r"need 1,048,576 bytes.*ulimit"), limited(limit, 1 << 19):
        Arena(1)
    assert set(os.listdir("/proc/self/fd")) <= before


# ---- forks ------------------------------------------------------------------------------------------
# `test_forked_children` has births, deaths and forks in any order.


def test_a_block_that_a_child_may_see_is_not_released_before_it_ends(arena: Arena) -> None:
    first, second = blocks(2)
    tensor = floats(arena, first)
    child = Fork()
    later = floats(arena, second)
    del tensor, later
    assert (arena.released_blocks(), arena.released_blocks()) == ([second[0]], [])
    child.die()
    assert arena.released_blocks() == [first[0]]


@pytest.mark.processes
def test_the_childs_own_leases_are_not_its_to_give_back() -> None:
    with opened() as arena:
        tensors = [floats(arena).fill_(1)]

        def drop() -> None:
            assert float(tensors.pop().sum()) == FLOATS

        assert end_of(fork(drop)) == 0
        assert arena.released_blocks() == []
        assert float(tensors.pop().sum()) == FLOATS


@pytest.mark.processes
def test_a_grandchild_that_outlives_its_parent_counts() -> None:
    with opened() as arena:
        tensor = floats(arena)
        orphan, report = os.pipe()
        end_of(fork(lambda: os.write(report, b"%d" % fork(signal.pause))))
        del tensor
        assert arena.released_blocks() == []
        os.kill(int(os.read(orphan, 20)), signal.SIGKILL)
        assert wait_until(lambda: arena.released_blocks() == [0], 30)
        os.close(orphan)
        os.close(report)


@pytest.mark.processes
@pytest.mark.parametrize("preexec", [None, os.getpid], ids=["spawned", "forked with the hooks"])
def test_programs_that_were_started_do_not_hold_blocks(preexec: Any) -> None:
    with opened() as arena:
        tensor = floats(arena)
        sleeper = subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=preexec)
        del tensor
        assert wait_until(lambda: arena.released_blocks() == [0], 30)
        sleeper.communicate(b"")
        assert sleeper.returncode == 0
