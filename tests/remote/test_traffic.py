"""Words of shared memory in which bytes are counted."""

from __future__ import annotations

import os

import pytest

from fastq_loader.memory.arena import AVAILABLE
from fastq_loader.remote import traffic
from fastq_loader.remote.traffic import Traffic

pytestmark = pytest.mark.skipif(not AVAILABLE, reason="this system has no memfd")


def test_what_a_stand_in_and_its_successor_count_is_read_by_the_consumer() -> None:
    fd = traffic.create(3)
    here, first, second = (Traffic(fd, 3) for _ in range(3))
    os.close(fd)
    assert [here.of(worker) for worker in range(3)] == [0, 0, 0]
    first.add(1, 5)
    second.add(1, 1 << 40)
    second.add(2, 7)
    assert [here.of(worker) for worker in range(3)] == [0, 5 + (1 << 40), 7]
