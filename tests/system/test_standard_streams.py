"""No descriptor of a standard stream stays free."""

from __future__ import annotations

import os

import pytest

from fastq_loader.system import calls
from tests.support.forking import end_of, fork


@pytest.mark.processes
@pytest.mark.parametrize("free", [(0,), (0, 2), (0, 1, 2), ()])
def test_free_descriptors_lead_to_dev_null_and_others_are_left_alone(free: tuple[int, ...]) -> None:
    before = [os.stat(descriptor).st_ino for descriptor in range(3)]
    null = os.stat(os.devnull).st_ino

    def check() -> None:
        for descriptor in free:
            os.close(descriptor)
        calls.occupy_standard_streams()
        for descriptor in range(3):
            expected = null if descriptor in free else before[descriptor]
            assert os.stat(descriptor).st_ino == expected
            assert os.get_inheritable(descriptor)

    assert end_of(fork(check)) == 0
